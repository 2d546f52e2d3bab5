"""moto's AWS behind a layer as strict as AWS: requests and answers must fit botocore's own model of the service.

moto ignores client tokens, accepts any type, lists everything at once, and has neither quotas nor prices. This layer
adds these, and faults. It replaces the client that ``Aws`` opens; everything below is boto3 and moto.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from boto3.session import Session
from botocore import xform_name
from botocore.exceptions import ClientError, ReadTimeoutError
from moto import mock_aws

from manager.providers.aws.provider import AwsProvider, open_aws
from manager.providers.aws.spec import AwsSpec, AwsType
from manager.providers.boot.cloud_init import cloud_init, user_data
from manager.providers.interface.cloud import Bounds, Identity
from manager.providers.interface.operations import Operations
from tests.providers.azure_world import START, Killed

REGION = "us-west-2"
PRICES = {"g4dn.xlarge": 0.2, "g4dn.12xlarge": 1.4}
BOUNDS = Bounds(delete_s=30, poll_s=0.01)
KILOBYTES_16 = 16384
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",  # this takes a second
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


@lru_cache
def boto3_client(service: str, region: str) -> Any:
    """Make the client once, because this takes half a second."""
    return Session().client(service, region_name=region)


@dataclass
class Fault:
    """A fault of some calls; ``code``: of the error (without one: no answer); ``answer``: replaces the true one."""

    operation: str
    code: str = ""
    status: int = 400
    carried_out: bool = False
    answer: dict[str, Any] | None = None
    times: int = 1


@dataclass
class FakeEc2:
    """The region; its fields change its behaviour.

    ``shortages``: an error for a type in a zone. ``error_of_all``: an error for all of them. ``hidden``: the number of
    looks that do not list a new instance. ``list_s``: how long providers expect such looks, in seconds. ``slow_ends``:
    the number of looks for which an instance is shutting down. ``passed_s``: the sum of the waits in ``wait``.
    ``protected``: VMs that may not be ended. ``trouble``: an error to each fleet of a VM. ``dies``: VMs that are
    terminated as soon as they are made, each with its StateReason.
    """

    shortages: dict[tuple[str, str], str] = field(default_factory=dict)
    error_of_all: str = ""
    hidden: int = 0
    list_s: float = BOUNDS.list_s
    slow_ends: int = 1
    passed_s: float = 0.0
    max_spot: int = 1000
    quota_vcpus: float | None = 64.0
    protected: set[str] = field(default_factory=set)
    trouble: dict[str, str] = field(default_factory=dict)
    dies: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    dropped: set[tuple[str, str]] = field(default_factory=set)
    kill: Callable[[str, bool], bool] = lambda _operation, _after: False

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.real = boto3_client("ec2", REGION)
        self._answers: dict[str, tuple[str, dict[str, Any]]] = {}
        self._looks_left: dict[str, int] = {}
        self._ending: dict[str, int] = {}
        self._went: set[str] = set()
        self._reasons: dict[str, str] = {}
        subnets = self.real.describe_subnets()["Subnets"]
        self.subnets = {told["AvailabilityZone"]: told["SubnetId"] for told in subnets if told["DefaultForAz"]}
        self.spec = AwsSpec(
            region=REGION,
            subnets={zone: self.subnets[zone] for zone in sorted(self.subnets)[:3]},
            types=(AwsType(name="g4dn.12xlarge", num_gpus=4), AwsType(name="g4dn.xlarge")),
            image=self.real.register_image(Name="ubuntu", RootDeviceName="/dev/sda1")["ImageId"],
            security_groups=(self.real.describe_security_groups()["SecurityGroups"][0]["GroupId"],),
            root_gib=100,
        )

    def wait(self, wait_s: float) -> None:
        """Let time pass for the versions of launch templates."""
        self.passed_s += wait_s

    def client(self, service: str) -> Client:
        return Client(self, service)

    def call(self, service: str, operation: str, parameters: dict[str, Any], client: Client) -> dict[str, Any]:
        model = boto3_client(service, REGION).meta.service_model
        name = next(name for name in model.operation_names if xform_name(name) == operation)
        shapes = model.operation_model(name)
        with self.lock:
            if client.is_dead or self.kill(name, False):
                client.is_dead = True
                raise Killed
            self.calls.append(name)
            self._check(f"{name} asked", shapes.input_shape, parameters)
            fault = next((fault for fault in self.faults if fault.operation in (name, "*")), None)
            if fault is not None:
                fault.times -= 1
                self.faults = [one for one in self.faults if one.times > 0]
                if fault.answer is not None:
                    return fault.answer
                if fault.carried_out:
                    self._carried_out(service, name, operation, parameters)
                if not fault.code:
                    raise ReadTimeoutError(endpoint_url="https://ec2")
                raise error(name, fault.code, status=fault.status)
            answer = self._carried_out(service, name, operation, parameters)
            told = {key: value for key, value in answer.items() if key != "ResponseMetadata"}
            self._check(f"{name} answered", shapes.output_shape, told)
            if self.kill(name, True):
                client.is_dead = True
                raise Killed
            return answer

    def _carried_out(self, service: str, name: str, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        own = getattr(self, f"_{operation}", None)
        return own(parameters) if own else getattr(boto3_client(service, REGION), operation)(**parameters)  # type: ignore[no-any-return]

    def _check(self, where: str, shape: Any, value: Any) -> None:
        """Note what does not fit the service's own model: unknown members, enumerations, lengths, patterns."""
        if shape is None:
            return
        kind = shape.type_name
        if kind == "structure" and isinstance(value, dict):
            self.wrong += [f"{where}.{key} is not known" for key in set(value) - set(shape.members)]
            self.wrong += [f"{where}.{key} is missing" for key in set(shape.required_members) - set(value)]
            for key in set(value) & set(shape.members):
                self._check(f"{where}.{key}", shape.members[key], value[key])
        elif kind == "list" and isinstance(value, list | tuple):
            for item in value:
                self._check(f"{where}[]", shape.member, item)
        elif kind == "string" and isinstance(value, str):
            if shape.enum and value not in shape.enum:
                self.wrong.append(f"{where}: {value!r} is none of {shape.enum[:9]}")
            rules = shape.metadata
            if not rules.get("min", 0) <= len(value) <= rules.get("max", float("inf")):
                self.wrong.append(f"{where}: {len(value)} characters")
            if (pattern := rules.get("pattern")) and not re.search(pattern, value):
                self.wrong.append(f"{where}: {value!r} does not match {pattern}")
        elif kind == "integer" and isinstance(value, int):
            if not shape.metadata.get("min", value) <= value <= shape.metadata.get("max", value):
                self.wrong.append(f"{where}: {value}")
        elif isinstance(value, dict | list):
            self.wrong.append(f"{where}: {kind} is wanted")

    def _create_launch_template(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._check_template(asked["LaunchTemplateData"])
        if asked.get("DryRun"):
            raise error("CreateLaunchTemplate", "DryRunOperation", status=412)
        return self.real.create_launch_template(**asked)  # type: ignore[no-any-return]

    def _create_launch_template_version(self, asked: dict[str, Any]) -> dict[str, Any]:
        data = {**asked["LaunchTemplateData"]}
        given = base64.b64decode(data.pop("UserData"))
        self._check_template(data)
        if len(given) > KILOBYTES_16 or not gzip.decompress(given).startswith(b"#cloud-config\n"):
            raise error("CreateLaunchTemplateVersion", "InvalidUserData.Malformed")
        return self._once(asked, lambda: self.real.create_launch_template_version(**asked))

    def _delete_launch_template_versions(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = [
            {"LaunchTemplateName": asked["LaunchTemplateName"], "VersionNumber": int(one)} for one in asked["Versions"]
        ]
        self.dropped |= {(one["LaunchTemplateName"], str(one["VersionNumber"])) for one in found}
        return {"SuccessfullyDeletedLaunchTemplateVersions": found, "UnsuccessfullyDeletedLaunchTemplateVersions": []}

    def _describe_launch_template_versions(self, asked: dict[str, Any]) -> dict[str, Any]:
        answer = self.real.describe_launch_template_versions(**asked)
        known = [
            told | {"CreateTime": told["CreateTime"] - timedelta(seconds=self.passed_s)}
            for told in answer["LaunchTemplateVersions"]
            if (told["LaunchTemplateName"], str(told["VersionNumber"])) not in self.dropped
        ]
        return {**answer, "LaunchTemplateVersions": known}

    def _delete_launch_template(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.dropped = {one for one in self.dropped if one[0] != asked["LaunchTemplateName"]}
        return self.real.delete_launch_template(**asked)  # type: ignore[no-any-return]

    def _check_template(self, data: dict[str, Any]) -> None:
        holds = {
            "IMDSv2": data["MetadataOptions"]["HttpTokens"] == "required",
            "hop limit 1": data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1,
            "terminate": data["InstanceInitiatedShutdownBehavior"] == "terminate",
            "volumes go": all(one["Ebs"]["DeleteOnTermination"] for one in data["BlockDeviceMappings"]),
            "no market of its own, which a fleet refuses": "InstanceMarketOptions" not in data,
            "no secret": "UserData" not in data,
        }
        self.wrong += [f"launch template: {what}" for what, found in holds.items() if not found]

    def _create_fleet(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked.get("DryRun"):
            raise error("CreateFleet", "DryRunOperation", status=412)
        return self._once(asked, lambda: self._fleet(asked))

    def _once(self, asked: dict[str, Any], carry_out: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Give a repeated request with the same client token the same answer."""
        kind = next((key for key in ("LaunchTemplateConfigs", "LaunchTemplateData") if key in asked), "")
        token, body = f"{kind} {asked['ClientToken']}", json.dumps(asked, sort_keys=True, default=str)
        if token not in self._answers:
            self._answers[token] = (body, carry_out())
        known, answer = self._answers[token]
        if known != body:
            raise error(kind, "IdempotentParameterMismatch")
        return answer

    def _fleet(self, asked: dict[str, Any]) -> dict[str, Any]:
        (config,) = asked["LaunchTemplateConfigs"]
        used = config["LaunchTemplateSpecification"]
        if (used["LaunchTemplateName"], used["Version"]) in self.dropped:
            raise error("CreateFleet", "InvalidLaunchTemplateId.VersionNotFound")
        tagged = {one["ResourceType"]: tuple_of(one["Tags"]) for one in asked["TagSpecifications"]}
        name = dict(tagged["instance"])["Name"]
        if name in self.trouble:
            raise error("CreateFleet", self.trouble[name], status=503)
        if set(tagged) != {"fleet", "instance", "volume", "network-interface"}:
            self.wrong.append(f"CreateFleet tags {sorted(tagged)}")
        zone_of = {subnet: zone for zone, subnet in self.subnets.items()}
        offers, errors = [], []
        for offer in config["Overrides"]:
            kind, zone = offer["InstanceType"], zone_of.get(offer["SubnetId"], "")
            code = self.shortages.get((kind, zone), "")
            if not zone:
                code = "InvalidSubnetID.NotFound"
            elif kind not in PRICES:
                code = "InvalidParameterValue"
            elif float(offer.get("MaxPrice", 99)) < self.price(kind, zone):
                code = "SpotMaxPriceTooLow"
            elif len(self.living()) >= self.max_spot:
                code = "MaxSpotInstanceCountExceeded"
            code = self.error_of_all or code
            shown = {
                "LaunchTemplateSpecification": {"LaunchTemplateName": "the run's", "Version": "1"},
                "Overrides": offer,
            }
            if code:
                said = {"ErrorCode": code, "ErrorMessage": f"{kind} in {zone}", "Lifecycle": "spot"}
                errors.append({"LaunchTemplateAndOverrides": shown, **said})
            else:
                offers.append((self.price(kind, zone), offer))
        if not offers:
            return {"FleetId": "fleet-0", "Errors": errors, "Instances": []}
        _, offer = min(offers, key=lambda found: found[0])
        asked = {**asked, "LaunchTemplateConfigs": [{**config, "Overrides": [offer]}]}
        answer = self.real.create_fleet(**asked)
        (made,) = [instance for one in answer["Instances"] for instance in one["InstanceIds"]]
        answer["Instances"][0]["AvailabilityZone"] = zone_of[offer["SubnetId"]]
        told = self.real.describe_instances(InstanceIds=[made])["Reservations"][0]["Instances"][0]
        beside = [told["BlockDeviceMappings"][0]["Ebs"]["VolumeId"], told["NetworkInterfaces"][0]["NetworkInterfaceId"]]
        self.real.create_tags(Resources=beside, Tags=list(asked["TagSpecifications"][1]["Tags"]))
        self._looks_left[made] = self.hidden
        if name in self.dies:
            self.take(made)
            self._reasons[made] = self.dies[name]
        return answer  # type: ignore[no-any-return]

    def _describe_instances(self, asked: dict[str, Any]) -> dict[str, Any]:
        answer = self.real.describe_instances(**asked)
        for reservation in answer["Reservations"]:
            for told in [*reservation["Instances"]]:
                made = told["InstanceId"]
                if made in self._reasons:
                    told["StateReason"] = {"Code": self._reasons[made], "Message": f"{self._reasons[made]}: injected"}
                told.pop("Platform", None)  # moto's own images are of Windows
                told.setdefault("CpuOptions", {"CoreCount": 2, "ThreadsPerCore": 2})
                if self._looks_left.get(made, 0) > 0:
                    self._looks_left[made] -= 1
                    reservation["Instances"].remove(told)
                elif self._ending.get(made, 0) > 0:
                    self._ending[made] -= 1
                    told["State"] = {"Code": 32, "Name": "shutting-down"}
        return answer  # type: ignore[no-any-return]

    def _terminate_instances(self, asked: dict[str, Any]) -> dict[str, Any]:
        for made in asked["InstanceIds"]:
            if self._looks_left.get(made, 0) > 0:
                raise error("TerminateInstances", "InvalidInstanceID.NotFound")
            if self.name_of(made) in self.protected:
                raise error("TerminateInstances", "OperationNotPermitted")
        return self.take(*asked["InstanceIds"])

    def take(self, *instances: str) -> dict[str, Any]:
        """End instances, as AWS or the user does."""
        told = self.real.describe_instances(InstanceIds=[*instances])["Reservations"]
        answer = self.real.terminate_instances(InstanceIds=[*instances])
        for instance in [one for reservation in told for one in reservation["Instances"]]:
            self._ending[instance["InstanceId"]] = self.slow_ends
            self._went |= {one["NetworkInterfaceId"] for one in instance["NetworkInterfaces"]}  # moto leaves these
        return answer  # type: ignore[no-any-return]

    def _describe_images(self, asked: dict[str, Any]) -> dict[str, Any]:
        answer = self.real.describe_images(**asked)
        for image in answer["Images"]:  # moto stores only part of its input
            image |= {"Architecture": "x86_64", "RootDeviceType": "ebs"}
        return answer  # type: ignore[no-any-return]

    def _describe_network_interfaces(self, asked: dict[str, Any]) -> dict[str, Any]:
        answer = self.real.describe_network_interfaces(**asked)
        found = [one for one in answer["NetworkInterfaces"] if one["NetworkInterfaceId"] not in self._went]
        return {**answer, "NetworkInterfaces": found}

    def _describe_spot_price_history(self, asked: dict[str, Any]) -> dict[str, Any]:
        history = [
            {"AvailabilityZone": zone, "InstanceType": kind, "ProductDescription": "Linux/UNIX", "Timestamp": when}
            | {"SpotPrice": f"{self.price(kind, zone) * factor:.6f}"}
            for kind in asked["InstanceTypes"]
            if kind in PRICES
            for zone in self.subnets
            for when, factor in ((datetime(2026, 1, 1, tzinfo=UTC), 3.0), (datetime(2026, 2, 1, tzinfo=UTC), 1.0))
        ]
        return {"SpotPriceHistory": history, "NextToken": ""}

    def _get_products(self, asked: dict[str, Any]) -> dict[str, Any]:
        wanted = {one["Field"]: one["Value"] for one in asked["Filters"]}
        unit, price = ("GB-Mo", 0.073) if "volumeApiName" in wanted else ("Hrs", 5 * PRICES[wanted["instanceType"]])
        dimension = {"unit": unit, "pricePerUnit": {"USD": f"{price:.10f}"}}
        product = {"terms": {"OnDemand": {"a": {"priceDimensions": {"b": dimension}}}}}
        return {"FormatVersion": "aws_v1", "PriceList": [json.dumps(product)]}

    def _list_service_quotas(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self.quota_vcpus is None:
            raise error("ListServiceQuotas", "AccessDeniedException")
        names = [
            "All P5 Spot Instance Requests",
            "All G and VT Spot Instance Requests",
            "Running On-Demand G and VT instances",
        ]
        return {"Quotas": [{"ServiceCode": "ec2", "QuotaName": name, "Value": self.quota_vcpus} for name in names]}

    def _describe_instance_type_offerings(self, asked: dict[str, Any]) -> dict[str, Any]:
        wanted = asked["Filters"][0]["Values"]
        offers = [(kind, zone) for kind in wanted if kind in PRICES for zone in sorted(self.subnets)[:3]]
        return {
            "InstanceTypeOfferings": [
                {"InstanceType": kind, "Location": zone, "LocationType": "availability-zone"} for kind, zone in offers
            ]
        }

    def _run_instances(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["DryRun"], "no run asks for instances without a fleet"
        raise error("RunInstances", "DryRunOperation", status=412)

    def price(self, kind: str, zone: str) -> float:
        """Return the price, which is lowest in the second zone."""
        return PRICES[kind] * (1.0 if zone == sorted(self.subnets)[1] else 1.1)

    def living(self) -> dict[str, str]:
        """Return the ids of existing instances by name."""
        filters = [{"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}]
        told = self.real.describe_instances(Filters=filters)["Reservations"]
        return {
            {tag["Key"]: tag["Value"] for tag in one.get("Tags", [])}.get("Name", one["InstanceId"]): one["InstanceId"]
            for reservation in told
            for one in reservation["Instances"]
        }

    def name_of(self, instance: str) -> str:
        return next((name for name, made in self.living().items() if made == instance), "")

    def left(self) -> dict[str, list[str]]:
        """Return all resources of any owner."""
        return {
            "instances": sorted(self.living()),
            "volumes": [one["VolumeId"] for one in self.real.describe_volumes()["Volumes"]],
            "network interfaces": [
                one["NetworkInterfaceId"] for one in self._describe_network_interfaces({})["NetworkInterfaces"]
            ],
            "launch templates": [
                one["LaunchTemplateName"] for one in self.real.describe_launch_templates()["LaunchTemplates"]
            ],
        }

    def provider(
        self, directory: Path, *, run: str = "tiny-1", spec: AwsSpec | None = None, **options: Any
    ) -> AwsProvider:
        """Return a manager's provider, with clients of its own."""
        spec = spec or self.spec
        clients = {service: self.client(service) for service in ("ec2", "pricing")}
        return open_aws(
            spec,
            Identity(run=run, job="tiny"),
            Operations(directory / f"operations-{run}.json"),
            lambda node, num_devices: user_data(cloud_init(START, node, "aws", num_devices)),
            open_client=clients.__getitem__,
            bounds=replace(BOUNDS, list_s=self.list_s),
            ending=f"morph cloud reconcile aws.yaml --run {run} --job tiny",
            **options,
        )


class Client:
    """Stands in for boto3's client; ``is_dead`` is set when its manager has died."""

    def __init__(self, region: FakeEc2, service: str) -> None:
        self._region, self._service = region, service
        self.is_dead = False

    def __getattr__(self, operation: str) -> Callable[..., dict[str, Any]]:
        return lambda **parameters: self._region.call(self._service, operation, parameters, self)


def error(operation: str, code: str, message: str = "injected", status: int = 400) -> ClientError:
    said = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(said, operation)  # type: ignore[arg-type]


def tuple_of(tags: list[dict[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((tag["Key"], tag["Value"]) for tag in tags)


NOTHING: dict[str, list[str]] = {"instances": [], "volumes": [], "network interfaces": [], "launch templates": []}


@contextmanager
def ec2_region() -> Iterator[FakeEc2]:
    """Yield the empty region; at the end, requests that did not fit the service's model are an error."""
    with patch.dict(os.environ, ENVIRONMENT), mock_aws():
        region = FakeEc2()
        yield region
        assert region.wrong == []
