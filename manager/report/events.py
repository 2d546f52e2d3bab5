"""Turns a journal into lines for people and programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter

from manager.controller.state.actions import Finish, ReasonCode
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Event
from manager.journal.condensed import VERSION, Head
from manager.journal.journal import Journal
from manager.journal.records import (
    DIED_WITH_MANAGER,
    OUTLIVES,
    SESSION_OVER,
    TOOK_OVER,
    TRACE_PLAYED,
    VM_KILLED,
    VM_UP,
    Decided,
    DecisionRecord,
    Entry,
    Fact,
    Line,
    LineReader,
)
from manager.report.journal_reader import RunReader, config_at, evaluations_in
from manager.report.milestones import AS_SAID, Milestones
from morph.contract.base import Value

OF_EVENTS = "event"
"""The key of this reader's state in a cut, and the kind of its records in the journal."""
ROUTINE = frozenset(
    {
        ReasonCode.AWAITING_ANSWERS,
        ReasonCode.STEP_STARTED,
        ReasonCode.STEP_DECIDED,
        ReasonCode.TIMES_NOTED,
        ReasonCode.UNITS_NOTED,
        ReasonCode.COMMIT_WAIT,
        ReasonCode.START_WAIT,
        ReasonCode.NOTHING_DUE,
        ReasonCode.IGNORED,
    }
)
INNER_FACTS = frozenset(
    {
        DIED_WITH_MANAGER,
        OUTLIVES,
        SESSION_OVER,
        TOOK_OVER,
        TRACE_PLAYED,
        VM_KILLED,
        VM_UP,
        "connection_broken",
        "job_code",
        "node_enrolled",
        "not_carried_out",
        "probe_failed",
        "vm_granted",
        "vm_released",
        "vm_requested",
    }
)


class Told(Value):
    """One thing that happened. ``code``: a reason's, a milestone's or a fact's name.

    ``inner``: it is about the manager's work, not the run's outcome; ``routine``: it is inner, and happens all the
    time.
    """

    sequence: int
    time_s: float
    code: str
    sentence: str
    phase: str | None = None
    generation: int | None = None
    version: int | None = None
    inner: bool = False
    routine: bool = False

    @property
    def line(self) -> str:
        """The event as text: time of day (UTC), version, code, sentence."""
        clock = datetime.fromtimestamp(self.time_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        at = "-" if self.version is None else str(self.version)
        return f"{clock}  {at:>6}  {self.code:<20}  {' | '.join(self.sentence.splitlines())}"


@dataclass
class EventReader:
    """A reader that can continue where it stopped. ``over``: the last line read says that the run has ended."""

    sequence: int = 0
    over: bool = False
    _config: ControllerConfig | None = None
    _milestones: Milestones = field(default_factory=Milestones)
    _lines: Any = field(default_factory=LineReader)

    @classmethod
    def at(cls, journal: Journal, head: Head) -> EventReader:
        """Return the reader in its state after the last condensed line."""
        if head.version == VERSION:
            reader = _STATE.validate_json(head.states[OF_EVENTS])
        else:
            run = RunReader.at(journal, head)
            reader = cls(head.sequence, run.finish is not None and not run.finish.rests)
            told = [record.version for record in evaluations_in(journal)]
            reader._milestones = Milestones(run.morphs, _evaluated=max(told, default=-1))
        reader._config = config_at(journal, head.sequence)
        return reader

    @property
    def state_json(self) -> str:
        return _STATE.dump_json(self, exclude={"_config", "_lines"}).decode()

    def new(self, journal: Journal) -> Iterator[Told]:
        """Return the events after the part that was read; routine events only from lines that are not condensed yet."""
        tail = journal.tail(self.sequence, (OF_EVENTS,))
        yield from (Told.model_validate_json(payload) for _, _, _, payload in tail.records)
        if tail.head is not None:
            newer = EventReader.at(journal, tail.head)
            self.over, self._config, self._milestones = newer.over, newer._config, newer._milestones
            self.sequence, self._lines = tail.head.sequence, LineReader()
        yield from self.take(tail.entries)

    def take(self, entries: Iterable[Entry]) -> Iterator[Told]:
        """Return the events of lines."""
        for entry in entries:
            line = self._lines.line(entry)
            self.sequence = entry.sequence
            if line is not None:
                yield from self.take_line(line)

    def take_line(self, line: Line) -> Iterator[Told]:
        """Return the events of one line."""
        match line.says:
            case ControllerConfig() as config:
                self.over = False
                self._config = config
                self._milestones.begin_session(config.initial_version)
                yield Told(sequence=line.sequence, time_s=line.time_s, code="session", sentence="a manager starts")
            case Decided(event=event, record=record):
                yield from self._decision(line, event, record)
            case Fact() as fact:
                yield self._fact(line, fact)

    def _decision(self, line: Line, event: Event, record: DecisionRecord) -> Iterator[Told]:
        self.over = self.over or any(isinstance(action, Finish) and not action.rests for action in record.actions)
        code = record.reason.code
        told = Told(
            sequence=line.sequence,
            time_s=line.time_s,
            code=code.value,
            sentence=record.reason.sentence,
            phase=record.phase.value,
            generation=record.generation,
            version=record.version,
            inner=code not in AS_SAID,
            routine=code in ROUTINE and not record.reshape,
        )
        if told.inner:
            yield told
        if self._config is not None:
            for milestone in self._milestones.take(self._config, event, record, line.time_s):
                update = {**milestone._asdict(), "inner": False, "routine": False}
                yield told.model_copy(update=update)

    def _fact(self, line: Line, fact: Fact) -> Told:
        self._milestones.morphs.take_fact(fact, line.time_s)
        sentence = ": ".join(text for text in (fact.worker, fact.detail) if text)
        inner = fact.name in INNER_FACTS
        return Told(sequence=line.sequence, time_s=line.time_s, code=fact.name, sentence=sentence, inner=inner)


_STATE = TypeAdapter(EventReader)
