"""Evaluations from the micro-batches that workers report; sums are exact, so that means are equal in any shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from morph.contract.evaluation import Array, EvaluationTotals
from morph.contract.messages import MARKS, SUM, WEIGHT, Evaluation, MicroBatchLoss


def mean_loss(losses: Iterable[MicroBatchLoss]) -> float | None:
    """Return the mean loss, or total over weight; None without losses, or if one is not a number."""
    entries = _each_once(losses)
    return _mean([entry.loss for entry in entries], [entry.weight_of() for entry in entries])


def mean_metrics(losses: Iterable[MicroBatchLoss]) -> dict[str, float]:
    """Return the mean, or total over weight, of each metric that is a number in every micro-batch."""
    return {name: mean for name, mean in _means(_each_once(losses)).items() if mean is not None}


def total_weight(losses: Iterable[MicroBatchLoss]) -> float | None:
    """Return the total weight of these losses; None: they are means over samples."""
    weights = [entry.metrics.get(WEIGHT) for entry in _each_once(losses)]
    given = [weight for weight in weights if weight is not None]
    return math.fsum(given) if given else None


def totals_of(shares: Sequence[Evaluation]) -> EvaluationTotals | None:
    """Combine an evaluation from last stages' reports, all of one version; None if micro-batches are missing."""
    losses = _each_once(loss for share in shares for loss in share.losses)
    if not losses or len(losses) < shares[0].num_micro_batches:
        return None
    sums = {name.removesuffix(SUM): _sum(losses, name) for name in losses[0].metrics if name.endswith(SUM)}
    return EvaluationTotals(
        version=shares[0].version,
        values={"loss": mean_loss(losses), **_means(losses), **sums},
        samples={name: _joined([loss.samples[name] for loss in losses]) for name in losses[0].samples},
    )


def _joined(arrays: Sequence[Array]) -> Array:
    rows = sum(array.shape[0] for array in arrays)
    shape = (rows, *arrays[0].shape[1:])
    return Array(dtype=arrays[0].dtype, shape=shape, data=b"".join(array.data for array in arrays))


def _each_once(losses: Iterable[MicroBatchLoss]) -> list[MicroBatchLoss]:
    """Return one entry for each micro-batch, in the order of micro-batches."""
    known = {entry.micro_batch: entry for entry in losses}
    return [known[micro_batch] for micro_batch in sorted(known)]


def _means(entries: Sequence[MicroBatchLoss]) -> dict[str, float | None]:
    names = sorted(name for name in entries[0].metrics if not name.endswith(MARKS)) if entries else []
    return {
        name: _mean([entry.metrics[name] for entry in entries], [entry.weight_of(name) for entry in entries])
        for name in names
    }


def _mean(numbers: Sequence[float], weights: Sequence[float | None]) -> float | None:
    """Return the mean of numbers, or, where they are totals, their sum divided by the sum of their weights."""
    if not numbers or not all(map(math.isfinite, numbers)):
        return None
    given = [weight for weight in weights if weight is not None]
    weight = math.fsum(given) if given else len(numbers)
    return math.fsum(numbers) / weight if weight else None


def _sum(entries: Sequence[MicroBatchLoss], name: str) -> float | None:
    numbers = [entry.metrics[name] for entry in entries]
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else None
