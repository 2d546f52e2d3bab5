"""Pre-copies from a member of a managed run that will be taken, or is slow: no step is lost, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from manager.controller.state.events import NoticeGiven
from manager.controller.state.state import Phase
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop import driver
from manager.engine.loop.driver import Observed, Observer
from manager.rehearsal.device import stretched
from morph.contract.messages import SlowSpell
from morph.contract.rules import PreCopyRules, StutterRules
from tests.system.ahead_runs import PROFILE, Case, Ran, best, emulated, real, run
from tests.system.harness import uninterrupted

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NOTICE_AT = 3
LEAD_S = 20.0
"""Enough on a busy machine, and no more: a VM trains on for as long as its notice surely allows."""
OPEN_ENDED = 100_000
Weights = Callable[[int], dict[str, str]]


@dataclass
class Leaving:
    """Gives notice of a member (``noticed``; slow ones need none), takes its VM once it is out, and ends the run."""

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


def leaving(victim: str, num_vms: int, *, noticed: bool = False) -> Callable[[VmFleet], Observer]:
    """Make the observer."""

    def attend(fleet: VmFleet) -> Observer:
        return Leaving(fleet, victim, num_vms, noticed)

    return attend


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Return the weights of one worker after so many steps, run 100 times faster, which does not change them."""
    known: dict[int, dict[str, str]] = {}
    quickly = partial(emulated, profile=stretched(PROFILE, 0.01))

    def weights(version: int) -> dict[str, str]:
        if version not in known:
            known[version] = run(tmp_path_factory.mktemp("alone"), quickly, Case({1: "1x1"}, 1, version)).weights
        return known[version]

    return weights


def assert_nothing_was_lost(ran: Ran, victim: str) -> None:
    """One planned change left the victim out; no step was run twice."""
    (morph,) = ran.report.morphs
    assert morph.planned
    assert morph.steps_redone == 0
    assert not any(record.redone_later for record in ran.report.steps)
    state = ran.turns[-1].decision.state
    assert victim not in {slot.worker for slot in state.slots}


@pytest.mark.parametrize(
    ("shapes", "num_vms"), [({2: "2x1"}, 3), ({2: "2x1", 3: "3x1"}, 3)], ids=["a spare", "the others"]
)
def test_a_member_that_will_be_taken_is_replaced_by_units_sent_ahead(
    shapes: dict[int, str], num_vms: int, alone: Weights, tmp_path: Path
) -> None:
    case = Case(shapes, num_vms, OPEN_ENDED, leaving("vm1", num_vms))
    ran = run(tmp_path, emulated, case)
    assert ran.sent_ahead() > 0
    assert ran.kinds()[-1] == {"keep", "ahead"}
    assert_nothing_was_lost(ran, "vm1")
    assert ran.weights == alone(ran.version)


def test_a_real_job_drained_ahead_equals_one_that_ran_alone(tmp_path: Path) -> None:
    ran = run(tmp_path / "drained", real, Case({2: "2x1"}, 3, OPEN_ENDED, leaving("vm0", 3)))
    assert ran.kinds()[-1] == {"keep", "ahead"}
    assert_nothing_was_lost(ran, "vm0")
    assert ran.weights == uninterrupted(ran.version, tmp_path / "alone")


def test_a_slow_member_is_replaced_by_units_sent_ahead(
    alone: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "TIMES_EVERY_S", 0.25)
    spells = (SlowSpell(worker="vm1", factor=2.0, first_step=6, end_step=OPEN_ENDED),)
    case = Case(
        {3: "3x1"},
        4,
        OPEN_ENDED,
        leaving("vm1", 4, noticed=True),
        spells=spells,
        stutter=StutterRules(probe_every_s=0.5, max_probes=100),
    )
    ran = run(tmp_path, emulated, case)
    assert ran.kinds()[-1] == {"keep", "ahead"}
    assert_nothing_was_lost(ran, "vm1")
    assert ran.weights == alone(ran.version)


@pytest.mark.parametrize("worth", [True, False])
def test_if_worth_a_drain_sends_ahead_what_would_make_a_long_pause_and_nothing_else(
    worth: bool, alone: Weights, tmp_path: Path
) -> None:
    """Nothing was measured yet, so that the policy's own speed decides: a step to send a stage's units, or far less."""
    step_s = best(PROFILE, "2x1").expected.mini_batch_s
    stage_bytes = sum(unit.parameter_bytes for unit in PROFILE.units) / 2
    speed = stage_bytes / step_s if worth else stage_bytes * 1e3
    rules = PreCopyRules(when="if_worth", bytes_per_s=speed, min_saved_s=0.02)
    ran = run(tmp_path, emulated, Case({2: "2x1"}, 3, OPEN_ENDED, leaving("vm1", 3), ahead=rules))
    assert ran.kinds()[-1] == {"keep", "ahead" if worth else "peer"}
    assert (ran.sent_ahead() > 0) == worth
    assert_nothing_was_lost(ran, "vm1")
    assert ran.weights == alone(ran.version)
