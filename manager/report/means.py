"""Means over micro-batches, exactly summed and the same in every shape; and a history of them that stays small."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from manager.report.values import EvaluationRecord
from morph.contract.messages import WEIGHT, Evaluation, MicroBatchLoss, Prepared


def mean_loss(losses: Sequence[MicroBatchLoss]) -> float | None:
    """Return the mean loss, or total over weight; None for none, or when one is not a number."""
    entries = _each_once(losses)
    return _mean([entry.loss for entry in entries], [entry.metrics.get(WEIGHT) for entry in entries])


def mean_metrics(losses: Sequence[MicroBatchLoss]) -> dict[str, float]:
    """Return the mean, or total over weight, of each metric that is a number in every micro-batch."""
    entries = _each_once(losses)
    names = sorted(name for name in entries[0].metrics if not name.endswith(WEIGHT)) if entries else []
    means = {
        name: _mean([entry.metrics[name] for entry in entries], [entry.metrics.get(name + WEIGHT) for entry in entries])
        for name in names
    }
    return {name: mean for name, mean in means.items() if mean is not None}


def extreme_rates(answers: Iterable[Prepared]) -> tuple[float, float] | None:
    """Return the lowest and the highest learning rate of a step; None where nobody said one."""
    known = [answer.learning_rates for answer in answers if answer.learning_rates is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def _each_once(losses: Iterable[MicroBatchLoss]) -> list[MicroBatchLoss]:
    return list({entry.micro_batch: entry for entry in losses}.values())


def _mean(numbers: Sequence[float], weights: Sequence[float | None]) -> float | None:
    """Return the mean of numbers, or, where they are totals, their sum over that of their weights."""
    if not numbers or not all(map(math.isfinite, numbers)):
        return None
    given = [weight for weight in weights if weight is not None]
    weight = math.fsum(given) if given else len(numbers)
    return math.fsum(numbers) / weight if weight else None


@dataclass
class EvaluationReader:
    """Puts evaluations together from the shares of the last stages; of one that is run again the newest counts."""

    _entries: dict[int, dict[int, MicroBatchLoss]] = field(default_factory=dict)
    _complete: dict[int, EvaluationRecord] = field(default_factory=dict)

    def take(self, share: Evaluation | None) -> EvaluationRecord | None:
        """Take one worker's share, if it reports one; returns the evaluation that it completes."""
        if share is None:
            return None
        entries = self._entries.setdefault(share.version, {})
        entries.update({entry.micro_batch: entry for entry in share.losses})
        if len(entries) < share.num_micro_batches:
            return None
        losses = list(self._entries.pop(share.version).values())
        record = EvaluationRecord(version=share.version, loss=mean_loss(losses), metrics=mean_metrics(losses))
        self._complete[share.version] = record
        return record

    def all(self) -> tuple[EvaluationRecord, ...]:
        """Return the evaluations of which every micro-batch is there, by version."""
        return tuple(self._complete[version] for version in sorted(self._complete))


MOST_POINTS = 512


@dataclass
class Series:
    """Points (time in s, value), evenly thinned: when there are too many, every other one goes, and so it goes on.

    The newest point is always there.
    """

    _kept: list[tuple[float, float]] = field(default_factory=list)
    _newest: tuple[float, float] | None = None
    _stride: int = 1
    _seen: int = 0

    @property
    def points(self) -> list[tuple[float, float]]:
        """What is left of the history, oldest first."""
        if self._newest is None or self._kept[-1] == self._newest:
            return list(self._kept)
        return [*self._kept, self._newest]

    def add(self, time_s: float, value: float) -> None:
        """Append a point."""
        self._newest = (time_s, value)
        if self._seen % self._stride == 0:
            self._kept.append(self._newest)
        self._seen += 1
        if len(self._kept) == MOST_POINTS:
            self._kept = self._kept[::2]
            self._stride *= 2
