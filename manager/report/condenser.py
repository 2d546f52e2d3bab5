"""Follows the lines that a manager writes into its journal, and condenses them; see docs/decisions/0031."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from manager.controller.state.actions import (
    NoteCorrection,
    NoteNextSave,
    ReasonCode,
    SendCommit,
    SendStep,
    WriteManifest,
)
from manager.controller.state.events import (
    ComputeTimesSeen,
    Event,
    ManifestWritten,
    Tick,
    UnitsWritten,
    WorkerAnswered,
)
from manager.controller.state.state import Phase
from manager.history.lives import OF_LIVES, LivesReader
from manager.journal.condensed import ACCOUNT, Cut, Kept
from manager.journal.journal import Journal
from manager.journal.records import VM_KILLED, Decided, DecisionRecord, Fact, Line
from manager.report.events import OF_EVENTS, ROUTINE, EventReader, Told
from manager.report.journal_reader import NAMES, OF_RUN, RunReader
from manager.report.steps import Step, columns_of
from morph.contract.messages import Committed, Prepared

LONG = 100_000
"""The number of lines above which progress of condensing is reported."""
_SAVES = frozenset({ReasonCode.COMMIT_STARTED, ReasonCode.CHECKPOINT_SEALED, ReasonCode.CHECKPOINT_COMPLETE})
_OF_STEPS = (SendStep, SendCommit, NoteNextSave, NoteCorrection, WriteManifest)


class Condenser:
    """The keeper of a journal: its readers, and their results until written; ``take`` gets later lines."""

    def __init__(self, journal: Journal) -> None:
        head = journal.head()
        self.run, self.lives = RunReader.at(journal, head), LivesReader.at(journal, head)
        self.events = EventReader() if head is None else EventReader.at(journal, head)
        self.num_taken = 0
        self._told: list[Told] = []
        self._over: list[Kept] = []
        self._kept: set[int] = set()
        self._last = (0, 0.0) if head is None else (head.sequence, head.time_s)
        self._trains, self._killed = True, False

    @property
    def may_cut(self) -> bool:
        """Whether every answer to a step has its decision, so that a reader that starts here misses no answer."""
        return not self.run.prepared or not self._trains

    def take(self, line: Line) -> None:
        was_open, num_decided = self.run.morphs.open is not None, self.run.num_decided
        self.run.take_line(line)
        self.lives.take_line(line)
        over = (life.model_dump_json() for life in self.lives.over)
        self._over += [Kept(line.sequence, line.time_s, OF_LIVES, life) for life in over]
        self.lives.over.clear()
        self._told += [told for told in self.events.take_line(line) if not told.routine]
        self._last = (line.sequence, line.time_s)
        if isinstance(line.says, Fact) and line.says.name == VM_KILLED:
            self._killed = True  # the change of shape begins with the next lines
        if isinstance(line.says, Decided):
            self.num_taken += 1
            event, record = line.says.event, line.says.record
            self._trains = record.phase in (Phase.TRAINING, Phase.COMMITTING)
            changes = was_open or self.run.morphs.open is not None or self._killed
            self._killed = self._killed and self.run.num_decided == num_decided
            if is_kept(event, record, changes=changes):
                self._kept |= {line.sequence - 1, line.sequence}

    def cut(self) -> Cut:
        sequence, time_s = self._last
        self.run.prepared.clear()
        records = [
            Kept(at, at_s, NAMES[type(one)], one.model_dump_json())
            for at, at_s, one in self.run.told
            if not isinstance(one, Step)
        ]
        records += self._over
        records += [Kept(told.sequence, told.time_s, OF_EVENTS, told.model_dump_json()) for told in self._told]
        return Cut(
            sequence=sequence,
            time_s=time_s,
            states={
                OF_RUN: self.run.state_json,
                OF_LIVES: self.lives.state_json,
                OF_EVENTS: self.events.state_json,
                ACCOUNT: self.run.ledger.account().model_dump_json(),
            },
            columns=columns_of(self.run.steps),
            records=records,
            kept=frozenset(self._kept),
        )

    def forget(self) -> None:
        for told in (self.run.told, self._over, self._told):
            told.clear()
        self._kept.clear()
        self.num_taken = 0


def condense_all(path: Path, tell: Callable[[str], None]) -> None:
    """Condense a journal, if there is one, before a run is resumed with it; report progress if that takes long.
    RunDirError if it cannot be opened or written now. None is made: the run may still be refused.
    """
    tenths = 0

    def told(line: int, last: int) -> None:
        nonlocal tenths
        if line < last and last > LONG and line * 10 // last > tenths:
            tenths = line * 10 // last
            tell(f"the run's journal is being condensed, once: {line} of {last} lines are done")

    if not path.exists():
        return
    with Journal.open(path) as journal:
        journal.condense(Condenser, tell=told)


def is_kept(event: Event, record: DecisionRecord, *, changes: bool) -> bool:
    """Whether an event and its decision are kept because they are unusual; ``changes``: the shape is being changed."""
    code = record.reason.code
    if isinstance(event, WorkerAnswered) and isinstance(event.answer, Prepared) and event.answer.timeline is not None:
        return True
    if record.reshape is not None or not all(isinstance(action, _OF_STEPS) for action in record.actions):
        return True
    is_step = isinstance(event, WorkerAnswered) and isinstance(event.answer, Prepared | Committed)
    is_usual = is_step or isinstance(event, ComputeTimesSeen | UnitsWritten | ManifestWritten | Tick)
    return changes or not is_usual or code not in ROUTINE | _SAVES
