"""Workers that fall silent or die: how this is detected, what the others do, and that a waking worker does no harm."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from manager.controller.state.events import WorkerAnswered, WorkerLost
from manager.controller.state.state import Phase
from manager.engine.joining.link_server import Entrance
from manager.engine.local_vms.namespaces import HostNetwork
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed
from manager.engine.machines.machines import Processes
from morph.contract.cluster import Policy
from morph.contract.faults import SlowSpell
from morph.contract.messages import Aborted, Prepared, WorkerReady
from morph.link.home import Home
from simulator import synthetic_profile
from tests.system.broken_connections import break_connections
from tests.system.broken_connections import permitted as may_break
from tests.system.emulated import Emulated, M, shape
from tests.system.relay import Relay
from tests.system.test_rehearsal import permitted
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PROFILE = synthetic_profile(
    num_sections=4, forward_s=0.001, overhead_s=0.0, batch_size=16, micro_batch_size=M, parameter_bytes=40_000
)
FAST = synthetic_profile(
    num_sections=4, forward_s=0.00001, overhead_s=0.0, batch_size=16, micro_batch_size=M, parameter_bytes=40_000
)
STEPS, FAULT_AT = 12, 3
VICTIM = "vm1"
# The step in which the victim stops cannot end without it, however late the test stops it.
STUCK = (SlowSpell(worker=VICTIM, factor=10_000, first_step=FAULT_AT),)
HEARTBEAT_TIMEOUT_S = 5.0 * PATIENCE
"""Longer than a busy machine keeps a process waiting."""


class Fault:
    """Does something to one worker when a step from version ``at`` is ordered, and records what follows."""

    def __init__(self, do: Callable[[int], None], victim: str = VICTIM, at: int = FAULT_AT) -> None:
        self._do, self.victim, self._at = do, victim, at
        self.pids: dict[str, int] = {}
        self.done = False
        self.cause = ""
        self.members: set[str] = set()
        self.answers: list[Aborted | Prepared] = []
        self.generation = 0
        self.reformed = False
        self.versions: list[int] = []

    def __call__(self, observed: Observed) -> None:
        event, state = observed.event, observed.decision.state
        self.versions.append(state.version)
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady):
            self.pids[event.worker] = event.answer.pid
        if isinstance(event, WorkerLost) and event.worker == self.victim:
            self.cause = event.cause
        if isinstance(event, WorkerAnswered) and self.done and not self.reformed:
            if event.worker == self.victim:  # at most the work done before it was stopped
                assert isinstance(event.answer, Prepared)
                assert event.answer.step == self._at
            elif isinstance(event.answer, Aborted | Prepared):
                self.answers.append(event.answer)
        self.reformed |= state.generation > self.generation > 0
        if not self.done and state.phase is Phase.TRAINING and state.version == self._at:
            self.done = True
            self.members = {slot.worker for slot in state.slots}
            self.generation = state.generation
            self._do(self.pids[self.victim])


def stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the weights of an undisturbed run."""
    weights, _ = Emulated(FAST, [shape(FAST, 1, 1)], STEPS, num_vms=1).run(tmp_path_factory.mktemp("one") / "run")
    return weights


class Waking:
    """Wakes the stopped worker as soon as the others have formed the next shape, and observes it."""

    def __init__(self, fault: Fault, wake_others: Callable[[], None] = lambda: None) -> None:
        self._fault, self._wake_others = fault, wake_others
        self.outlived: bool | None = None
        self.answers: list[str] = []

    def __call__(self, observed: Observed) -> None:
        self._fault(observed)
        if not self._fault.reformed:
            return
        if self.outlived is None:
            pid = self._fault.pids[self._fault.victim]
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            self._wake_others()
            self.outlived = outlives(pid)
        if isinstance(observed.event, WorkerAnswered) and observed.event.worker == self._fault.victim:
            self.answers.append(observed.event.model_dump_json())


def outlives(pid: int, bound_s: float = 60.0) -> bool:
    """Return whether a process still lives after this time."""
    until_s = time.monotonic() + bound_s
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > until_s:
                return True
            time.sleep(0.01)
    return False


def test_a_death_aborts_every_other_worker_without_a_time_out(expected: dict[str, str], tmp_path: Path) -> None:
    """Check answers before the next shape is formed: none of them reports the end of a wait."""
    fault = Fault(killed)
    plans = [shape(PROFILE, 3, 2), shape(PROFILE, 2, 2)]
    emulated = Emulated(PROFILE, plans, STEPS, num_vms=6, observers=[fault], spells=STUCK)
    weights, _ = emulated.run(tmp_path / "run")
    assert "silent for" not in fault.cause
    assert len(fault.members) == 6
    assert {answer.worker for answer in fault.answers} == fault.members - {VICTIM}
    assert all(isinstance(answer, Aborted) for answer in fault.answers), fault.answers
    assert not any("waited" in answer.model_dump_json() for answer in fault.answers), fault.answers
    assert not any("was not answered within" in line for line in emulated.lines)
    assert weights == expected


class AllStopped:
    """Stops every worker in a step, and wakes them when a single silent worker would be given up."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self.lost: list[str] = []
        self.versions: list[int] = []
        self.waking: threading.Timer | None = None

    def __call__(self, observed: Observed) -> None:
        event, state = observed.event, observed.decision.state
        if self._fault.done:
            return
        self.versions.append(state.version)
        if isinstance(event, WorkerLost):
            self.lost.append(event.worker)
        if self.waking is None and state.phase is Phase.TRAINING and state.version == FAULT_AT:
            for pid in self._fault.pids.values():
                stopped(pid)
            self.waking = threading.Timer(2.5 * HEARTBEAT_TIMEOUT_S, self._wake)
            self.waking.start()

    def _wake(self) -> None:
        for pid in self._fault.pids.values():
            os.kill(pid, signal.SIGCONT)


def test_a_worker_silent_alone_is_lost_and_no_bit_changes(expected: dict[str, str], tmp_path: Path) -> None:
    """The first worker that wakes does no harm. A host's link is cut where network namespaces are available."""
    network = HostNetwork(4, 1e9) if permitted() else None

    def host_of(vm: str) -> int:
        return int(vm.removeprefix("vm"))

    faults = [Fault(stopped, at=5)]
    waking = Waking(faults[0])
    if network is not None:
        faults.append(Fault(lambda _: network.cut(host_of("vm2")), "vm2", 8))
    stopping = AllStopped(faults[0])
    log = tmp_path / "workers.log"
    emulated = Emulated(
        PROFILE,
        [shape(PROFILE, *stages_and_replicas) for stages_and_replicas in ((2, 2), (3, 1), (2, 1))],
        STEPS,
        num_vms=4,
        policy=Policy(checkpoint_every_steps=2, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S),
        observers=[waking, *faults[1:], stopping],
        spells=(SlowSpell(worker=VICTIM, factor=10_000, first_step=5),),
        machines=Processes(log, network=network, host_of=host_of) if network else Processes(log),
    )
    weights, _ = emulated.run(tmp_path / "run")
    assert stopping.waking is not None
    stopping.waking.join()
    assert any("no worker was heard for" in line for line in emulated.lines)
    assert stopping.lost == []
    assert stopping.versions == sorted(stopping.versions)
    assert ["silent for" in fault.cause for fault in faults] == [True] * len(faults)
    assert all(isinstance(answer, Aborted) for answer in faults[0].answers), faults[0].answers
    assert waking.outlived is False
    assert waking.answers == []
    assert weights == expected


class Relayed:
    """Puts a relay before each worker's calls: resets all of them before some steps, and holds the victim's at last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, resets: set[int]) -> None:
        self.relays: dict[str, Relay] = {}
        self.left, self.num_reset, self.lost = resets, 0, list[str]()
        home = Entrance.home

        def through(entrance: Entrance, worker: str) -> Home:
            found = home(entrance, worker)
            if worker not in self.relays:
                self.relays[worker] = Relay((found.host, found.port))
            return found.model_copy(update={"port": self.relays[worker].port})

        monkeypatch.setattr(Entrance, "home", through)

    def __call__(self, observed: Observed) -> None:
        state = observed.decision.state
        if isinstance(observed.event, WorkerLost):
            self.lost.append(observed.event.worker)
        if state.phase is Phase.TRAINING and state.version in self.left:
            self.left.remove(state.version)
            self.num_reset += sum(relay.reset() for relay in self.relays.values())

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()


def test_resets_lose_nobody_and_half_open_connections_one_worker_and_no_bit(
    expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relayed = Relayed(monkeypatch, {2, 4, 5})
    fault = Fault(lambda _pid: relayed.relays[VICTIM].hold(), at=7)
    emulated = Emulated(
        PROFILE,
        [shape(PROFILE, 2, 2), shape(PROFILE, 3, 1)],
        STEPS,
        num_vms=4,
        policy=Policy(checkpoint_every_steps=2, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S),
        observers=[relayed, fault],
    )
    try:
        weights, _ = emulated.run(tmp_path / "run")
    finally:
        relayed.close()
    assert not relayed.left
    assert relayed.num_reset >= 3 * 4
    assert relayed.lost == [VICTIM]
    assert "silent for" in fault.cause
    assert fault.versions[-1] == STEPS
    assert weights == expected


class Breaking:
    """Breaks a worker's connections when some steps are about to run, where that is permitted."""

    def __init__(self, fault: Fault, versions: set[int]) -> None:
        self._fault, self.left = fault, versions if may_break() else set()
        self.num_broken: list[int] = []

    def __call__(self, observed: Observed) -> None:
        state = observed.decision.state
        if state.phase is Phase.TRAINING and state.version in self.left:
            self.left.remove(state.version)
            self.num_broken.append(break_connections(self._fault.pids[self._fault.victim]))


class WithoutDriver:
    """Kills the process that is Ray's driver once some steps are decided."""

    def __init__(self, fault: Fault, versions: set[int]) -> None:
        self._fault, self.left, self.killed = fault, versions, set[int]()

    def __call__(self, observed: Observed) -> None:
        state = observed.decision.state
        if state.phase is Phase.TRAINING and state.version in self.left:
            self.left.remove(state.version)
            host = psutil.Process(self._fault.pids[self._fault.victim]).parents()[1]
            for process in host.children():
                if "manager.engine.on_ray.driver" in process.cmdline():
                    process.kill()
                    self.killed.add(process.pid)


class Revoking:
    """Takes the last VM once it has trained alone for some steps, and requests another."""

    def __init__(self, fleet: VmFleet, version: int) -> None:
        self._fleet, self._version, self._done = fleet, version, False

    def __call__(self, observed: Observed) -> None:
        state = observed.decision.state
        if not self._done and state.phase is Phase.TRAINING and state.version == self._version:
            self._done = True
            self._fleet.request("vm3")
            self._fleet.revoke("vm0")


def test_a_run_on_ray_survives_broken_connections_silent_workers_and_a_revocation(
    expected: dict[str, str], tmp_path: Path
) -> None:
    """All faults happen in one run, because each node takes long to start.

    Ray's driver is killed, and the connections of one VM's worker are reset twice, without any loss. The next driver
    starts the worker of the last VM. The first worker is stopped, then another VM with all of its processes; both are
    given up, and cannot continue when they wake. The last VM is taken, and the run continues on its successor.
    """
    stopped_too: list[psutil.Process] = []

    def raylet_of(pid: int) -> psutil.Process:
        raylet = psutil.Process(pid).parent()
        assert raylet is not None
        assert raylet.name() == "raylet"
        return raylet

    def stop_worker(pid: int) -> None:
        raylet_of(pid)
        stopped(pid)

    def stop_vm(pid: int) -> None:
        raylet = raylet_of(pid)
        stopped(pid)
        stopped_too.extend([raylet, *raylet.children(recursive=True)])
        for process in stopped_too:
            process.suspend()

    def wake_vm() -> None:
        for process in stopped_too:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    faults = [Fault(stop_worker, at=5), Fault(stop_vm, "vm2", 7)]
    breaking, driverless = Breaking(faults[0], {2, 3}), WithoutDriver(faults[0], {1})
    spells = tuple(SlowSpell(worker=vm, factor=10_000, first_step=at) for vm, at in ((VICTIM, 5), ("vm2", 7)))
    emulated = Emulated(
        PROFILE,
        [shape(PROFILE, stages, 1) for stages in (3, 2, 1)],  # no other worker holds a stage
        STEPS,
        num_vms=3,
        policy=Policy(checkpoint_every_steps=1000, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S),
        observers=[driverless, breaking, *(wakings := [Waking(faults[0]), Waking(faults[1], wake_vm)])],
        attend=lambda fleet: Revoking(fleet, 9),
        spells=spells,
        under_ray=True,
    )
    weights, version = emulated.run(tmp_path / "run")
    assert (breaking.left, driverless.left, len(driverless.killed)) == (set(), set(), 1)
    assert all(breaking.num_broken)
    assert ["silent for" in fault.cause for fault in faults] == [True, True]
    assert [len(fault.members) for fault in faults] == [3, 2]
    assert len(stopped_too) > 1
    assert [waking.outlived for waking in wakings] == [False, False]
    assert [waking.answers for waking in wakings] == [[], []]
    assert (weights, version) == (expected, STEPS)
