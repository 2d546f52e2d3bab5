"""Workers that die, fall silent or give up."""

from __future__ import annotations

from controller_script import Script, changed, receivers, script_in
from simulated_job import MANIFEST, PLANS, UNITS

from manager.controller.shape.forming import GATHER_S
from manager.controller.state.actions import (
    Abort,
    EndWorker,
    Finish,
    RequestNodes,
    SendCommit,
    SendReshape,
    SendStep,
)
from manager.controller.state.draft import Draft
from manager.controller.state.events import (
    NodeAppeared,
    Tick,
    WorkerLost,
)
from manager.controller.state.reasons import ReasonCode
from manager.controller.state.state import Phase
from morph.contract.messages import (
    ReshapeOrder,
)


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


def test_who_prepares_a_step_while_it_is_given_up_has_nothing_run_again() -> None:
    """Its answer and the abort pass each other on the way."""
    script = script_in(Phase.TRAINING)
    victim = script.members[0]
    script.tell(WorkerLost(worker=victim, cause="killed"))
    order = next(action.order for action in script.prepared() if isinstance(action, SendReshape))
    assert order.salvage is not None
    assert order.salvage.remaining == ()


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
    assert "1 step is to be redone" in script.sentence


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


def test_below_the_minimum_survivors_save_what_they_hold_and_wait() -> None:
    script = Script(plans={count: PLANS[count] for count in (4, 6)}, expected_nodes=4)
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped()
    script.prepared()
    script.tell(WorkerLost(worker="n1", cause="killed"))
    commits = [action.order for action in script.aborted() if isinstance(action, SendCommit)]
    assert sorted(unit for order in commits for unit in order.checkpoint_units) == sorted(UNITS)
    assert all(order.held and order.version == 1 for order in commits)
    script.committed()
    script.wake()
    assert (script.state.phase, script.code) == (Phase.WAITING, "too_few_workers")
    script.saved(1)
    assert script.state.saving.checkpoint is not None
    assert script.state.saving.checkpoint.version == 1
    assert script.state.phase is Phase.WAITING
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


def test_an_order_that_is_never_answered_costs_its_worker() -> None:
    script = script_in(Phase.TRAINING)
    script.prepared("n1", "n2", "n3")
    actions = script.wake()
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
    (finish,) = script_in(Phase.SEALING).wake()
    assert isinstance(finish, Finish)
    assert finish.outcome == "failed"


def test_that_work_is_lost_is_told_whatever_else_a_tick_finds_due() -> None:
    draft = Draft(Script().state, 0.0)
    draft.say(ReasonCode.NODE_ABSENT, "n8 did not appear")
    draft.say(ReasonCode.SET_BACK, "back to version 0")
    draft.say(ReasonCode.NODE_ABSENT, "n9 did not appear")
    assert draft.decision(None).reason.code is ReasonCode.SET_BACK
    assert draft.decision(None).reason.sentence == "n8 did not appear; back to version 0; n9 did not appear"
    draft.end("stopped", "asked to")
    assert draft.decision(None).reason.code is ReasonCode.STOPPED


def test_workers_that_are_lost_together_dissolve_one_generation_and_none_of_them_gets_a_place() -> None:
    script = script_in(Phase.TRAINING)
    script.ready("vm.d0", "vm.d1")
    generation = script.state.generation
    script.tell(WorkerLost(worker="n1", cause="its VM left the cluster", beside=("vm.d0", "vm.d1", "stranger")))
    assert "n1, vm.d0, vm.d1 were lost: its VM left the cluster" in script.sentence
    script.aborted()
    assert (script.state.generation, script.state.waits.num_fruitless) == (generation + 1, 1)
    assert {slot.worker for slot in script.state.slots} <= {"n2", "n3", "n4"}


def with_two_devices_a_vm() -> Script:
    """A shape of four workers on two VMs that trains, with orders out; VMs are asked for."""
    script = Script(target_nodes=4)
    script.ready("a.d0", "a.d1", "b.d0", "b.d1")
    script.state = changed(script.state, requests={})
    script.reshaped()
    assert script.state.phase is Phase.TRAINING
    return script


def test_the_workers_of_a_vm_that_go_one_after_the_other_cost_one_shape_and_one_request() -> None:
    script = with_two_devices_a_vm()
    actions = script.tell(WorkerLost(worker="a.d0", cause="its process is gone"))
    assert {action.worker for action in actions if isinstance(action, Abort)} == {"a.d1", "b.d0", "b.d1"}  # at once
    actions = script.aborted("b.d0", "b.d1")
    actions += script.tell(WorkerLost(worker="a.d1", cause="its process is gone"), script.now_s + 0.5)
    assert [action.count for action in actions if isinstance(action, RequestNodes)] == [2]
    assert receivers(actions, SendReshape) == ["b.d0", "b.d1"]
    assert (script.state.generation, script.state.waits.torn) == (2, {})


def test_a_worker_that_dies_alone_is_left_out_when_its_vm_had_its_time_to_go() -> None:
    script = with_two_devices_a_vm()
    lost_s = script.now_s
    actions = script.tell(WorkerLost(worker="a.d0", cause="its process is gone"))
    actions += script.aborted("a.d1", "b.d0", "b.d1")
    assert script.state.phase is Phase.HOLDING
    assert "a may go as a whole" in script.sentence
    assert not any(isinstance(action, SendReshape | RequestNodes) for action in actions)
    actions = script.wake()
    assert lost_s < script.now_s <= lost_s + 2 * GATHER_S
    assert receivers(actions, SendReshape) == ["a.d1", "b.d0", "b.d1"]
    assert [action.count for action in actions if isinstance(action, RequestNodes)] == [1]
