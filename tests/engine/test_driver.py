"""The live loop with a pool that answers at once: each decision is in the journal before it is carried out; ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from manager.controller.state.actions import ProbeWorker, RequestNodes
from manager.controller.state.events import NoticeGiven
from manager.controller.state.validate import INVARIANTS, BrokenState
from manager.engine.loop.driver import Observed
from manager.journal.records import Fact
from manager.journal.replay import replay
from manager.report.fold import Fold
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.cluster import Limits
from morph.contract.messages import ProbeOrder
from tests.engine.driver_scene import Run
from tests.waiting import BOUND_S


def test_a_run_goes_from_its_first_vm_to_its_last_checkpoint(make_run: Callable[..., Run]) -> None:
    run = make_run()
    finish = run.driver.run()
    assert finish.outcome == "finished"
    assert run.driver.state.version == 6
    assert complete_versions(run.url)[-1] == 6
    assert {entry.unit for entry in read_manifest(run.url, 6).units} == set(run.config.units)
    assert [call for call in run.pool.calls if call.startswith("start")] == ["start_worker vm0", "start_worker vm1"]


def test_the_journal_gives_back_the_state_in_which_the_run_ended(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.driver.run()
    assert replay(run.journal) == run.driver.state


def train_on_once_granted(run: Run, worker: str) -> None:
    """Hold a worker's answer to step 2 until a grant is reported, because the run could be over by then."""
    late, granted = run.pool.hold_back(worker, 2), threading.Event()

    def answer(observed: Observed) -> None:
        if observed.event.kind == "nodes_granted":
            granted.set()
        if granted.is_set() and late:
            run.event_queue.put(late.pop())

    run.react = answer


def test_a_run_requests_the_vms_that_it_keeps_and_replaces_losses(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(limits=Limits(max_vms=2, usd_per_h=1.0), fewest=2)
    train_on_once_granted(run, "job-1-0")
    run.pool.lose = {("job-1-1", 3)}
    assert run.driver.run().outcome == "finished"
    assert {slot.worker for slot in run.driver.state.slots} == {"job-1-0", "job-2-0"}
    asked = [action for seen in run.observed for action in seen.decision.actions if isinstance(action, RequestNodes)]
    assert asked == [RequestNodes(request="job-1", count=2), RequestNodes(request="job-2", count=1)]
    assert run.host.up == ["job-1-0", "job-1-1", "job-2-0"]
    ended = threading.Event()  # VMs are ended in the background, for which the run does not wait
    run.provisioning._ends.put(ended.set)
    assert ended.wait(BOUND_S)
    assert run.host.ended == ["job-1-1"]
    run.provisioning.close()
    assert set(run.host.ended) == set(run.host.up)


def test_requests_beyond_limits_are_refused_with_a_journalled_reason(make_run: Callable[..., Run]) -> None:
    run = make_run(limits=Limits(usd_per_h=0.5))
    train_on_once_granted(run, "job-1-0")
    assert run.driver.run().outcome == "finished"
    told = [seen.decision.reason.sentence for seen in run.observed if seen.event.kind == "nodes_granted"]
    assert any("granted in part" in sentence or "boot" in sentence for sentence in told)
    assert run.host.up[:1] == ["job-1-0"]
    assert len(set(run.host.up) - set(run.host.ended)) <= 1
    facts = [Fact.model_validate_json(entry.payload_json) for entry in run.journal.read() if entry.kind == "fact"]
    assert any(fact.name == "request_reduced" and "vms.limits.usd_per_h is 0.5" in fact.detail for fact in facts)


def test_every_observer_sees_every_decision(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.driver.run()
    assert len(run.observed) == sum(entry.kind == "decision" for entry in run.journal.read())
    assert run.observed[-1].decision.state == run.driver.state


def test_a_lost_worker_is_left_behind_and_its_step_done_again(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.pool.lose = {("vm1", 3)}
    finish = run.driver.run()
    assert finish.outcome == "finished"
    assert complete_versions(run.url)[-1] == 6
    assert set(run.driver.state.workers) == {"vm0"}


def test_a_failed_worker_ends_the_run_and_says_why(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.pool.fail = {(run_worker, 2) for run_worker in ("vm0", "vm1")}
    finish = run.driver.run()
    assert finish.outcome == "failed"
    assert "the gradient of w is NaN or infinite" in finish.sentence


def test_a_requested_stop_saves_the_decided_version_and_ends(make_run: Callable[..., Run]) -> None:
    run = make_run(num_steps=10_000)

    def stop_at_five(observed: Observed) -> None:
        if observed.decision.state.version == 5 and observed.decision.state.stop_reason is None:
            observed.request_stop("enough")

    run.react = stop_at_five
    finish = run.driver.run()
    assert finish.outcome == "stopped"
    assert "enough" in finish.sentence
    assert run.driver.state.version < 10
    assert complete_versions(run.url)[-1] == run.driver.state.version


def test_facts_are_written_down_and_decide_nothing(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.event_queue.put(Fact(name="vm_killed", worker="vm9"))
    shown: list[Fact] = []
    run.react = lambda observed: shown.extend(fact for _, fact in observed.facts)
    run.driver.run()
    facts = [Fact.model_validate_json(entry.payload_json) for entry in run.journal.read() if entry.kind == "fact"]
    assert facts == shown == [Fact(name="vm_killed", worker="vm9")]


def test_an_observer_that_raises_ends_the_loop(make_run: Callable[..., Run]) -> None:
    """As after Ctrl-C, the driver must clean up and pass the error on."""
    run = make_run()

    def interrupt(_observed: Observed) -> None:
        raise KeyboardInterrupt

    run.react = interrupt
    with pytest.raises(KeyboardInterrupt):
        run.driver.run()
    assert run.journal.read()[-1].kind == "decision"


@pytest.mark.parametrize("asked", [True, False])
def test_a_broken_decision_is_not_carried_out_where_validation_is_asked_for(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setenv("MORPH_VALIDATE", "1" if asked else "")
    monkeypatch.setitem(INVARIANTS, "no order is sent", lambda state: state.step.order is None)
    run = make_run()
    if not asked:
        assert run.driver.run().outcome == "finished"
        return
    with pytest.raises(BrokenState, match="broken invariant: no order is sent"):
        run.driver.run()
    assert not [call for call in run.pool.calls if not call.startswith("start_worker")]
    assert run.journal.read()[-1].kind == "decision"


def test_a_probe_is_handed_to_the_pool_as_it_was_decided(make_run: Callable[..., Run]) -> None:
    run = make_run()
    action = ProbeWorker(worker="vm1", probe=2, step=5, first_section=0, end_section=1, healthy_s=0.25)
    run.driver._act(action)
    assert run.pool.probes == [
        ("vm1", ProbeOrder(probe=2, step=5, first_section=0, end_section=1, healthy_s=0.25)),
    ]


def test_a_noticed_node_is_released_once_a_step_is_decided_without_it(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()

    def notice(observed: Observed) -> None:
        state = observed.decision.state
        if state.version == 2 and "vm1" in {slot.worker for slot in state.slots} and not state.provisioning.leaving:
            run.event_queue.put(NoticeGiven(worker="vm1", lead_s=1.0, notice="preempt-7"))

    run.react = notice
    assert run.driver.run().outcome == "finished"
    assert run.let_go[:1] == [("vm1", "preempt-7")]
    told = next(seen.decision for seen in run.observed if "nothing of value" in seen.decision.reason.sentence)
    assert "vm1" not in {slot.worker for slot in told.state.slots}
    assert told.state.workers["vm1"].holds == frozenset()


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_set_during_a_step_loses_no_worker(
    jump_s: float, make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    wall = time.time
    late = run.pool.hold_back("vm1", 3)

    def jump_then_answer() -> None:
        """Called in each turn of the loop before time-outs are checked."""
        if late:
            monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
            run.pool.turns_held += 1
            if run.pool.turns_held > 3:
                run.pool.event_queue.put(late.pop())

    monkeypatch.setattr(run.pool, "watch", jump_then_answer)
    assert run.driver.run().outcome == "finished"
    assert set(run.driver.state.workers) == {"vm0", "vm1"}, [seen.decision.reason.sentence for seen in run.observed]
    fold = Fold()
    fold.steps(run.journal.read())
    assert fold.ledger.account().total_s < 60, "and nobody is billed for the hour"
