"""Requests for VMs from a provider."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from controller_script import Script, changed, receivers, script_in
from simulated_job import FILES, MANIFEST, MIXED, PLANS, RULES, make_config

from manager.controller.node_requests import MAX_SENT
from manager.controller.shape.formation import GATHER_S
from manager.controller.state.actions import (
    Action,
    EndWorker,
    Finish,
    ReleaseNodes,
    RequestNodes,
    SendReshape,
)
from manager.controller.state.config import Offer
from manager.controller.state.events import (
    Event,
    ManagerResumed,
    NodeAppeared,
    NodeFacts,
    NodesGranted,
    NodesStarted,
    NoticeGiven,
    RequestRefused,
    Tick,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.nodes import NODE_TRANSITIONS, ImpossibleNodeChange, NodeEvent, NodeState, after
from manager.controller.state.state import Phase
from morph.contract.messages import Failed

REQUESTS = RULES.requests


def asking(**fields: object) -> Script:
    return Script(target_nodes=4, **fields)


def requested(actions: Sequence[Action]) -> list[tuple[str, int]]:
    return [(action.request, action.count) for action in actions if isinstance(action, RequestNodes)]


def asking_types(target: int = 4, fast_usd: float = 3.0, slow_usd: float = 0.5, **policy: object) -> Script:
    """Return a script that requests VMs of two types; fast GPUs are 2.5 times as fast as slow ones."""
    prices = {"fast": fast_usd, "slow": slow_usd}
    offers = tuple(Offer(node_type=name, usd_per_h=usd) for name, usd in prices.items())
    given = make_config().policy.model_copy(update=policy)
    return Script(target_nodes=target, plans=MIXED, offers=offers, policy=given)


def types_in(actions: Sequence[Action]) -> list[tuple[str, int]]:
    return [(action.node_type, action.count) for action in actions if isinstance(action, RequestNodes)]


@pytest.mark.parametrize(
    ("objective", "slow_usd", "wanted"),
    [
        ("throughput", 0.5, [("fast", 4), ("slow", 2)]),
        ("dollars", 0.5, [("slow", 4), ("fast", 2)]),
        ("dollars", 2.5, [("fast", 4), ("slow", 2)]),
    ],
)
def test_the_type_that_adds_most_is_asked_for(objective: str, slow_usd: float, wanted: list[tuple[str, int]]) -> None:
    """The table of plans has at most four GPUs of each type."""
    script = asking_types(6, slow_usd=slow_usd, objective=objective)
    assert types_in(script.tell(Tick())) == wanted


def test_a_refused_type_pauses_while_another_is_asked_for() -> None:
    script = asking_types()
    assert types_in(script.tell(Tick())) == [("fast", 4)]
    actions = script.tell(RequestRefused(request="job-1", cause="capacity"))
    assert types_in(actions) == [("slow", 4)]
    assert types_in(script.tell(RequestRefused(request="job-2", cause="quota"))) == []
    assert types_in(script.wake()) == [("fast", 4)], "its pause is over first"
    script.tell(NodesGranted(request="job-3", nodes=("n1", "n2", "n3", "n4")))
    assert script.state.provisioning.refused.keys() == {"slow"}
    for node in ("n1", "n2", "n3", "n4"):
        script.tell(NodeAppeared(node=node, request="job-3"))
    assert {entry.facts.node_type for entry in script.state.workers.values()} == {"fast"}


def test_living_and_booting_vms_count_by_type() -> None:
    script = asking_types(5)
    assert types_in(script.tell(Tick())) == [("fast", 4), ("slow", 1)]
    script.tell(NodesGranted(request="job-1", nodes=("n1", "n2", "n3", "n4")))
    script.tell(NodeAppeared(node="n1", request="job-1"))
    assert types_in(script.tell(WorkerLost(worker="n1", cause="its VM was taken"))) == [("fast", 1)]


def test_a_vms_kind_comes_from_its_grant_or_itself() -> None:
    script, kinds = asking(), {f"n{number}": NodeFacts(provider="azure", zone=str(number)) for number in (1, 2, 3)}
    script.tell(Tick())
    script.tell(NodeAppeared(node="n1", request="job-1", facts=kinds["n1"]))
    script.tell(NodeAppeared(node="n2", request="job-1"))
    script.tell(NodesGranted(request="job-1", nodes=("n1", "n2", "n3", "n4"), facts=kinds))
    assert script.state.provisioning.requests["job-1"].facts == {"n3": kinds["n3"]}
    for node in ("n3", "n4"):
        script.tell(NodeAppeared(node=node, request="job-1"))
    assert {node: entry.facts for node, entry in script.state.workers.items()} == {**kinds, "n4": NodeFacts()}


def test_a_queued_vm_is_awaited_without_limit_until_it_boots() -> None:
    script, kind = asking(), NodeFacts(provider="slurm", zone="n7")
    boot_s = script.state.config.policy.rules.requests.boot_s
    script.tell(Tick())
    names = ("n1", "n2", "n3", "n4")
    script.tell(NodesGranted(request="job-1", nodes=names, waiting=names))
    script.tell(Tick(), at_s=script.now_s + 10 * boot_s)
    assert script.state.provisioning.requests["job-1"].granted.keys() == set(names)
    script.tell(NodesStarted(request="job-1", nodes=("n2", "stranger"), facts={"n2": kind}))
    script.tell(NodeAppeared(node="n3", request="job-1"))  # before anybody saw it leave the queue
    lost = script.tell(WorkerLost(worker="n4", cause="the provider no longer has its VM"))
    assert ReleaseNodes(nodes=("n4",)) in lost
    assert script.tell(NodesStarted(request="job-1", nodes=("n4",))) == ()
    request = script.state.provisioning.requests["job-1"]
    assert (request.granted.keys(), request.waiting, request.facts) == ({"n1", "n2"}, {"n1"}, {"n2": kind})
    script.tell(Tick(), at_s=script.now_s + boot_s)
    assert script.state.provisioning.requests["job-1"].granted.keys() == {"n1"}, "n2 did not appear in time"


def test_a_run_that_brings_its_own_vms_asks_for_none() -> None:
    script = Script()
    assert requested(script.tell(Tick())) == []
    assert requested(script.ready("n1")) == []


def test_lost_vms_are_replaced_after_and_noticed_ones_before_their_end() -> None:
    script = asking()
    script.tell(Tick())
    script.ready("n1", "n2", "n3", "n4")
    script.state = changed(script.state, requests={})
    assert requested(script.tell(NoticeGiven(worker="n1", lead_s=30.0))) == [("job-2", 1)]
    assert requested(script.tell(WorkerLost(worker="n1", cause="revoked"))) == []
    assert requested(script.tell(WorkerLost(worker="n2", cause="killed"))) == [("job-3", 1)]


def test_refusals_lengthen_the_wait_up_to_a_bound_until_a_grant() -> None:
    script = asking()
    script.tell(Tick())
    waits_s = []
    for number in range(1, 7):
        script.tell(RequestRefused(request=f"job-{number}", cause="quota", detail="0 of 4 left"))
        refused_s = script.now_s
        assert requested(script.tell(Tick())) == []
        assert requested(script.wake()) == [(f"job-{number + 1}", 4)]
        waits_s.append(script.now_s - refused_s)
    assert waits_s == pytest.approx([1.0, 2.0, 4.0, 8.0, 8.0, 8.0])
    script.tell(NodesGranted(request="job-7", nodes=("n1", "n2", "n3", "n4")))
    assert (script.state.provisioning.num_refused, script.state.provisioning.next_request_s) == (0, None)


def test_a_request_granted_in_part_is_asked_for_again_after_a_wait() -> None:
    script = asking()
    script.tell(Tick())
    assert requested(script.tell(NodesGranted(request="job-1", nodes=("n1",)))) == []
    assert requested(script.wake()) == [("job-2", 3)]


def test_an_unanswered_request_is_repeated_under_its_name_a_few_times() -> None:
    script = asking()
    script.tell(Tick())
    for _ in range(MAX_SENT - 1):
        assert requested(script.wake()) == [("job-1", 4)]
    assert requested(script.wake()) == [("job-2", 4)]
    assert script.state.provisioning.num_refused == 1


def absent(script: Script, number: int) -> Sequence[Action]:
    """Let a request be granted whose VM does not appear."""
    script.tell(NodesGranted(request=f"job-{number}", nodes=(f"m{number}",)))
    return script.tell(Tick(), at_s=script.now_s + REQUESTS.boot_s)


def test_vms_that_never_appear_are_requested_less_and_less_often() -> None:
    script = asking(policy=make_config().policy.model_copy(update={"order_timeout_s": 1e6}))
    script.tell(Tick())
    script.tell(NodesGranted(request="job-1", nodes=("n1", "n2", "n3", "n4")))
    script.ready("n1", "n2", "n3")
    assert requested(script.tell(Tick(), at_s=script.now_s + REQUESTS.boot_s)) == [("job-2", 1)]
    number, wait_s = 2, REQUESTS.backoff_s
    while number < REQUESTS.max_absent:
        assert requested(absent(script, number)) == []
        until_s, number = script.now_s + wait_s, number + 1
        assert requested(script.tell(Tick(), at_s=until_s - 0.01)) == []
        assert requested(script.tell(Tick(), at_s=until_s)) == [(f"job-{number}", 1)]
        wait_s *= 2
    assert ReleaseNodes(nodes=(f"m{number}",)) in absent(script, number)
    told = f"{REQUESTS.max_absent} times in a row VMs were granted and none of them joined: no further one is requested"
    assert told in script.sentence
    assert "vms.environment" in script.sentence
    for _ in range(3):
        assert requested(script.tell(Tick(), at_s=script.now_s + 10 * REQUESTS.backoff_max_s)) == []
    assert script.state.phase is not Phase.ENDED  # existing ones continue
    assert requested(script.tell(WorkerLost(worker="n1", cause="taken"))) == []


PYTHON = "its Python is 3.10.12"


def test_the_second_vm_that_is_unfit_in_the_same_way_ends_the_requests() -> None:
    script = asking(policy=make_config().policy.model_copy(update={"order_timeout_s": 1e6}))
    script.tell(Tick())
    script.tell(NodesGranted(request="job-1", nodes=("n1", "n2", "n3", "n4.d0", "n4.d1")))
    script.ready("n1", "n2", "n3")
    for number, cause in enumerate((PYTHON, PYTHON, "no space left", "its Python is 3.9.2"), start=1):
        nodes = ("n4.d0", "n4.d1") if number == 1 else (f"m{number}",)
        if number > 1:
            script.tell(Tick(), at_s=script.now_s + REQUESTS.backoff_max_s)
            script.tell(NodesGranted(request=f"job-{number}", nodes=nodes))
        if number == 2:
            script.tell(NodeAppeared(node="m2"))
            script.ready("m2")  # a VM that is well in between
            script.tell(WorkerLost(worker="m2", cause="taken"))
            continue
        for node in nodes:
            script.tell(WorkerLost(worker=node, cause=cause, unfit=True))
            assert f"{node} never appeared: {cause}" in script.sentence
            assert not script.state.provisioning.requests_over
    script.tell(Tick(), at_s=script.now_s + REQUESTS.backoff_max_s)
    script.tell(NodesGranted(request="job-5", nodes=("m5",)))
    script.tell(WorkerLost(worker="m5", cause=PYTHON, unfit=True))
    assert f"m5 never appeared: {PYTHON} (2 VMs in a row, in the same way): no further VM" in script.sentence
    assert requested(script.tell(Tick(), at_s=script.now_s + 10 * REQUESTS.backoff_max_s)) == []


@pytest.mark.parametrize("granted", [0, 3])
def test_an_error_that_only_the_user_can_mend_ends_the_requests_and_a_run_without_vms(granted: int) -> None:
    script = asking()
    script.tell(Tick())
    if granted:
        nodes = tuple(f"n{number}" for number in range(granted))
        event: Event = NodesGranted(request="job-1", nodes=nodes, short="input", detail="no such subnet.")
    else:
        event = RequestRefused(request="job-1", cause="input", detail="no such subnet.")
    script.tell(event)
    assert "no such subnet: no further VM is requested; mend this" in script.sentence
    actions = script.tell(Tick())
    ends = [action for action in actions if isinstance(action, Finish)]
    assert [(end.outcome, "no such subnet" in end.sentence) for end in ends] == ([] if granted else [("failed", True)])
    assert requested(actions) == []
    script.tell(Tick(), at_s=script.now_s + REQUESTS.boot_s / 2)
    assert script.state.provisioning.num_requests == 1
    if granted:  # the same command is given again
        assert requested(script.tell(ManagerResumed(living=()))) == [("job-2", 1)]


def test_a_run_with_too_few_vms_and_no_requests_left_ends() -> None:
    script = asking()
    script.tell(Tick())
    script.tell(NodesGranted(request="job-1", nodes=("n1", "n2", "n3", "n4")))
    script.tell(Tick(), at_s=script.now_s + REQUESTS.boot_s)
    for number in range(2, REQUESTS.max_absent):
        absent(script, number)
        script.tell(Tick(), at_s=script.now_s + REQUESTS.backoff_max_s)
    actions = absent(script, REQUESTS.max_absent)
    (finish,) = [action for action in actions if isinstance(action, Finish)]
    assert finish.outcome == "failed"
    assert "none of them joined" in finish.sentence
    assert "vms.environment" in finish.sentence


def test_vms_taken_while_they_boot_are_not_counted_as_mistakes() -> None:
    script = asking()
    script.tell(Tick())
    script.tell(NodesGranted(request="job-1", nodes=("n1", "n2", "n3", "n4")))
    for node in ("n1", "n2", "n3", "n4"):
        script.tell(WorkerLost(worker=node, cause="the provider no longer has its VM"))
    for number in range(2, 3 * REQUESTS.max_absent):
        script.tell(NodesGranted(request=f"job-{number}", nodes=(f"m{number}",)))
        script.tell(WorkerLost(worker=f"m{number}", cause="the provider no longer has its VM"))
        script.tell(Tick(), at_s=script.now_s + 2 * REQUESTS.backoff_max_s)
    assert script.state.provisioning.num_absent == 0
    assert script.state.provisioning.num_requests >= 2 * REQUESTS.max_absent


def test_vms_that_die_while_booting_are_replaced_less_and_less_often() -> None:
    script = asking()
    script.tell(Tick())
    script.tell(NodesGranted(request="job-1", nodes=("n1", "n2", "n3", "n4")))
    actions = script.tell(WorkerLost(worker="n1", cause="its raylet ended"))
    assert ReleaseNodes(nodes=("n1",)) in actions
    assert requested(actions) == [("job-2", 1)]
    # another VM of the same request is lost
    assert requested(script.tell(WorkerLost(worker="n2", cause="its raylet ended"))) == [("job-3", 1)]
    script.tell(NodesGranted(request="job-2", nodes=("m2",)))
    waits_s = []
    for number in (3, 4):
        script.tell(NodesGranted(request=f"job-{number}", nodes=(f"m{number}",)))
        assert requested(script.tell(WorkerLost(worker=f"m{number}", cause="its raylet ended"))) == []
        lost_s = script.now_s
        assert requested(script.wake()) == [(f"job-{number + 1}", 1)]
        waits_s.append(script.now_s - lost_s)
    assert waits_s == pytest.approx([1.0, 2.0])
    script.ready("n3")
    assert requested(script.tell(WorkerLost(worker="n4", cause="its raylet ended"))) == [("job-6", 1)]


def test_a_vm_noticed_while_it_boots_is_given_back_and_replaced() -> None:
    script = asking()
    script.tell(Tick())
    script.tell(NodesGranted(request="job-1", nodes=("n1", "n2", "n3", "n4")))
    actions = script.tell(NoticeGiven(worker="n3", lead_s=30.0, notice="first"))
    assert ReleaseNodes(nodes=("n3",)) in actions
    assert requested(actions) == [("job-2", 1)]
    assert script.tell(NoticeGiven(worker="n3", lead_s=29.0, notice="first")) == ()


def test_requests_are_named_as_the_run_says() -> None:
    script = asking(requests="tiny-3f9a1c-2")
    assert requested(script.tell(Tick())) == [("tiny-3f9a1c-2-1", 4)]


def test_every_state_is_reachable_and_all_but_gone_can_be_lost() -> None:
    reached = {NodeState.REQUESTED, *NODE_TRANSITIONS.values()}
    assert reached == set(NodeState)
    for state in set(NodeState) - {NodeState.GONE}:
        assert after(state, NodeEvent.LOST) is NodeState.GONE


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in itertools.product(NodeState, NodeEvent) if pair not in NODE_TRANSITIONS]
)
def test_an_unlisted_change_is_an_error_that_names_both(state: NodeState, event: NodeEvent) -> None:
    with pytest.raises(ImpossibleNodeChange, match=f"a node that is {state} cannot be {event}"):
        after(state, event)


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
    wake_at_s = script.last.wake_at_s
    assert wake_at_s == pytest.approx(script.now_s + 5.0)
    assert script.tell(Tick(), at_s=wake_at_s - 0.01) == ()
    assert receivers(script.tell(Tick(), at_s=wake_at_s), SendReshape) == ["n1", "n2"]


def test_a_run_that_has_all_its_steps_already_finishes_at_once() -> None:
    script = Script(initial_version=5, initial_checkpoint=MANIFEST, num_steps=5)
    script.tell(NodeAppeared(node="n1"))
    (finish,) = script.tell(Tick())
    assert finish.outcome == "finished"


def test_a_failed_setup_ends_the_run_only_before_its_start() -> None:
    failed = Failed(worker="n1", generation=0, error="no such job")
    script = Script()
    script.tell(NodeAppeared(node="n1"))
    (finish,) = script.tell(WorkerAnswered(worker="n1", answer=failed))
    assert finish == Finish(outcome="failed", sentence="n1 could not be set up: no such job", cause="run")
    script = script_in(Phase.TRAINING)
    script.tell(NodeAppeared(node="n9"))
    assert script.tell(WorkerAnswered(worker="n9", answer=failed)) == (EndWorker(worker="n9"),)
    assert script.state.phase is Phase.TRAINING


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


def test_patience_that_ends_beside_a_lost_worker_does_not_spin() -> None:
    script = Script(expected_nodes=9)
    script.ready("n1.d0", "n1.d1", "n2.d0", "n2.d1")
    first_s = script.state.waits.first_feasible_s
    assert first_s is not None
    patience_s = first_s + script.state.config.policy.start_patience_s
    script.tell(WorkerLost(worker="n1.d0", cause="killed"), at_s=patience_s - 0.1)
    assert script.last.wake_at_s == patience_s - 0.1 + GATHER_S
