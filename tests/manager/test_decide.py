"""What is decided, phase by phase and event by event."""

from __future__ import annotations

import itertools

import pytest
from cluster_invariants import phase_problem
from controller_script import Script, receivers, script_in
from simulated_job import PLANS, UNITS, file_of, make_config

from manager.controller.actions import (
    Abort,
    EndWorker,
    Finish,
    SendCommit,
    SendReshape,
    SendStep,
    StartWorker,
    WriteManifest,
)
from manager.controller.decide import TRANSITIONS, ImpossibleEvent, decide
from manager.controller.events import (
    EVENT_TYPES,
    MANIFEST_WRITER,
    CheckpointFailed,
    Event,
    ManifestWritten,
    NodeAppeared,
    StopRequested,
    Tick,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state import Phase
from manager.controller.stepping import MAX_ATTEMPTS
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.messages import (
    Aborted,
    Committed,
    Failed,
    Reshaped,
    ReshapeOrder,
    UnitWritten,
    WorkerReady,
)

GRID = list(itertools.product(Phase, EVENT_TYPES))
IMPOSSIBLE = {(Phase.STARTING, UnitsWritten), (Phase.STARTING, CheckpointFailed), (Phase.STARTING, ManifestWritten)}
FILES = tuple(UnitFile(unit=unit, file=file_of(unit), size_bytes=1, sha256="0" * 64) for unit in UNITS)
MANIFEST = Manifest(fingerprint="f", version=5, units=FILES)


def events_of(event_type: type[Event], script: Script) -> list[Event]:
    """Return events of one type: fitting ones, late ones, and such of strangers."""
    state = script.state
    everybody = [*state.workers, "stranger"]
    if event_type is NodeAppeared:
        return [NodeAppeared(node=worker) for worker in ("n1", "n9")]
    if event_type is WorkerAnswered:
        answers = [
            lambda worker, old: WorkerReady(worker=worker, pid=1, setup_s=0),
            lambda worker, old: Reshaped(
                worker=worker, generation=state.generation - old, groups_s=0, state_s=0, received_bytes=0
            ),
            lambda worker, old: script.prepared_answer(worker).model_copy(
                update={"generation": state.generation - old}
            ),
            lambda worker, old: Committed(worker=worker, generation=state.generation - old, version=state.version),
            lambda worker, old: Aborted(worker=worker, generation=state.generation - old, peer_lost=True),
            lambda worker, old: Failed(worker=worker, generation=state.generation - old, error="broken"),
        ]
        made = itertools.product(everybody, (0, 1), answers)
        return [WorkerAnswered(worker=worker, answer=make(worker, old)) for worker, old, make in made]
    if event_type is WorkerLost:
        return [WorkerLost(worker=worker, cause="killed") for worker in everybody]
    if event_type is UnitsWritten:
        entry = UnitWritten(worker="n1", version=state.version, unit="s0", file="s0", size_bytes=1, sha256="0" * 64)
        return [UnitsWritten(worker="n1", written=(entry,))]
    if event_type is CheckpointFailed:
        return [CheckpointFailed(worker=worker, error="disk full") for worker in (*everybody, MANIFEST_WRITER)]
    if event_type is ManifestWritten:
        return [ManifestWritten(version=version) for version in (state.version, 99)]
    return [StopRequested(reason="asked to")] if event_type is StopRequested else [Tick()]


@pytest.mark.parametrize(("phase", "event_type"), [pair for pair in GRID if pair not in IMPOSSIBLE])
def test_every_event_in_every_phase_keeps_the_phase_invariants(phase: Phase, event_type: type[Event]) -> None:
    script = script_in(phase)
    for event, later_s in itertools.product(events_of(event_type, script), (0.1, 1000.0)):
        before = script.state.model_dump_json()
        decision = decide(script.state, event, script.now_s + later_s)
        assert phase_problem(decision.state) is None
        assert decision.reason.sentence
        assert script.state.model_dump_json() == before, "the state given was changed"
        assert decision == decide(script.state, event, script.now_s + later_s)
        assert decision.wake_at_s is None or decision.state.phase is not Phase.ENDED


@pytest.mark.parametrize(("phase", "event_type"), sorted(IMPOSSIBLE, key=str))
def test_an_impossible_event_is_an_error_with_job_phase_event_and_history(
    phase: Phase, event_type: type[Event]
) -> None:
    script = script_in(phase)
    event = events_of(event_type, script)[0]
    with pytest.raises(ImpossibleEvent, match=rf"job job: {event.kind} cannot happen in phase starting") as caught:
        script.tell(event)
    assert "node_appeared n1 in starting: node_registered" in str(caught.value)
    assert event.model_dump_json() in str(caught.value)


def test_the_table_covers_the_grid_but_for_the_impossible_pairs() -> None:
    assert set(GRID) - set(TRANSITIONS) == IMPOSSIBLE


def test_ended_runs_take_any_event_without_an_action() -> None:
    script = script_in(Phase.ENDED)
    for event_type in EVENT_TYPES:
        for event in events_of(event_type, script):
            assert script.tell(event) == ()
            assert script.state.phase is Phase.ENDED


# --- start -------------------------------------------------------------------------------------------------------


def test_a_node_gets_a_worker_once() -> None:
    script = Script()
    assert script.tell(NodeAppeared(node="n1")) == (StartWorker(worker="n1"),)
    assert script.tell(NodeAppeared(node="n1")) == ()


def test_the_start_waits_for_every_expected_node() -> None:
    script = Script(expected_nodes=3)
    assert script.ready("n1", "n2") == ()
    assert script.code == "start_wait"
    actions = script.ready("n3")
    assert receivers(actions, SendReshape) == ["n1", "n2", "n3"]
    order = next(action.order for action in actions if isinstance(action, SendReshape))
    assert (order.generation, order.version, order.plan.shape) == (1, 0, "3x1")
    assert {source.kind for source in order.sources} == {"initial"}


def test_the_start_waits_no_longer_than_its_patience_once_a_plan_fits() -> None:
    script = Script(expected_nodes=6)
    script.ready("n1", "n2")
    assert script.last is not None
    wake_at_s = script.last.wake_at_s
    assert wake_at_s == pytest.approx(script.now_s + 5.0)
    assert script.tell(Tick(), at_s=wake_at_s - 0.01) == ()
    assert receivers(script.tell(Tick(), at_s=wake_at_s), SendReshape) == ["n1", "n2"]


def test_a_run_starts_from_the_checkpoint_it_is_given() -> None:
    script = Script(initial_version=5, initial_checkpoint=MANIFEST, expected_nodes=2)
    order = next(action.order for action in script.ready("n1", "n2") if isinstance(action, SendReshape))
    assert order.version == 5
    assert {source.kind for source in order.sources} == {"checkpoint"}


def test_a_run_that_has_all_its_steps_already_finishes_at_once() -> None:
    script = Script(initial_version=5, initial_checkpoint=MANIFEST, num_steps=5)
    script.tell(NodeAppeared(node="n1"))
    (finish,) = script.tell(Tick())
    assert isinstance(finish, Finish)
    assert finish.outcome == "finished"


def test_a_setup_that_fails_ends_the_run_before_the_start_and_only_the_worker_later() -> None:
    failed = Failed(worker="n1", generation=0, error="no such job")
    script = Script()
    script.tell(NodeAppeared(node="n1"))
    (finish,) = script.tell(WorkerAnswered(worker="n1", answer=failed))
    assert finish == Finish(outcome="failed", sentence="n1 could not be set up: no such job")
    script = script_in(Phase.TRAINING)
    script.tell(NodeAppeared(node="n9"))
    assert script.tell(WorkerAnswered(worker="n9", answer=failed)) == (EndWorker(worker="n9"),)
    assert script.state.phase is Phase.TRAINING


# --- steps -------------------------------------------------------------------------------------------------------


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
    assert script.state.pending is not None
    assert script.state.pending.version == 3
    (write,) = script.written(3)
    assert isinstance(write, WriteManifest)
    assert {file.unit for file in write.manifest.units} == set(UNITS)
    script.tell(ManifestWritten(version=3))
    script.prepared()
    assert script.state.pending.version == 8


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
        assert script.state.pending is None
    script.prepared()
    assert script.state.pending is not None
    assert script.state.pending.version == 6


# --- losses ------------------------------------------------------------------------------------------------------


def test_a_lost_worker_aborts_the_generation() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared("n1")
    assert script.tell(WorkerLost(worker="n2", cause="killed")) == (
        Abort(worker="n3", generation=1),
        Abort(worker="n4", generation=1),
    )
    assert script.state.phase is Phase.ABORTING
    assert script.aborted("n3") == ()
    actions = script.prepared("n4")
    assert receivers(actions, SendReshape) == ["n1", "n3", "n4"]
    assert script.state.version == 0
    assert script.tell(WorkerLost(worker="n2", cause="killed")) == ()


def test_state_comes_from_living_replicas_and_no_step_is_redone() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared()
    victim = script.members[0]
    script.tell(WorkerLost(worker=victim, cause="killed"))
    order = next(action.order for action in script.aborted() if isinstance(action, SendReshape))
    assert (order.generation, order.version) == (2, 1)
    assert {source.kind for source in order.sources} == {"keep", "peer"}
    holds = {worker: entry.holds for worker, entry in script.state.workers.items()}
    assert all(source.unit in holds[source.peer or source.worker] for source in order.sources)


def lose_a_stage(script: Script) -> ReshapeOrder:
    """Both replicas of stage 0 die."""
    for worker in script.members[:2]:
        script.tell(WorkerLost(worker=worker, cause="killed"))
    return next(action.order for action in script.aborted() if isinstance(action, SendReshape))


def test_without_a_living_holder_everybody_goes_back_to_the_checkpoint() -> None:
    script = Script()
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped()
    for _ in range(3):
        script.prepared()
    script.saved(3)
    script.prepared()
    script.prepared()
    assert script.state.version == 5
    order = lose_a_stage(script)
    assert (order.version, script.state.version, script.code) == (3, 3, "set_back")
    assert {source.kind for source in order.sources} == {"checkpoint"}
    assert "2 steps are to be redone" in script.sentence


def test_without_a_checkpoint_everybody_goes_back_to_the_start() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared()
    order = lose_a_stage(script)
    assert (order.version, script.code) == (0, "set_back")
    assert {source.kind for source in order.sources} == {"initial"}
    assert "1 steps are to be redone" in script.sentence


def test_lost_units_of_the_checkpointed_version_are_read_and_the_rest_kept() -> None:
    script = Script(initial_version=5, initial_checkpoint=MANIFEST)
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped()
    order = lose_a_stage(script)
    assert (order.version, script.code) == (5, "formed")
    assert {source.kind for source in order.sources} >= {"checkpoint", "keep"}


def test_a_failed_reshape_loses_nothing() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared()
    before = {worker: entry.holds for worker, entry in script.state.workers.items()}
    script.tell(WorkerLost(worker=script.members[0], cause="killed"))
    script.aborted()
    assert script.state.phase is Phase.RESHAPING
    script.reshaped(script.members[0])
    script.aborted()
    assert (script.state.generation, script.state.version) == (3, 1)
    assert all(entry.holds >= before[worker] for worker, entry in script.state.workers.items())


def test_a_worker_that_is_left_over_serves_what_only_it_holds() -> None:
    plans = {2: PLANS[2], 3: PLANS[2], 6: PLANS[6]}
    script = Script(plans=plans, expected_nodes=6)
    script.ready("n1", "n2", "n3", "n4", "n5", "n6")
    script.reshaped()
    script.prepared()
    for worker in script.members[::2]:
        script.tell(WorkerLost(worker=worker, cause="killed"))
    actions = script.aborted()
    order = next(action.order for action in actions if isinstance(action, SendReshape))
    members = {slot.worker for slot in order.slots}
    assert (order.version, len(members)) == (1, 2)
    assert len(receivers(actions, SendReshape)) == 3
    (server,) = set(receivers(actions, SendReshape)) - members
    assert server in {source.peer for source in order.sources}
    assert receivers(script.reshaped(), SendStep) == sorted(members)


def test_below_the_minimum_survivors_wait_and_keep_their_state() -> None:
    script = Script(plans={count: PLANS[count] for count in (4, 6)}, expected_nodes=4)
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped()
    script.prepared()
    script.tell(WorkerLost(worker="n1", cause="killed"))
    assert script.aborted() == ()
    assert (script.state.phase, script.code) == (Phase.WAITING, "too_few_workers")
    order = next(action.order for action in script.ready("n5") if isinstance(action, SendReshape))
    assert order.version == 1
    assert {source.kind for source in order.sources} == {"keep", "peer"}


def test_losing_a_spare_only_removes_it() -> None:
    script = script_in(Phase.TRAINING)
    script.ready("n5")
    assert script.tell(WorkerLost(worker="n5", cause="killed")) == ()
    assert (script.state.phase, script.code) == (Phase.TRAINING, "worker_removed")


def test_an_abort_before_the_loss_is_known_reforms_with_everybody_believed_alive() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared("n1")
    assert script.aborted("n2", peer_lost=True) == (Abort(worker="n3", generation=1), Abort(worker="n4", generation=1))
    assert receivers(script.aborted(), SendReshape) == ["n1", "n2", "n3", "n4"]
    aborts = script.tell(WorkerLost(worker="n1", cause="killed"))
    assert [action.worker for action in aborts if isinstance(action, Abort)] == ["n2", "n3", "n4"]


def test_generations_that_come_to_nothing_end_the_run() -> None:
    script = script_in(Phase.TRAINING)
    limit = script.state.config.policy.max_fruitless_generations
    for _ in range(limit):
        actions = script.aborted()
    finish = actions[-1]
    assert isinstance(finish, Finish)
    assert finish.outcome == "failed"
    assert f"{limit} generations in a row" in finish.sentence


def test_a_failed_order_ends_the_run_with_its_sentence() -> None:
    script = script_in(Phase.TRAINING)
    failed = Failed(worker="n2", generation=1, error="gradient of s3 is not finite")
    actions = script.tell(WorkerAnswered(worker="n2", answer=failed))
    assert [action.worker for action in actions if isinstance(action, Abort)] == ["n1", "n3", "n4"]
    assert actions[-1] == Finish(outcome="failed", sentence="n2 failed: gradient of s3 is not finite")


# --- bounds ------------------------------------------------------------------------------------------------------


def test_an_order_that_is_never_answered_costs_its_worker() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared("n1", "n2", "n3")
    assert script.last is not None
    assert script.last.wake_at_s is not None
    assert script.tell(Tick(), at_s=script.last.wake_at_s - 0.001) == ()
    actions = script.tell(Tick(), at_s=script.last.wake_at_s)
    assert actions[0] == EndWorker(worker="n4")
    assert receivers(actions, SendReshape) == ["n1", "n2", "n3"]


def test_a_worker_that_does_not_give_up_its_order_is_given_up() -> None:
    script = script_in(Phase.ABORTING)
    script.aborted("n2", "n3")
    assert script.last is not None
    assert script.last.wake_at_s is not None
    actions = script.tell(Tick(), at_s=script.last.wake_at_s)
    assert actions[0] == EndWorker(worker="n4")
    assert receivers(actions, SendReshape) == ["n1", "n2", "n3"]


def test_a_worker_that_never_gets_ready_is_given_up() -> None:
    script = script_in(Phase.TRAINING)
    script.tell(NodeAppeared(node="n9"))
    deadline_s = script.now_s + script.state.config.policy.order_timeout_s
    for _ in range(2):
        script.prepared()
    script.now_s = deadline_s
    assert EndWorker(worker="n9") in script.tell(Tick(), at_s=deadline_s)


def test_a_manifest_that_is_never_written_ends_the_run() -> None:
    script = script_in(Phase.SEALING)
    assert script.last is not None
    assert script.last.wake_at_s is not None
    (finish,) = script.tell(Tick(), at_s=script.last.wake_at_s)
    assert isinstance(finish, Finish)
    assert finish.outcome == "failed"


# --- joining and ending ------------------------------------------------------------------------------------------


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


def test_a_writer_lost_after_its_commit_has_the_version_committed_again() -> None:
    script = script_in(Phase.COMMITTING)
    script.committed()
    assert script.state.pending is not None
    actions = script.tell(WorkerLost(worker=script.state.pending.writers["s0"], cause="killed"))
    assert len(receivers(actions, SendReshape)) == 3
    assert len(receivers(script.reshaped(), SendCommit)) == 3
    script.committed()
    (finish,) = script.saved(2)
    assert isinstance(finish, Finish)
    assert finish.outcome == "finished"


# --- configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"unit_bytes": {"s0": 1}}, "do not name the same units"),
        ({"plans": {1: PLANS[2]}}, r"plans\[1\] needs 2 workers"),
        ({"fingerprint": "g"}, "made for another model"),
        ({"initial_version": 3}, "no checkpoint to start from"),
        ({"initial_version": 4, "initial_checkpoint": MANIFEST}, "initial_version is 4, the checkpoint's is 5"),
        (
            {"initial_version": 5, "initial_checkpoint": MANIFEST.model_copy(update={"units": FILES[:2]})},
            "do not name the same units",
        ),
    ],
)
def test_contradictions_in_the_configuration_are_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_config(**fields)


def test_an_answer_of_every_kind_is_refused_from_a_stranger() -> None:
    script = script_in(Phase.TRAINING)
    for event in events_of(WorkerAnswered, script):
        if isinstance(event, WorkerAnswered) and event.worker == "stranger":
            assert script.tell(event) == ()
            assert script.code == "ignored"
