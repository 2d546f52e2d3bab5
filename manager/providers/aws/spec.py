"""The cloud file for AWS, and the documents that are sent to AWS: pure, no SDK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from manager.providers.interface.cloud import DEVICES_TAG, Identity, Size, check_types, dearest, missing, of_type, turns
from manager.providers.interface.provider import Price, vm_name
from morph.contract.base import Value
from morph.contract.cluster import UsdPerHourAtMost

NAME_TAG, VM_TAG, TOKEN_TAG = "Name", "morph-vm", "morph-token"
"""Consoles show the first tag, and users may change it there; the second identifies a VM, the third its fleet."""
PUBLIC_DOMAIN = "amazonaws.com"


class AwsType(Size):
    """An instance type that may be used; its default price comes from AWS's price history or list."""

    name: str = Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$", description="such as g4dn.xlarge")


class AwsSpec(Value):
    """The cloud file for AWS. Everything named here must exist; ``docs/guides/aws.md`` says how to make it."""

    region: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")
    subnets: dict[
        Annotated[str, Field(pattern=r"^[a-z0-9-]+[a-z]$")], Annotated[str, Field(pattern=r"^subnet-[0-9a-f]+$")]
    ] = Field(min_length=1, description="the subnet in each zone where an instance may be, by the zone's name")
    types: tuple[AwsType, ...] = Field(min_length=1)
    spot: bool = True
    strategy: Literal["price-capacity-optimized", "capacity-optimized", "capacity-optimized-prioritized"] = Field(
        default="price-capacity-optimized",
        description="how AWS picks type and zone of a spot instance; prioritized: types in their order here",
    )
    max_usd_per_h: UsdPerHourAtMost | None = Field(
        default=None, description="highest price of a spot instance; None: the on-demand price"
    )
    image: str = Field(pattern=r"^ami-[0-9a-f]+$")
    security_groups: tuple[Annotated[str, Field(pattern=r"^sg-[0-9a-f]+$")], ...] = Field(min_length=1)
    instance_profile: str | None = Field(
        default=None, pattern=r"^[\w+=,.@-]{1,128}$", description="name of the profile whose role the instances have"
    )
    key_name: str | None = Field(default=None, min_length=1, max_length=255, description="key pair for ssh; None: none")
    root_device: str = Field(
        default="/dev/sda1", pattern=r"^/dev/\w+$", description="root device of the image: /dev/xvda for Amazon Linux"
    )
    root_volume: Literal["gp3", "gp2", "io1", "io2", "st1", "sc1", "standard"] = "gp3"
    root_gib: int | None = Field(default=None, ge=1, le=16384, description="root disk; None: as the image")
    endpoint: str | None = Field(
        default=None,
        pattern=r"^(https://[^\s'\"]+|http://(localhost|127\.\d+\.\d+\.\d+)(:\d+)?/?)$",
        description="URL of an EC2 other than the region's; without TLS only on this machine",
    )

    @model_validator(mode="after")
    def _types_of_all(self) -> AwsSpec:
        check_types(self.types, self.subnets, "types")
        return self

    def of_type(self, node_type: str) -> AwsSpec:
        """Return the spec with the types that have one type of GPU; empty: with all."""
        return self.model_copy(update={"types": of_type(self.types, node_type)})

    @property
    def provider(self) -> str:
        """The name under which the history keeps the VMs: emulators on this machine are kept apart from the cloud."""
        return "local" if (self.endpoint or "").startswith("http:") else "aws"

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones in which an instance may be."""
        return tuple(self.subnets)

    def type_of(self, name: str, zone: str) -> AwsType | None:
        """Return the type with this name in a zone; None: there is none."""
        return next((known for known in self.types if known.name == name and known.may_be_in(zone)), None)

    def price(self, find: Callable[[AwsType], float | None]) -> Price | None:
        """Return the price of one hour of the most expensive type; see ``dearest``."""
        listed = "AWS's spot price history" if self.spot else "AWS's price list"
        return dearest(self.types, find, listed)


def template_name(run: str) -> str:
    """Return the name of a run's launch template."""
    return f"morph-{vm_name(run, 0).rsplit('-', 1)[0]}"


def template_body(spec: AwsSpec, identity: Identity) -> dict[str, Any]:
    """Return the launch template for all instances of a run, without secrets; each boots from its own version."""
    volume: dict[str, Any] = {"DeleteOnTermination": True, "VolumeType": spec.root_volume}
    if spec.root_gib is not None:
        volume["VolumeSize"] = spec.root_gib
    data: dict[str, Any] = {
        "ImageId": spec.image,
        "SecurityGroupIds": list(spec.security_groups),
        "InstanceInitiatedShutdownBehavior": "terminate",  # the volumes of a merely stopped instance are billed
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",  # IMDSv2
            "HttpPutResponseHopLimit": 1,  # no token behind another hop, as in a container
        },
        "BlockDeviceMappings": [{"DeviceName": spec.root_device, "Ebs": volume}],
    }
    if spec.instance_profile is not None:
        data["IamInstanceProfile"] = {"Name": spec.instance_profile}
    if spec.key_name is not None:
        data["KeyName"] = spec.key_name
    return {
        "LaunchTemplateName": template_name(identity.run),
        "LaunchTemplateData": data,
        "TagSpecifications": [_tagged("launch-template", identity.tags())],
    }


def version_body(spec: AwsSpec, identity: Identity, user_data: Any, token: str) -> dict[str, Any]:
    """Return a version of the launch template for one instance, described by the token of the instance's fleet."""
    body = template_body(spec, identity)
    return {
        "LaunchTemplateName": body["LaunchTemplateName"],
        "LaunchTemplateData": body["LaunchTemplateData"] | {"UserData": user_data},
        "VersionDescription": token,
        "ClientToken": token,
    }


def fleet_body(
    spec: AwsSpec, identity: Identity, request: str, name: str, num_devices: int, version: str, token: str
) -> dict[str, Any]:
    """Return the request for one instance, at once or not at all, of any type with this many devices, in any zone."""
    tags = identity.tags(request) | {NAME_TAG: name, VM_TAG: name, TOKEN_TAG: token, DEVICES_TAG: str(num_devices)}
    types = [known for known in spec.types if known.num_devices == num_devices]
    limit = {} if spec.max_usd_per_h is None or not spec.spot else {"MaxPrice": f"{spec.max_usd_per_h:g}"}
    prioritized = spec.strategy == "capacity-optimized-prioritized" or not spec.spot
    overrides = [
        {"InstanceType": known.name, "SubnetId": subnet, **limit, **({"Priority": float(rank)} if prioritized else {})}
        for rank, known in enumerate(types)
        for zone, subnet in spec.subnets.items()
        if known.may_be_in(zone)
    ]
    market = "spot" if spec.spot else "on-demand"
    template = {"LaunchTemplateName": template_name(identity.run), "Version": version}
    how: dict[str, Any] = (
        {"SpotOptions": {"AllocationStrategy": spec.strategy, "InstanceInterruptionBehavior": "terminate"}}
        if spec.spot
        else {"OnDemandOptions": {"AllocationStrategy": "prioritized"}}
    )
    return {
        "Type": "instant",
        "ClientToken": token,
        "TargetCapacitySpecification": {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": market},
        "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": template, "Overrides": overrides}],
        "TagSpecifications": [_tagged(kind, tags) for kind in ("fleet", "instance", "volume", "network-interface")],
        **how,
    }


def _tagged(kind: str, tags: dict[str, str]) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def planned(
    spec: AwsSpec,
    run: str,
    job: str,
    request: str,
    count: int,
    cloud_config: Callable[[str, int], Any] = lambda _node, _num_devices: "(the cloud-config; it holds secrets)",
) -> list[dict[str, Any]]:
    """Return the calls that a request for ``count`` devices would make, in order; for the user, without secrets."""
    identity = Identity(run=run, job=job)
    calls: list[dict[str, Any]] = [{"call": "CreateLaunchTemplate", "body": template_body(spec, identity)}]
    num_devices = turns(spec.types, count, count)[0]
    for index, name in missing(request, {}, count, count, num_devices):
        token = "(new for each try)"
        version = version_body(spec, identity, cloud_config(name, num_devices), token)
        calls.append({"call": "CreateLaunchTemplateVersion", "body": version})
        body = fleet_body(spec, identity, request, name, num_devices, f"{index + 2}", token)
        calls.append({"call": "CreateFleet", "body": body})
    return calls


def policy(spec: AwsSpec, account: str = "*") -> dict[str, Any]:
    """Return the IAM policy with the minimal permissions of the manager's user in an ``account`` (``*``: its own).

    Only resources with the tag ``morph-run``, set at creation, may be made, changed or ended.
    """
    partition = next((f"aws-{part}" for part in ("cn", "us-gov") if spec.region.startswith(f"{part}-")), "aws")
    here = f"arn:{partition}:ec2:{spec.region}:{account}"
    made = [f"{here}:{kind}/*" for kind in ("instance", "volume", "network-interface", "launch-template", "fleet")]
    used = [f"{here}:spot-instances-request/*", f"arn:{partition}:ec2:{spec.region}::image/{spec.image}"]
    used += [f"{here}:subnet/{subnet}" for subnet in spec.subnets.values()]
    used += [f"{here}:security-group/{group}" for group in spec.security_groups]
    used += [f"{here}:key-pair/{spec.key_name}"] if spec.key_name else []
    ours, tagged = ({"StringLike": {f"{key}/morph-run": "*"}} for key in ("ec2:ResourceTag", "aws:RequestTag"))
    statements: list[dict[str, Any]] = [
        {
            "Sid": "Look",
            "Effect": "Allow",
            "Action": [
                "ec2:DescribeImages", "ec2:DescribeInstances", "ec2:DescribeInstanceTypeOfferings",
                "ec2:DescribeInstanceTypes", "ec2:DescribeLaunchTemplates", "ec2:DescribeLaunchTemplateVersions",
                "ec2:DescribeNetworkInterfaces", "ec2:DescribeSecurityGroups", "ec2:DescribeSpotPriceHistory",
                "ec2:DescribeSubnets", "ec2:DescribeVolumes", "pricing:GetProducts", "servicequotas:ListServiceQuotas",
            ],
            "Resource": "*",
        },
        {
            "Sid": "Make",
            "Effect": "Allow",
            "Action": ["ec2:CreateFleet", "ec2:CreateLaunchTemplate", "ec2:RunInstances"],
            "Resource": made,
            "Condition": tagged,
        },
        {
            "Sid": "UseOwnTemplates",
            "Effect": "Allow",
            "Action": ["ec2:CreateFleet", "ec2:RunInstances"],
            "Resource": [f"{here}:launch-template/*"],
            "Condition": ours,
        },
        {
            "Sid": "Use",
            "Effect": "Allow",
            "Action": ["ec2:CreateFleet", "ec2:RunInstances"],
            "Resource": used,
        },
        {
            "Sid": "TagWhatIsMade",
            "Effect": "Allow",
            "Action": ["ec2:CreateTags"],
            "Resource": made,
            "Condition": {
                "StringEquals": {"ec2:CreateAction": ["CreateFleet", "CreateLaunchTemplate", "RunInstances"]}
            },
        },
        {
            "Sid": "ChangeAndEndWhatIsMorphs",
            "Effect": "Allow",
            "Action": [
                "ec2:CreateLaunchTemplateVersion", "ec2:DeleteLaunchTemplate", "ec2:DeleteLaunchTemplateVersions",
                "ec2:DeleteNetworkInterface", "ec2:DeleteVolume", "ec2:GetConsoleOutput", "ec2:TerminateInstances",
            ],
            "Resource": made[:4],
            "Condition": ours,
        },
    ]  # fmt: skip
    if spec.instance_profile is not None:
        statements.append(
            {
                "Sid": "GiveInstancesTheirRole",
                "Effect": "Allow",
                "Action": ["iam:PassRole"],
                "Resource": [f"arn:{partition}:iam::{account}:role/{spec.instance_profile}"],
                "Condition": {"StringEquals": {"iam:PassedToService": f"ec2.{PUBLIC_DOMAIN}"}},
            }
        )
    return {"Version": "2012-10-17", "Statement": statements}
