"""One change of shape, span by span and worker by worker, as recorded in the journal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from manager.controller.state.actions import Abort, EndWorker, SendStep
from manager.controller.state.events import EVENT, Event, WorkerAnswered, WorkerLost
from manager.journal.records import VM_KILLED, DecisionRecord, Entry, Fact
from manager.report.values import MorphRecord
from morph.contract.base import Value
from morph.contract.messages import Aborted, Prepared, Reshaped, WorkerId

MANAGER = "manager"


class MorphSpan(Value):
    """A span of one worker (or the manager), in seconds since the change began. An instant has equal ends."""

    who: str
    what: str
    start_s: float
    end_s: float
    detail: str = ""

    @property
    def duration_s(self) -> float:
        """The length of the span."""
        return self.end_s - self.start_s


class MorphTrace(Value):
    """The trace of one change: its spans in order of their start. ``began_at_s``: on the wall clock."""

    began_at_s: float
    from_shape: str
    to_shape: str | None
    cause: str
    spans: tuple[MorphSpan, ...] = Field(description="in order of start")


def morph_trace(entries: Iterable[Entry], morph: MorphRecord) -> MorphTrace:
    """Read the lines of a whole journal from the beginning of a change in its report to the next decided step."""
    began_s = morph.detected_at_s if morph.killed_at_s is None else min(morph.killed_at_s, morph.detected_at_s)
    collected, begins, ends = _Spans(began_s), False, False
    for entry in entries:  # by place, not by time: if a clock is set back, earlier lines have the same times
        begins = begins or entry.time_s == began_s
        if ends and entry.time_s != morph.resumed_at_s:
            break
        if begins:
            collected.take(entry)
            ends = entry.time_s == morph.resumed_at_s
    spans = sorted(collected.spans, key=lambda span: (span.start_s, span.end_s, span.who))
    return MorphTrace(
        began_at_s=began_s, from_shape=morph.from_shape, to_shape=morph.to_shape, cause=morph.cause, spans=tuple(spans)
    )


def chrome_trace(trace: MorphTrace) -> dict[str, Any]:
    """Return the trace as an object for JSON, in the format that ui.perfetto.dev opens."""
    rows = [MANAGER, *sorted({span.who for span in trace.spans} - {MANAGER})]
    events: list[dict[str, Any]] = []
    for pid, who in enumerate(rows):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": who}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
    for span in trace.spans:
        place = {"name": span.what, "pid": rows.index(span.who), "tid": 0, "ts": round(span.start_s * 1e6, 3)}
        args = {"detail": span.detail} if span.detail else {}
        if span.duration_s:
            events.append({**place, "ph": "X", "dur": round(span.duration_s * 1e6, 3), "args": args})
        else:
            events.append({**place, "ph": "i", "s": "p", "args": args})
    facts = {"from": trace.from_shape, "to": trace.to_shape, "cause": trace.cause}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


@dataclass
class _Spans:
    """``since_s``: for each worker, the order that it has not answered, and when the worker got it."""

    began_s: float
    spans: list[MorphSpan] = field(default_factory=list)
    since_s: dict[WorkerId, tuple[str, float]] = field(default_factory=dict)
    event: Event | None = None

    def take(self, entry: Entry) -> None:
        now_s = entry.time_s - self.began_s
        if entry.kind == "fact":
            fact = Fact.model_validate_json(entry.payload_json)
            if fact.name == VM_KILLED:
                self._instant(now_s, f"{fact.worker} killed")
        elif entry.kind == "event":
            self.event = EVENT.validate_json(entry.payload_json)
            self._event(self.event, now_s)
        elif entry.kind == "decision":
            self._decision(DecisionRecord.model_validate_json(entry.payload_json), now_s)

    def _event(self, event: Event, now_s: float) -> None:
        match event:
            case WorkerLost(cause=cause):
                for worker in event.workers:
                    self._instant(now_s, f"{worker} lost", cause)
                    self.since_s.pop(worker, None)
            case WorkerAnswered(worker=worker, answer=Aborted() as answer):
                self._close(worker, now_s, "give up the order", answer.detail)
            case WorkerAnswered(worker=worker, answer=Reshaped() as answer):
                _, sent_s = self.since_s.pop(worker, ("", now_s))
                state_s = max(sent_s, now_s - answer.state_s)
                groups_s = max(sent_s, state_s - answer.groups_s)
                self._span(worker, "order on its way", sent_s, groups_s)
                self._span(worker, "form groups", groups_s, state_s)
                self._span(worker, "take state", state_s, now_s, f"{answer.received_bytes} bytes from peers")
            case WorkerAnswered(worker=worker, answer=Prepared()):
                self._close(worker, now_s, "step")

    def _decision(self, record: DecisionRecord, now_s: float) -> None:
        self._instant(now_s, record.reason.code.value, record.reason.sentence)
        for action in record.actions:
            match action:
                case Abort(worker=worker):
                    self.since_s.setdefault(worker, ("abort", now_s))
                case EndWorker(worker=worker):
                    self.since_s.pop(worker, None)
                case SendStep(worker=worker):
                    self.since_s[worker] = ("step", now_s)
        for worker in record.reshape_receivers:
            self.since_s[worker] = ("reshape", now_s)

    def _close(self, worker: WorkerId, now_s: float, what: str, detail: str = "") -> None:
        _, sent_s = self.since_s.pop(worker, ("", now_s))
        self._span(worker, what, sent_s, now_s, detail)

    def _span(self, who: str, what: str, start_s: float, end_s: float, detail: str = "") -> None:
        if end_s > start_s:
            self.spans.append(MorphSpan(who=who, what=what, start_s=start_s, end_s=end_s, detail=detail))

    def _instant(self, now_s: float, what: str, detail: str = "") -> None:
        self.spans.append(MorphSpan(who=MANAGER, what=what, start_s=now_s, end_s=now_s, detail=detail))
