"""One change of shape, span by span and worker by worker, as recorded in the journal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any

from pydantic import Field

from manager.controller.state.actions import Abort, EndWorker, SendStep
from manager.controller.state.events import Event, WorkerAnswered, WorkerLost
from manager.journal.records import VM_KILLED, Decided, DecisionRecord, Entry, Fact, JournalLine, lines
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
    collected, ends = _Spans(morph.began_s), False
    # by place, not by time: if a clock is set back, earlier lines have the same times
    for line in lines(dropwhile(lambda entry: entry.time_s != morph.began_s, entries)):
        if ends and line.time_s != morph.resumed_at_s:
            break
        collected.take(line)
        ends = line.time_s == morph.resumed_at_s
    spans = sorted(collected.spans, key=lambda span: (span.start_s, span.end_s, span.who))
    before, after = morph.from_shape, morph.to_shape
    return MorphTrace(
        began_at_s=morph.began_s, from_shape=before, to_shape=after, cause=morph.cause, spans=tuple(spans)
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

    def take(self, line: JournalLine) -> None:
        now_s = line.time_s - self.began_s
        match line.says:
            case Fact(name=name, worker=worker) if name == VM_KILLED:
                self._instant(now_s, f"{worker} killed")
            case Decided(event=event, record=record):
                self._event(event, now_s)
                self._decision(record, now_s)

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
