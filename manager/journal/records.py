"""The content of one line of the journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from manager.controller.state.actions import Action, Reason, SendReshape
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import EVENT, Event
from manager.controller.state.state import Decision, Phase
from morph.contract.base import Shown, Value
from morph.contract.errors import RunDirError
from morph.contract.messages import ReshapeOrder, WorkerId

EntryKind = Literal["config", "event", "decision", "fact"]
VM_KILLED = "vm_killed"
VM_UP = "vm_up"
PREEMPTION_INJECTED = "preemption_injected"
"""A VM (``worker`` is its name) is preempted on purpose; ``detail``: why, and with what notice."""
PREEMPTION_FAILED = "preemption_failed"
"""A VM should have been preempted on purpose, but was not."""
TRACE_PLAYED = "trace_played"
TOOK_OVER = "took_over"
"""Another manager continues with the nodes; there was no manager since the previous line."""
OUTLIVES = "outlives"
"""``detail``: the seconds for which the nodes outlive a killed manager."""
DIED_WITH_MANAGER = "died_with_manager"
"""The manager was killed, and the nodes did not outlive it until now: this line's time is their last sign of life."""
CLUSTER_LOST = "cluster_lost"
"""``detail``: which part of the cluster was lost."""
SESSION_OVER = "session_over"
"""The session's nodes are gone; missing if the manager was killed."""


class Entry(Value):
    """One line, in the order written. ``time_s``: seconds of the run's clock (``RunClock``)."""

    sequence: int
    time_s: float
    kind: EntryKind
    payload_json: str


class Fact(Value):
    """A fact from the shell that is not an event, such as the kill of a VM (``name`` is then ``VM_KILLED``)."""

    name: str
    worker: WorkerId | None = None
    detail: Shown = ""


class TraceMoment(Value):
    """The position in a trace: the detail of a fact ``TRACE_PLAYED``.

    ``num_played``: the number of played events. ``clock_s``: the trace's time at that moment. ``runs``: the trace has
    continued since.
    """

    num_played: int = 0
    clock_s: float = 0.0
    runs: bool = False


class DecisionRecord(Value):
    """A decision without its state, which a replay restores; the reshape order, equal for all receivers, is apart."""

    reason: Reason
    phase: Phase
    generation: int
    version: int
    wake_at_s: float | None
    actions: tuple[Action, ...] = ()
    reshape: ReshapeOrder | None = None
    reshape_receivers: tuple[WorkerId, ...] = Field(default=(), description="in order of appearance")

    @classmethod
    def of(cls, decision: Decision) -> DecisionRecord:
        """Build the record of a decision."""
        reshapes = [action for action in decision.actions if isinstance(action, SendReshape)]
        return cls(
            reason=decision.reason,
            phase=decision.state.phase,
            generation=decision.state.generation,
            version=decision.state.version,
            wake_at_s=decision.wake_at_s,
            actions=tuple(action for action in decision.actions if not isinstance(action, SendReshape)),
            reshape=reshapes[0].order if reshapes else None,
            reshape_receivers=tuple(action.worker for action in reshapes),
        )


@dataclass(frozen=True, slots=True)
class Decided:
    """An event and its decision: two lines."""

    event: Event
    record: DecisionRecord


@dataclass(frozen=True, slots=True)
class JournalLine:
    """The content of one or two lines. ``sequence``: the number of its last line."""

    sequence: int
    time_s: float
    says: ControllerConfig | Fact | Decided


class LineReader:
    """Reads lines one after another; an event waits for its decision."""

    def __init__(self) -> None:
        self._event: Event | None = None

    def line(self, entry: Entry) -> JournalLine | None:
        """Read one line; None for an event, or for a decision whose event was not read.

        RunDirError if another version of Morph wrote it. Damage to a line that has a digest is found before.
        """
        try:
            return self._line(entry)
        except ValidationError as error:
            raise RunDirError(
                f"line {entry.sequence} of the journal cannot be read: it was written by another version of Morph, or "
                "is damaged",
                allowed="that version; or morph resume of the run's checkpoints in another run directory",
            ) from error

    def _line(self, entry: Entry) -> JournalLine | None:
        text = entry.payload_json
        says: ControllerConfig | Fact | Decided
        match entry.kind:
            case "config":
                says = ControllerConfig.model_validate_json(text)
            case "fact":
                says = Fact.model_validate_json(text)
            case "event":
                self._event = EVENT.validate_json(text)
                return None
            case _ if self._event is None:
                return None
            case _:
                says, self._event = Decided(self._event, DecisionRecord.model_validate_json(text)), None
        return JournalLine(entry.sequence, entry.time_s, says)


def lines(entries: Iterable[Entry]) -> Iterator[JournalLine]:
    """Read several lines."""
    reader = LineReader()
    for entry in entries:
        line = reader.line(entry)
        if line is not None:
            yield line
