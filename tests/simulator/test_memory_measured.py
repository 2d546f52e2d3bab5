"""Plans that should fit do fit: estimates of stages' memory, compared with the tensors that real workers make.

Workers run whole steps, and changes of shape, in threads of one process; every storage that they make is counted for as
long as it lives. ``python -m benchmarks stage_memory`` prints the same for every shape of three jobs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.grids import cells
from tests.runtime.measured_memory import MeasuredJob, measured_job

pytestmark = pytest.mark.slow

TINY = f"{Path(__file__).parents[2]}/configs/jobs/tiny_gpt.py:job"
TOLERATED = 0.1


@pytest.fixture(scope="module")
def job() -> MeasuredJob:
    return measured_job(TINY)


@pytest.mark.parametrize(("shape", "recompute"), cells(["1x1", "1x2", "2x1", "2x2", "3x1", "6x1"], [True, False]))
def test_steps_take_what_the_planner_says(job: MeasuredJob, shape: str, recompute: bool, tmp_path: Path) -> None:
    depth, replicas = map(int, shape.split("x"))
    found = job.steps(depth, replicas, recompute=recompute, directory=tmp_path)
    for estimate, reached, peak in zip(found.estimates, found.reached, found.peaks, strict=True):
        assert estimate >= (1 - TOLERATED) * peak, found
        # two units' shares are counted as under way, and a fast ring completes one before the next comes
        assert reached <= (1 + TOLERATED + 0.1 * (replicas > 1)) * peak, found


def further(*values: str | int) -> Any:
    """Mark a case that only ``make test-long`` runs, in addition to those that include each value."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("shape", "live_sections"), [further("1x1", 1), further("1x2", 2), further("2x1", 1), ("2x1", 2), ("2x2", 1)]
)
def test_steps_whose_stages_run_again_in_groups_take_what_the_planner_says(
    job: MeasuredJob, shape: str, live_sections: int, tmp_path: Path
) -> None:
    depth, replicas = map(int, shape.split("x"))
    found = job.steps(depth, replicas, recompute=True, live_sections=live_sections, directory=tmp_path)
    for estimate, reached, peak in zip(found.estimates, found.reached, found.peaks, strict=True):
        assert estimate >= (1 - TOLERATED) * peak, found
        assert reached <= (1 + TOLERATED + 0.1 * (replicas > 1)) * peak, found


@pytest.mark.parametrize(("before", "after"), [("2x1", "3x1"), further("3x1", "2x1"), ("1x2", "2x1"), ("2x1", "1x1")])
def test_a_change_of_shape_never_takes_more_than_the_planner_says(
    job: MeasuredJob, before: str, after: str, tmp_path: Path
) -> None:
    found = job.change(before, after, tmp_path)
    assert all(peak <= estimate for estimate, peak in zip(found.estimates, found.peaks, strict=True)), found
