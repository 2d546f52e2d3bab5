"""From the lines of a journal to what happens in a run, each thing once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from manager.accounting.spent import Prices
from manager.controller.state.actions import NoteBadStep, ReasonCode
from manager.journal.records import DecisionRecord, Entry
from manager.report.journal_reader import RunReader
from manager.report.milestones import morph_line
from manager.report.values import EvaluationRecord, MorphRecord, StepRecord
from morph.contract.happenings import (
    CheckpointDone,
    EvaluationDone,
    Happening,
    RunEnded,
    ShapeChanged,
    StepDone,
    Trouble,
)

_TROUBLES = ('"setup_failed"', '"note_bad_step"')
"""What stands in the few lines of the journal that are read once more for them."""
_SHORTEST_S = 60.0
"""A shorter interval between checkpoints counts as this: a save that is a little late is not missed."""


class HappeningsReader:
    """Takes lines in their order, from the first one of the run; whatever was told before is not told again.

    Args:
        checkpoint_url: Where the run's checkpoints are.
        prices: That count for its VMs.
        missed_saves: Without a checkpoint for so many intervals it is said that none is completed.
    """

    def __init__(self, checkpoint_url: str, prices: Prices | None = None, missed_saves: int = 3) -> None:
        self._checkpoint_url, self._prices, self._missed_saves = checkpoint_url, prices, missed_saves
        self._unsaved_s, self._is_missed = 0.0, False
        self._reader = RunReader()
        self._step = self._evaluated = self._num_sessions = 0
        self._saved: int | None = None
        self._evaluation: EvaluationRecord | None = None
        self._num_morphs = 0
        self._pause_s = 0.0
        self._begun = self._over = False

    def take(self, entry: Entry) -> Iterator[Happening]:
        """Take in one line; yields what it tells."""
        reader = self._reader
        reader.take(entry)
        time_s = entry.time_s
        if reader.num_sessions != self._num_sessions:
            self._num_sessions, self._begun, self._over = reader.num_sessions, False, False
        records, reader.steps = reader.steps, []
        morphs = reader.morphs.over[self._num_morphs :]
        self._num_morphs = len(reader.morphs.over)
        self._pause_s += sum(morph.pause_ms / 1e3 for morph in morphs if morph.pause_ms is not None)
        for record in records:
            self._unsaved_s += record.duration_s
            if record.step >= self._step:
                self._step = record.step + 1
                pause_s, self._pause_s = self._pause_s, 0.0
                yield self._step_done(record, pause_s)
        newest = reader.evaluations.newest
        if newest is not None and newest is not self._evaluation:
            self._evaluation = newest
            if newest.version > self._evaluated:
                self._evaluated = newest.version
                yield EvaluationDone(step=newest.version, time_s=time_s, loss=newest.loss, metrics=newest.metrics)
        saved = reader.checkpoint_version
        if saved is not None and saved > (self._saved or 0):
            if entry.kind != "config":  # with which a session begins where the last one saved
                url = f"{self._checkpoint_url}/v{saved:08d}"
                yield CheckpointDone(step=saved, time_s=time_s, url=url)
            self._saved, self._unsaved_s, self._is_missed = saved, 0.0, False
        yield from self._changes(time_s, morphs)
        yield from self._troubles(entry)
        if reader.finish is not None and not self._over:
            self._over = True
            finish = reader.finish
            yield RunEnded(step=reader.version, time_s=time_s, outcome=finish.outcome, sentence=finish.sentence)

    def _troubles(self, entry: Entry) -> Iterator[Trouble]:
        reader, time_s = self._reader, entry.time_s

        def trouble(kind: Literal["setup_failed", "bad_step", "not_saved"], sentence: str) -> Trouble:
            return Trouble(step=reader.version, time_s=time_s, kind=kind, sentence=sentence)

        if entry.kind != "decision":
            return
        if any(mark in entry.payload_json for mark in _TROUBLES):
            record = DecisionRecord.model_validate_json(entry.payload_json)
            if record.reason.code is ReasonCode.SETUP_FAILED:
                yield trouble("setup_failed", record.reason.sentence)
            for action in record.actions:
                if isinstance(action, NoteBadStep):
                    yield trouble("bad_step", action.sentence)
        due, unsaved_s = reader.next_save, self._unsaved_s
        if due is None or self._is_missed or unsaved_s <= self._missed_saves * max(due.interval_s, _SHORTEST_S):
            return
        self._is_missed = True  # said once, until there is one
        saved = "there is none" if not self._saved else f"version {self._saved} is the last"
        sentence = f"no checkpoint was completed in {unsaved_s:.0f} s of training ({saved}), where one is due every"
        yield trouble("not_saved", f"{sentence} {due.interval_s:.3g} s")

    def _changes(self, time_s: float, morphs: list[MorphRecord]) -> Iterator[ShapeChanged]:
        reader = self._reader
        if not reader.shapes:
            return
        span = reader.shapes[-1]
        del reader.shapes[:-1]

        def changed(pause_s: float | None, sentence: str) -> ShapeChanged:
            return ShapeChanged(
                step=reader.version,
                time_s=time_s,
                shape=span.shape,
                num_workers=span.num_workers,
                pause_s=pause_s,
                sentence=sentence,
            )

        for morph in morphs:
            if morph.pause_ms is not None:
                yield changed(morph.pause_ms / 1e3, morph_line(morph))
        if not self._begun and span.end_s is None:
            self._begun = True
            yield changed(None, f"{span.shape} on {span.num_workers} workers, from step {span.first_version}")

    def _step_done(self, record: StepRecord, pause_s: float) -> StepDone:
        reader = self._reader
        spans = [span for span in reader.shapes if span.generation == record.generation]
        span = (spans or reader.shapes)[-1]
        bill = reader.ledger.account().bill(self._prices)
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
            dollars=None if bill is None else bill.total_usd,
        )
