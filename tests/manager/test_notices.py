"""Notices: workers drain at the next boundary, and are taken back if the VM is not revoked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from controller_script import Script, changed, formed, receivers, script_in
from simulated_job import PLANS, UNITS

from manager.controller.shape.planned_changes import MARGIN, STEP_MARGIN
from manager.controller.state.actions import (
    AcknowledgeNotice,
    Action,
    ReleaseNodes,
    RequestNodes,
    SendReshape,
    SendStep,
    StartWorker,
)
from manager.controller.state.events import (
    Event,
    NodeAppeared,
    NodesGranted,
    NoticeGiven,
    NoticeWithdrawn,
    RequestRefused,
    Tick,
    WorkerLost,
)
from manager.controller.state.nodes import NodeState
from manager.controller.state.state import Phase


def noticed(script: Script, worker: str, lead_s: float = 2.5, notice: str = "first") -> None:
    actions = script.tell(NoticeGiven(worker=worker, lead_s=lead_s, notice=notice))
    needed = worker in script.members or script.state.workers[worker].holds
    assert actions == (() if needed else (AcknowledgeNotice(worker=worker, notice=notice),))


def test_a_member_under_a_long_notice_trains_while_time_allows() -> None:
    script = Script(num_steps=1000, expected_nodes=4, target_nodes=4)
    for number in range(4):
        script.tell(NodesGranted(request="job-1", nodes=(f"n{number + 1}",)))
    script.ready("n1", "n2", "n3", "n4")
    script.reshaped()
    script.prepared()
    taken_s = script.now_s + 0.1 + 20.0
    actions = script.tell(NoticeGiven(worker="n2", lead_s=20.0))
    assert [action.count for action in actions if isinstance(action, RequestNodes)] == [1]
    version = script.state.version
    while not receivers(script.prepared(), SendReshape):
        assert "n2" in script.members
        assert script.now_s < taken_s
    assert "n2" not in script.members
    step_s, morph_s = script.state.saving.save_times.step_s, script.state.config.policy.rules.wait.morph_s
    assert step_s is not None
    left_s = taken_s - script.now_s
    needed_s = MARGIN * morph_s + STEP_MARGIN * max(step_s, PLANS[4].expected.mini_batch_s)
    assert MARGIN * morph_s <= left_s <= needed_s
    assert left_s > needed_s - 1.5 * step_s  # at the boundary, because there was no time for another step
    assert script.state.version > version + 10
    assert script.state.waits.num_fruitless == 0


def test_one_change_takes_in_all_newcomers_of_a_notices_time() -> None:
    script = formed(4, num_steps=20)
    script.prepared()
    noticed(script, "n2", lead_s=60.0)
    assert receivers(script.prepared(), SendStep) == ["n1", "n2", "n3", "n4"]
    script.ready("n5")  # the shape without n2 is as fast now, so that nothing is worth waiting for
    assert receivers(script.prepared(), SendReshape)
    assert set(script.members) == {"n1", "n3", "n4", "n5"}
    assert script.state.generation == 2


def test_no_noticed_worker_stays_in_an_unmeasured_or_no_faster_shape() -> None:
    script = script_in(Phase.RESHAPING)
    noticed(script, "n3", lead_s=60.0)
    script.reshaped()
    assert "n3" not in script.members
    idle = formed(4, num_steps=20, plans={3: PLANS[3]}, expected_nodes=4)
    idle.prepared()
    member = idle.members[0]
    noticed(idle, member, lead_s=60.0)
    assert receivers(idle.prepared(), SendReshape)
    assert member not in idle.members


def test_an_indispensable_member_trains_on_and_is_saved_at_once() -> None:
    """It alone holds its stage; if a replica held the stage too, nothing would have to be saved."""
    for plan, num_saved in ((PLANS[2], len(UNITS)), (PLANS[4], 0)):
        script = formed(plan.num_workers, plans={plan.num_workers: plan}, num_steps=20, expected_nodes=plan.num_workers)
        saves = script.state.saving.save_times.model_copy(update={"since_s": script.now_s - 100})
        script.state = changed(script.state, save_times=saves)
        noticed(script, "n2", lead_s=30.0)
        steps = [action.order for action in script.prepared() if isinstance(action, SendStep)]
        assert len(steps) == plan.num_workers
        assert sum(len(order.checkpoint_units) for order in steps) == num_saved
        assert script.state.saving.pending is None or script.state.saving.pending.kind == "emergency"


def test_a_notice_without_an_end_is_void_after_its_grace() -> None:
    script = formed(4, num_steps=20)
    noticed(script, "n2", lead_s=5.0)
    until_s = script.now_s + 5.0 + script.state.config.policy.rules.requests.notice_grace_s
    script.prepared()
    script.reshaped()
    script.tell(Tick(), at_s=until_s - 0.01)
    assert script.state.workers["n2"].node is NodeState.DRAINING
    script.tell(Tick(), at_s=until_s)
    assert (script.state.workers["n2"].node, script.code) == (NodeState.READY, "node_spared")
    script.prepared()
    assert "n2" in {slot.worker for slot in script.state.slots}


def test_a_withdrawn_notice_takes_the_node_back() -> None:
    script = script_in(Phase.TRAINING)
    noticed(script, "n2")
    script.tell(NoticeWithdrawn(worker="n2"))
    assert script.state.workers["n2"].node is NodeState.READY
    noticed(script, "n2")
    assert (script.state.workers["n2"].node, script.code) == (NodeState.READY, "ignored")
    noticed(script, "n2", notice="second")
    assert script.state.workers["n2"].node is NodeState.DRAINING


def test_a_notice_of_all_pauses_and_a_void_one_resumes() -> None:
    script = script_in(Phase.WAITING)
    noticed(script, "n1")
    assert script.ready("n7") == ()
    assert script.state.phase is Phase.WAITING
    assert receivers(script.wake(), SendReshape) == ["n1", "n7"]


def acknowledged(actions: Sequence[Action]) -> list[tuple[str, str]]:
    return [(action.worker, action.notice) for action in actions if isinstance(action, AcknowledgeNotice)]


def test_a_member_may_go_only_after_a_step_without_it() -> None:
    script = formed(4, num_steps=20)
    noticed(script, "n2")
    left_out = script.prepared()
    shaped = script.reshaped()
    assert acknowledged([*left_out, *shaped]) == []  # until then, others may still need what it holds
    assert acknowledged(script.prepared()) == [("n2", "first")]
    assert "nothing of value is left on n2" in script.sentence
    assert acknowledged(script.prepared()) == []


def test_a_spare_stays_while_its_vm_has_an_unnoticed_member() -> None:
    script = Script(num_steps=20)
    script.ready("a.d0", "a.d1", "b.d0", "b.d1")
    script.reshaped()
    script.ready("c.d0", "c.d1")
    assert script.tell(NoticeGiven(worker="c.d0", lead_s=30.0, notice="E-1")) == ()
    actions = script.tell(NoticeGiven(worker="c.d1", lead_s=30.0, notice="E-1"))
    assert actions == (AcknowledgeNotice(worker="c.d0", notice="E-1"),)


def test_a_repeated_notice_is_acknowledged_again() -> None:
    script = formed(4, num_steps=20)
    script.ready("n5")
    noticed(script, "n5")
    again = NoticeGiven(worker="n5", lead_s=2.0, notice="first")  # its agent returned, and did not get the answer
    assert acknowledged(script.tell(again)) == [("n5", "first")]
    assert script.code == "notice_acknowledged"


def test_a_worker_that_still_writes_a_checkpoint_is_not_released() -> None:
    script = formed(4, num_steps=20)
    while script.state.saving.pending is None:
        script.prepared()
    pending = script.state.saving.pending
    writer = next(iter(pending.writers.values()))
    noticed(script, writer)
    script.prepared()
    script.reshaped()
    assert acknowledged([*script.prepared(), *script.prepared()]) == []
    units = [unit for unit, owner in pending.writers.items() if owner == writer]
    assert acknowledged(script.written(pending.version, units)) == [(writer, "first")]


def asking() -> Script:
    script = Script(target_nodes=4, num_steps=20)
    script.tell(Tick())
    return script


def test_a_vm_noticed_before_its_grant_is_given_back_with_it() -> None:
    script = asking()
    assert script.tell(NoticeGiven(worker="n3", lead_s=30.0, notice="first")) == ()
    assert script.code == "notice_kept"
    actions = script.tell(NodesGranted(request="job-1", nodes=("n1", "n2", "n3", "n4")), at_s=script.now_s + 10.0)
    assert ReleaseNodes(nodes=("n3",)) in actions
    assert script.code == "nodes_granted"
    assert "n3 will be taken in 20 s and is not up yet: it is given back" in script.sentence
    assert set(script.state.provisioning.requests["job-1"].granted) == {"n1", "n2", "n4"}
    assert [action.count for action in actions if isinstance(action, RequestNodes)] == [1]
    assert script.state.provisioning.kept_notices == {}


def test_a_node_noticed_before_its_grant_drains_when_it_appears() -> None:
    script = asking()
    script.tell(NoticeGiven(worker="n1", lead_s=30.0, notice="first"))
    actions = script.tell(NodeAppeared(node="n1", request="job-1"), at_s=script.now_s + 10.0)
    assert script.state.workers["n1"].node is NodeState.DRAINING
    grace_s = script.state.config.policy.rules.requests.notice_grace_s
    assert script.state.workers["n1"].drain_until_s == script.now_s + 20.0 + grace_s
    assert acknowledged(actions) == [("n1", "first")], "nothing of value is on it"
    assert StartWorker(worker="n1") in actions
    assert script.state.provisioning.kept_notices == {}


@pytest.mark.parametrize(
    "meanwhile",
    [
        NoticeWithdrawn(worker="n1"),
        WorkerLost(worker="n1", cause="the provider no longer has its VM"),
        RequestRefused(request="job-1", cause="capacity"),
    ],
    ids=lambda event: event.kind,
)
def test_a_kept_notice_is_dropped_when_withdrawn_or_its_vm_fails(meanwhile: Event) -> None:
    script = asking()
    script.tell(NoticeGiven(worker="n1", lead_s=30.0, notice="first"))
    script.tell(meanwhile)
    assert script.state.provisioning.kept_notices == {}
    script.tell(NodeAppeared(node="n1"))
    assert script.state.workers["n1"].node is NodeState.WARMING


@pytest.mark.parametrize("count", [1, 2])
def test_a_two_device_vm_drains_whole_by_an_early_notice(count: int) -> None:
    script = Script(target_nodes=count, num_steps=20)
    script.tell(Tick())
    for worker in ("v.d0", "v.d1"):
        script.tell(NoticeGiven(worker=worker, lead_s=30.0, notice="first"))
    for worker in ("v.d0", "v.d1"):
        script.tell(NodeAppeared(node=worker, request="job-1"))
        assert script.state.workers[worker].node is NodeState.DRAINING
    assert script.state.provisioning.kept_notices == {}


def test_a_notice_void_before_its_node_is_known_changes_nothing() -> None:
    script = asking()
    script.tell(NoticeGiven(worker="n1", lead_s=5.0, notice="first"))
    late_s = script.now_s + 5.0 + script.state.config.policy.rules.requests.notice_grace_s
    script.tell(NodeAppeared(node="n1", request="job-1"), at_s=late_s)
    assert script.state.workers["n1"].node is NodeState.WARMING


def test_a_strangers_notice_is_ignored_when_nothing_is_requested() -> None:
    script = formed(4, num_steps=20)
    assert script.tell(NoticeGiven(worker="stranger", lead_s=30.0, notice="first")) == ()
    assert (script.code, script.state.provisioning.kept_notices) == ("ignored", {})
