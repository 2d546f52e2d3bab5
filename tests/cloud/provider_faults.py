"""Faults of a provider: each is injected into the fake resource manager, and Morph's reaction is recorded."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from functools import partial
from pathlib import Path

from manager.controller.state.events import ManagerResumed
from manager.controller.state.state import Phase, initial_state
from manager.providers.azure.spec import AzureSize
from morph.contract.cluster import Limits
from morph.contract.rules import RequestRules
from tests.cloud.fault_world import KEEP, Cases, Dying, World, config, whole, world
from tests.providers.azure_world import SPEC, Hasty
from tests.providers.fake_arm import FakeArm, Fault

CASES = Cases()
PUT = ("PUT", "virtualMachines/")
SIZES = [size.name for size in SPEC.sizes]


def puts(arm: FakeArm, name: str = "") -> int:
    return sum(call.startswith(f"PUT virtualMachines/{name}") for call in arm.calls)


@CASES("spot quota used up, then raised")
def quota(arm: FakeArm, directory: Path) -> list[str]:
    text = "Operation could not be completed as it results in exceeding approved LowPriorityCores Quota"
    arm.at_once = dict.fromkeys(SIZES, (409, "OperationNotAllowed", text))
    with world(arm, directory) as run:
        run.begin()
        run.until(lambda: run.has("is refused: quota"), "the refusal")
        assert puts(arm) == KEEP + 1  # the quota is the same in all zones; of the larger size one VM is enough
        arm.at_once = {}
        run.until_whole()
        return run.told


@CASES("no capacity in one zone")
def one_zone(arm: FakeArm, directory: Path) -> list[str]:
    arm.shortages = {(size, "1"): "ZonalAllocationFailed" for size in SIZES}
    with whole(arm, directory) as run:
        zones = sorted(vm.zone for vm in run.provider.list())
        assert zones == ["2", "2"]
        return [*run.told, f"VMs in zones {', '.join(zones)}"]


@CASES("no capacity in any zone or size, then some")
def no_capacity(arm: FakeArm, directory: Path) -> list[str]:
    arm.shortages = {(size, zone): "AllocationFailed" for size in SIZES for zone in SPEC.zones}
    with world(arm, directory) as run:
        run.begin()
        run.until(lambda: run.has("is refused: capacity"), "the refusal")
        assert arm.machines == {}
        arm.shortages = {}
        run.until_whole()
        return run.told


@CASES("no capacity for one VM of two, then some")
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


def _once(arm: FakeArm, directory: Path, faults: Sequence[Fault] = (), **options: object) -> list[str]:
    """Check transient faults: the request continues under its name, and no VM is made twice."""
    arm.faults = list(faults)
    with whole(arm, directory, options=options) as run:
        assert run.ready() == ["tiny-1-0", "tiny-1-1"]
        assert set(arm.machines) == {"tiny-1-0", "tiny-1-1"}
        assert arm.faults == []
        return run.told


def _put_off(arm: FakeArm, directory: Path, status: int, code: str) -> list[str]:
    """Check that the request is repeated when Azure allows it."""
    told = _once(arm, directory, [Fault(*PUT, status, code, {"Retry-After": "170"})])
    assert any("again in 170 s" in sentence for sentence in told)
    return told


CASES |= {
    "429 with Retry-After 170 s": partial(_put_off, status=429, code="TooManyRequests"),
    "503 with Retry-After 170 s": partial(_put_off, status=503, code="ServerBusy"),
    "409, another operation is under way": partial(_once, faults=[Fault(*PUT, 409, "Conflict")]),
    "503 to the request, 500 while it is under way": partial(
        _once, faults=[Fault(*PUT, 503), Fault("GET", "/operations/", 500)]
    ),
    "an answer slower than the time-out; it was carried out": partial(
        _once, faults=[Fault(*PUT, carried_out=True, slow_s=20.0)], line=Hasty()
    ),
    "the answer is lost; it was carried out": partial(_once, faults=[Fault(*PUT, drop=True, carried_out=True)]),
}


@CASES("the operation fails half way, once")
def half_way(arm: FakeArm, directory: Path) -> list[str]:
    class Once(dict):  # type: ignore[type-arg]
        def get(self, key: object, default: object = None) -> object:
            return self.pop("code", default)

    arm.shortages = Once(code="InternalExecutionError")
    return _once(arm, directory)


@CASES("a VM is granted and never joins")
def never_joins(arm: FakeArm, directory: Path) -> list[str]:
    state = initial_state(config(boot_s=60.0))
    with world(arm, directory, state=state, never_join={"tiny-1-0"}) as run:
        run.begin()
        run.until(lambda: "tiny-2-0" in run.ready(), "another VM")
        run.until_whole()
        run.until(lambda: "tiny-1-0" not in arm.machines, "the end of the first one")
        return run.told


class Everyone(set):  # type: ignore[type-arg]
    """A set that contains every name."""

    def __contains__(self, _name: object) -> bool:
        return True


@CASES("no VM ever joins")
def none_joins(arm: FakeArm, directory: Path) -> list[str]:
    state = initial_state(config(boot_s=60.0))
    with world(arm, directory, state=state, never_join=Everyone(), scale=200.0) as run:
        run.begin()
        run.until(lambda: run.state.phase is Phase.ENDED, "the end of the run")
        assert run.state.provisioning.num_requests == RequestRules().max_absent
        return run.told


@CASES("a VM is being made for ever")
def stuck(arm: FakeArm, directory: Path) -> list[str]:
    arm.stuck = {"tiny-1-0"}
    with world(arm, directory, options={"make_s": 5}) as run:  # the other VM is made in less time
        run.begin()
        run.until_whole()
        assert run.ready() == ["tiny-1-1", "tiny-2-0"]
        return run.told


@CASES("Azure is updating a VM that was just made")
def updating(arm: FakeArm, directory: Path) -> list[str]:
    arm.made_as = {"tiny-1-0": "Updating"}
    with whole(arm, directory) as run:
        assert run.ready() == ["tiny-1-0", "tiny-1-1"]
        assert not any(call.startswith("DELETE") for call in arm.calls)
        return run.told


@CASES("the price of every size is above `max_usd_per_h`, and then falls")
def too_dear(arm: FakeArm, directory: Path) -> list[str]:
    text = "the provided max price '0.1 USD' is lower than the current spot price '0.2 USD'"
    arm.at_once = dict.fromkeys(SIZES, (409, "SpotPriceGreaterThanProvidedMaxPrice", text))
    with world(arm, directory) as run:
        run.begin()
        run.until(lambda: run.has("is refused: capacity"), "the refusal")
        assert puts(arm) == KEEP + 1  # the result is the same in all zones
        arm.at_once = {}
        run.until_whole()
        return run.told


@CASES("a size is not for spot VMs, another one is")
def not_for_spot(arm: FakeArm, directory: Path) -> list[str]:
    arm.at_once = {"Standard_B4ms": (400, "AzureSpotIsNotSupportedForThisVMSize", "This size is not for spot.")}
    sizes = (AzureSize(name="Standard_B4ms", usd_per_h=0.1), SPEC.sizes[-1])
    with whole(arm, directory, options={"spec": SPEC.model_copy(update={"sizes": sizes})}) as run:
        assert puts(arm) == 2 * KEEP
        return [*run.told, f"VMs of {', '.join(sorted({vm.size for vm in run.provider.list()}))}"]


def _users(arm: FakeArm, directory: Path, code: str, text: str, num_granted: int = 0) -> list[str]:
    """Check an error that only the user can mend: one call, its sentence, no further request; what came goes on."""
    if num_granted:
        arm.faults = [Fault(*PUT[:1], "virtualMachines/tiny-1-1", 409, code, message=text, times=99)]
    else:
        arm.at_once = dict.fromkeys(SIZES, (409, code, text))
    with world(arm, directory) as run:
        run.begin()
        if num_granted:
            run.until(lambda: run.has("no further VM is requested") and run.ready(), "the end of requests")
            assert (run.ready(), run.state.phase) == (["tiny-1-0"], Phase.STARTING)
        else:
            run.until(lambda: run.state.phase is Phase.ENDED, "the end of the run")
            assert run.has(code)
        assert (puts(arm), run.state.provisioning.num_requests) == (1 + num_granted, 1)
        return run.told


LOCKED = "cannot perform write operation because following scope(s) are locked: 'train'."
CASES |= {
    "the subscription does not know Microsoft.Compute": partial(
        _users,
        code="MissingSubscriptionRegistration",
        text="The subscription is not registered to use namespace 'Microsoft.Compute'.",
    ),
    "the resource group is locked": partial(_users, code="ScopeLocked", text=LOCKED),
    "the resource group is locked after one VM came": partial(_users, code="ScopeLocked", text=LOCKED, num_granted=1),
    "the subscription is read-only": partial(
        _users,
        code="ReadOnlyDisabledSubscription",
        text="The subscription is disabled and therefore marked as read only.",
    ),
}


@CASES("one VM is evicted at each of its creations, the other one is not")
def evicted(arm: FakeArm, directory: Path) -> list[str]:
    arm.evicted = {"tiny-1-0"}
    with world(arm, directory, scale=200.0) as run:
        run.begin()
        run.until_whole()
        assert run.ready() == ["tiny-1-1", "tiny-2-0"]
        assert run.has("tiny-1 is granted in part: VM tiny-1-0 was made, and was gone at once")
        assert not any(call.startswith("DELETE") for call in arm.calls)
        return run.told


@CASES("503 with Retry-After as a date in 90 s, by a clock that is an hour ahead")
def busy_until(arm: FakeArm, directory: Path) -> list[str]:
    arm.ahead_s = 3600.0
    date, began = formatdate(time.time() + arm.ahead_s + 90, usegmt=True), time.monotonic()
    told = _once(arm, directory, [Fault(*PUT, 503, "ServerBusy", {"Retry-After": date})])
    took_s = time.monotonic() - began
    (found,) = [float(told_s) for sentence in told for told_s in re.findall(r"again in ([\d.]+) s", sentence)]
    assert 89 - took_s <= found <= 91
    return told


@CASES("a VM is deleted behind our back")
def deleted(arm: FakeArm, directory: Path) -> list[str]:
    with whole(arm, directory) as run:
        with arm.lock:
            del arm.machines["tiny-1-0"]
        run.lose("tiny-1-0")
        run.until_whole()
        assert run.ready() == ["tiny-1-1", "tiny-2-0"]
        return run.told


@contextmanager
def killed(arm: FakeArm, directory: Path) -> Iterator[World]:
    """Return a manager that is killed after its first request was carried out and before this was answered."""
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


@CASES("the manager is killed between request and answer; another takes over")
def taken_over(arm: FakeArm, directory: Path) -> list[str]:
    with killed(arm, directory) as first, world(arm, directory, state=first.state) as run:
        run.tell(ManagerResumed(living=()))
        run.until_whole()
        assert run.ready() == ["tiny-1-0", "tiny-1-1"]
        assert set(arm.machines) == {"tiny-1-0", "tiny-1-1"}
        return run.told


@CASES("a price is not known, and there is a limit in dollars")
def no_price(arm: FakeArm, directory: Path) -> list[str]:
    unpriced = tuple(size.model_copy(update={"usd_per_h": None}) for size in SPEC.sizes)
    options = {"spec": SPEC.model_copy(update={"sizes": unpriced})}
    with world(arm, directory, limits=Limits(usd_per_h=10.0), options=options) as run:
        run.begin()
        run.until(lambda: run.has("is refused: limit"), "the refusal")
        assert puts(arm) == 0
        return run.told


@CASES("the budget is spent, and then a VM is lost")
def budget(arm: FakeArm, directory: Path) -> list[str]:
    with whole(arm, directory, limits=Limits(budget_usd=0.05), scale=200.0) as run:
        usd_per_h = sum(vm.usd_per_h or 0.0 for vm in run.provider.list())
        assert usd_per_h > 0
        begin_s = run.now_s()
        run.until(lambda: run.now_s() - begin_s > 0.05 / usd_per_h * 3600, "the budget to be spent")
        run.lose("tiny-1-1")
        run.until(lambda: run.has("is refused: limit"), "the refusal")
        assert run.ready() == ["tiny-1-0"]  # running VMs continue
        return run.told
