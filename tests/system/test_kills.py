"""Workers die with SIGKILL; the weights end bit for bit as if nothing had happened.

``tests/runtime/test_kill_grid.py`` has every phase and victim.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from manager.controller.state.events import WorkerAnswered
from manager.controller.state.state import Phase
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed, Observer
from morph.contract.faults import Fault
from morph.contract.messages import WorkerReady
from morph.contract.trace import Trace, TraceEvent
from tests.system.conftest import REFERENCE_STEPS
from tests.system.harness import TinyJob, constant_vms, managed, uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SHAPES = {4: "2x2", 3: "3x1", 2: "2x1", 1: "1x1"}


def fault(worker: str, phase: str, step: int, nth: int = 0) -> Fault:
    return Fault.model_validate({"worker": worker, "phase": phase, "step": step, "nth": nth})


HISTORIES = {
    "in the forward pass, the backward pass and the reduction": (
        fault("vm1", "forward", 2, nth=1),
        fault("vm3", "backward", 5, nth=2),
        fault("vm0", "reduce", 8),
    ),
    # the two may hold the only copies of a stage; the run then loads a checkpoint, and vm2 dies while loading it
    "two at once, then while state moves": (
        fault("vm0", "forward", 10),
        fault("vm1", "forward", 10),
        *(fault("vm2", "transfer", version) for version in range(1, 14)),
    ),
}


@pytest.mark.parametrize("faults", HISTORIES.values(), ids=HISTORIES.keys())
def test_killed_workers_leave_the_weights_of_an_uninterrupted_run(
    faults: tuple[Fault, ...], tiny_job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    result = managed(
        tiny_job,
        tmp_path / "run",
        shapes=SHAPES,
        trace=constant_vms(4),
        num_steps=REFERENCE_STEPS,
        faults=faults,
        checkpoint_every=2,
    )
    assert result.outcome == "finished"
    for worker in {planned.worker for planned in faults}:  # each was really killed
        assert any("worker_lost" in line and worker in line for line in result.history), worker
    assert result.digests() == reference


def test_a_joining_worker_that_dies_while_it_is_taken_in_changes_nothing(tiny_job: TinyJob, tmp_path: Path) -> None:
    """Two VMs start; two more join during training, one of which dies while it receives state."""
    events = [TraceEvent(time_s=0, event="add", node_id=f"vm{index}") for index in range(2)]
    events += [TraceEvent(time_s=0.1, event="add", node_id=f"vm{index}") for index in (2, 3)]
    faults = tuple(fault("vm2", "transfer", version) for version in range(1, 2000))
    taken_in_at: list[int] = []

    def stop_when_joined(observed: Observed) -> None:
        state = observed.decision.state
        if not taken_in_at and state.phase is Phase.TRAINING and {slot.worker for slot in state.slots} >= {"vm3"}:
            taken_in_at.append(state.version)
        if taken_in_at and state.version >= taken_in_at[0] + 3 and "vm2" not in state.workers:
            observed.request_stop("both newcomers had their turn")

    result = managed(
        tiny_job,
        tmp_path / "run",
        shapes=SHAPES,
        trace=Trace(events=tuple(events)),
        num_steps=2000,
        faults=faults,
        checkpoint_every=500,
        observe=stop_when_joined,
    )
    assert result.outcome == "stopped"
    assert any("worker_lost" in line and "vm2" in line for line in result.history)
    assert result.digests() == uninterrupted(result.manifest.version, tmp_path / "reference")


def test_with_one_replica_kill_after_kill_loses_no_decided_step(tiny_job: TinyJob, tmp_path: Path) -> None:
    """Workers of the first, the last and the first stage are killed in turn, each once every follower is in step."""
    pids: dict[str, int] = {}
    killed: list[str] = []
    stages = [0, 2, 0]

    def kill_in_turn(observed: Observed) -> None:
        state, event = observed.decision.state, observed.event
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady):
            pids[event.worker] = event.answer.pid
        if state.phase is not Phase.TRAINING or state.reshape is None or any(name in state.workers for name in killed):
            return None
        if len(killed) == len(stages):
            return observed.request_stop("each had its turn")
        follows = state.reshape.follows
        in_step = [state.workers[follow.follower].holds.issuperset(follow.units) for follow in follows]
        if any(follow.units for follow in follows) and all(in_step):
            victim = next(slot.worker for slot in state.slots if slot.stage == stages[len(killed)])
            killed.append(victim)
            os.kill(pids[victim], signal.SIGKILL)
        return None

    result = managed(
        tiny_job,
        tmp_path / "run",
        shapes={4: "4x1", 3: "3x1", 2: "2x1", 1: "1x1"},
        trace=constant_vms(4),
        num_steps=100_000,
        checkpoint_every=100_000,
        observe=kill_in_turn,
        redundancy="salvage",
    )
    assert result.outcome == "stopped"
    assert result.shapes == ("4x1", "3x1", "2x1", "1x1")
    assert not [line for line in result.history if "back to version" in line]
    assert result.digests() == uninterrupted(result.manifest.version, tmp_path / "reference")


def test_a_run_that_lost_its_last_vm_stops_and_can_be_resumed(tiny_job: TinyJob, tmp_path: Path) -> None:
    """They are taken once a checkpoint is complete, however long the first steps take."""
    taken: list[str] = []

    def attend(fleet: VmFleet) -> Observer:
        def act(observed: Observed) -> None:
            if not taken and observed.decision.state.saving.checkpoint is not None:
                taken.extend(("vm0", "vm1"))
                fleet.revoke(*taken)

        return act

    first = managed(
        tiny_job,
        tmp_path / "run",
        shapes={2: "2x1"},
        trace=constant_vms(2),
        num_steps=100_000,
        checkpoint_every=2,
        attend=attend,
    )
    assert first.outcome == "stopped"
    assert "the trace brings no more" in first.history[-1]
    saved = first.manifest.version
    assert saved > 0
    second = managed(
        tiny_job,
        tmp_path / "run",
        shapes={2: "2x1", 1: "1x1"},
        trace=constant_vms(1),
        num_steps=saved + 3,
        initial=first.manifest,
    )
    assert second.outcome == "finished"
    assert second.digests() == uninterrupted(saved + 3, tmp_path / "reference")
