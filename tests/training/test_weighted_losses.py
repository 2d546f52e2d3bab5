"""Losses that are a total over a weight: the same bits in every shape, equal to a plain loop over the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import morph
from manager.controller.state.evaluations import mean_loss, mean_metrics
from morph.contract.decided import Decided, LossScale, decided_step
from morph.contract.errors import JobError, TrainingStopped
from morph.contract.messages import WEIGHT, MicroBatchLoss
from morph.cutting import export_job
from morph.data import MicroBatchLoader
from morph.losses import Loss, cross_entropy
from tests.training import training_jobs
from tests.training.shapes import ShapesCrew, parameters_of, trained_alone
from tests.training.training_jobs import BATCH_SIZE, MICRO_BATCH_SIZE, WIDTH, plain

NUM_STEPS = 5
NUM_MICRO_BATCHES = BATCH_SIZE // MICRO_BATCH_SIZE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by_token_scaled", "by_class", "mixed"])
def test_every_shape_and_history_gives_the_same_bits(crew: ShapesCrew, tmp_path: Path, name: str) -> None:
    alone = crew.train(name, [("1x1", NUM_STEPS)], tmp_path / "alone")
    shapes = crew.train(name, [("2x2", 2), ("1x3", 4), ("2x1", NUM_STEPS)], tmp_path / "shapes", lose=True)
    assert shapes.digests == alone.digests
    assert shapes.losses == alone.losses
    assert shapes.decided == alone.decided
    assert shapes.evaluations == alone.evaluations
    assert len({decided.gradient_factor for decided in alone.decided}) > 1
    assert any(entry.weight_of() == 0 for answers in alone.answers for answer in answers for entry in answer.losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by_token_still", "by_class_still", "by_token_fast", "by_count", "mixed"])
def test_the_weights_are_those_of_a_plain_loop_over_whole_mini_batches(name: str, tmp_path: Path) -> None:
    losses: list[float] = []
    found = trained_alone(name, NUM_STEPS, tmp_path, losses.append)
    expected, weights = plain_loop(getattr(training_jobs, name))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert found.keys() == weights.keys()
    for parameter, value in found.items():
        assert torch.allclose(value, weights[parameter], rtol=1e-6, atol=1e-6), parameter


def plain_loop(job: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = job.model()
    model.load_state_dict(dict(export_job(job).initial_parameters), strict=False)
    optimizer = job.optimizer(list(model.named_parameters()))
    loader = MicroBatchLoader(job.dataset(), job.seed, job.batch_size, MICRO_BATCH_SIZE)
    losses = []
    for step in range(NUM_STEPS):
        parts = [loader.load(step, number, ("x", "labels")) for number in range(NUM_MICRO_BATCHES)]
        batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        if job.loss is training_jobs.mixed_loss:  # it depends on the micro-batches
            results = [job.loss(model, part) for part in parts]
            loss = sum(result.total for result in results) / sum(result.weight for result in results)
        else:
            loss = of_torch(job, model, batch)
            result = job.loss(model, batch)
            mean = (result[0] if isinstance(result, tuple) else result).mean()
            assert mean.item() == pytest.approx(loss.item(), rel=1e-6)
        optimizer.zero_grad()
        loss.backward()
        if job.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def of_torch(job: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss as torch itself does."""
    if job.loss is training_jobs.counted_loss:
        return model(batch["x"]).square().mean()
    by_class = job.loss is training_jobs.class_loss
    given: Any = {"weight": torch.tensor(training_jobs.CLASS_WEIGHTS), "label_smoothing": 0.1} if by_class else {}
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), **given)


@pytest.mark.slow
def test_a_step_in_which_nothing_counts_changes_neither_weights_nor_loss_scale(
    crew: ShapesCrew, tmp_path: Path
) -> None:
    trained = crew.train("none_counts", [("2x2", 3)], tmp_path)
    assert [decided.skipped for decided in trained.decided] == [True] * 3
    assert len(set(trained.scales)) == 1
    before = export_job(training_jobs.none_counts).initial_parameters
    after = parameters_of(trained.manifest, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def weighted(*weights: float) -> list[dict[int, float]]:
    return [dict(enumerate(weights))]


def test_the_mean_over_micro_batches_becomes_the_total_over_the_weights() -> None:
    decided = decided_step(3, [{"s0": 4.0}], [False], ["s0"], [{0: 3.0, 1: 5.0}, {2: 0.0}, {1: 5.0}])
    assert decided.gradient_factor == 3 / 8
    assert decided.gradient_norm == 2 * 3 / 8
    assert decided_step(3, [{}], [False], ["s0"], [{}]).gradient_factor == 1


def test_no_weight_at_all_skips_the_step_and_leaves_the_loss_scale() -> None:
    scale = LossScale(exponent=4, growth_steps=2)
    decided = decided_step(3, [{"s0": 0.0}], [False], ["s0"], weighted(0.0, 0.0))
    assert (decided.skipped, decided.next_scale(scale)) == (True, scale)
    assert Decided(version=3, skipped=True).next_scale(scale) == scale.after(skipped=True)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_an_invalid_weight_ends_the_run(weight: float) -> None:
    with pytest.raises(TrainingStopped, match="step 2: a loss has a weight that is negative or not finite"):
        decided_step(3, [{}], [False], ["s0"], weighted(4.0, weight))


def test_reports_divide_totals_by_their_weights() -> None:
    entries = [
        MicroBatchLoss(
            micro_batch=0, loss=6.0, metrics={WEIGHT: 2.0, "right": 1.0, "right" + WEIGHT: 4.0, "size": 1.0}
        ),
        MicroBatchLoss(
            micro_batch=1, loss=0.0, metrics={WEIGHT: 0.0, "right": 2.0, "right" + WEIGHT: 0.0, "size": 2.0}
        ),
    ]
    assert mean_loss(entries) == 3.0
    assert mean_metrics(entries) == {"right": 0.75, "size": 1.5}
    assert mean_loss(entries[1:]) is None


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("weights", [None, torch.linspace(0.5, 2, WIDTH)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_is_that_of_torch(ignored: float, weights: Tensor | None, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5, WIDTH, generator=generator)
    labels = torch.randint(0, WIDTH, (4, 5), generator=generator)
    labels[torch.rand(4, 5, generator=generator) < ignored] = -100
    loss = cross_entropy(logits, labels, class_weights=weights, label_smoothing=smoothing)
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), weights, label_smoothing=smoothing)
    assert torch.allclose(loss.mean(), expected, rtol=1e-6, equal_nan=True)
    assert torch.isfinite(loss.total)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda error: Loss(error.expand(2), 2), "does not return a scalar (got '(2,)')"),
        (lambda error: Loss(error, error.expand(2)), "the weight of the loss is not a scalar (got (2,))"),
        (lambda error: Loss(error, "2"), "the weight of the loss is not a scalar (got 'str'); allowed: a number, or a"),
        (lambda error: (error, {"a": Loss(error, None)}), "the weight of metric 'a' is not a scalar"),
        (lambda error: (error, {"a/weight": error}), "is a metric's name that Morph uses itself (got 'a/weight')"),
    ],
)
def test_invalid_losses_are_refused(result: Any, message: str) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return result((model(batch["x"]) - batch["y"]).square().sum())

    with pytest.raises(JobError) as caught:
        export_job(replace(plain, loss=loss))
    assert message in str(caught.value)


def test_the_names_are_public() -> None:
    assert morph.Loss is Loss
    assert morph.losses.cross_entropy is cross_entropy
