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
from manager.journal.condensed import Cut, Kept
from manager.journal.journal import Journal
from manager.journal.records import VM_KILLED, Decided, DecisionRecord, Fact, JournalLine
from manager.report.events import ROUTINE, Told
from manager.report.fold import NAMES, Fold, Noted
from manager.report.steps import Step, columns_of
from morph.contract.messages import Committed, Prepared

LONG = 100_000
"""The number of lines above which progress of condensing is reported."""
_SAVES = frozenset({ReasonCode.COMMIT_STARTED, ReasonCode.CHECKPOINT_SEALED, ReasonCode.CHECKPOINT_COMPLETE})
_OF_STEPS = (SendStep, SendCommit, NoteNextSave, NoteCorrection, WriteManifest)


class Condenser:
    """The keeper of a journal: its fold, and what the lines added until that is written."""

    def __init__(self, journal: Journal) -> None:
        head = journal.head()
        self.fold, self.num_taken = Fold.at(journal, head), 0
        self.noted: list[Noted] = []
        self._kept: set[int] = set()
        self._last = (0, 0.0) if head is None else (head.sequence, head.time_s)
        self._trains, self._killed = True, False

    @property
    def may_cut(self) -> bool:
        """Whether every answer to a step has its decision, so that a reader that starts here misses no answer."""
        return not self.fold.prepared or not self._trains

    def take(self, line: JournalLine) -> None:
        fold, self._last = self.fold, (line.sequence, line.time_s)
        was_open, num_decided = fold.morphs.open is not None, fold.figures.num_decided
        self.noted += [each for each in fold.step(line) if not (isinstance(each.record, Told) and each.record.routine)]
        if isinstance(line.says, Fact) and line.says.name == VM_KILLED:
            self._killed = True  # the change of shape begins with the next lines
        if isinstance(line.says, Decided):
            self.num_taken += 1
            event, record = line.says.event, line.says.record
            self._trains = record.phase in (Phase.TRAINING, Phase.COMMITTING)
            changes = was_open or fold.morphs.open is not None or self._killed
            self._killed = self._killed and fold.figures.num_decided == num_decided
            if is_kept(event, record, changes=changes):
                self._kept |= {line.sequence - 1, line.sequence}

    def cut(self) -> Cut:
        sequence, time_s = self._last
        self.fold.prepared.clear()
        return Cut(
            sequence=sequence,
            time_s=time_s,
            states=self.fold.states,
            columns=columns_of([noted.record for noted in self.noted if isinstance(noted.record, Step)]),
            records=[
                Kept(at, at_s, NAMES[type(record)], record.model_dump_json())
                for at, at_s, record in self.noted
                if not isinstance(record, Step)
            ],
            kept=frozenset(self._kept),
        )

    def forget(self) -> None:
        self.noted.clear()
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
