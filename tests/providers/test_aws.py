"""The provider of AWS on moto behind a strict layer: its requests, and how it handles AWS's possible answers."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import NoCredentialsError
from pydantic import ValidationError

from manager.providers import aws
from manager.providers.aws.checks import Checks, quota_of
from manager.providers.aws.client import Aws, aws_client
from manager.providers.aws.errors import fleet_error, provider_error
from manager.providers.aws.provider import end_run
from manager.providers.aws.spec import AwsSpec, AwsType, planned, policy
from manager.providers.interface.provider import (
    CapacityShort,
    Misconfigured,
    Price,
    ProviderError,
    QuotaExceeded,
    Refused,
    Throttled,
    Transient,
    end_all,
)
from tests.notices.metadata_server import MetadataServer, Reply, served
from tests.providers.azure_world import NODE_SECRET, Killed
from tests.providers.fake_ec2 import BOUNDS, ENVIRONMENT, NOTHING, PRICES, FakeEc2, Fault

SPEC = AwsSpec(
    region="us-west-2",
    subnets={"us-west-2a": "subnet-0a", "us-west-2b": "subnet-0b"},
    types=(AwsType(name="g5.xlarge", usd_per_h=0.5), AwsType(name="g4dn.xlarge", usd_per_h=0.3)),
    image="ami-0123",
    security_groups=("sg-01",),
    instance_profile="nodes",
    key_name="me",
)


def test_instances_are_made_in_the_cheapest_zone_and_removed_completely(ec2: FakeEc2, tmp_path: Path) -> None:
    provider = ec2.provider(tmp_path)
    made = provider.request("tiny-1", 2)
    second = sorted(ec2.subnets)[1]
    assert [(vm.name, vm.size, vm.zone, vm.usd_per_h) for vm in made] == [
        (f"tiny-1-{index}", "g4dn.xlarge", second, PRICES["g4dn.xlarge"]) for index in range(2)
    ]
    assert provider.price() == Price(usd_per_h=1.54, source="AWS's spot price history")
    ec2.slow_ends = 3
    assert provider.dismantle() == ()
    assert ec2.left() == NOTHING


def test_a_type_that_names_its_zone_comes_in_no_other(ec2: FakeEc2, tmp_path: Path) -> None:
    zones = sorted(ec2.subnets)[:2]
    types = tuple(AwsType(name="g4dn.xlarge", node_type=f"t4@{zone}") for zone in zones)
    provider = ec2.provider(tmp_path, spec=ec2.spec.model_copy(update={"types": types}))
    for number, zone in enumerate(zones):
        (made,) = provider.request(f"tiny-{number}", 1, node_type=f"t4@{zone}")
        assert (made.zone, made.node_type) == (zone, f"t4@{zone}")
    assert {(vm.zone, vm.node_type) for vm in provider.list()} == {(zone, f"t4@{zone}") for zone in zones}
    elsewhere = {"name": "g4dn.xlarge", "node_type": "t4@mars-1a"}
    with pytest.raises(ValidationError, match="types: no zone mars-1a, which a node_type names; allowed: us-west-2a"):
        AwsSpec.model_validate({**SPEC.model_dump(), "types": [elsewhere]})


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_request_is_completed_after_a_kill_at_any_call(ec2: FakeEc2, tmp_path: Path, after: bool) -> None:
    """No instance is made twice, although AWS lists new ones late."""
    num_kills, lived = 0, False
    while not lived:
        directory, left = tmp_path / str(num_kills), iter(range(num_kills, -1, -1))
        directory.mkdir()
        ec2.hidden = 2
        ec2.kill = lambda _name, late, left=left: late is after and not next(left, 1)  # type: ignore[misc]
        try:
            ec2.provider(directory).request("tiny-1", 2)
            lived = True
        except Killed:
            num_kills += 1
        ec2.kill = lambda *_: False
        provider = ec2.provider(directory)
        assert [vm.name for vm in provider.request("tiny-1", 2)] == ["tiny-1-0", "tiny-1-1"]
        assert sorted(ec2.living()) == ["tiny-1-0", "tiny-1-1"]
        end_all(provider, pause=lambda _s: None)
        assert ec2.left() == NOTHING
    assert num_kills >= 9


def test_an_answer_that_is_lost_is_asked_for_again_under_the_same_token(ec2: FakeEc2, tmp_path: Path) -> None:
    ec2.faults, ec2.hidden = [Fault("CreateFleet", carried_out=True)], 2
    with pytest.raises(Transient, match="Read timeout"):
        ec2.provider(tmp_path).request("a", 1)
    assert [vm.name for vm in ec2.provider(tmp_path).request("a", 1)] == ["a-0"]
    assert list(ec2.living()) == ["a-0"]


def test_a_new_instance_exists_although_no_list_has_it_yet(ec2: FakeEc2, tmp_path: Path) -> None:
    ec2.hidden, now_s = 1000, [0.0]
    provider = ec2.provider(tmp_path, clock=lambda: now_s[0])
    (made,) = provider.request("a", 1)
    assert provider.list() == (made,)
    another = ec2.provider(tmp_path, clock=lambda: now_s[0])
    assert another.list() == another.request("a", 1) == (made,)
    with pytest.raises(Transient, match=r"a-0 \(i-\w+\) is left: InvalidInstanceID.NotFound"):
        another.delete(["a-0"])
    now_s[0] = BOUNDS.list_s + 1
    assert another.list() == ()


def test_a_run_has_not_ended_while_aws_may_list_more_of_its_instances(ec2: FakeEc2, tmp_path: Path) -> None:
    """Another machine reconciles, which knows no ids: it asks by what was requested."""
    told: list[str] = []

    def reconciled(run: str) -> list[str]:
        options: dict[str, Any] = {"pause": ec2.wait, "open_client": ec2.client, "bounds": BOUNDS}
        return sorted(vm.name for vm in end_run(ec2.spec, run, "tiny", told.append, **options))

    ec2.hidden = 6
    ec2.provider(tmp_path).request("a", 3)
    assert reconciled("tiny-1") == ["a-0", "a-1", "a-2"]
    assert ec2.left() == NOTHING
    assert told[0].startswith("3 of the run's instances were requested and are not listed by AWS")
    ec2.trouble = {"b-0": "InternalError"}
    with pytest.raises(Transient):
        ec2.provider(tmp_path, run="tiny-2").request("b", 1)
    ec2.passed_s = 0.0
    assert reconciled("tiny-2") == [], "what is not listed after that time was never made"
    assert ec2.left() == NOTHING
    assert ec2.passed_s == pytest.approx(BOUNDS.list_s, abs=60), "and it is not waited for after it"


def test_an_ended_instance_can_be_made_again_under_its_name(ec2: FakeEc2, tmp_path: Path) -> None:
    provider = ec2.provider(tmp_path)
    provider.request("a", 1)
    ec2.take(*ec2.living().values())
    assert provider.list() == ()
    assert [vm.name for vm in provider.request("a", 1)] == []  # the request was answered
    assert [vm.name for vm in ec2.provider(tmp_path).request("b", 1)] == ["b-0"]


def test_fleets_that_get_nothing_leave_a_request_granted_in_part(ec2: FakeEc2, tmp_path: Path) -> None:
    ec2.max_spot = 3
    provider = ec2.provider(tmp_path)
    assert len(provider.request("a", 4)) == 3
    with pytest.raises(QuotaExceeded, match="b-0: MaxSpotInstanceCountExceeded"):
        provider.request("b", 1)
    ec2.error_of_all = "InsufficientInstanceCapacity"
    with pytest.raises(CapacityShort, match="c-0: InsufficientInstanceCapacity"):
        provider.request("c", 1)


def test_a_type_that_is_short_is_followed_by_larger_ones(ec2: FakeEc2, tmp_path: Path) -> None:
    ec2.shortages = {("g4dn.xlarge", zone): "InsufficientInstanceCapacity" for zone in ec2.subnets}
    (vm,) = ec2.provider(tmp_path).request("a", 3)
    assert (vm.size, vm.num_devices) == ("g4dn.12xlarge", 4)
    assert ec2.calls.count("CreateFleet") <= 4


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("RequestLimitExceeded", 503, Throttled),
        ("Throttling", 400, Throttled),
        ("MaxSpotInstanceCountExceeded", 400, QuotaExceeded),
        ("VcpuLimitExceeded", 400, QuotaExceeded),
        ("InsufficientInstanceCapacity", 500, CapacityShort),
        ("SpotMaxPriceTooLow", 400, CapacityShort),
        ("ExpiredToken", 400, Transient),
        ("RequestExpired", 400, Transient),
        ("InvalidInstanceID.NotFound", 400, Transient),
        ("IdempotentParameterMismatch", 400, Transient),
        ("InternalError", 500, Transient),
        ("Unavailable", 503, Transient),
        ("", 200, Transient),
        ("UnauthorizedOperation", 403, Misconfigured),
        ("InvalidAMIID.NotFound", 400, Misconfigured),
        ("AuthFailure", 401, Transient),
        ("InvalidLaunchTemplateId.VersionNotFound", 400, Transient),
        ("SomethingNew", 400, Transient),
    ],
)
def test_errors_say_what_to_do_next(code: str, status: int, kind: type[ProviderError]) -> None:
    found = provider_error(code, "a\n  sentence", status, "VM a-0")
    assert type(found) is kind
    assert str(found) == f"VM a-0: {code}: a sentence"


def test_a_foreign_image_is_not_mistaken_for_an_expired_login() -> None:
    assert type(provider_error("AuthFailure", "Not authorized for images: [ami-1]", 403)) is Misconfigured


def test_a_vm_is_recognised_by_its_own_tag_whatever_its_name(ec2: FakeEc2, tmp_path: Path) -> None:
    provider = ec2.provider(tmp_path)
    provider.request("a", 2)
    first, second = (ec2.living()[name] for name in ("a-0", "a-1"))
    ec2.real.create_tags(Resources=[first], Tags=[{"Key": "Name", "Value": "web"}])
    ec2.real.delete_tags(Resources=[second], Tags=[{"Key": "Name"}, {"Key": "morph-vm"}])
    assert [vm.name for vm in ec2.provider(tmp_path / "other").list()] == ["a-0", second]
    ec2.provider(tmp_path / "other").dismantle()
    assert ec2.left() == NOTHING


def test_a_launch_template_is_deleted_once_its_instance_is_made_or_refused(ec2: FakeEc2, tmp_path: Path) -> None:
    provider = ec2.provider(tmp_path)
    provider.request("a", 1)
    ec2.error_of_all = "InsufficientInstanceCapacity"
    with pytest.raises(CapacityShort):
        provider.request("b", 1)
    assert ec2.calls.count("CreateLaunchTemplateVersion") == len(ec2.dropped) >= 2


def test_without_a_login_one_sentence_says_so(ec2: FakeEc2) -> None:
    class Nobody:
        def get_caller_identity(self) -> dict[str, str]:
            raise NoCredentialsError

    (found,) = Checks(ec2.spec, lambda _service: Nobody(), 1).run()
    assert found == (
        False,
        "who you are: Unable to locate credentials (`aws configure`, AWS_PROFILE, or an instance with a role)",
    )


def test_a_fleets_own_errors_have_no_status() -> None:
    assert type(fleet_error("InternalError", "-", "VM a")) is Transient
    assert type(fleet_error("InvalidParameterValue", "-", "VM a")) is Misconfigured


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"Reservations": None},
        {"Reservations": [{}]},
        {"Reservations": [{"Instances": [{"Tags": [{"Key": "morph-run"}]}]}]},
        {"Reservations": [{"Instances": [{"InstanceId": "i-1", "Tags": [{"Key": "morph-run", "Value": "tiny-1"}]}]}]},
    ],
    ids=["nothing", "none", "no instances", "half a tag", "no state"],
)
def test_an_unreadable_answer_is_not_an_empty_list(ec2: FakeEc2, tmp_path: Path, answer: object) -> None:
    provider = ec2.provider(tmp_path)
    (made,) = provider.request("a", 1)
    for ask in (provider.list, lambda: provider.delete(["a-0"]), provider.dismantle):
        ec2.faults = [Fault("DescribeInstances", answer=answer)]  # type: ignore[arg-type]
        with pytest.raises(Transient):
            ask()
    assert provider.list() == (made,)


def test_credentials_that_expired_are_looked_up_anew_and_the_call_made_once_more() -> None:
    from tests.providers.fake_ec2 import error

    opened = []

    class Once:
        def __init__(self) -> None:
            opened.append(self)

        def describe_instances(self) -> dict[str, str]:
            if len(opened) < 2:
                raise error("DescribeInstances", "ExpiredToken")
            return {"told": "yes"}

        def describe_volumes(self) -> dict[str, str]:
            raise error("DescribeVolumes", "ExpiredToken")

        def describe_subnets(self) -> dict[str, str]:
            raise NoCredentialsError

    aws = Aws(Once)
    assert aws.call("describe_instances", "") == {"told": "yes"}
    assert len(opened) == 2
    with pytest.raises(Transient, match="the list: ExpiredToken"):
        aws.call("describe_volumes", "the list")
    assert len(opened) == 3
    with pytest.raises(Misconfigured, match="Unable to locate credentials"):
        aws.call("describe_subnets", "")


def test_leftovers_of_instances_are_deleted_and_named_with_their_price(ec2: FakeEc2, tmp_path: Path) -> None:
    provider = ec2.provider(tmp_path)
    provider.request("a", 1)
    tags = [{"Key": key, "Value": value} for key, value in (("morph-run", "tiny-1"), ("morph-job", "tiny"))]
    for owned in (tags, []):
        volume = ec2.real.create_volume(AvailabilityZone="us-west-2a", Size=100, VolumeType="gp3")["VolumeId"]
        made = ec2.real.create_network_interface(SubnetId=ec2.subnets["us-west-2a"])["NetworkInterface"]
        if owned:
            ec2.real.create_tags(Resources=[volume, made["NetworkInterfaceId"]], Tags=owned)
    told: list[str] = []
    options: dict[str, Any] = {"open_client": ec2.client, "bounds": BOUNDS}
    assert [vm.name for vm in end_run(ec2.spec, "tiny-1", "tiny", told.append, **options)] == ["a-0"]
    assert [re.sub(r"(vol|eni)-\w+", r"\1", sentence) for sentence in told] == [
        "ended what an instance had left behind: volume vol (100 GiB, gp3), 0.0100 dollars an hour",
        "ended what an instance had left behind: network interface eni, 0.0000 dollars an hour",
    ]
    left = ec2.left()
    assert [len(found) for found in left.values()] == [0, 1, 1, 0], "what has no tags is somebody else's"
    with pytest.raises(Misconfigured, match=r"nothing in us-west-2 has the tags of run tiny-1 .* has any there"):
        end_run(ec2.spec, "tiny-1", "tiny", told.append, **options)


def test_one_instance_that_may_not_be_ended_keeps_no_other(ec2: FakeEc2, tmp_path: Path) -> None:
    provider = ec2.provider(tmp_path)
    provider.request("a", 3)
    ec2.protected = {"a-1"}
    with pytest.raises(Misconfigured, match=r"^a-1 \(i-\w+\) is left: OperationNotPermitted: injected$"):
        provider.dismantle()
    assert list(ec2.living()) == ["a-1"]
    ec2.protected = set()
    provider.dismantle()
    assert ec2.left() == NOTHING


def test_a_template_of_somebody_elses_is_left_alone(ec2: FakeEc2, tmp_path: Path) -> None:
    name = "morph-tiny-1"
    ec2.real.create_launch_template(LaunchTemplateName=name, LaunchTemplateData={"ImageId": ec2.spec.image})
    provider = ec2.provider(tmp_path)
    with pytest.raises(Misconfigured, match="launch template morph-tiny-1 exists without the tags of this run"):
        provider.request("a", 1)
    provider.dismantle()
    assert ec2.left()["launch templates"] == [name]


def test_prices_are_looked_up_for_what_the_user_does_not_say(ec2: FakeEc2, tmp_path: Path) -> None:
    on_demand = ec2.provider(tmp_path, spec=ec2.spec.model_copy(update={"spot": False}))
    assert on_demand.price() == Price(usd_per_h=7.0, source="AWS's price list")
    given = tuple(known.model_copy(update={"usd_per_h": 0.7}) for known in ec2.spec.types)
    provider = ec2.provider(tmp_path, run="b", spec=ec2.spec.model_copy(update={"types": given}))
    assert provider.price() == Price(usd_per_h=0.7, source="the cluster file")
    ec2.faults = [Fault("DescribeSpotPriceHistory", "UnauthorizedOperation", 403, times=99)]
    assert ec2.provider(tmp_path).price() is None


def test_the_policy_allows_what_is_asked_and_no_more_is_needed(ec2: FakeEc2, tmp_path: Path) -> None:
    provider = ec2.provider(tmp_path, spec=ec2.spec.model_copy(update={"spot": False}))
    provider.request("a", 1)
    ec2.provider(tmp_path).request("b", 1)
    provider.boot_log("a-0")
    ec2.real.create_tags(
        Resources=[ec2.real.create_volume(AvailabilityZone="us-west-2a", Size=1)["VolumeId"]],
        Tags=[{"Key": key, "Value": value} for key, value in (("morph-run", "tiny-1"), ("morph-job", "tiny"))],
    )
    provider.dismantle()
    written = policy(SPEC, "123456789012")
    allowed = [action for statement in written["Statement"] for action in statement["Action"]]
    asked = {f"pricing:{call}" if call == "GetProducts" else f"ec2:{call}" for call in ec2.calls}
    assert asked - set(allowed) == set()
    calls = "".join(path.read_text(encoding="utf-8") for path in Path(aws.__file__).parent.glob("*.py"))
    implied = {"ec2:CreateTags", "iam:PassRole"}  # at each creation
    names = {action: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", action.split(":")[1]).lower() for action in allowed}
    assert {action for action, name in names.items() if f'"{name}"' not in calls} == implied
    assert not [action for action in allowed if "*" in action]
    for statement in written["Statement"]:
        if any(fnmatch.fnmatch(action, "ec2:[CDT]*") and "Describe" not in action for action in statement["Action"]):
            assert "*" not in statement["Resource"]
    ends = next(one for one in written["Statement"] if "ec2:TerminateInstances" in one["Action"])
    assert ends["Condition"] == {"StringLike": {"ec2:ResourceTag/morph-run": "*"}}
    assert len(json.dumps(written).encode()) < 6144, "what a managed policy may have"


@pytest.mark.parametrize("kind", ["instance", "volume", "network-interface", "fleet", "launch-template"])
def test_the_policy_lets_nothing_be_made_or_ended_without_the_runs_tag(kind: str) -> None:
    """As AWS evaluates policies: a request needs a statement whose condition holds, for each resource of a call."""
    make = {"fleet": "ec2:CreateFleet", "launch-template": "ec2:CreateLaunchTemplate"}.get(kind, "ec2:RunInstances")
    end = {"volume": "ec2:DeleteVolume", "launch-template": "ec2:DeleteLaunchTemplate"}.get(kind)
    ours, others = {"morph-run": "tiny-1"}, {"Name": "another"}

    def may(action: str, **tags: dict[str, str]) -> bool:
        known = {f"aws:RequestTag/{key}": value for key, value in tags.get("asked", {}).items()}
        known |= {f"ec2:ResourceTag/{key}": value for key, value in tags.get("has", {}).items()}
        return any(
            action in one["Action"]
            and any(fnmatch.fnmatch(f"arn:aws:ec2:us-west-2:123456789012:{kind}/x", name) for name in one["Resource"])
            and all(key in known for key in one.get("Condition", {}).get("StringLike", {}))
            for one in policy(SPEC, "123456789012")["Statement"]
        )

    assert [may(make, asked=tags) for tags in (ours, others, {})] == [True, False, False]
    if kind == "launch-template":
        assert [may("ec2:RunInstances", has=tags) for tags in (ours, others, {})] == [True, False, False]
    if end is not None:
        assert [may(end, has=tags) for tags in (ours, others, {})] == [True, False, False]


def test_a_cloud_file_is_checked_and_nothing_is_made(ec2: FakeEc2, tmp_path: Path) -> None:
    ec2.provider(tmp_path, run="another").request("a", 1)
    before = ec2.left()
    found = list(Checks(ec2.spec, ec2.client, 8).run())
    assert [finding.sentence for finding in found if not finding.is_well] == []
    sentences = "\n".join(finding.sentence for finding in found)
    for part in (
        "AWS knows you as arn:aws:sts::",
        "g4dn.12xlarge has 4 GPUs",
        "g4dn.xlarge is offered in us-west-2a, us-west-2b, us-west-2c",
        *(f"{call} would be carried out" for call in ("create_launch_template", "create_fleet", "run_instances")),
        "8 workers on g4dn.xlarge take 32 vCPUs; quota 'All G and VT Spot Instance Requests': 64, 4 in use",
        "1.54 dollars an hour at most",
    ):
        assert part in sentences
    assert ec2.left() == before
    end_all(ec2.provider(tmp_path, run="another"), pause=lambda _s: None)


def test_every_thing_that_is_wrong_is_found_at_once(ec2: FakeEc2) -> None:
    types = (AwsType(name="g4dn.xlarge", num_gpus=2), AwsType(name="t3.small", num_gpus=0))
    subnets = {"us-west-2a": ec2.subnets["us-west-2b"]}
    spec = ec2.spec.model_copy(update={"types": types, "subnets": subnets, "root_device": "/dev/xvda"})
    ec2.quota_vcpus = 3.0
    login = Fault("GetCallerIdentity", "InvalidClientTokenId", times=2)
    ec2.faults = [Fault("CreateFleet", "UnauthorizedOperation", 403), login]
    wrong = [finding.sentence for finding in Checks(spec, ec2.client, 4).run() if not finding.is_well]
    assert [re.sub(r"(ami|subnet)-\w+", r"\1", sentence) for sentence in wrong] == [
        "who you are: InvalidClientTokenId: injected",
        "g4dn.xlarge has 1 GPUs, and num_gpus is 2",
        "image ami boots from /dev/sda1, and root_device is /dev/xvda",
        "subnet is in zone us-west-2b, not in the zone given in subnets",
        "t3.small is offered in none of your zones",
        "create_fleet: UnauthorizedOperation: injected",
        "no quota of EC2 is known for t3.small",
        "a type's price is not known: give usd_per_h, or limits in dollars cannot be kept",
    ]
    ec2.spec = ec2.spec.model_copy(update={"spot": False})
    (short,) = [finding.sentence for finding in Checks(ec2.spec, ec2.client, 1).run() if not finding.is_well]
    assert short == ("1 workers on g4dn.xlarge take 4 vCPUs; quota 'Running On-Demand G and VT instances': 3, 0 in use")


@pytest.mark.parametrize(
    ("family", "quota"),
    [
        ("g4dn", "All G and VT Spot Instance Requests"),
        ("vt1", "All G and VT Spot Instance Requests"),
        ("p3", "All P4, P3 and P2 Spot Instance Requests"),
        ("p5en", "All P5 Spot Instance Requests"),
        ("p6-b200", None),
        ("m6i", "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"),
        ("inf2", "All Inf Spot Instance Requests"),
    ],
)
def test_the_quota_of_a_family_is_known_by_its_name(family: str, quota: str | None) -> None:
    names = {"All G and VT", "All P4, P3 and P2", "All P5", "All Inf", "All Standard (A, C, D, H, I, M, R, T, Z)"}
    known = {f"{name} Spot Instance Requests": 1.0 for name in sorted(names)} | {"Running On-Demand P instances": 2.0}
    assert quota_of(family, known, spot=True) == quota
    assert quota_of("p6-b200", known, spot=False) == "Running On-Demand P instances"


def test_the_planned_request_is_shown_without_secrets() -> None:
    template, *calls = planned(SPEC, "tiny-1", "tiny", "tiny-1", 2)
    assert [call["call"] for call in calls] == 2 * ["CreateLaunchTemplateVersion", "CreateFleet"]
    fleets = calls[1::2]
    assert template["body"]["LaunchTemplateData"]["IamInstanceProfile"] == {"Name": "nodes"}
    overrides = fleets[0]["body"]["LaunchTemplateConfigs"][0]["Overrides"]
    assert [(one["InstanceType"], one["SubnetId"]) for one in overrides] == [
        (kind, subnet) for kind in ("g5.xlarge", "g4dn.xlarge") for subnet in ("subnet-0a", "subnet-0b")
    ]
    assert fleets[0]["body"]["SpotOptions"]["AllocationStrategy"] == "price-capacity-optimized"
    assert NODE_SECRET not in json.dumps([template, *calls])
    ranked = SPEC.model_copy(update={"strategy": "capacity-optimized-prioritized", "max_usd_per_h": 0.25})
    (_, _, fleet) = planned(ranked, "tiny-1", "tiny", "tiny-1", 1)
    overrides = fleet["body"]["LaunchTemplateConfigs"][0]["Overrides"]
    assert [(one["Priority"], one["MaxPrice"]) for one in overrides] == [
        (rank, "0.25") for rank in (0.0, 0.0, 1.0, 1.0)
    ]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"region": "US West"}, "region"),
        ({"subnets": {}}, "subnets"),
        ({"subnets": {"us-west-2a": "vpc-1"}}, "subnets"),
        ({"types": [{"name": "Standard_NC6"}]}, "types"),
        ({"image": "ubuntu"}, "image"),
        ({"security_groups": []}, "security_groups"),
        ({"strategy": "lowest-price"}, "strategy"),
        ({"endpoint": "http://ec2.example.org"}, "endpoint"),
    ],
)
def test_a_wrong_field_of_a_cloud_file_is_named(changed: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        AwsSpec.model_validate({**SPEC.model_dump(), **changed})


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with served() as server:
        yield server


LISTED = "<DescribeInstancesResponse><reservationSet/></DescribeInstancesResponse>"
BUSY = "<Response><Errors><Error><Code>RequestLimitExceeded</Code><Message>-</Message></Error></Errors></Response>"


def test_botocore_retries_throttled_calls_and_a_proxys_page_is_refused(endpoint: MetadataServer) -> None:
    spec = SPEC.model_copy(update={"endpoint": endpoint.url})
    aws = Aws(lambda: aws_client(spec))
    endpoint.script("POST", "/", Reply(status=503, body=BUSY), Reply(body=LISTED))
    assert list(aws.pages("describe_instances", "Reservations", "the list")) == []
    assert len(endpoint.asked) == 2
    once = Aws(lambda: aws_client(spec, attempts=1))
    for reply, kind in (
        (Reply(status=503, body=BUSY), Throttled),
        (Reply(body="<html>Sign in</html>"), Transient),
        (Reply(body="Sign in"), Transient),
        (Reply(body="<DescribeInstancesResponse/>"), Transient),
        (Reply(status=502, body="<html>"), Transient),
        (Reply(drop=True), Transient),
    ):
        endpoint.script("POST", "/", reply)
        with pytest.raises(kind):
            list(once.pages("describe_instances", "Reservations", "the list"))
    assert (spec.provider, SPEC.provider) == ("local", "aws")


def test_a_run_that_is_over_asks_for_nothing_more(ec2: FakeEc2, tmp_path: Path) -> None:
    provider = ec2.provider(tmp_path)
    provider.stop()
    with pytest.raises(Transient, match="no longer waited for"):
        provider.request("a", 2)
    assert "CreateFleet" not in ec2.calls
    ec2.error_of_all = "UnfulfillableCapacity"
    with pytest.raises(Refused):
        ec2.provider(tmp_path).request("a", 2)
