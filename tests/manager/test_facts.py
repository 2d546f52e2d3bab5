"""Facts over all units: combined when a step is decided, and told with the next order."""

from __future__ import annotations

import math

import pytest
from controller_script import Script, script_in
from simulated_job import MANIFEST, UNITS

from manager.controller.state.actions import Action, Finish, SendCommit, SendReshape, SendStep
from manager.controller.state.config import units_by_stage
from manager.controller.state.draft import Draft
from manager.controller.state.events import WorkerLost
from manager.controller.state.state import ControllerState, Phase
from morph.contract.decided import Decided, LossScale

SCALE = LossScale(exponent=4, good_steps=1, growth_steps=3)
NORMS_SQ = {unit: 0.1 * (index + 1) for index, unit in enumerate(UNITS)}
NORM = math.sqrt(math.fsum(NORMS_SQ.values()))


def started(loss_scale: LossScale | None = None) -> Script:
    """Four workers, two stages, in the first step."""
    script = Script(num_steps=5)
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped(loss_scale=loss_scale)
    return script


def norms_of(script: Script, worker: str) -> dict[str, float]:
    """What a member reports of its units."""
    assert script.state.plan is not None
    needed = units_by_stage(script.state.plan, UNITS)
    stage = next(slot.stage for slot in script.state.slots if slot.worker == worker)
    return {unit: NORMS_SQ[unit] for unit in needed[stage]}


def prepare_all(script: Script, **last: object) -> tuple[Action, ...]:
    """Every member reports its norms; the last one these facts instead."""
    *others, final = script.members
    for worker in others:
        script.prepared_with(worker, unit_norms_sq=norms_of(script, worker))
    return script.prepared_with(final, **({"unit_norms_sq": norms_of(script, final)} | last))


def orders(actions: tuple[Action, ...]) -> list[Decided | None]:
    """What each order of a decision tells."""
    return [action.order.decided for action in actions if isinstance(action, SendStep | SendCommit | SendReshape)]


def test_the_norm_is_over_every_unit_once_and_told_to_every_member() -> None:
    script = started()
    assert orders(prepare_all(script)) == [Decided(version=1, gradient_norm=NORM)] * 4
    assert script.state.decided == Decided(version=1, gradient_norm=NORM)


def test_a_job_that_reports_no_norm_is_told_none() -> None:
    script = started()
    assert orders(script.prepared()) == [Decided(version=1)] * 4


def test_survivors_of_a_loss_are_told_the_facts_of_the_last_decided_step() -> None:
    script = started()
    prepare_all(script)
    script.tell(WorkerLost(worker=script.members[0], cause="killed"))
    told = orders(script.aborted())
    assert told == [Decided(version=1, gradient_norm=NORM)] * 3
    script.aborted()
    told = orders(script.aborted())
    assert set(told) <= {Decided(version=1, gradient_norm=NORM)}


def test_the_last_commit_tells_them_too() -> None:
    script = script_in(Phase.TRAINING)
    prepare_all(script)
    actions = prepare_all(script)
    assert [action for action in actions if isinstance(action, SendCommit)]
    assert orders(actions) == [Decided(version=2, gradient_norm=NORM)] * 4


def test_nothing_is_told_of_a_version_that_was_restored() -> None:
    script = Script(initial_version=5, initial_checkpoint=MANIFEST, num_steps=9)
    script.ready("n1", "n2", "n3", "n4")
    first = script.reshaped()
    assert orders(first) == [None] * 4
    prepare_all(script)
    for worker in script.members[:2]:
        script.tell(WorkerLost(worker=worker, cause="killed"))
    told = orders(script.aborted())
    assert (script.state.version, set(told)) == (5, {None})


def test_one_member_whose_gradient_is_not_finite_skips_the_step_for_all() -> None:
    script = started(SCALE)
    actions = prepare_all(script, unit_norms_sq={}, non_finite=True)
    assert orders(actions) == [Decided(version=1, skipped=True)] * 4
    assert script.state.step.loss_scale == LossScale(exponent=3, good_steps=0, growth_steps=3)
    assert "weights unchanged" in script.sentence


def test_a_step_that_is_skipped_is_not_run_again_for_an_overflow() -> None:
    script = started(SCALE)
    script.prepared("n1", "n2")
    script.prepared("n3", overflowed=True)
    actions = script.prepared_with("n4", non_finite=True)
    assert script.state.version == 1
    assert {action.order.attempt for action in actions if isinstance(action, SendStep)} == {0}


def test_an_overflow_is_run_again_with_the_same_facts_and_scale() -> None:
    script = started(SCALE)
    prepare_all(script)
    scale = script.state.step.loss_scale
    script.prepared("n1", "n2", "n3")
    actions = script.prepared("n4", overflowed=True)
    assert {action.order.loss_scale for action in actions if isinstance(action, SendStep)} == {scale}
    assert orders(actions) == [Decided(version=1, gradient_norm=NORM)] * 4


def test_the_scale_follows_the_units_through_every_generation() -> None:
    script = started(SCALE)
    scales = [script.state.step.loss_scale]
    for _ in range(2):
        actions = prepare_all(script)
        scales.append(next(action.order.loss_scale for action in actions if isinstance(action, SendStep)))
    assert [(scale.exponent, scale.good_steps) for scale in scales if scale] == [(4, 1), (4, 2), (5, 0)]
    script.tell(WorkerLost(worker=script.members[0], cause="killed"))
    script.aborted()
    assert script.state.step.loss_scale is None
    actions = script.reshaped(loss_scale=scales[-1])
    assert {action.order.loss_scale for action in actions if isinstance(action, SendStep)} == {scales[-1]}


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"unit_norms_sq": NORMS_SQ | {"s0+s5": 7.0}}, "two workers hold different gradients of unit s0+s5"),
        ({"unit_norms_sq": {}}, ""),
    ],
)
def test_members_that_contradict_each_other_end_the_run(facts: dict[str, object], sentence: str) -> None:
    script = started()
    actions = prepare_all(script, **facts)
    if sentence:
        finish = actions[-1]
        assert isinstance(finish, Finish)
        assert (finish.outcome, script.state.version) == ("failed", 0)
        assert sentence in finish.sentence
    else:  # its replica reported them
        assert script.state.version == 1


def test_a_scale_that_cannot_get_smaller_ends_the_run() -> None:
    script = started(LossScale(exponent=-20, growth_steps=3))
    finish = prepare_all(script, non_finite=True)[-1]
    assert isinstance(finish, Finish)
    assert finish.sentence == "gradients are not finite even at a loss scale of 2**-20"


def test_facts_survive_json_exactly() -> None:
    script = started(SCALE)
    prepare_all(script)
    assert ControllerState.model_validate_json(script.state.model_dump_json()) == script.state


def test_fields_are_replaced_where_they_stand() -> None:
    state = started(SCALE).state
    draft = Draft(state, 0.0)
    draft.change(generation=7)
    draft.change_step(attempt=3)
    draft.change_saving(sealing_since_s=2.0)
    draft.change_save_times(num_refused=1)
    later = draft.state
    assert later.saving.save_times == state.saving.save_times.model_copy(update={"num_refused": 1})
    assert (later.generation, later.step.attempt, later.saving.sealing_since_s) == (7, 3, 2.0)
    assert later.step.order == state.step.order
    assert later.waits is state.waits
