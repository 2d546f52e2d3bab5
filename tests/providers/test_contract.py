"""The contract of every provider."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from manager.providers.hosts.ssh import SshHost
from manager.providers.hosts.static import StaticProvider, StaticSpec
from manager.providers.interface.provider import RETRYABLE, Provider, ProviderError, Refused, RunName, Vm, vm_name
from manager.providers.local import LocalProvider
from manager.providers.slurm.provider import SlurmProvider
from morph.contract.trace import UNKNOWN
from tests.providers import fake_slurm
from tests.providers.azure_world import SPEC, provider
from tests.providers.fake_arm import FakeArm
from tests.providers.fake_arm import Fault as ArmFault
from tests.providers.fake_ec2 import REGION, FakeEc2, Fault
from tests.providers.real_slurm import NODE, RealSlurm, why_none
from tests.waiting import poll_until

ROOM = 4
TYPES = ("t4", "v100")
USD = {"t4": 0.5, "v100": 3.0}
LARGE = 4
"""The number of devices of a VM with several."""


class Fleet:
    """Local VMs that are only names."""

    def __init__(self) -> None:
        self.up: list[str] = []
        self.booted: list[str] = []

    def request(self, node: str, *, answers: str | None = None, instance_type: str = UNKNOWN) -> str:
        assert node not in self.booted
        self.booted.append(node)
        self.up.append(node)
        return node

    def release(self, *nodes: str) -> None:
        for node in nodes:
            self.up.remove(node)


Kind = tuple[str, str, str, str]
"""Provider, size, region and zone of a VM."""


@dataclass(frozen=True)
class Case:
    """A provider with room for ``ROOM`` VMs.

    ``again`` makes the provider of another manager, if that can take over. ``kinds``: those of the first two VMs.
    ``large`` makes a provider whose VMs have ``LARGE`` devices; None: there is none. ``silence`` makes the market give
    no usable answer from now on, or answer again; None: it always answers.
    """

    provider: Provider
    again: Callable[[], Provider] | None
    another_run: Callable[[], Provider] | None
    kinds: tuple[Kind, Kind]
    large: Callable[[], Provider] | None = None
    silence: Callable[[bool], None] | None = None


def local(_arm: FakeArm, _directory: Path) -> Case:
    fleet = Fleet()
    first = LocalProvider(fleet, ROOM, 0.25)
    kind = ("local", "", "", "unknown")
    return Case(first, lambda: LocalProvider(fleet, ROOM, 0.25, inherited=first.list()), None, (kind, kind))


def static(_arm: FakeArm, directory: Path) -> Case:
    def make(run: str = "tiny", num_gpus: int = 1) -> Provider:
        hosts = tuple(SshHost(address=f"host{index}", num_gpus=num_gpus) for index in range(ROOM))
        spec = StaticSpec(hosts=hosts, command=("run", "{node}"), usd_per_h=0.25)
        return StaticProvider(spec, run, directory / "leases.json", shell=lambda host, remote, secret="": None)

    kinds = (("static", "", "", "host0:22"), ("static", "", "", "host1:22"))
    return Case(make(), make, lambda: make("another"), kinds, lambda: make(num_gpus=LARGE))


def azure(arm: FakeArm, directory: Path) -> Case:
    offers = [(size.name, zone) for size in SPEC.sizes for zone in SPEC.zones]

    class Room(dict):  # type: ignore[type-arg]
        """Short of everything once the room is taken."""

        def get(self, key: object, default: object = None) -> object:
            made = [vm for vm in arm.machines.values() if vm["properties"]["provisioningState"] == "Succeeded"]
            return "AllocationFailed" if key in offers and len(made) >= ROOM else default

    def silence(is_silent: bool) -> None:
        arm.faults[:] = [ArmFault(method, "virtualMachines", 503, times=1000) for method in ("GET", "PUT") if is_silent]

    arm.shortages = Room()
    return Case(
        provider(arm, directory),
        lambda: provider(arm, directory),
        lambda: provider(arm, directory, run="another"),
        (("azure", "Standard_NC6", SPEC.location, "1"), ("azure", "Standard_NC6", SPEC.location, "2")),
        lambda: provider(arm, directory, spec=SPEC.model_copy(update={"sizes": SPEC.sizes[:1]})),
        silence,
    )


def slurm(_arm: FakeArm, directory: Path, version: str = "22.05.8") -> Case:
    cluster = fake_slurm.FakeSlurm(submits=ROOM, version=version)

    def make(run: str = "tiny-1", num_gpus: int = 1) -> Provider:
        spec = fake_slurm.SPEC.model_copy(update={"num_gpus": num_gpus})
        return fake_slurm.provider(cluster, directory, run, spec)

    def silence(is_silent: bool) -> None:
        cluster.is_down = is_silent

    kinds = (("slurm", "spot", "", "n0"), ("slurm", "spot", "", "n1"))
    return Case(make(), make, lambda: make("another"), kinds, lambda: make(num_gpus=LARGE), silence)


def slurm_json(arm: FakeArm, directory: Path) -> Case:
    return slurm(arm, directory, "24.05.4")


def aws(region: FakeEc2, directory: Path) -> Case:
    region.max_spot = ROOM

    def silence(is_silent: bool) -> None:
        region.faults[:] = [Fault("*", "Unavailable", 503, times=1000)] if is_silent else []

    kind = ("aws", "g4dn.xlarge", REGION, sorted(region.subnets)[1])
    large = region.spec.model_copy(update={"types": region.spec.types[:1]})
    return Case(
        region.provider(directory),
        lambda: region.provider(directory),
        lambda: region.provider(directory, run="another"),
        (kind, kind),
        lambda: region.provider(directory, spec=large),
        silence,
    )


class Settled(SlurmProvider):
    """Answers a request once its jobs have begun, because until then they change by themselves."""

    def request(self, request: str, count: int, max_vms: int | None = None) -> tuple[Vm, ...]:
        names = [vm.name for vm in super().request(request, count, max_vms)]
        poll_until(lambda: not any(vm.waits for vm in self.list()), "jobs that run")
        return tuple(next(vm for vm in self.list() if vm.name == name) for name in names)


def slurm_real(cluster: RealSlurm, directory: Path) -> Case:
    def make(run: str = "tiny-1", num_gpus: int = 1) -> Provider:
        spec = fake_slurm.SPEC.model_copy(update={"num_gpus": num_gpus, "max_jobs": ROOM})
        script = "#!/bin/sh\nexec sleep 600\n"
        name = RunName(run=run, job=f"tiny {directory.name}")  # Slurm remembers the jobs of the test before
        return Settled(spec, name, lambda _node, _grace_s: script, directory)

    def silence(is_silent: bool) -> None:
        cluster.stop_controller() if is_silent else cluster.start_controller()

    kind = ("slurm", "spot", "", NODE)
    return Case(make(), make, lambda: make("another"), (kind, kind), lambda: make(num_gpus=LARGE), silence)


REAL = pytest.param(slurm_real, marks=[pytest.mark.slow, pytest.mark.skipif(bool(why_none()), reason=why_none())])
MARKETS = [static, azure, aws, slurm, slurm_json, REAL]
"""Providers on which several runs have VMs, and VMs have several devices."""


def of_two_types(kind: str, arm: Any, directory: Path) -> Provider:
    if kind == "aws":
        types = tuple(
            known.model_copy(update={"num_gpus": 1, "node_type": of, "usd_per_h": USD[of]})
            for known, of in zip(arm.spec.types, TYPES, strict=True)
        )
        return arm.provider(directory, spec=arm.spec.model_copy(update={"types": types}))
    if kind == "local":
        return LocalProvider(Fleet(), ROOM, 0.25)
    if kind == "azure":
        one = SPEC.sizes[0].model_copy(update={"num_gpus": 1})
        sizes = tuple(
            one.model_copy(update={"name": f"Standard_{of}", "node_type": of, "usd_per_h": USD[of]}) for of in TYPES
        )
        return provider(arm, directory, spec=SPEC.model_copy(update={"sizes": sizes}))
    hosts = tuple(
        SshHost(address=f"host{index}", node_type=of, usd_per_h=USD[of]) for index, of in enumerate(TYPES * 2)
    )
    spec = StaticSpec(hosts=hosts, command=("run", "{node}"))
    return StaticProvider(spec, "tiny", directory / "leases.json", shell=lambda host, remote, secret="": None)


@pytest.mark.parametrize("kind", ["local", "static", "azure", "aws"])
def test_vms_of_the_type_that_is_asked_for_come(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    opened = of_two_types(kind, request.getfixturevalue("ec2" if kind == "aws" else "arm"), tmp_path)
    for name, of in (("a", "v100"), ("b", "t4")):
        vms = opened.request(name, 2, node_type=of)
        assert [vm.node_type for vm in vms] == [of, of]
    assert sorted(vm.node_type for vm in opened.list()) == ["t4", "t4", "v100", "v100"]
    each = [0.25] * 3 if kind == "local" else [0.5, 3.0, 3.0]
    assert [price.usd_per_h for of in (*TYPES, "") if (price := opened.price(of)) is not None] == each
    if kind == "static":
        with pytest.raises(Refused, match="none of the 2 hosts with t4 is free"):
            opened.request("c", 1, node_type="t4")


@pytest.fixture(params=[local, *MARKETS], ids=lambda make: make.__name__)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    stand_in = {slurm_real: "cluster", aws: "ec2"}.get(request.param, "arm")
    return request.param(request.getfixturevalue(stand_in), tmp_path)


@pytest.fixture(scope="module")
def cluster_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSlurm]:
    cluster = RealSlurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(cluster_of_all: RealSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealSlurm]:
    for name, value in cluster_of_all.environment.items():
        monkeypatch.setenv(name, value)
    yield cluster_of_all
    cluster_of_all.clear()


def test_a_request_gets_vms_named_after_it(case: Case) -> None:
    vms = case.provider.request("tiny-7", 2)
    assert [vm.name for vm in vms] == [vm_name("tiny-7", 0), vm_name("tiny-7", 1)]
    assert {vm.request for vm in vms} == {"tiny-7"}
    assert set(case.provider.list()) == set(vms)


def test_a_vm_and_the_list_agree_about_its_kind(case: Case) -> None:
    vms = case.provider.request("a", 2)
    assert tuple((vm.provider, vm.size, vm.region, vm.zone) for vm in vms) == case.kinds
    assert {(vm.name, vm.zone) for vm in case.provider.list()} == {(vm.name, vm.zone) for vm in vms}


def test_the_same_request_again_gets_the_same_vms_and_no_others(case: Case) -> None:
    first = case.provider.request("a", 2)
    assert set(case.provider.request("a", 2)) == set(first)
    if case.again is not None:
        assert set(case.again().request("a", 2)) == set(first)
    assert len(case.provider.list()) == 2


@pytest.mark.slow
def test_more_than_there_is_is_granted_in_part_and_then_refused(case: Case) -> None:
    granted = case.provider.request("a", ROOM + 2)
    assert len(granted) == ROOM
    assert len(case.provider.request("a", ROOM + 2)) == ROOM
    with pytest.raises(Refused):
        case.provider.request("b", 1)
    assert len(case.provider.list()) == ROOM


def test_deleted_vms_are_gone_and_make_room(case: Case) -> None:
    granted = case.provider.request("a", ROOM)
    case.provider.delete([granted[0].name])
    case.provider.delete([granted[0].name, "never-there-0"])
    assert set(case.provider.list()) == set(granted[1:])
    (new,) = case.provider.request("b", 1)
    assert new.name == vm_name("b", 0)


def test_another_manager_finds_and_ends_everything_and_ending_it_twice_changes_nothing(case: Case) -> None:
    granted = case.provider.request("a", 3)
    other = case.again() if case.again is not None else case.provider
    assert set(other.list()) == set(granted)
    other.delete([granted[0].name])
    for _ in range(2):
        other.dismantle()
        assert other.list() == ()


def test_a_request_gets_no_more_vms_than_it_may(case: Case) -> None:
    granted = case.provider.request("a", 3, 2)
    assert len(granted) == 2 or sum(vm.num_devices for vm in granted) >= 3
    assert set(case.provider.request("a", 3, 2)) == set(granted)
    assert len(case.provider.list()) <= 2


@pytest.mark.parametrize("case", MARKETS, ids=lambda make: make.__name__, indirect=True)
@pytest.mark.parametrize(("count", "num_vms"), [(1, 1), (LARGE, 1), (LARGE + 1, 2), (2 * LARGE, 2)])
def test_vms_with_several_devices_are_counted_by_devices(case: Case, count: int, num_vms: int) -> None:
    assert case.large is not None
    granted = case.large().request("a", count)
    assert [vm.name for vm in granted] == [vm_name("a", index) for index in range(num_vms)]
    assert {vm.num_devices for vm in granted} == {LARGE}
    assert granted[0].workers == tuple(f"{granted[0].name}.d{device}" for device in range(LARGE))
    again = case.large()
    assert set(again.request("a", count)) == set(again.list()) == set(granted)


@pytest.mark.parametrize("case", MARKETS, ids=lambda make: make.__name__, indirect=True)
def test_another_run_neither_sees_nor_ends_them(case: Case) -> None:
    assert case.another_run is not None
    granted = case.provider.request("a", 2)
    other = case.another_run()
    assert other.list() == ()
    other.delete([vm.name for vm in granted])
    other.dismantle()
    assert set(case.provider.list()) == set(granted)


@pytest.mark.parametrize("case", [azure, aws, slurm, slurm_json, REAL], ids=lambda make: make.__name__, indirect=True)
def test_a_silent_market_loses_no_vm_and_gets_no_second_request(case: Case) -> None:
    assert case.silence is not None
    granted = case.provider.request("a", 2)
    case.silence(True)
    for asked in (case.provider.list, lambda: case.provider.request("b", 1), case.provider.dismantle):
        with pytest.raises(RETRYABLE):
            asked()
    with pytest.raises(ProviderError):
        case.provider.delete([granted[0].name])
    case.silence(False)
    assert set(case.provider.list()) == set(granted)
    assert len(case.provider.request("b", 1)) == 1
    assert len(case.provider.list()) == 3


@pytest.mark.parametrize("case", MARKETS, ids=lambda make: make.__name__, indirect=True)
def test_a_vm_of_another_run_is_not_evicted(case: Case) -> None:
    assert case.another_run is not None
    granted = case.provider.request("a", 1)
    other = case.another_run()
    with contextlib.suppress(ProviderError):
        assert not other.evict(granted[0].name)
    assert case.provider.list() == granted


def test_an_eviction_takes_the_vm_or_changes_nothing(case: Case) -> None:
    first, second = case.provider.request("a", 2)
    expected = {first} if case.provider.evict(second.name) else {first, second}
    assert set(case.provider.list()) == expected


def test_price_and_capabilities_are_known(case: Case) -> None:
    price = case.provider.price()
    assert price is not None
    assert price.usd_per_h > 0
    assert price.source
    (vm,) = case.provider.request("a", 1)
    assert vm.usd_per_h is not None
    assert 0 < vm.usd_per_h <= price.usd_per_h
    assert case.provider.list() == (vm,)
    most = case.provider.capabilities().max_vms
    assert most is None or most == ROOM


@pytest.mark.parametrize("request_name", ["job-1", "My Job!-3", "x" * 200, "---", "été-2"])
def test_names_are_fit_for_a_host_and_differ_between_requests(request_name: str) -> None:
    name = vm_name(request_name, 12)
    assert len(name) <= 60
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert not name.startswith("-")
    assert vm_name(request_name + "x", 12) != name


def test_the_leases_are_for_their_owner_alone(tmp_path: Path, arm: FakeArm) -> None:
    static(arm, tmp_path).provider.request("a", 1)
    assert stat.S_IMODE((tmp_path / "leases.json").stat().st_mode) == 0o600
