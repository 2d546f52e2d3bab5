"""A run gathered live says the same as its journal does afterwards."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from random_history import random_faults
from simulated_cluster import JournalledCluster, SimulatedCluster, played

from manager.controller.state.events import Event
from manager.controller.state.state import ControllerState, Decision
from manager.dashboard.snapshot import snapshot
from manager.report.live import LiveRun
from manager.report.means import MOST_POINTS, Series
from manager.report.reading import read_report


@pytest.mark.parametrize("seed", range(6))
def test_the_live_account_is_the_journals_account(tmp_path: Path, seed: int) -> None:
    faults, num_nodes, _ = random_faults(seed)
    faults = replace(faults, restarts_after_s=(), fresh_starts_after_s=(), dies_before="")  # one manager sees it all
    run = LiveRun("job", 12, 8)

    def observe(cluster: SimulatedCluster, _before: ControllerState, event: Event, decision: Decision) -> None:
        run.take(cluster.now_s, event, decision)

    cluster = JournalledCluster(seed, tmp_path, faults, expected_nodes=num_nodes)
    cluster.observers = (*cluster.observers, observe)
    cluster.run(num_nodes)
    cluster.journal.close()
    report = read_report(tmp_path)
    assert run.ledger.account() == report.account
    assert run.version == report.version
    assert (run.loss is None) == (not report.steps)


def test_the_grid_has_a_node_in_every_place_while_a_shape_trains() -> None:
    run = played(stop_at=6)
    grid = snapshot(run)["grid"]
    assert [len(row) for row in grid] == [2, 2]
    assert all(cell["node"] and cell["state"] == "ready" for row in grid for cell in row)
    assert [node["state"] for node in snapshot(run)["others"]] == ["ready"], "five live, four have a place"
    assert run.headline.startswith("training  2x2  step 6/12")
    assert "on demand" in run.headline


def test_a_series_keeps_its_newest_point_and_stays_small() -> None:
    series = Series()
    for number in range(100_000):
        series.add(float(number), float(-number))
        assert len(series.points) <= MOST_POINTS
        assert series.points[-1] == (number, -number)
    times = [time_s for time_s, _ in series.points]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0
    assert len(set(gaps[:-1])) == 1
    assert gaps[0] <= 2 * 100_000 / (MOST_POINTS / 2)
