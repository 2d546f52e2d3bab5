"""The papers' spot tables, with few seeds: what is published is met about as closely as docs/benchmarks.md says."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.bamboo_tables import ROWS
from benchmarks.bamboo_tables import job as bert
from benchmarks.bamboo_tables import play as play_row
from benchmarks.spotify_tables import HEAVY, LIGHT, MTTP_S, STEPS, Inferred, play


@pytest.mark.slow
@pytest.mark.parametrize("job", [LIGHT, HEAVY], ids=lambda job: job.name)
def test_the_thesis_totals_are_met(job: Inferred) -> None:
    for policy, (hours, _) in job.published.items():
        found = statistics.fmean(one.hours for one in play(job, policy, STEPS, MTTP_S, 6))
        assert found == pytest.approx(hours, rel=0.02), policy


@pytest.mark.slow
def test_fewer_nodes_and_more_losses_slow_bamboo_down_as_published() -> None:
    job = bert(11.4)
    first, tenth = (
        statistics.fmean(one.examples_per_s for one in play_row(job, row, "bamboo", 2)) for row in (ROWS[0], ROWS[2])
    )
    assert tenth / first == pytest.approx(ROWS[2].throughput / ROWS[0].throughput, rel=0.06)
