"""The journal's decisions as lines for people and programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from manager.controller.actions import Finish
from manager.controller.reasons import ReasonCode
from manager.journal.records import DecisionRecord, Entry, Fact
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


class Told(Value):
    """One thing that happened. ``code`` is a reason's, or a fact's name; ``routine``: it happens all the time."""

    sequence: int
    time_s: float
    code: str
    sentence: str
    phase: str | None = None
    generation: int | None = None
    version: int | None = None
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

    def take(self, entries: Iterable[Entry]) -> Iterator[Told]:
        """Tell the lines that say something."""
        for entry in entries:
            self.sequence = entry.sequence
            if entry.kind == "config":
                self.over = False
                yield Told(sequence=entry.sequence, time_s=entry.time_s, code="session", sentence="a manager begins")
            elif entry.kind == "decision":
                yield self._decision(entry)
            elif entry.kind == "fact":
                yield _fact(entry)

    def _decision(self, entry: Entry) -> Told:
        record = DecisionRecord.model_validate_json(entry.payload_json)
        self.over = self.over or any(isinstance(action, Finish) for action in record.actions)
        return Told(
            sequence=entry.sequence,
            time_s=entry.time_s,
            code=record.reason.code.value,
            sentence=record.reason.sentence,
            phase=record.phase.value,
            generation=record.generation,
            version=record.version,
            routine=record.reason.code in ROUTINE and not record.reshape,
        )


def _fact(entry: Entry) -> Told:
    fact = Fact.model_validate_json(entry.payload_json)
    about = [text for text in (fact.worker, fact.detail) if text]
    return Told(sequence=entry.sequence, time_s=entry.time_s, code=fact.name, sentence=": ".join(about))
