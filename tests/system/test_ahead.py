"""Pre-copies to workers that join a managed run, and kills meanwhile, change no bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from manager.controller.state.state import Phase
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed
from morph.contract.faults import Fault
from tests.system.ahead_runs import Case, emulated, real, run
from tests.system.harness import uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SHAPES = {2: "2x1", 4: "2x2"}
JOIN_AT = 2


@dataclass
class Joining:
    """Requests two VMs at a version; with ``stops``, the run ends soon after they joined."""

    fleet: VmFleet
    stops: bool = False
    asked: bool = False

    def __call__(self, observed: Observed) -> None:
        state = observed.decision.state
        if not self.asked and state.phase is Phase.TRAINING and state.version >= JOIN_AT:
            self.asked = True
            for name in ("vm2", "vm3"):
                self.fleet.request(name)
        joined = state.reshape is not None and len(state.slots) == 4 and state.version >= state.reshape.version + 2
        if self.stops and joined and state.phase is Phase.TRAINING and state.stop_reason is None:
            observed.request_stop("they have joined")


STEPS = 30


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(tmp_path_factory.mktemp("undisturbed"), emulated, Case(SHAPES, 2, STEPS)).weights


def test_a_kill_of_a_pre_copying_sender_costs_no_extra_step(undisturbed: dict[str, str], tmp_path: Path) -> None:
    worker = "vm1"
    faults = tuple(Fault(worker=worker, phase="send_ahead", step=step) for step in range(JOIN_AT, STEPS - 4))
    ran = run(tmp_path, emulated, Case(SHAPES, 2, STEPS, Joining, faults))
    assert ran.weights == undisturbed
    assert ran.sent_ahead() > 0
    assert any(morph.lost_workers == (worker,) for morph in ran.report.morphs)


def test_a_newcomer_that_is_killed_while_it_receives_disturbs_no_step(
    undisturbed: dict[str, str], tmp_path: Path
) -> None:
    worker = "vm2"
    faults = tuple(Fault(worker=worker, phase="receive_ahead", step=step) for step in range(JOIN_AT, STEPS))
    ran = run(tmp_path, emulated, Case(SHAPES, 2, STEPS, Joining, faults))
    assert ran.weights == undisturbed
    assert ran.sent_ahead() > 0
    assert ran.report.morphs == ()  # no worker stopped because of it


def test_a_real_job_joined_ahead_equals_one_that_ran_alone(tmp_path: Path) -> None:
    ran = run(tmp_path / "joined", real, Case(SHAPES, 2, 100_000, lambda fleet: Joining(fleet, stops=True)))
    assert ran.kinds()[-1] == {"keep", "ahead"}
    assert ran.weights == uninterrupted(ran.version, tmp_path / "alone")
