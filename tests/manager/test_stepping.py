"""Steps, their checkpoints, newcomers, and the end of a run."""

from __future__ import annotations

import math

import pytest
from controller_script import Script, formed, receivers, script_in
from simulated_job import MANIFEST, PLANS, UNITS

from manager.controller.state.actions import (
    Action,
    Finish,
    SendCommit,
    SendReshape,
    SendStep,
    WriteManifest,
)
from manager.controller.state.config import units_by_stage
from manager.controller.state.events import (
    MANIFEST_WRITER,
    CheckpointFailed,
    ManifestWritten,
    StopRequested,
    WorkerLost,
)
from manager.controller.state.state import Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.training_loop import MAX_ATTEMPTS
from manager.run.controller_config import constant_trace, controller_config
from morph.contract.cluster import LocalVms, Policy
from morph.contract.decided import Decided, LossScale
from morph.contract.plan import Schedule
from simulator import PlanRequest, synthetic_profile


def test_an_overflow_runs_the_same_step_again_and_not_for_ever() -> None:
    script = script_in(Phase.TRAINING)
    for attempt in range(1, MAX_ATTEMPTS):
        script.prepared("n1", "n2", "n3")
        actions = script.prepared("n4", overflowed=True)
        orders = [action.order for action in actions if isinstance(action, SendStep)]
        assert [(order.step, order.attempt) for order in orders] == [(0, attempt)] * 4
    finish = script.prepared(overflowed=True)[-1]
    assert (finish.outcome, script.state.version) == ("failed", 0)
    assert "overflowed" in finish.sentence


def test_a_refused_writer_repeats_the_last_checkpoint_until_it_is_there() -> None:
    script = script_in(Phase.COMMITTING)
    script.committed()
    generation, (owing, *others) = script.state.generation, sorted(set(script.state.saving.pending.writers.values()))
    for writer in others:
        script.written(2, [unit for unit, by in script.state.saving.pending.writers.items() if by == writer])
    pauses_s, owed = [], tuple(unit for unit, writer in script.state.saving.pending.writers.items() if writer == owing)
    for _ in range(8):
        failed_s = script.now_s
        script.tell(CheckpointFailed(worker=owing, error="No space left on device"))
        actions = script.wake()
        pauses_s.append(round(script.now_s - failed_s, 1))
        assert receivers(actions, SendCommit) == [owing]
        assert [action.order.checkpoint_units for action in actions if isinstance(action, SendCommit)] == [owed]
    assert pauses_s == sorted(pauses_s)
    assert (round(pauses_s[0]), round(pauses_s[-1])) == (1, 30)
    assert (script.state.phase, script.state.generation) == (Phase.COMMITTING, generation)
    script.written(2, owed)
    script.tell(ManifestWritten(version=2))
    assert script.code == "finished"


def test_the_last_manifest_is_written_again_until_it_is_there() -> None:
    script = script_in(Phase.SEALING)
    for _ in range(5):
        script.tell(CheckpointFailed(worker=MANIFEST_WRITER, error="No space left on device", version=2))
        (action,) = script.wake()
        assert isinstance(action, WriteManifest)
        assert action.manifest.version == 2
    script.tell(CheckpointFailed(worker=MANIFEST_WRITER, error="No space left on device", version=2))
    script.tell(ManifestWritten(version=2))
    assert script.code == "finished"


def test_a_last_checkpoint_refused_for_too_long_ends_the_run() -> None:
    script = script_in(Phase.SEALING)
    script.tell(CheckpointFailed(worker=MANIFEST_WRITER, error="Read-only file system", version=2))
    script.wake()
    limit_s = script.state.config.policy.rules.wait.vms_patience_s
    script.now_s += limit_s
    script.tell(CheckpointFailed(worker=MANIFEST_WRITER, error="Read-only file system", version=2))
    script.wake()
    assert script.code == "failed"
    assert f"could not be written for {limit_s:g} s" in script.sentence


def test_newcomers_that_gain_too_little_stay_spare() -> None:
    speed = PLANS[4].expected.examples_per_s * 1.01
    slow = PLANS[6].model_copy(update={"expected": PLANS[6].expected.model_copy(update={"examples_per_s": speed})})
    script = formed(4, plans={4: PLANS[4], 6: slow})
    script.ready("n5", "n6")
    assert receivers(script.prepared(), SendStep) == ["n1", "n2", "n3", "n4"]


def test_a_stop_at_a_saved_version_commits_without_writing_it_again() -> None:
    script = Script(initial_version=5, initial_checkpoint=MANIFEST)
    script.ready("n1", "n2", "n3", "n4")
    script.tell(StopRequested(reason="interrupted"))
    commits = [action.order for action in script.reshaped() if isinstance(action, SendCommit)]
    assert [order.checkpoint_units for order in commits] == [()] * 4
    (finish,) = script.committed()
    assert finish.outcome == "stopped"


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.WAITING])
def test_a_stop_while_no_worker_trains_ends_at_once(phase: Phase) -> None:
    finish = script_in(phase).tell(StopRequested(reason="interrupted"))[-1]
    assert finish.outcome == "stopped"


def test_a_writer_lost_after_its_commit_has_the_version_committed_again() -> None:
    script = script_in(Phase.COMMITTING)
    script.committed()
    actions = script.tell(WorkerLost(worker=script.state.saving.pending.writers["s0"], cause="killed"))
    assert len(receivers(actions, SendReshape)) == 3
    assert len(receivers(script.reshaped(), SendCommit)) == 3
    script.committed()
    (finish,) = script.saved(2)
    assert finish.outcome == "finished"


SCALE = LossScale(exponent=4, good_steps=1, growth_steps=3)
NORMS_SQ = {unit: 0.1 * (index + 1) for index, unit in enumerate(UNITS)}
NORM = math.sqrt(math.fsum(NORMS_SQ.values()))


def started(loss_scale: LossScale | None = None) -> Script:
    """Return a script with four workers in two stages, in the first step."""
    script = Script(num_steps=5)
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped(loss_scale=loss_scale)
    return script


def norms_of(script: Script, worker: str) -> dict[str, float]:
    assert script.state.plan is not None
    needed = units_by_stage(script.state.plan, UNITS)
    stage = next(slot.stage for slot in script.state.slots if slot.worker == worker)
    return {unit: NORMS_SQ[unit] for unit in needed[stage]}


def prepare_all(script: Script, **last: object) -> tuple[Action, ...]:
    """Let every member report its norms; the last one reports these facts instead."""
    *others, final = script.members
    for worker in others:
        script.prepared_with(worker, unit_norms_sq=norms_of(script, worker))
    return script.prepared_with(final, **({"unit_norms_sq": norms_of(script, final)} | last))


def orders(actions: tuple[Action, ...]) -> list[Decided | None]:
    return [action.order.decided for action in actions if isinstance(action, SendStep | SendCommit | SendReshape)]


def test_the_norm_includes_every_unit_once_and_is_sent_to_every_member() -> None:
    script = started()
    assert orders(prepare_all(script)) == [Decided(version=1, gradient_norm=NORM)] * 4
    assert script.state.decided == Decided(version=1, gradient_norm=NORM)


def test_a_restored_version_has_no_facts_of_its_step() -> None:
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
        assert (finish.outcome, script.state.version) == ("failed", 0)
        assert sentence in finish.sentence
    else:  # its replica reported them
        assert script.state.version == 1


def test_a_scale_that_cannot_get_smaller_ends_the_run() -> None:
    script = started(LossScale(exponent=-20, growth_steps=3))
    finish = prepare_all(script, non_finite=True)[-1]
    assert isinstance(finish, Finish)
    assert finish.sentence == "gradients are not finite even at a loss scale of 2**-20"


def test_fields_are_replaced_where_they_stand() -> None:
    state = started(SCALE).state
    transition = Transition(state, 0.0)
    transition.change(generation=7)
    transition.change_step(attempt=3)
    transition.change_saving(sealing_since_s=2.0)
    transition.change_save_times(num_refused=1)
    later = transition.state
    assert later.saving.save_times == state.saving.save_times.model_copy(update={"num_refused": 1})
    assert (later.generation, later.step.attempt, later.saving.sealing_since_s) == (7, 3, 2.0)
    assert later.step.order == state.step.order
    assert later.waits is state.waits


PROFILE = synthetic_profile(num_sections=4, batch_size=16)
VMS = LocalVms(num_vms=4, memory_bytes=10**12)


@pytest.mark.parametrize("schedule", ["varuna", "gpipe", "1f1b"])
def test_every_plan_of_a_run_has_the_schedule_asked_for(schedule: Schedule) -> None:
    config = controller_config(PROFILE, VMS, Policy(), constant_trace(VMS), 10, PlanRequest(schedule=schedule))
    assert {plan.schedule for plan in config.plans.values()} == {schedule}
    assert config.timeline_step is None


def test_only_the_step_asked_for_is_recorded_in_each_of_its_attempts() -> None:
    script = Script(timeline_step=1)
    script.ready("n1", "n2", "n3", "n4")
    recorded = []
    actions = script.reshaped()
    for overflowed in (False, True, False, False):
        orders = [action.order for action in actions if isinstance(action, SendStep)]
        assert len(orders) == 4
        recorded += [(order.step, order.attempt) for order in orders if order.record_timeline]
        actions = script.prepared(overflowed=overflowed)
    assert recorded == [(1, 0)] * 4 + [(1, 1)] * 4
