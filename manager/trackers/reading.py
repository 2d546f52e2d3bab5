"""Reads the events of a run from its journal, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manager.accounting.spent import Prices
from manager.journal.journal import Journal
from manager.journal.records import Entry
from manager.report.events import morph_line
from manager.report.fold import FoldReader, Noted
from manager.report.steps import Step
from manager.report.values import (
    EvaluationRecord,
    MorphRecord,
    Saved,
    SessionBegun,
    SessionOver,
    ShapeSpan,
)
from morph.contract.happenings import (
    CheckpointDone,
    EvaluationDone,
    Happening,
    RunEnded,
    ShapeChanged,
    StepDone,
    Trouble,
)

_KINDS = (SessionBegun, ShapeSpan, MorphRecord, EvaluationRecord, Saved, Trouble, SessionOver, Step)
_SHORTEST_S = 60.0
"""Seconds. A shorter interval between checkpoints counts as this, so that a slightly late save is not called missed."""


class HappeningsReader:
    """Reads a journal from the run's first line, continuing where it stopped, so that each event comes once.

    ``missed_saves``: the number of intervals without a complete checkpoint after which this is reported.
    """

    def __init__(self, checkpoint_url: str, prices: Prices | None = None, missed_saves: int = 3) -> None:
        self._checkpoint_url, self._prices, self._missed_saves = checkpoint_url, prices, missed_saves
        self._unsaved_s, self._is_missed = 0.0, False
        self._follower = FoldReader(*_KINDS)
        self._version = self._step = self._evaluated = self._saved = 0
        self._span: ShapeSpan | None = None
        self._pause_s = 0.0
        self._begun = self._over = False

    def new(self, journal: Journal, most: int = -1) -> Iterator[tuple[int, list[Happening]]]:
        """Read the journal on to its end; yield each line's number and events. RunDirError if it cannot be read.

        ``most``: the number of lines read at once.
        """
        for sequence, noted in self._follower.new(journal, most):
            yield sequence, list(self._happened(noted))

    def take(self, entry: Entry) -> Iterator[Happening]:
        """Process one line; yield its events."""
        return self._happened(self._follower.take(entry))

    def _happened(self, noted: Sequence[Noted]) -> Iterator[Happening]:
        """Yield a line's events: its steps, with the pause before them, and then its other events."""
        morphs = [record for _, _, record in noted if isinstance(record, MorphRecord) and record.pause_ms is not None]
        self._pause_s += sum((morph.pause_ms or 0.0) / 1e3 for morph in morphs)
        for _, _, record in noted:
            if isinstance(record, SessionBegun):
                self._begun = self._over = False
                self._version, self._saved = record.version, max(self._saved, record.saved or 0)
            elif isinstance(record, Step):
                yield from self._decided(record)
        for _, time_s, record in noted:
            if isinstance(record, EvaluationRecord) and record.version > self._evaluated:
                self._evaluated = record.version
                yield EvaluationDone(step=record.version, time_s=time_s, loss=record.loss, metrics=record.metrics)
            elif isinstance(record, Saved) and record.version > self._saved:
                self._saved, self._unsaved_s, self._is_missed = record.version, 0.0, False
                url = f"{self._checkpoint_url}/v{record.version:08d}"
                yield CheckpointDone(step=record.version, time_s=time_s, url=url)
        for _, time_s, record in noted:
            if isinstance(record, ShapeSpan):
                self._span = record
                if not self._begun:
                    self._begun = True
                    sentence = f"{record.shape} on {record.num_workers} workers, from step {record.first_version}"
                    yield self._changed(record, record.first_version, time_s, None, sentence)
            elif isinstance(record, MorphRecord) and record.pause_ms is not None and self._span is not None:
                yield self._changed(self._span, self._version, time_s, record.pause_ms / 1e3, morph_line(record))
            elif isinstance(record, Trouble):
                yield record
            elif isinstance(record, SessionOver) and not self._over:
                self._over = True
                yield RunEnded(step=record.version, time_s=time_s, **record.model_dump(exclude={"version"}))
        if noted:
            yield from self._missed(noted[-1][1])

    def _decided(self, step: Step) -> Iterator[StepDone]:
        self._version = step.record.step + 1
        self._unsaved_s += step.record.duration_s
        if step.record.step >= self._step:
            self._step = step.record.step + 1
            pause_s, self._pause_s = self._pause_s, 0.0
            yield self._step_done(step, pause_s)

    def _missed(self, time_s: float) -> Iterator[Trouble]:
        due, unsaved_s = self._follower.fold.figures.next_save, self._unsaved_s
        if due is None or self._is_missed or unsaved_s <= self._missed_saves * max(due.interval_s, _SHORTEST_S):
            return
        self._is_missed = True  # reported once, until a save is complete
        saved = "there is none" if not self._saved else f"version {self._saved} is the last"
        sentence = (
            f"no checkpoint was completed in {unsaved_s:.0f} s of training ({saved}), but one is due every "
            f"{due.interval_s:.3g} s"
        )
        yield Trouble(step=self._version, time_s=time_s, kind="not_saved", sentence=sentence)

    def _changed(self, span: ShapeSpan, step: int, time_s: float, pause_s: float | None, sentence: str) -> ShapeChanged:
        return ShapeChanged(
            step=step,
            time_s=time_s,
            shape=span.shape,
            num_workers=span.num_workers,
            pause_s=pause_s,
            sentence=sentence,
        )

    def _step_done(self, step: Step, pause_s: float) -> StepDone:
        record, span = step.record, self._span
        assert span is not None, "a step was decided in no shape"
        seconds = record.duration_s
        return StepDone(
            step=record.step + 1,
            time_s=record.decided_at_s,
            loss=record.loss,
            metrics=record.metrics,
            gradient_norm=record.gradient_norm,
            learning_rates=record.learning_rates,
            skipped=record.skipped,
            seconds=seconds,
            pause_s=pause_s,
            examples_per_s=span.batch_size / seconds if seconds else None,
            tokens_per_s=record.weight / seconds if record.weight is not None and seconds else None,
            shape=span.shape,
            num_workers=span.num_workers,
            dollars=step.cost.dollars(self._prices),
        )
