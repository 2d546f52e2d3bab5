"""Data workers: who reads a micro-batch changes no bit of what is learned, whatever becomes of who reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.shapes import ShapesCrew, Trained

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_STEPS = 9
ONE, WORKER_LOST = (("1x1", NUM_STEPS),), (("2x1", 3), ("1x2", 5), ("1x1", NUM_STEPS))


@pytest.fixture(scope="module")
def reference(crew: ShapesCrew, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What comes of samples that the thread that computes reads, with crops and dropout, on one worker."""
    return crew.train("read_between", [("1x1", NUM_STEPS)], tmp_path_factory.mktemp("between"))


def same(trained: Trained, reference: Trained) -> None:
    assert trained.digests == reference.digests
    assert trained.losses == reference.losses
    assert trained.evaluations == reference.evaluations
    assert len(trained.evaluations) == 2


def test_in_one_shape_data_workers_read_everything(crew: ShapesCrew, reference: Trained, tmp_path: Path) -> None:
    trained = crew.train("read_beside", ONE, tmp_path)
    same(trained, reference)
    assert trained.num_own_reads < NUM_STEPS, "a worker has 36 micro-batches to read, of 9 steps"


def test_changing_shapes_and_lost_workers_change_no_bit(crew: ShapesCrew, reference: Trained, tmp_path: Path) -> None:
    trained = crew.train("read_by_one", WORKER_LOST, tmp_path, lose=True, kill_readers_at=4)
    same(trained, reference)
