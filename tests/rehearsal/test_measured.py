"""What is taken from the manager's decisions: mini-batch times, the manager's turn, and where time went."""

from __future__ import annotations

import pytest

from manager.controller.state.events import WorkerAnswered
from manager.controller.state.reasons import Reason, ReasonCode
from manager.controller.state.state import ControllerState, Decision, Phase
from manager.engine.loop.driver import Observed
from manager.rehearsal.figures import Rehearsed
from manager.rehearsal.measured import Measured
from manager.rehearsal.planning import plan_rehearsal
from manager.rehearsal.run import controller_config_of
from manager.rehearsal.spec import RehearsalSpec
from morph.contract.messages import Prepared, ReshapeOrder, Slot
from morph.contract.timeline import ComputeTimes
from simulator import synthetic_profile

SLOTS = (Slot(worker="vm0", stage=0, replica=0), Slot(worker="vm1", stage=1, replica=0))
PLANNED = plan_rehearsal(
    RehearsalSpec(
        profile=synthetic_profile(num_sections=4, micro_batch_size=4, commit_s=0.5),
        num_stages=2,
        num_hosts=2,
        time_scale=1.0,
    )
)
CONFIG = controller_config_of(PLANNED)


def prepared(worker: str, step: int, step_s: float, late_s: float = 0.0) -> Prepared:
    times = ComputeTimes(
        forward_s=0.1, recompute_s=0.2, backward_s=0.3, reduce_s=0.0, wait_s=0.4, step_s=step_s, late_s=late_s
    )
    return Prepared(worker=worker, generation=1, step=step, times=times)


def observed(time_s: float, version: int, answer: Prepared) -> Observed:
    order = ReshapeOrder(generation=1, version=0, plan=PLANNED.plan, slots=SLOTS, sources=())
    state = ControllerState(config=CONFIG, phase=Phase.TRAINING, version=version, reshape=order)
    decision = Decision(state=state, reason=Reason(code=ReasonCode.STEP_DECIDED, sentence="said"))
    return Observed(time_s, WorkerAnswered(worker=answer.worker, answer=answer), decision, lambda _: None)


def three_steps() -> Measured:
    """Steps that take 2 s after a longer first one; the first stage begins 0.25 s after each decision."""
    measured = Measured()
    for step, (decided_s, late_s) in enumerate(((105.0, 9.0), (107.0, 0.001), (109.0, 0.003))):
        measured(observed(decided_s - 0.05, step, prepared("vm0", step, step_s=1.70, late_s=late_s)))
        measured(observed(decided_s, step + 1, prepared("vm1", step, step_s=1.9)))
    return measured


def test_the_first_step_is_not_counted() -> None:
    measured = three_steps()
    assert measured.mini_batches_s == pytest.approx((2.0, 2.0))
    assert list(measured.counted_steps) == [1, 2]
    assert measured.late_s == pytest.approx(0.003)


def test_the_turn_lasts_from_a_decision_until_the_first_stage_begins() -> None:
    assert three_steps().turn_s == pytest.approx(0.25)


def test_parts_are_means_over_workers_and_counted_steps() -> None:
    parts = three_steps().parts_s()
    assert parts == pytest.approx({"forward": 0.1, "recompute": 0.2, "backward": 0.3, "reduce": 0.0, "wait": 0.4})


def test_the_measured_commit_takes_the_place_of_the_profiles() -> None:
    rehearsed = Rehearsed(
        planned=PLANNED,
        mini_batches_s=(2.0, 3.0, 9.0),
        commit_s=0.1,
        parts_s={},
        late_s=0.0,
        busy_share=0.5,
        others_share=0.1,
    )
    simulated_s = PLANNED.simulation.expected.mini_batch_s
    assert rehearsed.expected_s == pytest.approx(simulated_s - 0.5 + 0.1)
    assert rehearsed.measured_s == 3.0
    assert rehearsed.error == pytest.approx(rehearsed.expected_s / 3.0 - 1)
    assert not rehearsed.host_too_busy
