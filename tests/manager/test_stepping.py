"""Steps, their checkpoints, newcomers, and the end of a run."""

from __future__ import annotations

import pytest
from controller_script import Script, receivers, script_in, unit_written
from simulated_job import MANIFEST, PLANS, UNITS

from manager.controller.state.actions import (
    Finish,
    SendCommit,
    SendReshape,
    SendStep,
    WriteManifest,
)
from manager.controller.state.events import (
    MANIFEST_WRITER,
    CheckpointFailed,
    ManifestWritten,
    StopRequested,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import Phase
from manager.controller.steps.stepping import MAX_ATTEMPTS


def test_a_step_is_decided_when_the_last_member_prepared_it() -> None:
    script = script_in(Phase.TRAINING)
    assert script.prepared("n1", "n2", "n3") == ()
    assert script.state.version == 0
    actions = script.prepared("n4")
    assert script.state.version == 1
    assert script.code == "step_decided"
    assert receivers(actions, SendStep) == ["n1", "n2", "n3", "n4"]
    assert {action.order.step for action in actions if isinstance(action, SendStep)} == {1}


def test_an_overflow_runs_the_same_step_again_and_not_for_ever() -> None:
    script = script_in(Phase.TRAINING)
    for attempt in range(1, MAX_ATTEMPTS):
        script.prepared("n1", "n2", "n3")
        actions = script.prepared("n4", overflowed=True)
        orders = [action.order for action in actions if isinstance(action, SendStep)]
        assert [(order.step, order.attempt) for order in orders] == [(0, attempt)] * 4
    finish = script.prepared(overflowed=True)[-1]
    assert isinstance(finish, Finish)
    assert (finish.outcome, script.state.version) == ("failed", 0)
    assert "overflowed" in finish.sentence


def test_late_and_doubled_answers_change_nothing() -> None:
    script = script_in(Phase.TRAINING)
    first = script.prepared_answer("n1")
    script.prepared()
    assert script.tell(WorkerAnswered(worker="n1", answer=first)) == ()
    assert script.code == "ignored"
    old = first.model_copy(update={"step": 1, "generation": 0})
    assert script.tell(WorkerAnswered(worker="n1", answer=old)) == ()
    assert script.code == "ignored"
    assert len(script.busy) == 4


def test_a_checkpoint_is_written_every_so_many_versions_each_unit_once() -> None:
    script = Script()
    script.ready("n1", "n2", "n3", "n4")
    shares = []
    actions = script.reshaped()
    for _ in range(4):
        steps = [action for action in actions if isinstance(action, SendStep)]
        shares.append([unit for action in steps for unit in action.order.checkpoint_units])
        actions = script.prepared()
    assert shares[:3] == [[], [], []]
    assert sorted(shares[3]) == sorted(UNITS)


def test_a_checkpoint_waits_for_the_one_before_it() -> None:
    script = Script(num_steps=20)
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped()
    for _ in range(7):
        script.prepared()
    assert script.state.saving.pending is not None
    assert script.state.saving.pending.version == 3
    (write,) = script.written(3)
    assert isinstance(write, WriteManifest)
    assert {file.unit for file in write.manifest.units} == set(UNITS)
    script.tell(ManifestWritten(version=3))
    script.prepared()
    assert script.state.saving.pending.version == 8


def test_a_failed_checkpoint_is_tried_again_a_whole_interval_later() -> None:
    script = Script(num_steps=20)
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped()
    for _ in range(3):
        script.prepared()
    script.tell(CheckpointFailed(worker="n1", error="disk full"))
    assert script.code == "checkpoint_abandoned"
    for _ in range(2):
        script.prepared()
        assert script.state.saving.pending is None
    script.prepared()
    assert script.state.saving.pending is not None
    assert script.state.saving.pending.version == 6


def test_the_last_checkpoint_is_written_again_by_whom_storage_refused_until_it_is_there() -> None:
    script = script_in(Phase.COMMITTING)
    script.committed()
    assert script.state.saving.pending is not None
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


def test_the_last_manifest_is_written_again_until_it_is_there_or_the_users_bound_is_reached() -> None:
    script = script_in(Phase.SEALING)
    for _ in range(5):
        script.tell(CheckpointFailed(worker=MANIFEST_WRITER, error="No space left on device", version=2))
        (action,) = script.wake()
        assert isinstance(action, WriteManifest)
        assert action.manifest.version == 2
    script.tell(CheckpointFailed(worker=MANIFEST_WRITER, error="No space left on device", version=2))
    script.tell(ManifestWritten(version=2))
    assert script.code == "finished"


def test_a_last_checkpoint_that_is_refused_for_as_long_as_the_user_allows_ends_the_run() -> None:
    script = script_in(Phase.SEALING)
    script.tell(CheckpointFailed(worker=MANIFEST_WRITER, error="Read-only file system", version=2))
    script.wake()
    limit_s = script.state.config.policy.rules.wait.vms_patience_s
    script.now_s += limit_s
    script.tell(CheckpointFailed(worker=MANIFEST_WRITER, error="Read-only file system", version=2))
    script.wake()
    assert script.code == "failed"
    assert f"could not be written for {limit_s:g} s" in script.sentence


def test_newcomers_join_at_a_step_boundary_when_they_make_it_faster() -> None:
    script = Script()
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped()
    script.ready("n5")
    assert receivers(script.prepared(), SendStep) == ["n1", "n2", "n3", "n4"]
    script.ready("n6")
    actions = script.prepared()
    assert receivers(actions, SendReshape) == ["n1", "n2", "n3", "n4", "n5", "n6"]
    assert not receivers(actions, SendStep)
    assert (script.state.version, script.code) == (2, "formed")


def test_newcomers_that_gain_too_little_stay_spare() -> None:
    speed = PLANS[4].expected.examples_per_s * 1.01
    slow = PLANS[6].model_copy(update={"expected": PLANS[6].expected.model_copy(update={"examples_per_s": speed})})
    script = Script(plans={4: PLANS[4], 6: slow})
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped()
    script.ready("n5", "n6")
    assert receivers(script.prepared(), SendStep) == ["n1", "n2", "n3", "n4"]


def test_the_last_version_is_committed_saved_and_sealed_before_the_end() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared()
    actions = script.prepared()
    commits = [action.order for action in actions if isinstance(action, SendCommit)]
    assert {order.version for order in commits} == {2}
    assert sorted(unit for order in commits for unit in order.checkpoint_units) == sorted(UNITS)
    assert script.committed() == ()
    assert script.written(2, list(UNITS)[:3]) == ()
    (write,) = script.written(2)
    assert isinstance(write, WriteManifest)
    assert script.tell(ManifestWritten(version=1)) == ()
    (finish,) = script.tell(ManifestWritten(version=2))
    assert isinstance(finish, Finish)
    assert finish.outcome == "finished"


def test_a_stop_saves_the_next_boundary() -> None:
    script = Script()
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped()
    assert script.tell(StopRequested(reason="interrupted")) == ()
    assert receivers(script.prepared(), SendCommit) == ["n1", "n2", "n3", "n4"]
    script.committed()
    (finish,) = script.saved(1)
    assert finish == Finish(outcome="stopped", sentence="interrupted; version 1 is saved")


def test_a_stop_at_a_saved_version_commits_without_writing_it_again() -> None:
    script = Script(initial_version=5, initial_checkpoint=MANIFEST)
    script.ready("n1", "n2", "n3", "n4")
    script.tell(StopRequested(reason="interrupted"))
    commits = [action.order for action in script.reshaped() if isinstance(action, SendCommit)]
    assert [order.checkpoint_units for order in commits] == [()] * 4
    (finish,) = script.committed()
    assert isinstance(finish, Finish)
    assert finish.outcome == "stopped"


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.WAITING])
def test_a_stop_while_nobody_works_ends_at_once(phase: Phase) -> None:
    finish = script_in(phase).tell(StopRequested(reason="interrupted"))[-1]
    assert isinstance(finish, Finish)
    assert finish.outcome == "stopped"


def test_only_who_was_told_to_write_a_unit_is_believed_to_have_written_it() -> None:
    script = script_in(Phase.COMMITTING)
    script.committed()
    assert script.state.saving.pending is not None
    writer = script.state.saving.pending.writers["s0"]
    for other, author in (("n9", "n9"), ("n9", writer), (writer, "n9")):
        script.tell(UnitsWritten(worker=other, written=(unit_written(author, 2, "s0"),)))
        assert script.last is not None
        assert script.last.reason.code is ReasonCode.IGNORED
    assert script.state.saving.pending.written == {}
    script.tell(UnitsWritten(worker=writer, written=(unit_written(writer, 2, "s0"),)))
    assert set(script.state.saving.pending.written) == {"s0"}


def test_a_writer_lost_after_its_commit_has_the_version_committed_again() -> None:
    script = script_in(Phase.COMMITTING)
    script.committed()
    assert script.state.saving.pending is not None
    actions = script.tell(WorkerLost(worker=script.state.saving.pending.writers["s0"], cause="killed"))
    assert len(receivers(actions, SendReshape)) == 3
    assert len(receivers(script.reshaped(), SendCommit)) == 3
    script.committed()
    (finish,) = script.saved(2)
    assert isinstance(finish, Finish)
    assert finish.outcome == "finished"
