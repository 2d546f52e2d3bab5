"""Every node-second of a run is accounted for, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from journalled_history import JournalledCluster
from random_history import random_faults
from simulated_cluster import TIMES, Faults
from simulated_job import make_config

from manager.controller.decide import decide
from manager.controller.events import (
    Event,
    ManagerResumed,
    NodeAppeared,
    NodesGranted,
    Tick,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state import initial_state
from manager.journal.records import DecisionRecord
from manager.report.accounting import Account, Ledger, Part
from manager.report.reading import read_report
from morph.contract.messages import WorkerReady

COMPUTE_S = TIMES.forward_s + TIMES.recompute_s + TIMES.backward_s


def account_of(run_dir: Path, faults: Faults, num_nodes: int, seed: int = 0, **fields: object) -> Account:
    """Play a journalled run to its end and read its account."""
    cluster = JournalledCluster(seed, run_dir, faults, expected_nodes=num_nodes, **fields)
    cluster.run(num_nodes)
    cluster.journal.close()
    return read_report(run_dir).account


def test_an_undisturbed_run_computes_waits_within_steps_and_warms_up(tmp_path: Path) -> None:
    account = account_of(tmp_path, Faults(), 4)
    assert account.part_s(Part.COMPUTE) == pytest.approx(12 * 4 * COMPUTE_S)
    assert account.parts_ns[Part.LOST] == account.parts_ns[Part.SPARE] == 0
    assert account.parts_ns[Part.WARMING] > 0
    assert account.parts_ns[Part.CHECKPOINT] > 0
    assert sum(account.parts_ns.values()) == account.total_ns


def test_a_killed_step_is_lost_and_the_change_of_shape_is_no_bubble(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    account = account_of(tmp_path, Faults(deaths_after_s=((6.0, 1),)), 6)
    calm = account_of(tmp_path / "calm", Faults(), 6)
    assert account.parts_ns[Part.LOST] > 0
    assert account.parts_ns[Part.MORPH] > calm.parts_ns[Part.MORPH]
    assert account.parts_ns[Part.SPARE] > 0, "one of five has no place in 2x2"


@pytest.mark.parametrize("seed", range(12))
def test_the_parts_add_up_to_the_nodes_lives_in_any_history(tmp_path: Path, seed: int) -> None:
    faults, num_nodes, _ = random_faults(seed)
    account = account_of(tmp_path, faults, num_nodes, seed)
    assert sum(account.parts_ns.values()) == account.total_ns, f"seed {seed}: {account}"
    assert min(account.parts_ns.values()) >= 0


def test_a_worker_that_was_lost_while_there_was_no_manager_costs_no_more() -> None:
    ledger, state = Ledger(), initial_state(make_config(expected_nodes=9))
    events: list[Event] = [NodeAppeared(node=node) for node in ("a", "b", "warms up")]
    events += [WorkerAnswered(worker=node, answer=WorkerReady(worker=node, pid=1, setup_s=0)) for node in ("a", "b")]
    for event in (*events, ManagerResumed(living=("a",))):
        ledger.advance(100.0)
        decision = decide(state, event, 100.0)
        state = decision.state
        ledger.take(event, DecisionRecord.of(decision))
    ledger.advance(103.0)
    assert set(ledger.appeared_ns) == set(state.workers) == {"a", "warms up"}
    account = ledger.account()
    assert (account.total_s, sum(account.parts_ns.values())) == (6.0, account.total_ns)


def test_a_vm_that_boots_is_paid_for_from_its_grant_until_it_is_given_back() -> None:
    ledger, state = Ledger(), initial_state(make_config(target_nodes=3))
    boot_s = state.config.policy.rules.requests.boot_s
    granted = NodesGranted(request="job-1", nodes=("a", "b", "c"))
    late = NodesGranted(request="job-1", nodes=("a", "b", "c"))
    taken = WorkerLost(worker="c", cause="the provider has its VM no more")
    timed: list[tuple[float, Event]] = [(0.0, Tick()), (10.0, granted), (12.0, late), (13.0, taken)]
    timed += [(14.0, NodeAppeared(node="a")), (10.0 + boot_s, Tick())]
    for now_s, event in timed:
        ledger.advance(now_s)
        decision = decide(state, event, now_s)
        state = decision.state
        ledger.take(event, DecisionRecord.of(decision))
    assert set(ledger.appeared_ns) == {"a"}, "b did not appear in time"
    account = ledger.account()
    assert account.total_s == 2 * boot_s + 3.0
    assert account.part_s(Part.WARMING) == account.total_s
