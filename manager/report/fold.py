"""Folds the lines of a journal, each once, into one state from which every reader answers; see docs/decisions/0031.

A journal of another form, or of another version, is treated in three places: damaged lines are left out by the
``Journal``, lines that this version cannot read are refused by ``LineReader``, and a condensed part whose state this
version cannot read is folded anew by ``Fold.at``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from manager.accounting.account import Account
from manager.accounting.ledger import Ledger
from manager.accounting.spent import NS_PER_S
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import WorkerAnswered
from manager.journal.condensed import ACCOUNT, SEQUENCE, VERSION, Column, Head, Kept
from manager.journal.journal import Journal
from manager.journal.records import (
    DIED_WITH_MANAGER,
    OUTLIVES,
    SESSION_OVER,
    TOOK_OVER,
    Decided,
    Entry,
    Fact,
    JournalLine,
    LineReader,
    lines,
)
from manager.report.events import Milestones, Told, told_of
from manager.report.figures import EvaluationReader, Figures, Seen
from manager.report.lives import Life, Lives
from manager.report.morphs import MorphReader
from manager.report.steps import SetBack, Step, steps_in
from manager.report.values import (
    EvaluationRecord,
    MorphRecord,
    Saved,
    SessionBegun,
    SessionOver,
    ShapeLeft,
    ShapeSpan,
    VmCount,
)
from morph.contract.base import Value
from morph.contract.happenings import Trouble
from morph.contract.messages import Committed, Prepared

RECORDS: dict[str, type[Value]] = {
    "session": SessionBegun,
    "shape": ShapeSpan,
    "left": ShapeLeft,
    "morph": MorphRecord,
    "evaluation": EvaluationRecord,
    "vms": VmCount,
    "set_back": SetBack,
    "saved": Saved,
    "trouble": Trouble,
    "over": SessionOver,
    "life": Life,
    "event": Told,
}
"""The types of records, besides decided steps, into which lines are condensed, by the name in the journal."""
NAMES: dict[type, str] = {kind: name for name, kind in RECORDS.items()}
FOLD = "fold"
"""The key of the fold's state in a cut."""


class Noted(NamedTuple):
    """A step or record, with its line and its time."""

    sequence: int
    time_s: float
    record: Value | Step


@dataclass
class Fold:
    """The state of all readers after a line. ``prepared``: answers to orders of the step that is not decided yet.

    ``ledger`` books time and money, ``morphs`` follows changes of shape, ``lives`` follows VMs, ``figures`` are those
    of the report, and ``milestones`` selects what a user sees of decisions. A line goes through each of them once.
    """

    config: ControllerConfig | None = None
    prepared: dict[tuple[int, int, int], dict[str, Prepared]] = field(default_factory=dict)
    evaluations: EvaluationReader = field(default_factory=EvaluationReader)
    ledger: Ledger = field(default_factory=Ledger)
    morphs: MorphReader = field(default_factory=MorphReader)
    lives: Lives = field(default_factory=Lives)
    figures: Figures = field(default_factory=Figures)
    milestones: Milestones = field(default_factory=Milestones)

    @classmethod
    def at(cls, journal: Journal, head: Head | None) -> Fold:
        """Return the state after the last condensed line, or at the beginning if there is none."""
        if head is None:
            return cls()
        if head.version != VERSION:
            return _folded_anew(journal, head)
        fold = _STATE.validate_json(head.states[FOLD])
        entry = journal.last_config(head.sequence)
        fold.config = None if entry is None else ControllerConfig.model_validate_json(entry.payload_json)
        return fold

    @property
    def states(self) -> dict[str, str]:
        """The state between two steps, as JSON; the account is also read by versions that cannot read the rest."""
        own = _STATE.dump_json(self, exclude={"config", "prepared"}).decode()
        return {FOLD: own, ACCOUNT: self.ledger.account().model_dump_json()}

    @property
    def version(self) -> int:
        """The last decided version."""
        return self.morphs.version

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, and does not only rest."""
        return self.figures.finish is not None and not self.figures.finish.rests

    def steps(self, entries: Iterable[Entry]) -> list[Noted]:
        """Process lines as they are in the journal; return all that they add."""
        return [noted for line in lines(entries) for noted in self.step(line)]

    def step(self, line: JournalLine) -> list[Noted]:
        """Process a line; return what it adds: steps and records of the report, finished lives, and events."""
        says, time_s = line.says, line.time_s
        event, milestones = told_of(line), list[tuple[str, str]]()
        match says:
            case ControllerConfig():
                self.ledger.begin_session(time_s)
                self.figures.begin_session(says, self.version, time_s)
                self.morphs.end_session(says.initial_version)
                self.config = says
                self.prepared.clear()
            case Fact():
                self._take_fact(says, time_s)
            case Decided():
                self.figures.pass_time(time_s)
                self.ledger.advance(time_s)
                if self.config is not None:
                    milestones = self._decided(self.config, says, line)
        self.lives.step(line)
        events = [event] if event.inner or not isinstance(says, Decided) else []
        outer = {"inner": False, "routine": False}
        events += [event.model_copy(update={"code": code, "sentence": text, **outer}) for code, text in milestones]
        noted = [*self.figures.over, *self.morphs.over, *self.lives.over, *events]
        for over in (self.figures.over, self.morphs.over, self.lives.over):
            over.clear()
        return [Noted(line.sequence, time_s, record) for record in noted]

    def _take_fact(self, fact: Fact, time_s: float) -> None:
        self.figures.pass_time(time_s)
        if fact.name == TOOK_OVER:
            self.ledger.unmanaged(time_s)
        elif fact.name == DIED_WITH_MANAGER:
            self.ledger.outlived(time_s)
        else:
            self.ledger.advance(time_s)
        if fact.name == OUTLIVES:
            self.ledger.outlives_ns = round(float(fact.detail) * NS_PER_S)
        elif fact.name in (SESSION_OVER, DIED_WITH_MANAGER):
            self.ledger.end_session()
        self.morphs.take_fact(fact, time_s)
        self.figures.take_fact(fact, time_s)

    def _decided(self, config: ControllerConfig, says: Decided, line: JournalLine) -> list[tuple[str, str]]:
        event, record = says.event, says.record
        answer = event.answer if isinstance(event, WorkerAnswered) else None
        answers: tuple[Prepared, ...] = ()
        if isinstance(event, WorkerAnswered) and isinstance(answer, Prepared):
            attempts = self.prepared.setdefault((answer.generation, answer.step, answer.attempt), {})
            attempts.setdefault(event.worker, answer)  # a late answer of an earlier attempt does not count
            if record.version == self.version + 1:
                answers = tuple(attempts.values())
                self.prepared.clear()
        evaluation = self.evaluations.take(answer) if isinstance(answer, Prepared | Committed) else None
        before = self.version, self.morphs.shape, self.morphs.phase
        seen = Seen(line.sequence, line.time_s, config, event, record, *before, answers, evaluation, self.ledger)
        self.figures.take(seen)
        self.ledger.take(event, record, answers)
        self.morphs.take(config, event, record, line.time_s)
        return list(self.milestones.take(seen, self.morphs))


_STATE = TypeAdapter(Fold)


def noted_in(records: Iterable[Kept]) -> Iterator[Noted]:
    """Read stored records."""
    for kept in records:
        yield Noted(kept.sequence, kept.time_s, RECORDS[kept.kind].model_validate_json(kept.payload_json))


class FoldReader:
    """Follows a journal from its first line: reading continues where it stopped, so that nothing comes twice.

    ``kinds``: the types of records, or ``Step``, that are wanted.
    """

    def __init__(self, *kinds: type[Value | Step]) -> None:
        self.fold = Fold()
        self._kinds, self._after, self._lines = kinds, 0, LineReader()

    def new(self, journal: Journal, most: int = -1) -> Iterator[tuple[int, list[Noted]]]:
        """Read on to the end; yield what each line added, with its number; routine events are not condensed.

        ``most``: the number of lines read at once. RunDirError: the journal cannot be read.
        """
        names = [NAMES[kind] for kind in self._kinds if kind in NAMES]
        while True:
            tail, num = journal.tail(self._after, names, rows=Step in self._kinds, most=most), 0
            if tail.head is not None:
                steps = (Noted(step.sequence, step.record.decided_at_s, step) for step in steps_in(journal, tail.rows))
                condensed = heapq.merge(noted_in(tail.records), steps, key=lambda noted: noted.sequence)
                for sequence, of_line in groupby(condensed, key=lambda noted: noted.sequence):
                    yield sequence, list(of_line)
                self.fold, self._after, self._lines = Fold.at(journal, tail.head), tail.head.sequence, LineReader()
            for entry in tail.entries if most < 0 else tuple(tail.entries):
                num += 1
                yield entry.sequence, self.take(entry)
            if most < 0 or num < most:
                return

    def take(self, entry: Entry) -> list[Noted]:
        """Process one line; return what it adds."""
        line, self._after = self._lines.line(entry), entry.sequence
        return [] if line is None else [item for item in self.fold.step(line) if isinstance(item.record, self._kinds)]


def _folded_anew(journal: Journal, head: Head) -> Fold:
    """Fold the condensed part: lines that are kept, the columns of the steps between them, and records.

    Only unfinished values at the head are missing: when the next save is due, a correction, half an evaluation, and the
    loss scale of one step.
    """
    fold, names = Fold(), (SEQUENCE, "step", "decided_at_s", "compute_s", "loss")
    steps, at = {name: journal.column(name) for name in names}, 0
    saved, session = journal.records("saved"), 0
    for line in lines(journal.each(until=head.sequence)):
        end = int(np.searchsorted(steps[SEQUENCE], line.sequence))
        _take_columns(fold, {name: column[at:end] for name, column in steps.items()})
        at = end + (end < len(steps[SEQUENCE]) and int(steps[SEQUENCE][end]) == line.sequence)
        session = line.sequence if isinstance(line.says, ControllerConfig) else session
        fold.step(line)
    _take_columns(fold, {name: column[at:] for name, column in steps.items()})
    figures, ledger = fold.figures, fold.ledger
    known = [each.version for at, _, each in noted_in(saved) if at > session and isinstance(each, Saved)]
    figures.checkpoint_version = max([*known, figures.checkpoint_version or 0]) or figures.checkpoint_version
    fold.evaluations, fold.milestones = EvaluationReader(), Milestones()
    for _, _, record in noted_in(journal.records("evaluation")):
        assert isinstance(record, EvaluationRecord)
        fold.evaluations.note(record)
        fold.milestones.evaluated = max(fold.milestones.evaluated, record.version)
    has_loss = ~np.isnan(steps["loss"])
    with_loss, losses = steps["step"][has_loss], steps["loss"][has_loss]
    if len(losses):
        first, last = (np.flatnonzero(with_loss == edge)[-1] for edge in (with_loss.min(), with_loss.max()))
        figures.first_loss = int(with_loss[first]), float(losses[first])
        figures.last_loss = int(with_loss[last]), float(losses[last])
    ledger.advance(head.time_s)
    ledger.saved(figures.checkpoint_version or 0)
    with suppress(KeyError, ValidationError):  # written by a version that stores no account
        ledger.rebook(Account.model_validate_json(head.states[ACCOUNT]))
    figures.loss_scale, figures.end_s = None, max(figures.end_s, head.time_s)
    fold.lives.last_s = max(fold.lives.last_s, head.time_s)
    fold.prepared.clear()
    return fold


def _take_columns(fold: Fold, steps: Mapping[str, Column]) -> None:
    """Process steps that were decided one after another, with nothing else between them."""
    num = len(steps[SEQUENCE])
    if num:
        end = int(steps["step"][-1]) + 1
        fold.ledger.advance(float(steps["decided_at_s"][-1]))
        fold.ledger.settle_all(int(steps["step"][0]), end, round(float(steps["compute_s"].sum()) * NS_PER_S))
        fold.figures.take_columns(steps)
        fold.morphs.version = end
        fold.prepared.clear()
