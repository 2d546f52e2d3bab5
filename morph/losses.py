"""Losses that are not means over samples: a total, which is divided once by the weight of the whole mini-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from morph.contract.messages import SAMPLES, SUM, WEIGHT

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """What ``Job.loss`` may return instead of a mean over samples; metrics may be of this type too.

    The loss of a step is the sum of all totals divided by the sum of all weights, over the whole mini-batch, however it
    is cut into micro-batches and whatever the shape. So a mean over tokens, or one with class weights, equals the mean
    in a plain loop over the whole mini-batch. A step whose weights are all 0 changes nothing.

    Attributes:
        total: The sum over everything that counts in this micro-batch, a scalar; 0 if nothing counts.
        weight: The weight of everything that counts, such as the number of tokens: a number or a scalar tensor, at
            least 0. It has no gradient.
    """

    total: Tensor
    weight: Tensor | float

    def mean(self) -> Tensor:
        """Return the mean of this batch alone; NaN if nothing counts."""
        return self.total / self.weight


@dataclass(frozen=True)
class Sum:
    """A metric that is summed over all samples, such as a number of hits, for ``Job.eval_metrics``.

    Attributes:
        total: The sum over this micro-batch, a scalar. It has no gradient.
    """

    total: Tensor


@dataclass(frozen=True)
class PerSample:
    """An evaluation's values for each sample, such as predictions and labels, for ``Job.eval_metrics``.

    Attributes:
        values: One row per sample, of shape [samples, ...]. They have no gradient, and training does not keep them.
    """

    values: Tensor


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Loss:
    """Return ``torch.nn.functional.cross_entropy``, to be averaged over the whole mini-batch.

    The total is the sum over the labels that count, and the weight is their number, or the sum of their class weights.

    Args:
        logits: Of shape (..., classes).
        labels: Class numbers, of shape (...); ``ignore_index`` for a label that does not count.
        class_weights: Of shape (classes,): the weight of a label of each class. None: each has weight one.
    """
    import torch
    from torch.nn import functional

    flat, wanted = logits.flatten(0, -2), labels.flatten()
    total = functional.cross_entropy(
        flat, wanted, class_weights, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    counts = wanted != ignore_index
    if class_weights is None:
        return Loss(total, counts.sum())
    of_label = class_weights[torch.where(counts, wanted, 0)]
    return Loss(total, torch.where(counts, of_label, 0.0).sum())


def values_of(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Split the result of a loss into the value whose gradient is taken, and further values by name.

    A weight is a further value, named after the value that it weights; metrics and weights have no gradient.
    """
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    further: dict[str, Tensor] = {}
    if isinstance(loss, Loss):
        further[WEIGHT] = _weight(loss)
        loss = loss.total
    for name, value in metrics.items():
        if isinstance(value, Loss):
            further[name + WEIGHT] = _weight(value)
            value = value.total
        elif isinstance(value, Sum):
            name, value = name + SUM, value.total
        elif isinstance(value, PerSample):
            name, value = name + SAMPLES, value.values
        further[name] = value.detach().clone()
    return loss, further


def names_of(result: Any) -> tuple[str, ...]:
    """Return the names of a loss's further values, in the order in which sections return them."""
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    weights = [name + WEIGHT for name, value in metrics.items() if isinstance(value, Loss)]
    kinds = {Sum: SUM, PerSample: SAMPLES}
    named = [name + kinds.get(type(value), "") for name, value in metrics.items()]
    return tuple(sorted([*named, *weights, *([WEIGHT] if isinstance(loss, Loss) else [])]))


def _weight(loss: Loss) -> Tensor:
    import torch

    weight, total = loss.weight, loss.total
    if not isinstance(weight, torch.Tensor):
        return torch.scalar_tensor(weight, dtype=torch.float64, device=total.device)
    return weight.detach().to(torch.float64, copy=True)
