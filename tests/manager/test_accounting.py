"""Every node-second of a run is accounted for exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_history import random_faults
from simulated_cluster import TIMES, Faults, JournalledCluster
from simulated_job import make_config

from manager.accounting.account import Account, TimeUse
from manager.accounting.ledger import Ledger, Stretch
from manager.accounting.spent import NOTHING, NS_PER_S, SHARES, Prices, Spent, nano_usd
from manager.controller.decide import decide
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import (
    EVENT,
    Event,
    ManagerResumed,
    NodeAppeared,
    NodesGranted,
    NodesStarted,
    NoticeGiven,
    Paid,
    StopRequested,
    Tick,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.state import initial_state
from manager.journal.records import (
    DIED_WITH_MANAGER,
    OUTLIVES,
    SESSION_OVER,
    TOOK_OVER,
    Decided,
    DecisionRecord,
    Fact,
    JournalLine,
    lines,
)
from manager.report.fold import Fold
from manager.report.journal_reader import read_report
from morph.contract.messages import WorkerReady

COMPUTE_S = TIMES.forward_s + TIMES.recompute_s + TIMES.backward_s


def booked(timed: list[tuple[float, Event]], **fields: object) -> Ledger:
    """Decide these events, given as seconds and event, and book them."""
    ledger, state = Ledger(), initial_state(make_config(**fields))
    for now_s, event in timed:
        ledger.advance(now_s)
        decision = decide(state, event, now_s)
        state = decision.state
        ledger.take(event, DecisionRecord.of(decision))
    return ledger


def account_of(run_dir: Path, faults: Faults, num_nodes: int, seed: int = 0, **fields: object) -> Account:
    """Play a journalled run to its end, and read its account."""
    cluster = JournalledCluster(seed, run_dir, faults, expected_nodes=num_nodes, **fields)
    cluster.run(num_nodes)
    cluster.journal.close()
    return read_report(run_dir).account


def test_an_undisturbed_run_computes_waits_within_steps_and_warms_up(tmp_path: Path) -> None:
    account = account_of(tmp_path, Faults(), 4)
    assert account.part_s(TimeUse.COMPUTE) == pytest.approx(12 * 4 * COMPUTE_S)
    assert account.parts_ns[TimeUse.LOST] == account.parts_ns[TimeUse.SPARE] == 0
    assert account.parts_ns[TimeUse.WARMING] > 0
    assert account.parts_ns[TimeUse.CHECKPOINT] > 0
    assert sum(account.parts_ns.values()) == account.total_ns


def test_a_killed_step_counts_as_lost_and_a_morph_as_no_bubble(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    account = account_of(tmp_path, Faults(deaths_after_s=((6.0, 1),)), 6)
    calm = account_of(tmp_path / "calm", Faults(), 6)
    assert account.parts_ns[TimeUse.LOST] > 0
    assert account.parts_ns[TimeUse.MORPH] > calm.parts_ns[TimeUse.MORPH]
    assert account.parts_ns[TimeUse.SPARE] > 0, "one of five has no place in 2x2"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_the_parts_add_up_to_the_nodes_lives_in_any_history(tmp_path: Path, seed: int) -> None:
    faults, num_nodes, _ = random_faults(seed)
    asked = {"target_nodes": num_nodes + 2} if seed % 3 else {}  # requested VMs have prices
    account = account_of(tmp_path, faults, num_nodes, seed, **asked)
    if seed == 1:  # as in most histories
        assert 0 < account.total.unpriced_ns < account.total.vm_ns, "VMs with prices and without"
    assert sum(account.parts.values(), NOTHING) == account.total, f"seed {seed}: {account}"
    for spent in account.parts.values():
        assert min(spent.node_ns, spent.vm_ns, spent.unpriced_ns, spent.cost) >= 0
    for prices in (None, Prices(paid_usd_per_h=0.7), Prices(paid_usd_per_h=0.7, for_all=True)):
        bill = account.bill(prices)
        assert (bill is None) == (prices is None and account.dearest is None)
        assert bill is None or sum(bill.parts.values()) == bill.total


def test_a_worker_lost_while_no_manager_ran_costs_nothing_more() -> None:
    events: list[Event] = [NodeAppeared(node=node) for node in ("a", "b", "warms up")]
    events += [ready("a"), ready("b"), ManagerResumed(living=("a",))]
    ledger = booked([(100.0, event) for event in events], expected_nodes=9)
    ledger.advance(103.0)
    assert set(ledger.since_ns) == {"a", "warms up"}
    account = ledger.account()
    assert (account.total_s, sum(account.parts_ns.values())) == (6.0, account.total_ns)


def test_a_booting_vm_costs_from_grant_to_release() -> None:
    boot_s = make_config().policy.rules.requests.boot_s
    granted = NodesGranted(request="job-1", nodes=("a", "b", "c"))
    late = NodesGranted(request="job-1", nodes=("a", "b", "c"))
    taken = WorkerLost(worker="c", cause="the provider no longer has its VM")
    timed: list[tuple[float, Event]] = [(0.0, Tick()), (10.0, granted), (12.0, late), (13.0, taken)]
    timed += [(14.0, NodeAppeared(node="a")), (10.0 + boot_s, Tick())]
    ledger = booked(timed, target_nodes=3)
    assert set(ledger.since_ns) == {"a"}, "b did not appear in time"
    account = ledger.account()
    assert account.total_s == 2 * boot_s + 3.0
    assert account.part_s(TimeUse.WARMING) == account.total_s


def test_a_vm_in_a_queue_costs_nothing_until_it_begins() -> None:
    priced = Paid(usd_per_h=3600.0)
    names = ("seen", "joins", "cancelled", "for ever")
    queued = NodesGranted(request="job-1", nodes=names, waiting=names, paid={"joins": priced})
    seen = NodesStarted(
        request="job-1", nodes=("seen", "cancelled"), paid={"seen": Paid(usd_per_h=7200.0, before_s=2.0)}
    )
    timed: list[tuple[float, Event]] = [
        (0.0, Tick()),
        (10.0, queued),
        (50.0, WorkerLost(worker="cancelled", cause="the provider no longer has its VM")),
        (100.0, seen),
        (103.0, NodeAppeared(node="joins", request="job-1")),
        (105.0, NodeAppeared(node="seen", request="job-1")),
    ]
    ledger = booked(timed, target_nodes=4)
    ledger.advance(110.0)
    account = ledger.account()
    assert account.total_s == (2.0 + 10.0) + 7.0
    assert account.bill(None).total_usd == pytest.approx(2 * 12.0 + 7.0)
    assert ledger.waiting.keys() == {"for ever"}
    ledger.end_session()
    assert ledger.waiting == {}


def journalled(*items: tuple[float, Event | Fact | ControllerConfig]) -> Account:
    """Return the account of a journal with these lines; each event's decision follows it."""
    fold, state = Fold(), initial_state(make_config())
    for time_s, item in items:
        says: ControllerConfig | Fact | Decided
        if isinstance(item, ControllerConfig):
            says, state = item, initial_state(item)
        elif isinstance(item, Fact):
            says = item
        else:
            decision = decide(state, item, time_s)
            says, state = Decided(item, DecisionRecord.of(decision)), decision.state
        fold.step(JournalLine(0, time_s, says))
    account = fold.ledger.account()
    assert sum(account.parts.values(), NOTHING) == account.total
    return account


CONFIG = make_config(expected_nodes=9)
BEGUN: tuple[tuple[float, Event | Fact | ControllerConfig], ...] = (
    (0.0, CONFIG),
    (0.0, Fact(name=OUTLIVES, detail="60.0")),
    (0.0, NodeAppeared(node="a")),
    (0.0, NodeAppeared(node="b")),
)
"""A manager that is killed after its last line, with two nodes that outlive it by a minute."""


@pytest.mark.parametrize(
    ("next_s", "unmanaged_s"), [(91.0, 60.0), (3691.0, 60.0), (31.0, 31.0)], ids=["later", "clock set on", "in time"]
)
def test_node_time_after_a_managers_death_is_a_separate_part(next_s: float, unmanaged_s: float) -> None:
    account = journalled(*BEGUN, (next_s, CONFIG), (next_s + 5, NodeAppeared(node="a")), (next_s + 9, Tick()))
    assert account.part_s(TimeUse.UNMANAGED) == 2 * unmanaged_s
    assert account.total_s == 2 * unmanaged_s + 4.0


@pytest.mark.parametrize("lived_s", [0.0, 7.0])
def test_nodes_that_died_with_their_manager_count_until_their_last_sign_of_life(lived_s: float) -> None:
    account = journalled(*BEGUN, (lived_s, Fact(name=DIED_WITH_MANAGER)), (50.0, CONFIG), (59.0, Tick()))
    assert account.part_s(TimeUse.UNMANAGED) == account.total_s == 2 * lived_s


def test_a_clock_set_forward_does_not_lengthen_nodes_lives() -> None:
    account = journalled(*BEGUN, (9e9, Fact(name=DIED_WITH_MANAGER)), (9e9, CONFIG))
    assert account.part_s(TimeUse.UNMANAGED) == account.total_s == 2 * 60.0


def test_node_time_until_a_takeover_is_a_separate_part() -> None:
    took_over = (Fact(name=TOOK_OVER), ManagerResumed(living=()))
    account = journalled(*BEGUN, *((41.0, item) for item in took_over), (44.0, Tick()))
    assert (account.part_s(TimeUse.UNMANAGED), account.part_s(TimeUse.WARMING)) == (82.0, 6.0)


def test_nothing_is_paid_between_a_proper_end_and_the_next_session() -> None:
    account = journalled(*BEGUN, (7.0, Fact(name=SESSION_OVER)), (91.0, CONFIG), (92.0, Tick()))
    assert (account.part_s(TimeUse.UNMANAGED), account.total_s) == (0.0, 14.0)


def ready(node: str) -> WorkerAnswered:
    return WorkerAnswered(worker=node, answer=WorkerReady(worker=node, pid=1, setup_s=0))


def test_each_vm_has_its_own_price_from_its_creation_on() -> None:
    paid = {"a": Paid(usd_per_h=0.3, before_s=60.0), "b": Paid(usd_per_h=1.4), "c": Paid()}
    granted = NodesGranted(request="job-1", nodes=("a", "b", "c"), paid=paid)
    timed: list[tuple[float, Event]] = [(0.0, Tick()), (100.0, granted)]
    timed += [(200.0, NodeAppeared(node=node)) for node in "abc"]
    timed += [(300.0, ready("a")), (400.0, WorkerLost(worker="b", cause="taken")), (3700.0, Tick())]
    account = booked(timed, target_nodes=3).account()
    dollars = 0.3 * 3660 / 3600 + 1.4 * 300 / 3600
    assert account.total_s == 3660 + 300 + 3600
    bill, at_two = account.bill(), account.bill(Prices(paid_usd_per_h=2.0))
    assert at_two is not None
    assert bill.total_usd == pytest.approx(dollars + 1.4, rel=1e-12), "the one without a price is as dear as any"
    assert at_two.total_usd == pytest.approx(dollars + 2.0, rel=1e-12)
    all_at_two = account.bill(Prices(paid_usd_per_h=2.0, for_all=True))
    assert all_at_two.total_usd == pytest.approx(2.0 * 7560 / 3600, rel=1e-12)
    assert bill.part_usd(TimeUse.WARMING) == pytest.approx(0.3 * 260 / 3600 + 1.4 * 300 / 3600 + 1.4, rel=1e-12)
    assert sum(bill.parts.values()) == bill.total


@pytest.mark.parametrize("ready_first", [False, True])
def test_a_late_grant_books_what_was_paid_before(ready_first: bool) -> None:
    paid = {node: Paid(usd_per_h=3.6, num_nodes=2, before_s=50.0) for node in ("a.0", "a.1")}
    granted = NodesGranted(request="job-1", nodes=("a.0", "a.1"), paid=paid)
    timed: list[tuple[float, Event]] = [(0.0, Tick())]
    timed += [(60.0, NodeAppeared(node=node, request="job-1")) for node in granted.nodes]
    timed += [(70.0, ready("a.0"))] if ready_first else []
    timed += [(80.0, granted), (90.0, granted)]  # reported twice, but paid once
    account = booked(timed, target_nodes=2).account()
    assert account.total_s == 2 * 60.0
    late_s = 20 if ready_first else 0  # VM a.0's costs, whose price came too late for them
    assert account.total.unpriced_ns == late_s * NS_PER_S * SHARES, "and nobody knew that two share the VM"
    assert account.total.cost * 2 == (120 - late_s) * nano_usd(3.6) * NS_PER_S * SHARES
    bill, on_demand = account.bill(), account.on_demand_usd(Prices(on_demand_usd_per_h=36.0))
    assert bill.total_usd == pytest.approx((60 + late_s / 2) * 3.6 / 3600, rel=1e-12), "two nodes cost one VM"
    assert on_demand == pytest.approx((60 + late_s / 2) * 36 / 3600, rel=1e-12)
    assert sum(account.parts.values(), NOTHING) == account.total


def test_a_vm_priced_when_it_appears_costs_from_its_creation_on() -> None:
    paid = Paid(usd_per_h=3.6, num_nodes=2, before_s=30.0)
    timed: list[tuple[float, Event]] = [(0.0, Tick())]
    timed += [(60.0, NodeAppeared(node=node, request="job-1", paid=paid)) for node in ("a.d0", "a.d1")]
    timed += [(70.0, ready("a.d0"))]
    late = Paid(usd_per_h=3.6, num_nodes=2, before_s=50.0)  # the same costs, from its grant on
    granted = NodesGranted(request="job-1", nodes=("a.d0", "a.d1"), paid={"a.d0": late, "a.d1": late})
    account = booked([*timed, (80.0, granted), (90.0, Tick())], target_nodes=2).account()
    assert (account.total_s, account.total.unpriced_ns) == (120.0, 0)
    bill = account.bill()
    assert bill.total_usd == pytest.approx(60 * 3.6 / 3600, rel=1e-12)
    assert account.part_s(TimeUse.WARMING) == 100.0


PAIR = ("v.d0", "v.d1")
PAIR_GRANTED = NodesGranted(request="job-1", nodes=PAIR, paid=dict.fromkeys(PAIR, Paid(usd_per_h=2.0, num_nodes=2)))


def pair_up() -> list[tuple[float, Event]]:
    """Return a VM with two workers, paid and ready from 0 s on, in a run that waits for a third worker."""
    timed: list[tuple[float, Event]] = [(0.0, Tick()), (0.0, PAIR_GRANTED)]
    timed += [(0.0, NodeAppeared(node=node)) for node in PAIR]
    return timed + [(0.0, ready(node)) for node in PAIR]


def check_whole(ledger: Ledger, paid_s: int) -> Account:
    """Check that the whole VM was paid for this long, and that the parts add up to this."""
    account = ledger.account()
    assert account.total.vm_ns == paid_s * NS_PER_S * SHARES
    assert account.total.cost == account.total.vm_ns * nano_usd(2.0)
    assert sum(account.parts.values(), NOTHING) == account.total
    for spent in account.parts.values():
        assert min(spent.node_ns, spent.vm_ns, spent.unpriced_ns, spent.cost) >= 0
    return account


@pytest.mark.parametrize(
    "gone",
    [WorkerLost(worker="v.d0", cause="its process died"), ManagerResumed(living=("v.d1",))],
    ids=lambda event: event.kind,
)
def test_a_vm_is_paid_whole_until_the_last_of_its_workers_goes(gone: Event) -> None:
    last = WorkerLost(worker="v.d1", cause="its VM is gone")
    timed = [*pair_up(), (100.0, gone), (3700.0, last), (9000.0, Tick())]
    account = check_whole(booked(timed, target_nodes=2, expected_nodes=3), 3700)
    assert (account.part_s(TimeUse.WAITING), account.part_s(TimeUse.SPARE)) == (100.0 + 3700.0, 3600.0)


def test_a_vm_that_loses_one_worker_while_booting_is_paid_whole() -> None:
    timed: list[tuple[float, Event]] = [(0.0, Tick()), (0.0, PAIR_GRANTED)]
    timed += [(10.0, NoticeGiven(worker="v.d0", lead_s=30.0)), (40.0, NoticeGiven(worker="v.d1", lead_s=5.0))]
    account = check_whole(booked([*timed, (90.0, Tick())], target_nodes=2), 40)
    assert (account.part_s(TimeUse.WARMING), account.part_s(TimeUse.SPARE)) == (10.0 + 40.0, 30.0)


class EachStep(Ledger):
    """Sums up no steps."""

    def _settled(self, step: int, compute: Spent, bubble: Spent) -> None:
        self.settled.append(Stretch(step, step + 1, compute, bubble))


@pytest.mark.parametrize("seed", range(4))
def test_steps_are_booked_alike_summed_up_and_one_by_one(seed: int, tmp_path: Path) -> None:
    faults = Faults(deaths_after_s=((8.0, 20), (21.0, 20)), joins_after_s=(9.0, 9.1, 9.2, 9.3, 22.0, 22.1, 22.2, 22.3))
    cluster = JournalledCluster(seed, tmp_path, faults, expected_nodes=6, num_steps=40)
    cluster.run(6)
    folds, most = (Fold(), Fold(ledger=EachStep())), 0
    for line in lines(cluster.journal.read()):
        for fold in folds:
            fold.step(line)
        most = max(most, len(folds[1].ledger.settled) - len(folds[0].ledger.settled))
        assert folds[0].ledger.account() == folds[1].ledger.account()
        assert len(folds[0].ledger.settled) <= 3, "one since each save under way, not one a step"
    cluster.journal.close()
    assert folds[0].ledger.parts[TimeUse.LOST].node_ns
    assert most > 2


@pytest.mark.parametrize("how", ["session", "finish"])
def test_sessions_and_runs_end_with_their_vms_idle_devices(how: str) -> None:
    lost = WorkerLost(worker="v.d0", cause="its process died")
    end: Event = Tick() if how == "session" else StopRequested(reason="enough")
    ledger = booked([*pair_up(), (100.0, lost), (200.0, end)], target_nodes=2, expected_nodes=3)
    if how == "session":
        ledger.begin_session(500.0)
    ledger.advance(900.0)
    check_whole(ledger, 200)
    assert not ledger.since_ns
    assert not ledger.idle


def test_a_journal_without_prices_is_read_as_before() -> None:
    old = EVENT.validate_json('{"kind": "nodes_granted", "request": "job-1", "nodes": ["a"]}')
    account = booked([(0.0, Tick()), (10.0, old), (3610.0, Tick())], target_nodes=1).account()
    assert account.bill() is None
    bill = account.bill(Prices(paid_usd_per_h=0.5))
    assert bill.total_usd == 0.5
