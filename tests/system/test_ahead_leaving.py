"""Pre-copies in managed runs because a member will be taken: no step is lost, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from manager.controller.state.events import NoticeGiven
from manager.controller.state.state import Phase
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed, Observer
from manager.rehearsal.device import stretched
from tests.system.ahead_runs import PROFILE, Case, Ran, emulated, real, run
from tests.system.harness import uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NOTICE_AT = 3
LEAD_S = 20.0
"""Enough on a busy machine, but short: a VM trains for as long as its notice surely allows."""
OPEN_ENDED = 100_000


@dataclass
class Leaving:
    """Gives notice of a member, takes its VM once it has left the shape, and ends the run."""

    fleet: VmFleet
    victim: str
    num_vms: int
    noticed: bool = False
    out_at: int | None = None

    def __call__(self, observed: Observed) -> None:
        state = observed.decision.state
        members = {slot.worker for slot in state.slots}
        if state.phase is not Phase.TRAINING:
            return
        ready = sum(entry.ready for entry in state.workers.values())
        if not self.noticed and state.version >= NOTICE_AT and ready == self.num_vms:
            self.noticed = True
            self.fleet._event_queue.put(NoticeGiven(worker=self.victim, lead_s=LEAD_S))
        if self.out_at is None and self.noticed and self.victim not in members:
            self.out_at = state.version
            self.fleet.revoke(self.victim)  # as the provider does in the end
        if self.out_at is not None and state.version >= self.out_at + 3 and state.stop_reason is None:
            observed.request_stop("it is gone")


def leaving(victim: str, num_vms: int) -> Callable[[VmFleet], Observer]:
    """Return the function that makes the observer."""

    def attend(fleet: VmFleet) -> Observer:
        return Leaving(fleet, victim, num_vms)

    return attend


def assert_nothing_was_lost(ran: Ran, victim: str) -> None:
    """Check that one planned change left the victim out, and that no step was run twice."""
    (morph,) = ran.report.morphs
    assert morph.planned
    assert morph.steps_redone == 0
    assert not any(record.redone_later for record in ran.report.steps)
    state = ran.turns[-1].decision.state
    assert victim not in {slot.worker for slot in state.slots}


def test_a_member_that_will_be_taken_is_replaced_by_units_sent_ahead(tmp_path: Path) -> None:
    """The weights are those of one worker with times a hundredth as long: they do not depend on times."""
    ran = run(tmp_path / "drained", emulated, Case({2: "2x1", 3: "3x1"}, 3, OPEN_ENDED, leaving("vm1", 3)))
    assert ran.sent_ahead() > 0
    assert ran.kinds()[-1] == {"keep", "ahead"}
    assert_nothing_was_lost(ran, "vm1")
    quickly = partial(emulated, profile=stretched(PROFILE, 0.01))
    assert ran.weights == run(tmp_path / "alone", quickly, Case({1: "1x1"}, 1, ran.version)).weights


def test_a_real_job_drained_ahead_equals_one_that_ran_alone(tmp_path: Path) -> None:
    ran = run(tmp_path / "drained", real, Case({2: "2x1"}, 3, OPEN_ENDED, leaving("vm0", 3)))
    assert ran.kinds()[-1] == {"keep", "ahead"}
    assert_nothing_was_lost(ran, "vm0")
    assert ran.weights == uninterrupted(ran.version, tmp_path / "alone")
