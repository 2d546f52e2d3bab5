"""Workers that die, fall silent, fail or give up; pauses; and a new manager that takes over."""

from __future__ import annotations

import pytest
from controller_script import Script, changed, formed, receivers, script_in
from simulated_job import PLANS

from manager.controller.shape.formation import GATHER_S
from manager.controller.state.actions import (
    Abort,
    Action,
    EndWorker,
    Finish,
    ReasonCode,
    RequestNodes,
    SendCommit,
    SendReshape,
    SendStep,
    StartWorker,
    WriteManifest,
)
from manager.controller.state.events import (
    ManagerResumed,
    ManifestWritten,
    NodeAppeared,
    StopRequested,
    Tick,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.state import Phase
from manager.controller.state.transition import Transition
from manager.controller.steps.recovery import PAUSES
from morph.contract.messages import Failed, FailureCause, ReshapeOrder

TRACE = 'Traceback (most recent call last):\n  File "job.py", line 7, in __getitem__\nValueError: bad sample\n'


def fail(script: Script, worker: str, cause: FailureCause) -> tuple[Action, ...]:
    failed = Failed(
        worker=worker, generation=script.state.generation, error="ValueError: bad sample", cause=cause, traceback=TRACE
    )
    return script.tell(WorkerAnswered(worker=worker, answer=failed))


def save(script: Script) -> Finish:
    """Let workers save what they hold, after which the run is over."""
    version = script.state.version
    assert receivers(script.reshaped(), SendCommit)
    script.committed()
    script.written(version)
    (finish,) = (action for action in script.tell(ManifestWritten(version=version)) if isinstance(action, Finish))
    return finish


def test_a_jobs_error_is_retried_without_the_worker_that_raised_it() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared()  # version 1, which is not saved
    fail(script, "n2", "job")
    actions = script.aborted()
    assert EndWorker(worker="n2") not in actions
    assert set(script.members) == {"n1", "n3", "n4"}
    assert script.state.version == 1
    script.reshaped()
    script.prepared()
    assert script.state.version == 2
    assert script.state.failing is None


def test_an_error_repeated_at_one_step_ends_the_run_saved() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared()
    fail(script, "n2", "job")
    script.aborted()
    script.reshaped()
    fail(script, "n3", "job")
    script.aborted()
    finish = save(script)
    assert finish.outcome == "failed"
    assert finish.traceback == TRACE
    wanted = "n3 failed at step 1: ValueError: bad sample (as before on n2); version 1 is saved"
    assert finish.sentence == wanted


def test_an_error_that_no_retry_fixes_ends_the_run_saved() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared()
    for worker in ("n2", "n1", "n3", "n4"):
        fail(script, worker, "run")
    finish = save(script)
    assert (finish.outcome, finish.sentence) == (
        "failed",
        "n2 failed at step 1: ValueError: bad sample; version 1 is saved",
    )


def test_an_error_during_the_last_save_ends_the_run_at_once() -> None:
    script = script_in(Phase.TRAINING)
    fail(script, "n2", "run")
    script.aborted()
    finish = fail(script, "n1", "job")[-1]
    assert finish.outcome == "failed"
    assert "is not saved" in finish.sentence


def test_memory_exhausted_twice_at_one_step_ends_the_run_with_advice() -> None:
    script = script_in(Phase.TRAINING)
    fail(script, "n2", "memory")
    script.aborted()
    script.reshaped()
    fail(script, "n3", "memory")
    assert "n3" in script.state.workers  # this worker gives others what it holds
    script.aborted()
    finish = save(script)
    assert finish.outcome == "failed"
    assert "lower vms.memory_bytes" in finish.sentence


def test_a_device_that_fails_in_setup_costs_its_worker_then_a_pause() -> None:
    script = Script(target_nodes=2, expected_nodes=2)
    script.tell(Tick())
    for number, num_requested, error in ((1, 1, "CUDA error"), (2, 0, "NCCL error"), (3, 0, "NCCL error")):
        script.tell(NodeAppeared(node=f"n{number}", request="job-1"))
        answer = Failed(worker=f"n{number}", generation=0, error=error, cause="device")
        actions = script.tell(WorkerAnswered(worker=f"n{number}", answer=answer))
        assert EndWorker(worker=f"n{number}") in actions
        assert len(ends(actions)) == (number == 3)
        assert sum(isinstance(action, RequestNodes) for action in actions) == num_requested


def saved(script: Script) -> None:
    script.committed()
    actions = script.written(script.state.version)
    assert any(isinstance(action, WriteManifest) for action in actions)
    script.tell(ManifestWritten(version=script.state.version))


def test_after_fruitless_generations_the_holders_save_and_try_again() -> None:
    script = script_in(Phase.RESTING)
    orders = [action for action in script.last.actions if isinstance(action, SendCommit)]
    assert {(action.order.version, action.order.held) for action in orders} == {(1, True)}
    written = [unit for action in orders for unit in action.order.checkpoint_units]
    assert sorted(written) == sorted(script.state.config.units)
    assert "training was interrupted 10 times in a row" in script.sentence
    saved(script)
    assert (script.state.phase, script.state.saving.checkpoint.version) == (Phase.RESTING, 1)
    began_s = script.now_s
    actions = script.wake()
    assert script.now_s - began_s <= PAUSES.first_s
    assert receivers(actions, SendReshape) == ["n1", "n2", "n3", "n4"]
    assert script.state.version == 1
    script.reshaped()
    script.prepared()
    assert (script.state.version, script.state.waits.num_fruitless, script.state.waits.resting_since_s) == (2, 0, None)


def test_each_further_fruitless_generation_is_followed_by_a_longer_pause() -> None:
    script = script_in(Phase.RESTING)
    saved(script)
    pauses = []
    for _ in range(3):
        script.wake()
        script.aborted()
        assert script.state.waits.rest_until_s is not None
        assert script.state.step.order is None
        pauses.append(round(script.state.waits.rest_until_s - script.now_s, 6))
    assert pauses == [2 * PAUSES.first_s, 4 * PAUSES.first_s, 8 * PAUSES.first_s]
    assert PAUSES.pause_s(10**6) == PAUSES.most_s


def test_the_run_ends_when_the_users_limit_is_reached() -> None:
    script = script_in(Phase.RESTING)
    saved(script)
    limit_s = script.state.config.policy.give_up_after_s
    began_s = script.state.waits.resting_since_s
    assert began_s is not None
    while script.state.phase is not Phase.ENDED:
        script.wake()
        actions = script.aborted()
    assert 0 <= script.now_s - began_s - limit_s <= PAUSES.most_s + 1
    (finish,) = actions
    assert finish.outcome == "failed"
    assert "policy.give_up_after_s" in finish.sentence
    assert finish.sentence.endswith("version 1 is saved")


def test_a_stop_while_resting_ends_the_run_once_saved() -> None:
    script = script_in(Phase.RESTING)
    assert script.tell(StopRequested(reason="SIGINT")) == ()
    script.committed()
    script.written(1)
    ended = Finish(outcome="stopped", sentence="SIGINT; version 1 is saved")
    assert script.tell(ManifestWritten(version=1)) == (ended,)
    at_once = script_in(Phase.RESTING)
    saved(at_once)
    assert at_once.tell(StopRequested(reason="SIGINT"))[-1] == ended


ALL = ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize(
    ("phase", "kind"), [(Phase.RESHAPING, SendReshape), (Phase.TRAINING, SendStep), (Phase.COMMITTING, SendCommit)]
)
def test_orders_that_are_not_answered_go_out_again_as_they_were(phase: Phase, kind: type) -> None:
    script = Script(num_steps=2)
    sent = script.ready(*ALL)
    if phase is not Phase.RESHAPING:
        sent = script.reshaped()
    if phase is Phase.COMMITTING:
        script.prepared()
        sent = script.prepared()
    before = {action.worker: action for action in sent if isinstance(action, kind)}
    again = {action.worker: action for action in script.tell(ManagerResumed(living=ALL)) if isinstance(action, kind)}
    assert again == before
    assert script.state.phase is phase


def test_a_setup_under_way_is_requested_again_with_its_full_time() -> None:
    script = script_in(Phase.TRAINING)
    script.tell(NodeAppeared(node="n9"))
    script.now_s += 15.0
    actions = script.tell(ManagerResumed(living=ALL))
    assert StartWorker(worker="n9") in actions
    assert script.state.workers["n9"].appeared_s == script.now_s


def test_the_last_checkpoint_is_requested_again_from_workers_that_owe_units() -> None:
    script = script_in(Phase.COMMITTING)
    script.committed()
    owing = set(script.state.saving.pending.writers.values())
    actions = script.tell(ManagerResumed(living=ALL))
    assert {action.worker for action in actions if isinstance(action, SendCommit)} == owing
    script.committed()
    (finish,) = script.saved(2)
    assert isinstance(finish, Finish)


def test_a_worker_that_prepared_an_aborted_step_reruns_nothing() -> None:
    """Its answer and the abort pass each other on the way."""
    script = script_in(Phase.TRAINING)
    victim = script.members[0]
    script.tell(WorkerLost(worker=victim, cause="killed"))
    order = next(action.order for action in script.prepared() if isinstance(action, SendReshape))
    assert order.salvage.remaining == ()


def lose_a_stage(script: Script) -> ReshapeOrder:
    for worker in script.members[:2]:
        script.tell(WorkerLost(worker=worker, cause="killed"))
    return next(action.order for action in script.aborted() if isinstance(action, SendReshape))


def test_without_a_living_holder_everybody_goes_back_to_the_checkpoint() -> None:
    script = formed(4)
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


def test_a_worker_that_is_left_over_serves_what_only_it_holds() -> None:
    plans = {2: PLANS[2], 3: PLANS[2], 6: PLANS[6]}
    script = formed(6, plans=plans, expected_nodes=6)
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


def test_that_work_is_lost_is_told_whatever_else_a_tick_finds_due() -> None:
    transition = Transition(Script().state, 0.0)
    transition.say(ReasonCode.NODE_ABSENT, "n8 did not appear")
    transition.say(ReasonCode.SET_BACK, "back to version 0")
    transition.say(ReasonCode.NODE_ABSENT, "n9 did not appear")
    assert transition.decision(None).reason.code is ReasonCode.SET_BACK
    assert transition.decision(None).reason.sentence == "n8 did not appear; back to version 0; n9 did not appear"
    transition.end("stopped", "asked to")
    assert transition.decision(None).reason.code is ReasonCode.STOPPED


def with_two_devices_a_vm() -> Script:
    """Return a script with a shape of four workers on two VMs in training, with orders out; VMs are requested."""
    script = Script(target_nodes=4)
    script.ready("a.d0", "a.d1", "b.d0", "b.d1")
    script.state = changed(script.state, requests={})
    script.reshaped()
    assert script.state.phase is Phase.TRAINING
    return script


def test_workers_of_a_vm_lost_in_turn_cost_one_shape_and_request() -> None:
    script = with_two_devices_a_vm()
    actions = script.tell(WorkerLost(worker="a.d0", cause="its process is gone"))
    assert {action.worker for action in actions if isinstance(action, Abort)} == {"a.d1", "b.d0", "b.d1"}  # at once
    actions = script.aborted("b.d0", "b.d1")
    actions += script.tell(WorkerLost(worker="a.d1", cause="its process is gone"), script.now_s + 0.5)
    assert [action.count for action in actions if isinstance(action, RequestNodes)] == [2]
    assert receivers(actions, SendReshape) == ["b.d0", "b.d1"]
    assert (script.state.generation, script.state.waits.partly_lost) == (2, {})


def test_a_lone_death_is_replaced_after_its_vm_had_time_to_go() -> None:
    script = with_two_devices_a_vm()
    lost_s = script.now_s
    actions = script.tell(WorkerLost(worker="a.d0", cause="its process is gone"))
    actions += script.aborted("a.d1", "b.d0", "b.d1")
    assert script.state.phase is Phase.HOLDING
    assert "a may be lost as a whole" in script.sentence
    assert not any(isinstance(action, SendReshape | RequestNodes) for action in actions)
    actions = script.wake()
    assert lost_s < script.now_s <= lost_s + 2 * GATHER_S
    assert receivers(actions, SendReshape) == ["a.d1", "b.d0", "b.d1"]
    assert [action.count for action in actions if isinstance(action, RequestNodes)] == [1]


# Workers that cannot be set up, and VMs that contribute nothing.


def fail_setup(script: Script, worker: str, error: str = "FileNotFoundError: /data/shard-17") -> tuple[Action, ...]:
    script.tell(NodeAppeared(node=worker))
    answer = Failed(worker=worker, generation=0, error=error, cause="job", detail="FileNotFoundError")
    return script.tell(WorkerAnswered(worker=worker, answer=answer))


def waiting(**fields: object) -> Script:
    """Return a run of two workers that decided two steps, lost one worker, saved what the other holds, and waits."""
    script = Script(target_nodes=2, expected_nodes=2, **fields)
    script.tell(Tick())
    script.ready("n1", "n2")
    script.state = changed(script.state, requests={})
    script.reshaped()
    script.prepared()
    script.tell(WorkerLost(worker="n2", cause="revoked"))
    script.aborted()
    assert script.state.phase is Phase.WAITING
    return script


def policy_of(script: Script, **fields: object) -> None:
    config = script.state.config
    script.state = changed(
        script.state, config=config.model_copy(update={"policy": config.policy.model_copy(update=fields)})
    )


def ends(actions: tuple[Action, ...]) -> list[Finish]:
    return [action for action in actions if isinstance(action, Finish)]


def test_a_second_setup_that_fails_alike_ends_a_run_that_waits() -> None:
    script = waiting()
    assert ends(fail_setup(script, "n3")) == []
    assert (script.code, "n3 could not be set up: FileNotFoundError" in script.sentence) == ("setup_failed", True)
    (finish,) = ends(fail_setup(script, "n4", "FileNotFoundError: /data/shard-4"))
    assert (finish.outcome, finish.cause, finish.rests) == ("failed", "job", False)
    assert finish.sentence.startswith(
        "n4 could not be set up: FileNotFoundError: /data/shard-4 (2 workers in a row, in the same way)"
    )


def test_setups_that_fail_in_different_ways_end_no_run() -> None:
    script = waiting()
    for number in range(6):
        assert ends(fail_setup(script, f"n{3 + number}", ("no such file", "no such host")[number % 2])) == []
    assert script.state.phase is Phase.WAITING


def test_a_worker_that_is_set_up_makes_earlier_failures_count_no_more() -> None:
    script = waiting()
    fail_setup(script, "n3")
    script.ready("n4")
    assert script.state.provisioning.failed_setups is None
    assert ends(fail_setup(script, "n5")) == []


def test_a_worker_that_is_being_set_up_is_awaited_before_the_run_ends() -> None:
    script = waiting()
    script.tell(NodeAppeared(node="n9"))
    fail_setup(script, "n3")
    assert ends(fail_setup(script, "n4")) == []
    answer = Failed(
        worker="n9", generation=0, error="FileNotFoundError: /data/shard-2", cause="job", detail="FileNotFoundError"
    )
    assert ends(script.tell(WorkerAnswered(worker="n9", answer=answer)))


def test_setups_that_hang_are_failures_that_are_alike() -> None:
    script = waiting()
    for number, num_ends in ((3, 0), (4, 1)):
        script.tell(NodeAppeared(node=f"n{number}"))
        actions = script.tell(Tick(), at_s=script.now_s + 21.0)
        assert len(ends(actions)) == num_ends
    assert "it was not set up within 20 s" in script.sentence


def test_where_the_user_wants_it_the_run_rests_in_place_of_its_end() -> None:
    script = waiting()
    policy_of(script, when_stuck="rest")
    fail_setup(script, "n3")
    (finish,) = ends(fail_setup(script, "n4"))
    assert (finish.outcome, finish.rests, finish.traceback) == ("stopped", True, "")


def test_setups_that_fail_beside_training_end_it_saved_after_a_while() -> None:
    script = script_in(Phase.TRAINING)
    rules = script.state.config.policy.rules
    policy_of(
        script, rules=rules.model_copy(update={"setups": rules.setups.model_copy(update={"beside_training_s": 9})})
    )
    fail_setup(script, "n8")
    fail_setup(script, "n9")
    assert script.state.stop_reason is None
    script.tell(Tick(), at_s=script.now_s + 9.0)
    assert script.state.stop_reason is not None
    script.prepared()
    script.committed()
    script.written(script.state.version)
    (finish,) = ends(script.tell(ManifestWritten(version=script.state.version)))
    assert finish.outcome == "failed"
    assert "n9 could not be set up" in finish.sentence


def test_one_machine_on_which_setups_fail_does_not_end_a_run_that_trains() -> None:
    script = script_in(Phase.TRAINING)
    rules = script.state.config.policy.rules
    setups = rules.setups.model_copy(update={"beside_training_s": 0.1})
    policy_of(script, rules=rules.model_copy(update={"setups": setups}))
    for worker, host in (("n8", "h1"), ("n9", "h1"), ("n10", "h2")):
        assert script.state.stop_reason is None
        script.tell(NodeAppeared(node=worker, host=host))
        script.tell(
            WorkerAnswered(worker=worker, answer=Failed(worker=worker, generation=0, error="no disk", cause="job"))
        )
    assert script.state.stop_reason is not None


def test_a_stop_by_the_user_does_not_become_a_rest() -> None:
    script = script_in(Phase.TRAINING)
    rules = script.state.config.policy.rules
    setups = rules.setups.model_copy(update={"beside_training_s": 0.1})
    policy_of(script, when_stuck="rest", rules=rules.model_copy(update={"setups": setups}))
    fail_setup(script, "n8")
    fail_setup(script, "n9")
    assert script.state.provisioning.gives_up
    script.tell(StopRequested(reason="SIGINT"))
    assert (script.state.stop_reason, script.state.provisioning.gives_up) == ("SIGINT", None)


def test_memory_that_runs_out_in_a_step_and_in_setups_ends_the_run() -> None:
    script = waiting()
    script.ready("n3")
    script.reshaped()
    fail(script, "n3", "memory")
    script.aborted()
    assert script.state.phase is Phase.WAITING
    for worker, num_ends in (("n4", 0), ("n5", 1)):
        script.tell(NodeAppeared(node=worker))
        answer = Failed(worker=worker, generation=0, error="MemoryError: ", cause="memory", detail="MemoryError")
        assert len(ends(script.tell(WorkerAnswered(worker=worker, answer=answer)))) == num_ends


def test_costs_without_training_are_bounded() -> None:
    script = waiting(idle_vm_h=0.01)
    began_s = script.now_s
    assert ends(script.tell(Tick(), at_s=began_s + 30.0)) == []
    assert script.last.wake_at_s is not None
    assert script.last.wake_at_s <= began_s + 36.1
    script.tell(NodeAppeared(node="n3"))  # from here on two VMs are paid for
    (finish,) = ends(script.tell(Tick(), at_s=began_s + 33.2))
    assert finish.outcome == "stopped"
    assert "VMs were paid for 0.01 hours together while no step was trained" in finish.sentence
    assert finish.at_limit
