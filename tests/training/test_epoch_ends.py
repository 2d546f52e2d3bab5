"""Steps of fewer samples at the end of an epoch: equal to a plain loop, and the same bits in every shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph.contract.errors import JobError
from morph.contract.job_facts import EpochEnd, Epochs
from morph.cutting import export_job
from morph.data.loader import order_of, short_sizes
from morph.data.order import EpochOrder
from morph.preflight.data_check import epoch_notes
from tests.training import training_jobs
from tests.training.shapes import ShapesCrew, trained_alone
from tests.training.training_jobs import BATCH_SIZE, MICRO_BATCH_SIZE

NUM_STEPS = 9  # two epochs of 8, 8, 8 and 3 samples, and one step


@pytest.mark.parametrize(
    ("end", "sizes", "steps_of_3"),
    [("fill", [8] * 9, 11), ("short", [8, 8, 8, 3] * 2 + [8], 12), ("drop", [8] * 9, 9)],
)
def test_an_epoch_ends_as_the_job_says(end: EpochEnd, sizes: list[int], steps_of_3: int) -> None:
    order = EpochOrder(range(27), 5, 8, end=end)
    found = [order.mini_batch(step) for step in range(9)]
    assert [len(places) for places in found] == sizes
    assert order.epochs.steps_of(3) == steps_of_3
    per_epoch = {"fill": 27, "short": 27, "drop": 24}[end]
    first = [place for places in found for place in places][:per_epoch]
    assert first == [(0, int(index)) for index in order.epoch(0)[:per_epoch]]
    second = [index for places in found for epoch, index in places if epoch == 1]
    assert second == order.epoch(1)[: len(second)].tolist()


def test_an_epoch_without_a_whole_step_is_refused_unless_it_is_filled() -> None:
    with pytest.raises(JobError, match=r"batch_size: is larger than an epoch of 5 samples.*got 8.*allowed: at most 5"):
        _ = EpochOrder(range(5), 0, 8, end="short").epochs
    assert EpochOrder(range(5), 0, 8).epochs == Epochs(num_samples=5, batch_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["short", "short_by_token", "of_batches_as_whole"])
def test_every_shape_and_history_gives_the_same_bits(crew: ShapesCrew, tmp_path: Path, name: str) -> None:
    alone = crew.train(name, [("1x1", NUM_STEPS)], tmp_path / "alone")
    spans = [("2x2", 2), ("1x3", 5), ("2x1", NUM_STEPS)]  # a replica of three has nothing to do in step 3
    shapes = crew.train(name, spans, tmp_path / "shapes", lose=True)
    assert shapes.digests == alone.digests
    assert shapes.losses == alone.losses
    assert shapes.decided == alone.decided
    assert shapes.evaluations == alone.evaluations
    assert {sum(len(answer.losses) for answer in answers) for answers in shapes.answers} == {4, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["short_still", "short_by_token", "short_dropped", "of_batches", "of_batches_as_whole"]
)
def test_weights_and_losses_are_those_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    losses: list[float] = []
    found = trained_alone(name, NUM_STEPS, tmp_path, losses.append)
    expected, weights = plain_loop(getattr(training_jobs, name))
    assert losses == pytest.approx(expected, rel=1e-6)
    for parameter, value in found.items():
        assert torch.allclose(value, weights[parameter], rtol=1e-6, atol=1e-6), parameter


def plain_loop(job: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train as a loop over a ``DataLoader`` does, which accumulates micro-batches if each is a batch of the loop."""
    model, data = job.model(), job.dataset()
    model.load_state_dict(dict(export_job(job).initial_parameters), strict=False)
    optimizer = job.optimizer(list(model.named_parameters()))
    order, losses = order_of(job), []
    for step in range(NUM_STEPS):
        epoch, place = divmod(step, 3 if job.epoch_end == "drop" else 4)
        numbers = order.epoch(epoch)[place * BATCH_SIZE :][:BATCH_SIZE].tolist()
        size = BATCH_SIZE if job.short_step is None else MICRO_BATCH_SIZE
        parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        whole = job.short_step is not None and job.short_step.of_whole
        optimizer.zero_grad()
        told = []
        for part in parts:
            samples = [data[number] for number in part]
            loss = of_torch(job, model, {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]})
            (loss / (BATCH_SIZE // MICRO_BATCH_SIZE if whole else len(parts))).backward()
            told.append(loss.item())
        if job.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
        optimizer.step()
        losses.append(sum(told) / len(told))
    return losses, dict(model.named_parameters())


def of_torch(job: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["x"])
    if "labels" not in batch:
        return functional.mse_loss(out, batch["y"])
    return functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


def test_the_model_is_cut_also_for_micro_batches_that_have_fewer_samples() -> None:
    assert short_sizes(training_jobs.short, 2) == (1,)
    assert short_sizes(training_jobs.short, 4) == (3,)  # three of 27, and three of the 7 of the evaluation
    assert short_sizes(training_jobs.short_dropped, 8) == (7,)
    assert short_sizes(training_jobs.evaluated, 8) == (3,)
    assert short_sizes(training_jobs.plain, 8) == ()


def test_the_default_is_told_where_it_takes_samples_of_the_next_epoch() -> None:
    filled, dropped = (replace(training_jobs.short_still, epoch_end=end) for end in ("fill", "drop"))
    size = "an epoch of 27 samples is not a multiple of batch_size 8: "
    assert [text.partition(" (")[0] for text in epoch_notes(filled)] == [
        f"{size}its last step takes 5 samples from the next epoch"
    ]
    assert [text.partition(" (")[0] for text in epoch_notes(dropped)] == [f"{size}3 samples are left out of each"]
    assert epoch_notes(training_jobs.short_still) == epoch_notes(training_jobs.plain) == ()
