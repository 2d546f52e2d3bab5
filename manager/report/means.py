"""Combines the workers' reports on steps and evaluations, and keeps a bounded history of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from manager.controller.state.evaluations import totals_of
from manager.report.values import EvaluationRecord
from morph.contract.messages import Committed, Evaluation, Prepared

MOST_EVALUATIONS = 100
MOST_POINTS = 512


def extreme_rates(answers: Iterable[Prepared]) -> tuple[float, float] | None:
    """Return the lowest and the highest learning rate of a step; None if no worker reported one."""
    known = [answer.learning_rates for answer in answers if answer.learning_rates is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


@dataclass
class EvaluationReader:
    """Combines workers' answers into evaluations, the newest of each version; keeps the last ``MOST_EVALUATIONS``."""

    _shares: dict[int, list[Evaluation]] = field(default_factory=dict)
    _unfinished: dict[int, EvaluationRecord] = field(default_factory=dict)
    _complete: dict[int, EvaluationRecord] = field(default_factory=dict)

    def take(self, answer: Prepared | Committed) -> EvaluationRecord | None:
        """Add one worker's answer; return the evaluation that it completes, with the job's own metrics."""
        finished, share = answer.finished, answer.evaluation
        completed = None
        if finished is not None and finished.version in self._unfinished:
            record = self._unfinished.pop(finished.version)
            numbers = {name: value for name, value in finished.values.items() if value is not None}
            completed = self.note(record.model_copy(update={"metrics": record.metrics | numbers}))
        if share is None:
            return completed
        shares = self._shares.setdefault(share.version, [])
        shares.append(share)
        totals = totals_of(shares)
        if totals is None:
            return completed
        del self._shares[share.version]
        values = dict(totals.values)
        loss = values.pop("loss")
        numbers = {name: value for name, value in values.items() if value is not None}
        record = EvaluationRecord(version=share.version, loss=loss, metrics=numbers)
        if share.finishes:
            self._unfinished[share.version] = record
            return completed
        return self.note(record)

    def note(self, record: EvaluationRecord) -> EvaluationRecord:
        """Add a complete evaluation."""
        self._complete[record.version] = record
        if len(self._complete) > MOST_EVALUATIONS:
            del self._complete[min(self._complete)]
        return record

    def all(self) -> tuple[EvaluationRecord, ...]:
        """Return the last complete evaluations, by version."""
        return tuple(self._complete[version] for version in sorted(self._complete))


@dataclass
class Series:
    """Points (time in s, value), evenly thinned: if there are too many, every other one goes, but never the newest."""

    _kept: list[tuple[float, float]] = field(default_factory=list)
    _newest: tuple[float, float] | None = None
    _stride: int = 1
    _seen: int = 0

    @property
    def points(self) -> list[tuple[float, float]]:
        """The points that are kept, oldest first."""
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
