"""Checks a cloud file for AWS before a run, by reading and by dry runs of calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from manager.providers.aws.client import Aws, code_of, reading
from manager.providers.aws.errors import DRY_RUN
from manager.providers.aws.prices import prices_of
from manager.providers.aws.spec import AwsSpec, AwsType, fleet_body, template_body
from manager.providers.interface.cloud import Finding, Identity, turns
from manager.providers.interface.provider import Misconfigured, ProviderError

IDENTITY = Identity(run="check", job="check")
LIVING = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]


class Checks:
    """Checks of one cloud file, which make and change nothing; ``count``: the devices that the run should have."""

    def __init__(self, spec: AwsSpec, open_client: Callable[[str], Any], count: int) -> None:
        self._spec, self._open, self._count = spec, open_client, count
        self._ec2 = Aws(lambda: open_client("ec2"))
        self._types: dict[str, dict[str, Any]] = {}

    def run(self) -> Iterator[Finding]:
        """Yield the findings, one sentence each; a failing check does not stop the others, except the login's."""
        try:
            with reading("AWS"):
                yield from self._login()
        except ProviderError as error:
            yield Finding(False, str(error))
            if isinstance(error, Misconfigured):
                return
        types: list[Callable[[], Iterator[Finding]]] = [partial(self._type, known) for known in self._spec.types]
        for check in (*types, self._image, self._network, self._offers, self._rights, self._quota):
            yield from self._found(check)
        price = self._spec.price(prices_of(self._spec, self._open).dearest)
        if price is None:
            yield Finding(False, "a type's price is not known: give usd_per_h, or limits in dollars cannot be kept")
        else:
            yield Finding(True, f"an instance costs {price.usd_per_h:.4g} dollars an hour at most ({price.source})")

    def _found(self, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        try:
            with reading("AWS"):
                yield from check()
        except ProviderError as error:
            yield Finding(False, str(error))

    def _login(self) -> Iterator[Finding]:
        identity = Aws(lambda: self._open("sts")).call("get_caller_identity", "who you are")
        yield Finding(True, f"AWS knows you as {identity['Arn']}")

    def _type(self, known: AwsType) -> Iterator[Finding]:
        answer = self._ec2.call("describe_instance_types", known.name, InstanceTypes=[known.name])
        self._types[known.name] = described = answer["InstanceTypes"][0]
        num_gpus = sum(gpu["Count"] for gpu in described.get("GpuInfo", {}).get("Gpus", []))
        if known.num_gpus > num_gpus:
            yield Finding(False, f"{known.name} has {num_gpus} GPUs, and num_gpus is {known.num_gpus}")
        elif self._spec.spot and "spot" not in described["SupportedUsageClasses"]:
            yield Finding(False, f"{known.name} is not for spot instances")
        else:
            yield Finding(True, f"{known.name} has {num_gpus} GPUs")

    def _image(self) -> Iterator[Finding]:
        image = self._ec2.call("describe_images", "the image", ImageIds=[self._spec.image])["Images"][0]
        name, root = f"image {self._spec.image}", image["RootDeviceName"]
        if image["State"] != "available":
            yield Finding(False, f"{name} is {image['State']}")
        if root != self._spec.root_device:
            yield Finding(False, f"{name} boots from {root}, and root_device is {self._spec.root_device}")
        for size, described in self._types.items():
            if image["Architecture"] not in described["ProcessorInfo"]["SupportedArchitectures"]:
                yield Finding(False, f"{name} is for {image['Architecture']}, which {size} is not")
        yield Finding(True, f"{name}: {image.get('Name', '-')}")

    def _network(self) -> Iterator[Finding]:
        subnets = [*self._spec.subnets.values()]
        described = self._ec2.call("describe_subnets", "the subnets", SubnetIds=subnets)["Subnets"]
        networks = {subnet["VpcId"] for subnet in described}
        for subnet in described:
            if self._spec.subnets.get(subnet["AvailabilityZone"]) != subnet["SubnetId"]:
                yield Finding(
                    False,
                    f"{subnet['SubnetId']} is in zone {subnet['AvailabilityZone']}, not in the zone given in subnets",
                )
            elif subnet["AvailableIpAddressCount"] < self._count:
                left = subnet["AvailableIpAddressCount"]
                yield Finding(False, f"{subnet['SubnetId']} has {left} addresses left for {self._count} workers")
        groups = [*self._spec.security_groups]
        described = self._ec2.call("describe_security_groups", "the security groups", GroupIds=groups)["SecurityGroups"]
        networks |= {group["VpcId"] for group in described}
        if len(networks) > 1:
            yield Finding(False, f"subnets and security groups are in several networks: {', '.join(sorted(networks))}")
        else:
            yield Finding(True, f"subnets and security groups are in network {networks.pop()}")

    def _offers(self) -> Iterator[Finding]:
        filters = [{"Name": "instance-type", "Values": [known.name for known in self._spec.types]}]
        offers = {
            (offering["InstanceType"], offering["Location"])
            for offering, _ in self._ec2.pages(
                "describe_instance_type_offerings",
                "InstanceTypeOfferings",
                "what zones have",
                LocationType="availability-zone",
                Filters=filters,
            )
        }
        for known in self._spec.types:
            zones = [zone for zone in self._spec.subnets if (known.name, zone) in offers and known.may_be_in(zone)]
            yield Finding(bool(zones), f"{known.name} is offered in {', '.join(zones) or 'none of your zones'}")

    def _rights(self) -> Iterator[Finding]:
        """Make the calls of a run as dry runs: AWS says whether it would carry them out."""
        template, known = template_body(self._spec, IDENTITY), self._spec.types[0]
        fleet = fleet_body(self._spec, IDENTITY, "check", "check-0", known.num_devices, "1", "check")
        instance = {
            **template["LaunchTemplateData"],
            **{"InstanceType": known.name, "SubnetId": next(iter(self._spec.subnets.values()))},
            **({"InstanceMarketOptions": {"MarketType": "spot"}} if self._spec.spot else {}),
            **{"MinCount": 1, "MaxCount": 1, "TagSpecifications": fleet["TagSpecifications"][1:]},
        }
        calls = {"create_launch_template": template, "create_fleet": fleet, "run_instances": instance}
        for operation, parameters in calls.items():
            try:
                self._ec2.call(operation, operation, DryRun=True, **parameters)
            except ProviderError as error:
                may = code_of(error) == DRY_RUN
                yield Finding(may, f"{operation} would be carried out" if may else str(error))
            else:
                yield Finding(False, f"{operation}: AWS does not say whether it would be carried out")

    def _quota(self) -> Iterator[Finding]:
        number = turns(self._spec.types, self._count, self._count)[0]
        first = next(known for known in self._spec.types if known.num_devices == number)
        family = first.name.partition(".")[0]
        quotas = Aws(lambda: self._open("service-quotas"))
        known = {
            str(quota["QuotaName"]): float(quota["Value"])
            for quota, _ in quotas.pages("list_service_quotas", "Quotas", "the quotas", ServiceCode="ec2")
        }
        name = quota_of(family, known, spot=self._spec.spot)
        if first.name not in self._types:  # reported above
            return
        if name is None:
            yield Finding(False, f"no quota of EC2 is known for {first.name}")
            return
        living = [
            reservation
            for reservation, _ in self._ec2.pages("describe_instances", "Reservations", "what runs", Filters=LIVING)
        ]
        used = sum(
            instance["CpuOptions"]["CoreCount"] * instance["CpuOptions"]["ThreadsPerCore"]
            for reservation in living
            for instance in reservation["Instances"]
            if (instance.get("InstanceLifecycle") == "spot") is self._spec.spot
            and quota_of(instance["InstanceType"].partition(".")[0], known, spot=self._spec.spot) == name
        )
        vcpus = self._types[first.name]["VCpuInfo"]["DefaultVCpus"] * -(-self._count // number)
        said = (
            f"{self._count} workers on {first.name} take {vcpus} vCPUs; quota {name!r}: {known[name]:g}, {used} in use"
        )
        yield Finding(vcpus + used <= known[name], said)


def quota_of(family: str, known: dict[str, float], *, spot: bool) -> str | None:
    """Return the name of the quota (as "All G and VT Spot Instance Requests") for a family of types (as g4dn)."""
    read = re.match(r"[a-z]+?(?=\d)", family)
    letters = read[0] if read else family
    digits = family[len(letters) : len(letters) + 1]
    for wanted in (f"{letters}{digits}", letters):  # a quota of this generation first, as "All P5 ..."
        for name in known:
            kind = name.endswith("Spot Instance Requests") if spot else name.startswith("Running On-Demand")
            if kind and wanted in re.findall(r"\b[a-z]+\d*\b", re.sub(r"\b(all|spot|on|demand)\b", "", name.lower())):
                return name
    return None
