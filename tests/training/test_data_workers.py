"""Data workers and streams: which process reads a sample, and its loss, change no bit of the result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from morph.checkpoint.unit_files import from_payload
from morph.data import data_of
from morph.data.order import EpochOrder
from morph.jobs.job import load_job
from tests.training.shapes import ShapesCrew, Trained, spec_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_STEPS = 9
ONE, WORKER_LOST = (("1x1", NUM_STEPS),), (("2x1", 3), ("1x2", 5), ("1x1", NUM_STEPS))


@pytest.fixture(scope="module")
def reference(crew: ShapesCrew, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the results of one worker whose computing thread reads the samples, with crops and dropout."""
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


def num_trained_on(trained: Trained) -> list[int]:
    """Return how often the model was trained on each sample, by its own count."""
    for entry in trained.manifest.units:
        folder = trained.directory / f"v{trained.manifest.version:08d}"
        for name, tensor in from_payload((folder / entry.file).read_bytes()).items():
            if name.endswith("seen"):
                return [round(-count) for count in tensor.tolist()]
    raise AssertionError("no unit has the counts")


@pytest.mark.parametrize("name", ["streamed", "passing"])
def test_no_history_loses_or_repeats_a_sample_of_a_stream(crew: ShapesCrew, name: str, tmp_path: Path) -> None:
    job = load_job(spec_of(name))
    reference = crew.train(name, ONE, tmp_path / "one")
    trained = crew.train(name, WORKER_LOST, tmp_path / "lost", lose=True, kill_readers_at=4)
    assert trained.digests == reference.digests
    assert trained.losses == reference.losses
    dataset = data_of(job)
    order = EpochOrder(dataset, job.seed, job.batch_size)
    trained_on = [index for step in range(NUM_STEPS) for _, index in order.mini_batch(step)]
    ids = torch.tensor([int(dataset[index]["id"]) for index in trained_on])
    assert num_trained_on(trained) == torch.bincount(ids, minlength=len(dataset)).tolist()
    assert set(num_trained_on(trained)) == {1, 2}, "an epoch, and most of another"
