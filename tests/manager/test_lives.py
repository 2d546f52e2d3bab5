"""Lives of VMs according to a journal: their beginning, kind and end."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
from controller_script import Script
from random_history import random_faults
from simulated_cluster import JournalledCluster
from simulated_job import RULES

from manager.controller.state.actions import Action
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import (
    Event,
    ManagerResumed,
    NodeAppeared,
    NodeFacts,
    NodesGranted,
    NodesStarted,
    NoticeGiven,
    NoticeWithdrawn,
    Paid,
    StopRequested,
    Tick,
    WorkerAnswered,
    WorkerLost,
)
from manager.journal.records import (
    OUTLIVES,
    PREEMPTION_FAILED,
    PREEMPTION_INJECTED,
    SESSION_OVER,
    TOOK_OVER,
    VM_KILLED,
    Decided,
    DecisionRecord,
    Fact,
    JournalLine,
)
from manager.report.fold import Fold, Noted
from manager.report.journal_reader import lives_in, lives_of
from manager.report.lives import Ending, Life
from morph.contract.messages import Failed, WorkerReady
from morph.contract.vm_names import vm_of

GRACE_S = RULES.requests.notice_grace_s
KIND = NodeFacts(provider="azure", size="NC24", region="westeurope", zone="2")


class Told(Script):
    """A script whose lines are all in a journal."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)
        self.fold, self.noted = Fold(), list[Noted]()
        self.write(0.0, self.state.config)

    def write(self, time_s: float, says: ControllerConfig | Fact | Decided) -> None:
        self.noted += self.fold.step(JournalLine(0, time_s, says))

    def fact(self, name: str, at_s: float, worker: str | None = None, detail: str = "") -> None:
        self.write(at_s, Fact(name=name, worker=worker, detail=detail))
        self.now_s = at_s

    def tell(self, event: Event, at_s: float | None = None) -> tuple[Action, ...]:
        """Give the controller one event, and record it with the decision."""
        actions = super().tell(event, at_s)
        assert self.last is not None
        self.write(self.now_s, Decided(event, DecisionRecord.of(self.last)))
        return actions

    def set_up(self, *workers: str, at_s: float) -> None:
        for worker in workers:
            self.tell(WorkerAnswered(worker=worker, answer=WorkerReady(worker=worker, pid=1, setup_s=1)), at_s)

    def lives(self) -> dict[str, Life]:
        found = lives_of(deepcopy(self.fold), self.noted)
        assert len({life.vm for life in found}) == len(found)
        return {life.vm: life for life in found}


def granted(*nodes: str, **fields: object) -> Told:
    """Return VMs that were requested at 10 s and granted at 40 s."""
    told = Told(target_nodes=len(nodes), **fields)
    told.tell(Tick(), 10.0)
    paid = dict.fromkeys(nodes, Paid(usd_per_h=0.7))
    told.tell(NodesGranted(request="job-1", nodes=nodes, paid=paid, facts=dict.fromkeys(nodes, KIND)), 40.0)
    return told


def ready(*nodes: str, **fields: object) -> Told:
    """Return the same VMs, up at 100 s and ready at 130 s."""
    told = granted(*nodes, **fields)
    for node in nodes:
        told.tell(NodeAppeared(node=node, request="job-1"), 100.0)
    told.set_up(*nodes, at_s=130.0)
    return told


def test_a_life_has_the_facts_from_request_grant_and_worker() -> None:
    told = ready("a", "b")
    told.tell(WorkerLost(worker="a", cause="its connection closed"), 3640.0)
    a, b = told.lives()["a"], told.lives()["b"]
    assert (a.begun_s, a.ended_s, a.hours, a.ending, a.is_lost) == (40.0, 3640.0, 1.0, Ending.REVOKED, True)
    assert (a.facts, a.usd_per_h, a.allocation_s, a.preparation_s) == (KIND, 0.7, 90.0, 30.0)
    assert (a.lead_s, a.lost_with, a.lost_of) == (None, 1, 2)
    assert (b.ending, b.ended_s, b.lost_with, b.lost_of) == (Ending.RUN_OVER, 3640.0, 0, 0)


def test_a_vm_up_before_its_grant_lives_since_then() -> None:
    told = Told(target_nodes=1)
    told.tell(Tick(), 10.0)
    told.tell(NodeAppeared(node="a", request="job-1", facts=KIND.model_copy(update={"zone": ""})), 30.0)
    told.tell(NodesGranted(request="job-1", nodes=("a",), facts={"a": KIND}), 40.0)
    life = told.lives()["a"]
    assert (life.begun_s, life.appeared_s, life.allocation_s, life.facts) == (30.0, 30.0, 20.0, KIND)
    assert life.preparation_s is None


def test_a_life_begins_as_a_vm_leaves_its_markets_queue() -> None:
    told, price = Told(target_nodes=3), Paid(usd_per_h=0.7)
    told.tell(Tick(), 10.0)
    told.tell(NodesGranted(request="job-1", nodes=("a", "b", "c"), waiting=("a", "b", "c")), 40.0)
    told.tell(NodesStarted(request="job-1", nodes=("a",), paid={"a": price}, facts={"a": KIND}), 3600.0)
    told.tell(NodeAppeared(node="a", request="job-1"), 3630.0)
    told.tell(NodeAppeared(node="b", request="job-1", paid=price), 3640.0)
    told.tell(WorkerLost(worker="c", cause="the provider no longer has its VM"), 4000.0)
    lives = told.lives()
    assert lives.keys() == {"a", "b"}
    assert (lives["a"].begun_s, lives["a"].allocation_s, lives["a"].facts) == (3600.0, 3620.0, KIND)
    assert (lives["b"].begun_s, lives["b"].usd_per_h) == (3640.0, 0.7)


def test_a_notice_counts_if_the_vm_goes_by_it_however_it_goes() -> None:
    told = ready("taken", "left", "withdrawn", "outlived", "booting", "over")
    told.tell(NodesGranted(request="job-2", nodes=("late",)), 200.0)
    for number, vm in enumerate(("taken", "withdrawn", "outlived", "over")):
        told.tell(NoticeGiven(worker=vm, lead_s=30.0, notice=f"notice {number}"), 1000.0)
    told.tell(NoticeGiven(worker="taken", lead_s=10.0, notice="notice 0"), 1020.0)  # the same notice again
    told.tell(NoticeWithdrawn(worker="withdrawn"), 1001.0 + 20.0)
    told.tell(WorkerLost(worker="taken", cause="its connection closed"), 1030.0)
    told.tell(WorkerLost(worker="withdrawn", cause="its connection closed"), 1031.0)
    told.tell(WorkerLost(worker="outlived", cause="its connection closed"), 1031.0 + GRACE_S)
    told.tell(NoticeGiven(worker="over", lead_s=30.0, notice="another"), 1040.0 + GRACE_S)
    told.tell(StopRequested(reason="Ctrl-C"), 1041.0 + GRACE_S)
    lives = told.lives()
    assert {vm: life.lead_s for vm, life in lives.items()} == {
        **dict.fromkeys(("left", "booting", "withdrawn", "outlived"), None),
        "taken": 30.0,
        "over": 30.0,
    }
    assert lives["taken"].noticed_s == 1000.0
    assert lives["over"].noticed_s == 1040.0 + GRACE_S
    assert {vm for vm, life in lives.items() if life.is_lost} == {"taken", "withdrawn", "outlived", "over"}


def test_a_loss_before_readiness_counts_only_if_the_provider_took_it() -> None:
    told = granted("noticed", "unfit", "absent", "killed", "early")
    told.tell(NoticeGiven(worker="noticed", lead_s=30.0), 50.0)  # it is given back at once
    told.tell(WorkerLost(worker="unfit", cause="no such package", unfit=True), 60.0)
    told.tell(NodeAppeared(node="killed", request="job-1"), 70.0)
    told.fact(VM_KILLED, 80.0, worker="killed")
    told.tell(WorkerLost(worker="killed", cause="its connection closed"), 81.0)
    told.tell(Tick(), 50.0 + RULES.requests.boot_s)
    assert {vm: life.ending for vm, life in told.lives().items()} == {
        "noticed": Ending.REVOKED,
        "unfit": Ending.FAILED,
        "killed": Ending.REVOKED,
        "absent": Ending.GIVEN_BACK,
        "early": Ending.GIVEN_BACK,
    }


def test_a_notice_that_came_before_its_vm_was_known_is_its_own() -> None:
    told = Told(target_nodes=2)
    told.tell(Tick(), 10.0)
    told.tell(NoticeGiven(worker="a", lead_s=30.0), 30.0)
    told.tell(NodesGranted(request="job-1", nodes=("a", "b")), 40.0)
    life = told.lives()["a"]
    assert (life.ending, life.noticed_s, life.lead_s, life.ended_s) == (Ending.REVOKED, 30.0, 30.0, 40.0)


def test_vms_taken_on_purpose_are_not_losses_unless_that_failed() -> None:
    told = ready("a", "b", "c", "d")
    for vm in ("a", "b", "c"):
        told.fact(PREEMPTION_INJECTED, 200.0, worker=vm, detail="by name")
    told.tell(NoticeGiven(worker="a", lead_s=30.0, notice="injected"), 201.0)
    told.fact(PREEMPTION_FAILED, 202.0, worker="c")
    for vm in ("a", "b", "c"):
        told.tell(WorkerLost(worker=vm, cause="its connection closed"), 231.0)
    lives = told.lives()
    assert [lives[vm].ending for vm in "abcd"] == [
        *(Ending.INJECTED, Ending.INJECTED, Ending.REVOKED, Ending.RUN_OVER),
    ]
    assert lives["c"].lost_with == 1


def test_a_workers_error_ends_its_vm_without_counting_as_a_loss() -> None:
    told = ready("a", "b", "c", "d")
    told.tell(NodeAppeared(node="e"), 200.0)
    failed = Failed(worker="e", generation=0, error="no device", traceback="", cause="device")
    told.tell(WorkerAnswered(worker="e", answer=failed), 210.0)
    life = told.lives()["e"]
    assert (life.ending, life.ended_s, life.preparation_s) == (Ending.GIVEN_BACK, 210.0, None)


def test_a_vm_lives_as_long_as_any_of_its_workers() -> None:
    nodes = [f"{vm}.d{device}" for vm in ("v", "w") for device in (0, 1)]
    told = ready(*nodes)
    told.tell(WorkerLost(worker="v.d0", cause="it crashed"), 200.0)
    told.tell(WorkerLost(worker="w.d0", cause="its VM left the cluster", beside=("w.d1",)), 300.0)
    lives = told.lives()
    assert set(lives) == {"v", "w"}
    assert (lives["v"].ending, lives["w"].ending, lives["w"].ended_s) == (Ending.RUN_OVER, Ending.REVOKED, 300.0)
    assert (lives["w"].lost_with, lives["w"].lost_of, lives["w"].preparation_s) == (1, 2, 30.0)


def test_losses_due_close_together_are_one_event() -> None:
    told = ready("a", "b", "c", "d", "e", "f")
    for vm in ("a", "b"):
        told.tell(NoticeGiven(worker=vm, lead_s=30.0, notice=vm), 1000.0)
    told.tell(WorkerLost(worker="a", cause="it left at a boundary"), 1004.0)
    told.tell(WorkerLost(worker="b", cause="its connection closed"), 1030.0)
    told.tell(WorkerLost(worker="c", cause="silent for 5 s"), 1035.0)
    told.tell(WorkerLost(worker="d", cause="silent for 5 s"), 1100.0)
    lives = told.lives()
    assert {vm: (life.lost_with, life.lost_of) for vm, life in lives.items()} == {
        **dict.fromkeys(("a", "b", "c"), (3, 6)),
        "d": (1, 3),
        **dict.fromkeys(("e", "f"), (0, 0)),
    }


def test_a_session_ends_its_vms_whether_it_says_so_or_was_killed() -> None:
    told = ready("a", "b")
    told.fact("anything", 500.0)
    told.write(9000.0, told.state.config)  # the first manager was killed, and its VMs are gone
    told.now_s = 9000.0
    told.state = Told(target_nodes=1).state
    told.tell(NodeAppeared(node="c"), 9100.0)
    told.fact(SESSION_OVER, 9200.0)
    told.fact("more", 9300.0)
    assert [(life.vm, life.ended_s, life.ending) for life in told.lives().values()] == [
        ("a", 500.0, Ending.RUN_OVER),
        ("b", 500.0, Ending.RUN_OVER),
        ("c", 9200.0, Ending.RUN_OVER),
    ]


@pytest.mark.parametrize(
    ("away_s", "ending", "ended_s"), [(20.0, Ending.REVOKED, 220.0), (90.0, Ending.RUN_OVER, 200.0)]
)
def test_a_vm_that_a_new_manager_misses_is_lost(away_s: float, ending: Ending, ended_s: float) -> None:
    told = ready("a", "b", "c", "d")
    told.fact(OUTLIVES, 200.0, detail="60")
    told.fact(TOOK_OVER, 200.0 + away_s)
    told.tell(ManagerResumed(living=("b", "c", "d")), 200.0 + away_s)
    told.tell(WorkerLost(worker="b", cause="its connection closed"), 1000.0)
    lives = told.lives()
    assert (lives["a"].ending, lives["a"].ended_s) == (ending, ended_s)
    assert (lives["b"].ending, lives["b"].ended_s) == (Ending.REVOKED, 1000.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_in_any_history_each_vm_has_its_lives_one_after_the_other(seed: int, tmp_path: Path) -> None:
    faults, num_nodes, _ = random_faults(seed)
    fields = {"target_nodes": num_nodes} if seed % 2 else {}
    cluster = JournalledCluster(seed, tmp_path, faults, expected_nodes=num_nodes, **fields)
    cluster.run(num_nodes)
    with cluster.journal as journal:
        lives = lives_in(journal)
    events = [event for _, event, _ in cluster.history]
    known = {vm_of(event.node) for event in events if isinstance(event, NodeAppeared)}
    known |= {vm_of(node) for event in events if isinstance(event, NodesGranted) for node in event.nodes}
    assert {life.vm for life in lives} <= known
    assert {vm_of(name) for name, worker in cluster.state.workers.items() if worker.ready} <= {
        life.vm for life in lives
    }
    for life in lives:
        told_s = [life.begun_s, life.appeared_s, life.ready_s, life.ended_s]
        assert sorted(time_s for time_s in told_s if time_s is not None) == [
            time_s for time_s in told_s if time_s is not None
        ]
        assert life.is_lost == (1 <= life.lost_with <= life.lost_of)
    by_vm: dict[str, list[Life]] = {}
    for life in lives:
        by_vm.setdefault(life.vm, []).append(life)
    for told in by_vm.values():  # no VM has two lives at a time
        told.sort(key=lambda life: life.begun_s)
        assert all(before.ended_s <= after.begun_s for before, after in pairwise(told))
