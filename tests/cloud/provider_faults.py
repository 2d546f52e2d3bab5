"""What a provider can do to a run: each fault injected into the fake resource manager, and what Morph did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from manager.controller.events import ManagerResumed
from manager.controller.state import initial_state
from morph.contract.cluster import Limits
from tests.cloud.fault_world import KEEP, Dying, World, config, world
from tests.providers.azure_world import SPEC
from tests.providers.fake_arm import FakeArm, Fault

Case = Callable[[FakeArm, Path], list[str]]
CASES: dict[str, Case] = {}
SIZES = [size.name for size in SPEC.sizes]


def case(name: str) -> Callable[[Case], Case]:
    """Enter a case under the name of its fault."""

    def enter(function: Case) -> Case:
        CASES[name] = function
        return function

    return enter


def puts(arm: FakeArm, name: str = "") -> int:
    """How often a VM was asked for."""
    return sum(call.startswith(f"PUT virtualMachines/{name}") for call in arm.calls)


@case("spot quota used up, then raised")
def quota(arm: FakeArm, directory: Path) -> list[str]:
    text = "Operation could not be completed as it results in exceeding approved LowPriorityCores Quota"
    arm.at_once = dict.fromkeys(SIZES, (409, "OperationNotAllowed", text))
    with world(arm, directory) as run:
        run.begin()
        run.until(lambda: run.has("is refused: quota"), "the refusal")
        assert puts(arm) == KEEP + 1  # no zone has another quota; of the larger size one VM is enough
        arm.at_once = {}
        run.until_whole()
        return run.told


@case("no capacity in one zone")
def one_zone(arm: FakeArm, directory: Path) -> list[str]:
    arm.shortages = {(size, "1"): "ZonalAllocationFailed" for size in SIZES}
    with world(arm, directory) as run:
        run.begin()
        run.until_whole()
        zones = sorted(vm.zone for vm in run.azure.list())
        assert zones == ["2", "2"]
        return [*run.told, f"VMs in zones {', '.join(zones)}"]


@case("no capacity in any zone or size, then some")
def no_capacity(arm: FakeArm, directory: Path) -> list[str]:
    arm.shortages = {(size, zone): "AllocationFailed" for size in SIZES for zone in SPEC.zones}
    with world(arm, directory) as run:
        run.begin()
        run.until(lambda: run.has("is refused: capacity"), "the refusal")
        assert arm.machines == {}
        arm.shortages = {}
        run.until_whole()
        return run.told


@case("no capacity for one VM of two, then some")
def partly(arm: FakeArm, directory: Path) -> list[str]:
    class Room(dict):  # type: ignore[type-arg]
        def get(self, key: object, default: object = None) -> object:
            made = [vm for vm in arm.machines.values() if vm["properties"]["provisioningState"] == "Succeeded"]
            return "AllocationFailed" if made else default

    arm.shortages = Room()
    with world(arm, directory) as run:
        run.begin()
        run.until(lambda: run.has("granted in part"), "the grant of a part")
        arm.shortages = {}
        run.until_whole()
        return run.told


def _once(arm: FakeArm, directory: Path, *faults: Fault, **options: object) -> list[str]:
    """Faults that pass: the same request goes on under its name, and no VM comes twice."""
    arm.faults = list(faults)
    with world(arm, directory, options=options) as run:
        run.begin()
        run.until_whole()
        assert run.ready() == ["tiny-1-0", "tiny-1-1"]
        assert set(arm.machines) == {"tiny-1-0", "tiny-1-1"}
        assert arm.faults == []
        return run.told


@case("429 with Retry-After 17 s")
def throttled(arm: FakeArm, directory: Path) -> list[str]:
    told = _once(arm, directory, Fault("PUT", "virtualMachines/", 429, "TooManyRequests", {"Retry-After": "17"}))
    assert any("again in 17 s" in sentence for sentence in told)
    return told


@case("409, another operation is under way")
def conflict(arm: FakeArm, directory: Path) -> list[str]:
    return _once(arm, directory, Fault("PUT", "virtualMachines/", 409, "Conflict"))


@case("503 to the request, 500 while it is under way")
def unavailable(arm: FakeArm, directory: Path) -> list[str]:
    return _once(arm, directory, Fault("PUT", "virtualMachines/", 503), Fault("GET", "/operations/", 500))


@case("an answer slower than the time-out; it was carried out")
def slow(arm: FakeArm, directory: Path) -> list[str]:
    return _once(arm, directory, Fault("PUT", "virtualMachines/", carried_out=True, slow_s=1.0), read_timeout_s=0.4)


@case("the answer is lost; it was carried out")
def lost_answer(arm: FakeArm, directory: Path) -> list[str]:
    return _once(arm, directory, Fault("PUT", "virtualMachines/", drop=True, carried_out=True))


@case("the operation fails half way, once")
def half_way(arm: FakeArm, directory: Path) -> list[str]:
    class Once(dict):  # type: ignore[type-arg]
        def get(self, key: object, default: object = None) -> object:
            return self.pop("code", default)

    arm.shortages = Once(code="InternalExecutionError")
    return _once(arm, directory)


@case("a VM is granted and never joins")
def never_joins(arm: FakeArm, directory: Path) -> list[str]:
    state = initial_state(config(boot_s=60.0))
    with world(arm, directory, state=state, never_join={"tiny-1-0"}) as run:
        run.begin()
        run.until(lambda: "tiny-2-0" in run.ready(), "another VM")
        run.until_whole()
        run.until(lambda: "tiny-1-0" not in arm.machines, "the end of the first one")
        return run.told


@case("a VM is deleted behind our back")
def deleted(arm: FakeArm, directory: Path) -> list[str]:
    with world(arm, directory) as run:
        run.begin()
        run.until_whole()
        with arm.lock:
            del arm.machines["tiny-1-0"]
        run.lose("tiny-1-0")
        run.until_whole()
        assert run.ready() == ["tiny-1-1", "tiny-2-0"]
        return run.told


@contextmanager
def killed(arm: FakeArm, directory: Path) -> Iterator[World]:
    """A manager that is killed when its first request for a VM was carried out, and not answered yet."""
    line = Dying()
    first = World(arm, directory, options={"line": line})
    try:
        first.begin()
        first.until(line.dead.is_set, "the manager's death")
        first.die()
        yield first
    finally:
        line.over.set()
        first.shell.close()


@case("the manager is killed between request and answer; another takes over")
def taken_over(arm: FakeArm, directory: Path) -> list[str]:
    with killed(arm, directory) as first, world(arm, directory, state=first.state) as run:
        run.tell(ManagerResumed(living=()))
        run.until_whole()
        assert run.ready() == ["tiny-1-0", "tiny-1-1"]
        assert set(arm.machines) == {"tiny-1-0", "tiny-1-1"}
        return run.told


@case("a price is not known, and there is a limit in dollars")
def no_price(arm: FakeArm, directory: Path) -> list[str]:
    unpriced = tuple(size.model_copy(update={"usd_per_h": None}) for size in SPEC.sizes)
    options = {"spec": SPEC.model_copy(update={"sizes": unpriced})}
    with world(arm, directory, limits=Limits(usd_per_h=10.0), options=options) as run:
        run.begin()
        run.until(lambda: run.has("is refused: limit"), "the refusal")
        assert puts(arm) == 0
        return run.told


@case("the budget is spent, and then a VM is lost")
def budget(arm: FakeArm, directory: Path) -> list[str]:
    with world(arm, directory, limits=Limits(budget_usd=0.05), scale=200.0) as run:
        run.begin()
        run.until_whole()
        usd_per_h = sum(vm.usd_per_h or 0.0 for vm in run.azure.list())
        assert usd_per_h > 0
        begin_s = run.now_s()
        run.until(lambda: run.now_s() - begin_s > 0.05 / usd_per_h * 3600, "the budget to be spent")
        run.lose("tiny-1-1")
        run.until(lambda: run.has("is refused: limit"), "the refusal")
        assert run.ready() == ["tiny-1-0"]  # what runs goes on
        return run.told
