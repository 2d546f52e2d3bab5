"""A journal as lines for people and programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from manager.controller.state.actions import Finish, ReasonCode
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import EVENT, Event
from manager.journal.records import (
    DIED_WITH_MANAGER,
    OUTLIVES,
    SESSION_OVER,
    TOOK_OVER,
    TRACE_PLAYED,
    VM_KILLED,
    VM_UP,
    DecisionRecord,
    Entry,
    Fact,
)
from manager.report.milestones import AS_SAID, Milestones
from morph.contract.base import Value

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
        "probe_failed",
        "vm_granted",
        "vm_released",
        "vm_requested",
    }
)


class Told(Value):
    """One thing that happened. ``code``: a reason's, a milestone's or a fact's name.

    ``inner``: how the manager works, not what became of the run; ``routine``: and it happens all the time.
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
        """As text: time of day (UTC), version, code, sentence."""
        clock = datetime.fromtimestamp(self.time_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        at = "-" if self.version is None else str(self.version)
        return f"{clock}  {at:>6}  {self.code:<20}  {self.sentence}"


@dataclass
class EventReader:
    """Reads on where it stopped. ``over``: the run has ended, as far as was read."""

    sequence: int = 0
    over: bool = False
    _config: ControllerConfig | None = None
    _event: Event | None = None
    _milestones: Milestones = field(default_factory=Milestones)

    def take(self, entries: Iterable[Entry]) -> Iterator[Told]:
        """Tell what the lines say."""
        for entry in entries:
            self.sequence = entry.sequence
            if entry.kind == "config":
                self.over = False
                self._config = ControllerConfig.model_validate_json(entry.payload_json)
                self._milestones.begin_session(self._config.initial_version)
                yield Told(sequence=entry.sequence, time_s=entry.time_s, code="session", sentence="a manager starts")
            elif entry.kind == "event":
                self._event = EVENT.validate_json(entry.payload_json)
            elif entry.kind == "decision":
                yield from self._decision(entry)
            elif entry.kind == "fact":
                yield self._fact(entry)

    def _decision(self, entry: Entry) -> Iterator[Told]:
        record = DecisionRecord.model_validate_json(entry.payload_json)
        self.over = self.over or any(isinstance(action, Finish) and not action.rests for action in record.actions)
        code = record.reason.code
        told = Told(
            sequence=entry.sequence,
            time_s=entry.time_s,
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
        if self._config is not None and self._event is not None:
            for milestone in self._milestones.take(self._config, self._event, record, entry.time_s):
                update = {**milestone._asdict(), "inner": False, "routine": False}
                yield told.model_copy(update=update)

    def _fact(self, entry: Entry) -> Told:
        fact = Fact.model_validate_json(entry.payload_json)
        self._milestones.morphs.take_fact(fact, entry.time_s)
        sentence = ": ".join(text for text in (fact.worker, fact.detail) if text)
        inner = fact.name in INNER_FACTS
        return Told(sequence=entry.sequence, time_s=entry.time_s, code=fact.name, sentence=sentence, inner=inner)
