"""Faults of AWS: each is injected in front of moto, and Morph's reaction is recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from manager.controller.state.events import ManagerResumed
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import Phase, initial_state
from manager.notices.aws import ACTION_PATH, REBALANCE_PATH, AwsInterruptions, AwsMetadata, AwsRebalance
from manager.providers.aws.provider import end_run
from manager.providers.interface.provider import ProviderError
from morph.contract.cluster import Limits
from tests.cloud.fault_world import BOUND_S, KEEP, Cases, World, config
from tests.cloud.notice_faults import VM, agent, until_draining
from tests.notices.metadata_server import MetadataServer, Reply, json_reply, served
from tests.providers.azure_world import Killed
from tests.providers.fake_ec2 import BOUNDS, NOTHING, FakeEc2, Fault

CASES, ENDING_CASES, NOTICE_CASES = Cases(), Cases(), Cases()
NAMES = ["tiny-1-0", "tiny-1-1"]


@contextmanager
def world(ec2: FakeEc2, directory: Path, **options: Any) -> Iterator[World]:
    opened = World(ec2, directory, open_provider=FakeEc2.provider, **options)
    try:
        yield opened
    finally:
        opened.close()
    assert ec2.left() == NOTHING


@contextmanager
def whole(ec2: FakeEc2, directory: Path, **options: Any) -> Iterator[World]:
    with world(ec2, directory, **options) as run:
        run.begin()
        run.until_whole()
        yield run


def _once(ec2: FakeEc2, directory: Path, fault: Fault, told: str = "") -> list[str]:
    """Check a transient fault: the request continues under its name, and no instance is made twice."""
    ec2.faults = [replace(fault)]
    with whole(ec2, directory) as run:
        assert run.ready() == sorted(ec2.living()) == NAMES
        assert ec2.faults == []
        assert told in str(run.told)
        return run.told


FLEET = partial(Fault, "CreateFleet")
CASES |= {
    "RequestLimitExceeded to a fleet, after botocore has repeated it": partial(
        _once, fault=FLEET("RequestLimitExceeded", 503), told="again in"
    ),
    "InternalError to a fleet": partial(_once, fault=FLEET("InternalError", 500), told="again in"),
    "the answer to a fleet is lost; it was carried out": partial(_once, fault=FLEET(carried_out=True), told="again in"),
    "ExpiredToken, once: the credentials are looked up anew": partial(_once, fault=FLEET("ExpiredToken")),
    "ExpiredToken, for a while": partial(_once, fault=FLEET("ExpiredToken", times=4), told="again in"),
    "a fleet without an instance and without an error": partial(
        _once, fault=FLEET(answer={"FleetId": "fleet-1"}), told="neither an instance nor an error"
    ),
    "a fleet's own InternalError": partial(
        _once, fault=FLEET(answer={"Errors": [{"ErrorCode": "InternalError", "ErrorMessage": "-"}]}), told="again in"
    ),
    "the launch template is not known yet": partial(
        _once, fault=FLEET("InvalidLaunchTemplateName.NotFoundException"), told="again in"
    ),
}


def _refused(ec2: FakeEc2, directory: Path, code: str, cause: str) -> list[str]:
    """Check that the next request is granted after no fleet got an instance for a while."""
    ec2.error_of_all = code
    with world(ec2, directory) as run:
        run.begin()
        run.until(lambda: run.has(f"is refused: {cause}"), "the refusal")
        assert ec2.living() == {}
        ec2.error_of_all = ""
        run.until_whole()
        assert run.ready() == ["tiny-2-0", "tiny-2-1"]
        return run.told


CASES |= {
    "InsufficientInstanceCapacity for all types and zones, then some": partial(
        _refused, code="InsufficientInstanceCapacity", cause="capacity"
    ),
    "MaxSpotInstanceCountExceeded, then raised": partial(_refused, code="MaxSpotInstanceCountExceeded", cause="quota"),
    "the price of all types is above `max_usd_per_h`, and then falls": partial(
        _refused, code="SpotMaxPriceTooLow", cause="capacity"
    ),
}


@CASES("UnauthorizedOperation inside a fleet")
def unauthorised(ec2: FakeEc2, directory: Path) -> list[str]:
    ec2.error_of_all = "UnauthorizedOperation"
    with world(ec2, directory) as run:
        run.begin()
        run.until(lambda: run.state.phase is Phase.ENDED, "the end of the run")
        assert run.has("is refused: input, VM tiny-1-")
        assert run.has("UnauthorizedOperation")
        assert run.state.provisioning.num_requests == 1
        return run.told


def _one_of_two(ec2: FakeEc2, directory: Path, code: str = "", died: str = "", told: str = "") -> list[str]:
    """Check that repeated trouble with one VM costs neither the other one nor a dearer type."""
    ec2.trouble, ec2.dies = {VM: code} if code else {}, {VM: died} if died else {}
    ec2.list_s = 0.0  # the fleet in trouble makes nothing late
    with world(ec2, directory, scale=200.0) as run:
        run.begin()
        run.until_whole()
        assert run.ready() == sorted(ec2.living()) == ["tiny-1-1", "tiny-2-0"]
        assert {vm.size for vm in run.provider.list()} == {"g4dn.xlarge"}
        assert told in str(run.told)
        assert "TerminateInstances" not in ec2.calls
        return run.told


CASES |= {
    "InternalError to one VM of two, always": partial(
        _one_of_two, code="InternalError", told="granted in part: VM tiny-1-0: InternalError"
    ),
    "RequestLimitExceeded to one VM of two, always": partial(
        _one_of_two, code="RequestLimitExceeded", told="granted in part: VM tiny-1-0: RequestLimitExceeded"
    ),
    "one instance of two dies at once, always": partial(
        _one_of_two,
        died="Server.SpotInstanceTermination",
        told="granted in part: VM tiny-1-0 was made and ended: SpotInstanceTermination",
    ),
    "one instance of two dies at once, for lack of capacity": partial(
        _one_of_two, died="Server.InsufficientInstanceCapacity", told="made and ended: InsufficientInstanceCapacity"
    ),
}


@CASES("the cheap type is short, and a dearer one is not; `vms.limits` allow it, or not")
def dearer(ec2: FakeEc2, directory: Path) -> list[str]:
    ec2.shortages = {("g4dn.xlarge", zone): "InsufficientInstanceCapacity" for zone in ec2.subnets}
    (directory / "little").mkdir()
    with world(ec2, directory / "little", limits=Limits(usd_per_h=1.0)) as run:
        run.begin()
        run.until(lambda: run.has("is refused: limit"), "the refusal")
        assert "CreateFleet" not in ec2.calls
    with world(ec2, directory) as run:
        run.begin()
        run.until(lambda: "tiny-1-0.d0" in run.ready(), "the VM")
        assert [vm.size for vm in run.provider.list()] == ["g4dn.12xlarge"]
        choice = "tiny-1: 1 of g4dn.12xlarge with 4 devices requested, because VM tiny-1-"
        assert choice in run.chosen[0]
        assert "InsufficientInstanceCapacity" in run.chosen[0]
        return [*run.told, *run.chosen]


@CASES("InsufficientInstanceCapacity in one zone")
def one_zone(ec2: FakeEc2, directory: Path) -> list[str]:
    cheapest = sorted(ec2.subnets)[1]
    ec2.shortages = {(known.name, cheapest): "InsufficientInstanceCapacity" for known in ec2.spec.types}
    with whole(ec2, directory) as run:
        zones = {vm.zone for vm in run.provider.list()}
        assert cheapest not in zones
        return [*run.told, f"VMs in {', '.join(sorted(zones))}"]


@CASES("one fleet of two gets an instance, then more")
def partly(ec2: FakeEc2, directory: Path) -> list[str]:
    ec2.max_spot = 1
    with world(ec2, directory) as run:
        run.begin()
        run.until(lambda: run.has("granted in part"), "the grant of a part")
        ec2.max_spot = 9
        run.until_whole()
        return run.told


@CASES("DescribeInstances does not tell of new instances for long")
def told_late(ec2: FakeEc2, directory: Path) -> list[str]:
    ec2.hidden = 12
    with whole(ec2, directory, look_every_s=0.02) as run:
        before = len(ec2.calls)
        run.until(lambda: ec2.calls[before:].count("DescribeInstances") > 14, "looks")
        assert run.ready() == sorted(ec2.living()) == NAMES
        assert "TerminateInstances" not in ec2.calls
        return run.told


@CASES("an instance is interrupted, without a notice")
def interrupted(ec2: FakeEc2, directory: Path) -> list[str]:
    with whole(ec2, directory) as run:
        ec2.take(ec2.living()[VM])
        run.lose(VM)
        run.until_whole()
        assert run.ready() == ["tiny-1-1", "tiny-2-0"]
        return run.told


@CASES("an instance is interrupted while it boots")
def never_joins(ec2: FakeEc2, directory: Path) -> list[str]:
    state = initial_state(config(boot_s=600.0))
    with world(ec2, directory, state=state, never_join={VM}, look_every_s=0.05) as run:
        run.begin()
        run.until(lambda: VM in ec2.living() and "tiny-1-1" in run.ready(), "the VMs")
        ec2.take(ec2.living()[VM])
        run.until_whole()
        assert run.ready() == ["tiny-1-1", "tiny-2-0"]
        return run.told


@contextmanager
def killed(ec2: FakeEc2, directory: Path) -> Iterator[World]:
    """Return a manager that is killed after its first fleet was carried out and before this was answered."""
    dead, over = threading.Event(), threading.Event()
    ec2.kill = lambda name, late: name == "CreateFleet" and late
    first = World(ec2, directory, open_provider=FakeEc2.provider)
    request = first.provider.request

    def die(*arguments: Any) -> Any:
        try:
            return request(*arguments)
        except Killed:
            dead.set()
            over.wait(BOUND_S)
            raise RuntimeError("the manager is gone") from None  # not an error of AWS, so nothing is retried

    first.provider.request = die  # type: ignore[method-assign]
    try:
        first.begin()
        first.until(dead.is_set, "the manager's death")
        ec2.kill = lambda *_: False
        first.die()
        yield first
    finally:
        over.set()
        first.shell.close()


@CASES("the manager is killed between request and answer; another takes over")
def taken_over(ec2: FakeEc2, directory: Path) -> list[str]:
    with killed(ec2, directory) as first, world(ec2, directory, state=first.state) as run:
        run.tell(ManagerResumed(living=()))
        run.until_whole()
        assert run.ready() == sorted(ec2.living()) == NAMES
        return run.told


def reconcile(ec2: FakeEc2, run: str = "tiny-1", job: str = "tiny") -> list[str]:
    told: list[str] = []
    options: dict[str, Any] = {"pause": ec2.wait, "open_client": ec2.client, "bounds": BOUNDS}
    try:
        ended = end_run(ec2.spec, run, job, told.append, **options)
    except ProviderError as error:
        return [*told, f"{error} (exit status 1)"]
    return [*told, f"ended, by their tags: {', '.join(vm.name for vm in ended)} and the launch template"]


@ENDING_CASES("the manager is killed between request and answer, for good; `morph cloud reconcile`")
def reconciled(ec2: FakeEc2, directory: Path) -> list[str]:
    with killed(ec2, directory):
        assert 1 <= len(ec2.living()) <= KEEP
        told = reconcile(ec2)
    assert ec2.left() == NOTHING
    return told


@ENDING_CASES("the name of the run is misspelt for `reconcile`")
def misspelt(ec2: FakeEc2, directory: Path) -> list[str]:
    with whole(ec2, directory):
        told = reconcile(ec2, run="tiny-l")
        assert sorted(ec2.living()) == NAMES
        return told


def _unknown(ec2: FakeEc2, directory: Path, fault: Fault) -> list[str]:
    """Check that five unreadable lists in a row make Morph neither give up nor end an instance."""
    with whole(ec2, directory, look_every_s=0.05) as run:
        ec2.faults = [replace(fault, times=5)]
        run.until(lambda: not ec2.faults, "the looks")
        before = len(ec2.calls)
        run.until(lambda: ec2.calls[before:].count("DescribeInstances") > 2, "looks that are answered")
        assert run.ready() == sorted(ec2.living()) == NAMES
        assert "TerminateInstances" not in ec2.calls
        return run.told


LIST = partial(Fault, "DescribeInstances")
ENDING_CASES |= {
    "an answer to the list of instances that holds no list, five times": partial(_unknown, fault=LIST(answer={})),
    "InvalidInstanceID.NotFound to the list, five times": partial(_unknown, fault=LIST("InvalidInstanceID.NotFound")),
    "UnauthorizedOperation to the list, five times": partial(_unknown, fault=LIST("UnauthorizedOperation", 403)),
    "ExpiredToken to the list, five times": partial(_unknown, fault=LIST("ExpiredToken")),
}


@ENDING_CASES("one instance is protected when the run ends; `reconcile` later")
def protected(ec2: FakeEc2, directory: Path) -> list[str]:
    run = World(ec2, directory, open_provider=FakeEc2.provider)
    run.begin()
    run.until_whole()
    ec2.protected = {VM}
    run.end()
    assert list(ec2.living()) == [VM]
    assert run.has("morph cloud reconcile aws.yaml --run tiny-1 --job tiny")
    ec2.protected = set()
    told = [*run.told, "it is protected no more", *reconcile(ec2)]
    assert ec2.left() == NOTHING
    return told


def _ended(ec2: FakeEc2, directory: Path, fault: Fault) -> list[str]:
    """Check that a run that ends during a transient fault leaves nothing."""
    with whole(ec2, directory) as run:
        ec2.faults = [replace(fault)]
        run.end()
        assert ec2.faults == []
        assert not run.has("vms left")
        return run.told


ENDING_CASES |= {
    "RequestLimitExceeded to the ends when the run ends, three times": partial(
        _ended, fault=Fault("TerminateInstances", "RequestLimitExceeded", 503, times=3)
    ),
    "ExpiredToken when the run ends": partial(_ended, fault=LIST("ExpiredToken", times=3)),
    "no answer to the ends; they were carried out": partial(
        _ended, fault=Fault("TerminateInstances", carried_out=True)
    ),
}


@ENDING_CASES("the run ends before AWS tells of its instances")
def ended_early(ec2: FakeEc2, directory: Path) -> list[str]:
    ec2.hidden = 4
    with whole(ec2, directory) as run:
        run.end()
        assert ec2.left() == NOTHING
        return run.told


@ENDING_CASES("a volume and a network interface stay behind")
def orphans(ec2: FakeEc2, directory: Path) -> list[str]:
    with whole(ec2, directory) as run:
        tags = [{"Key": key, "Value": value} for key, value in (("morph-run", "tiny-1"), ("morph-job", "tiny"))]
        volume = ec2.real.create_volume(AvailabilityZone="us-west-2a", Size=100, VolumeType="gp3")["VolumeId"]
        made = ec2.real.create_network_interface(SubnetId=ec2.subnets["us-west-2a"])["NetworkInterface"]
        names = {volume: "vol-1", made["NetworkInterfaceId"]: "eni-1"}
        ec2.real.create_tags(Resources=[*names], Tags=tags)
        run.end()
        assert ec2.left() == NOTHING
        told = "\n".join(run.told)
        for id, name in names.items():
            told = told.replace(id, name)
        assert "volume vol-1 (100 GiB, gp3), 0.0100 dollars an hour" in told
        return told.split("\n")


@contextmanager
def watched(ec2: FakeEc2, directory: Path) -> Iterator[tuple[World, MetadataServer]]:
    """Start a manager with its VMs, and the agent of one of them."""
    with served() as metadata, whole(ec2, directory) as run:
        metadata.script("PUT", "/latest/api/token", Reply(body="t"))
        run.told.clear()
        asked = AwsMetadata(metadata.url)
        with agent(run, metadata, sources=[AwsInterruptions(asked), AwsRebalance(asked)]):
            yield run, metadata


def notice(lead_s: float = 120.0) -> Reply:
    at = datetime.now(UTC) + timedelta(seconds=lead_s)
    return json_reply({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")})


@NOTICE_CASES("a notice of two minutes, and the instance is taken")
def noticed(ec2: FakeEc2, directory: Path) -> list[str]:
    with watched(ec2, directory) as (run, metadata):
        metadata.script("GET", ACTION_PATH, notice())
        until_draining(run)
        ec2.take(ec2.living()[VM])
        run.lose(VM)
        assert run.ready() == ["tiny-1-1", "tiny-2-0"]
        return run.told


@NOTICE_CASES("a rebalance recommendation, and then a notice")
def recommended(ec2: FakeEc2, directory: Path) -> list[str]:
    with watched(ec2, directory) as (run, metadata):
        metadata.script("GET", REBALANCE_PATH, json_reply({"noticeTime": "2026-02-01T08:22:00Z"}))
        run.until(lambda: run.has("notice recommended"), "the recommendation")
        assert run.state.workers[VM].node is NodeState.READY
        metadata.script("GET", ACTION_PATH, notice())
        until_draining(run)
        return run.told


@NOTICE_CASES("the metadata service refuses the agent's token, then gives another")
def token_refused(ec2: FakeEc2, directory: Path) -> list[str]:
    with watched(ec2, directory) as (run, metadata):
        metadata.script("GET", ACTION_PATH, Reply(status=401), Reply(status=401), Reply(status=401), notice())
        until_draining(run)
        return run.told
