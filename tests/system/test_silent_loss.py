"""Workers that fall silent or die: who finds it, what the others do, and that whoever wakes disturbs nobody."""

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
from manager.engine.local_vms.namespaces import HostNetwork
from manager.engine.loop.driver import Observed
from manager.engine.run.machines import Processes
from morph.contract.cluster import LocalVms, Policy
from morph.contract.faults import SlowSpell
from morph.contract.messages import Aborted, Prepared, WorkerReady
from simulator import synthetic_profile
from tests.system.emulated import Emulated, M, shape
from tests.system.harness import TinyJob, constant_vms, managed, uninterrupted
from tests.system.test_rehearsal import permitted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PROFILE = synthetic_profile(
    num_sections=4, forward_s=0.001, overhead_s=0.0, batch_size=16, micro_batch_size=M, parameter_bytes=40_000
)
FAST = synthetic_profile(
    num_sections=4, forward_s=0.00001, overhead_s=0.0, batch_size=16, micro_batch_size=M, parameter_bytes=40_000
)
STEPS, FAULT_AT = 12, 3
VICTIM = "vm1"
# The step in which it stops cannot end without it, however late the test comes to stop it.
STUCK = (SlowSpell(worker=VICTIM, factor=10_000, first_step=FAULT_AT),)
HEARTBEAT_TIMEOUT_S = 5.0
"""Longer than a busy machine keeps a process waiting."""


class Fault:
    """Does something to one worker when a step from version ``at`` was ordered; remembers what follows."""

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
            if event.worker == self.victim:  # at most what it had done when it was stopped
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
    """The weights of a run that nothing happened to."""
    weights, _ = Emulated(FAST, [shape(FAST, 1, 1)], STEPS, num_vms=1).run(tmp_path_factory.mktemp("one") / "run")
    return weights


class Waking:
    """Wakes the worker that was stopped as soon as the others formed the next shape, and sees what becomes of it."""

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
    """Whether a process still lives after that long."""
    until_s = time.monotonic() + bound_s
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > until_s:
                return True
            time.sleep(0.01)
    return False


def test_a_death_aborts_every_other_worker_and_nobody_waits_for_a_time_out(
    expected: dict[str, str], tmp_path: Path
) -> None:
    """What counts is who answers what before the next shape is formed: nobody's answer tells of a wait's end."""
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


def test_a_stopped_worker_is_left_behind_dead_and_changes_no_bit(expected: dict[str, str], tmp_path: Path) -> None:
    fault = Fault(stopped)
    waking = Waking(fault)
    policy = Policy(checkpoint_every_steps=2, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
    plans = [shape(PROFILE, 2, 2), shape(PROFILE, 3, 1)]
    emulated = Emulated(PROFILE, plans, STEPS, num_vms=4, policy=policy, observers=[waking], spells=STUCK)
    weights, _ = emulated.run(tmp_path / "run")
    assert "silent for" in fault.cause
    assert all(isinstance(answer, Aborted) for answer in fault.answers), fault.answers
    assert waking.outlived is False
    assert waking.answers == []
    assert weights == expected


class AllStopped:
    """Stops every worker in a step, and wakes them when one that were silent alone would be given up."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.versions: list[int] = []
        self.waking: threading.Timer | None = None

    def __call__(self, observed: Observed) -> None:
        event, state = observed.event, observed.decision.state
        self.versions.append(state.version)
        assert not isinstance(event, WorkerLost), event
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady):
            self.pids[event.worker] = event.answer.pid
        if self.waking is None and state.phase is Phase.TRAINING and state.version == FAULT_AT:
            for pid in self.pids.values():
                stopped(pid)
            self.waking = threading.Timer(2.5 * HEARTBEAT_TIMEOUT_S, self._wake)
            self.waking.start()

    def _wake(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGCONT)


def test_workers_that_are_all_stopped_for_a_while_are_not_lost(expected: dict[str, str], tmp_path: Path) -> None:
    stopping = AllStopped()
    policy = Policy(checkpoint_every_steps=1000, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
    emulated = Emulated(PROFILE, [shape(PROFILE, 2, 2)], STEPS, num_vms=4, policy=policy, observers=[stopping])
    weights, _ = emulated.run(tmp_path / "run")
    assert stopping.waking is not None
    stopping.waking.join()
    assert any("no worker was heard for" in line for line in emulated.lines)
    assert stopping.versions == sorted(stopping.versions)
    assert weights == expected


def test_a_stopped_ray_worker_is_given_up_and_cannot_go_on_when_it_wakes(tiny_job: TinyJob, tmp_path: Path) -> None:
    """First the worker of one VM alone, then that of another with its raylet and all else that the VM runs."""
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

    faults = [Fault(stop_worker), Fault(stop_vm, "vm2", 2 * FAULT_AT)]
    wakings = [Waking(faults[0]), Waking(faults[1], wake_vm)]

    def observe(observed: Observed) -> None:
        for waking in wakings:
            waking(observed)

    result = managed(
        tiny_job,
        tmp_path / "run",
        shapes={3: "3x1", 2: "2x1", 1: "1x1"},
        trace=constant_vms(3),
        num_steps=STEPS,
        observe=observe,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        vms=LocalVms(launcher="ray"),
    )
    assert ["silent for" in fault.cause for fault in faults] == [True, True]
    assert [len(fault.members) for fault in faults] == [3, 2]
    assert len(stopped_too) > 1
    assert [waking.outlived for waking in wakings] == [False, False]
    assert [waking.answers for waking in wakings] == [[], []]
    assert result.digests() == uninterrupted(STEPS, tmp_path / "reference")


@pytest.mark.skipif(not permitted(), reason="network namespaces need Linux, root, ip and tc")
def test_a_host_whose_link_is_cut_is_found_by_its_silence(expected: dict[str, str], tmp_path: Path) -> None:
    network = HostNetwork(4, 1e9)
    fault = Fault(lambda pid: network.cut(int(VICTIM.removeprefix("vm"))))
    policy = Policy(checkpoint_every_steps=1000, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
    machines = Processes(
        tmp_path / "workers.log",
        network=network,
        host_of=lambda vm: int(vm.removeprefix("vm")),
    )
    plans = [shape(PROFILE, 2, 2), shape(PROFILE, 3, 1)]
    emulated = Emulated(PROFILE, plans, STEPS, num_vms=4, policy=policy, observers=[fault], machines=machines)
    weights, _ = emulated.run(tmp_path / "run")
    assert "silent for" in fault.cause
    assert weights == expected
