"""A spot trace: the arrivals, removals, notices and prices of VMs.

CSV with header ``time_s,event,node_id,zone,instance_type,source,notice_s,usd_per_h``, lines in time order. Only the
first three columns are required. Four kinds of event:

- ``add``: a VM comes.
- ``remove``: a VM is taken, ``notice_s`` seconds after its notice; empty: without one. A notice is part of the removal
  that it announces, not a line of its own: so no notice lacks its removal or its VM, and programs that do not know
  notices still see every VM come and go.
- ``price``: from this time on a VM of this ``zone`` and ``instance_type`` costs ``usd_per_h``; ``node_id`` is empty.
- ``end``: the recording ended at this time; the last line, all other columns empty. Without it a trace ends with its
  last event, and a quiet time after that is lost.
"""

from __future__ import annotations

import bisect
import csv
import heapq
import io
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from morph.contract import ranges
from morph.contract.base import Value, first_problem, read_text
from morph.contract.errors import TraceError
from morph.contract.files import write_output
from morph.contract.kinds import TRACE, kind_in, mistaken

HEADER = ("time_s", "event", "node_id", "zone", "instance_type", "source", "notice_s", "usd_per_h")
_COLUMNS = {
    "add": HEADER[:6],
    "remove": HEADER[:7],
    "price": tuple(name for name in HEADER if name not in ("node_id", "notice_s")),
    "end": ("time_s", "event"),
}
_MAY_BE_EMPTY = ("node_id", "notice_s", "usd_per_h")
UNKNOWN = "unknown"

MOST_S = 1e13
"""Later times are mistakes: seconds since 1970 replayed at the slowest speed are earlier."""

TimeS = Annotated[float, Field(ge=0, le=MOST_S)]


class TraceEvent(Value):
    """One VM comes (``add``) or is revoked (``remove``), ``notice_s`` seconds after its notice; None: without one."""

    time_s: TimeS
    event: Literal["add", "remove"]
    node_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    zone: str = UNKNOWN
    instance_type: str = UNKNOWN
    source: str = ""
    notice_s: Annotated[float, Field(gt=0)] | None = None


class TracePrice(Value):
    """From this time on a VM of this zone and instance type costs this much."""

    time_s: TimeS
    usd_per_h: Annotated[float, Field(ge=0, le=ranges.USD_PER_HOUR.high)]
    zone: str = UNKNOWN
    instance_type: str = UNKNOWN
    source: str = ""


class TraceEnd(Value):
    """The end of the recording."""

    time_s: TimeS


class Trace(Value):
    """Events and prices in time order; a node is added before it is removed, and is present at most once at a time."""

    events: tuple[TraceEvent, ...]
    prices: tuple[TracePrice, ...] = ()
    end_s: TimeS | None = Field(default=None, description="no event is later; None: the trace ends with its last event")

    @property
    def duration_s(self) -> float:
        """End of the recording: the end event, or the time of the last event or price."""
        return max((*(lines[-1].time_s for lines in (self.events, self.prices) if lines), self.end_s or 0.0))

    @property
    def max_nodes(self) -> int:
        """The largest number of VMs at once."""
        count = most = 0
        for event in self.events:
            count += 1 if event.event == "add" else -1
            most = max(most, count)
        return most

    def price_at(self, time_s: float, zone: str = UNKNOWN, instance_type: str = UNKNOWN) -> float | None:
        """Return the price of a VM at a time, in dollars per hour; None: the trace has none for such VMs until then."""
        since_s, usd_per_h = self._prices.get((zone, instance_type), ((), ()))
        place = bisect.bisect_right(since_s, time_s)
        return usd_per_h[place - 1] if place else None

    @cached_property
    def _prices(self) -> dict[tuple[str, str], tuple[Sequence[float], Sequence[float]]]:
        """Prices and their beginnings, by zone and instance type."""
        prices: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
        for price in self.prices:
            since_s, usd_per_h = prices.setdefault((price.zone, price.instance_type), ([], []))
            since_s.append(price.time_s)
            usd_per_h.append(price.usd_per_h)
        return dict(prices)

    def at_most(self, num_vms: int) -> Trace:
        """Return the trace for a user of at most so many VMs, who replaces each lost one by the VM that came first."""
        waiting: dict[str, TraceEvent] = {}
        taken: set[str] = set()
        events: list[TraceEvent] = []
        for event in self.events:
            if event.event == "add":
                waiting[event.node_id] = event
            elif event.node_id in taken:
                taken.remove(event.node_id)
                events.append(event)
            else:
                del waiting[event.node_id]
            while waiting and len(taken) < num_vms:
                node, came = next(iter(waiting.items()))
                del waiting[node]
                taken.add(node)
                events.append(came.model_copy(update={"time_s": event.time_s}))
        return self.model_copy(update={"events": tuple(events), "end_s": self.duration_s})

    def from_first_event(self) -> Trace:
        """Return the trace with its first event at time 0, since recordings may count from 1970."""
        start_s = self.events[0].time_s if self.events else 0.0
        prices = (price.model_copy(update={"time_s": max(0.0, price.time_s - start_s)}) for price in self.prices)
        events = (event.model_copy(update={"time_s": event.time_s - start_s}) for event in self.events)
        end_s = None if self.end_s is None else self.end_s - start_s
        return Trace(events=tuple(events), prices=tuple(prices), end_s=end_s)

    def scaled(self, factor: float) -> Trace:
        """Return the trace with every time multiplied by ``factor`` (0.01 = a hundred times faster)."""
        events = tuple(
            event.model_copy(
                update={
                    "time_s": event.time_s * factor,
                    "notice_s": None if event.notice_s is None else event.notice_s * factor,
                }
            )
            for event in self.events
        )
        prices = tuple(price.model_copy(update={"time_s": price.time_s * factor}) for price in self.prices)
        return Trace(events=events, prices=prices, end_s=None if self.end_s is None else self.end_s * factor)


def parse_trace(lines: Iterable[str], source: str) -> Trace:
    """Parse the CSV form; ``source`` names the file in errors."""
    reader = csv.DictReader(lines)
    try:
        return _parse(reader, source)
    except csv.Error as error:
        raise TraceError(f"is not CSV: {error}", source=f"{source}, line {reader.reader.line_num}") from error


def _parse(reader: csv.DictReader[str], source: str) -> Trace:
    columns = tuple(reader.fieldnames or ())
    doubled = len(set(columns)) < len(columns)
    if doubled or not set(HEADER[:3]) <= set(columns) or not set(columns) <= set(HEADER):
        raise TraceError("wrong header", source=f"{source}, line 1", value=",".join(columns), allowed=",".join(HEADER))
    lines: list[tuple[str, TraceEvent | TracePrice | TraceEnd]] = []
    for row in reader:
        where = f"{source}, line {reader.line_num}"
        if None in row or None in row.values():
            raise TraceError("wrong number of columns", source=where, allowed=f"{len(columns)} columns")
        lines.append((where, _line(row, where)))
        if len(lines) > 1 and isinstance(lines[-2][1], TraceEnd):
            raise TraceError("comes after the trace's end", source=where, field="event", value=row["event"])
    check_order(lines)
    events = tuple(line for _, line in lines if isinstance(line, TraceEvent))
    if not events:
        raise TraceError("holds no events", source=source)
    prices = tuple(line for _, line in lines if isinstance(line, TracePrice))
    end_s = next((line.time_s for _, line in lines if isinstance(line, TraceEnd)), None)
    return Trace(events=events, prices=prices, end_s=end_s)


def _line(row: dict[str, str], where: str) -> TraceEvent | TracePrice | TraceEnd:
    kind = row["event"]
    if kind not in _COLUMNS:
        raise TraceError(
            "is not a kind of event", source=where, field="event", value=kind, allowed=", ".join(map(repr, _COLUMNS))
        )
    given = {name: value for name, value in row.items() if value or (name not in _MAY_BE_EMPTY and kind != "end")}
    for name in given.keys() - set(_COLUMNS[kind]):
        raise TraceError(
            f"does not belong to a line of event {kind}", source=where, field=name, value=given[name], allowed="nothing"
        )
    try:
        if kind in ("price", "end"):
            del given["event"]
            return (TracePrice if kind == "price" else TraceEnd).model_validate(given)
        return TraceEvent.model_validate(given)
    except ValidationError as error:
        field, problem, value = first_problem(error)
        shown = value if isinstance(value, str) else None  # otherwise the value is the whole line, as a cell is empty
        raise TraceError(problem, source=where, field=field, value=shown) from error


def check_order(lines: Sequence[tuple[str, TraceEvent | TracePrice | TraceEnd]], unit: str = "s") -> None:
    """Check that lines, each with its place in the file, are in time order, and that VMs leave after they came.

    ``unit``: of the file's times, ``s`` or ``ms``. Raises TraceError naming the line.
    """
    scale = 1000 if unit == "ms" else 1
    for (_, before), (where, line) in pairwise(lines):
        if line.time_s < before.time_s:
            raise TraceError(
                "time steps back, so the file is not sorted by time",
                source=where,
                field=f"time_{unit}",
                value=line.time_s * scale,
                allowed=f"at least {before.time_s * scale:.16g}, the time of the line before it",
            )
    added_s: dict[str, float] = {}
    for where, line in lines:
        if isinstance(line, TraceEvent):
            _check_presence(line, added_s, where)


def _check_presence(event: TraceEvent, added_s: dict[str, float], where: str) -> None:
    """Check an event against earlier ones; ``added_s``: arrival times of the present VMs."""
    node = event.node_id
    if (node in added_s) == (event.event == "add"):
        state = "already there" if event.event == "add" else "not there"
        raise TraceError(f"node is {state}", source=where, field="node_id", value=node)
    if event.event == "add":
        added_s[node] = event.time_s
        return
    lived_s = event.time_s - added_s.pop(node)
    if event.notice_s is not None and event.notice_s > lived_s + 1e-9 * event.time_s:  # times may have been scaled
        raise TraceError(
            "notice of a node that is not present yet",
            source=where,
            field="notice_s",
            value=event.notice_s,
            allowed=f"at most {lived_s}, the lifetime of the node",
        )


def load_trace(path: Path) -> Trace:
    """Read a trace file."""
    return parse_trace(io.StringIO(trace_text(path)), str(path))


def trace_text(path: Path) -> str:
    """Read the text of a trace in any form; TraceError if it cannot be read or is another kind of file."""
    text = read_text(path, TraceError, "utf-8-sig", TRACE)
    kind = kind_in(text)
    if kind not in (None, TRACE):
        raise TraceError(mistaken(path, ""), source=str(path), allowed=TRACE.wanted)
    return text


def write_trace(trace: Trace, path: Path) -> None:
    """Write the CSV form, with times in full and without columns that would be empty."""
    columns = [*HEADER[:6]]
    if any(event.notice_s is not None for event in trace.events):
        columns.append("notice_s")
    if trace.prices:
        columns.append("usd_per_h")
    lines: Iterable[TraceEvent | TracePrice] = heapq.merge(trace.prices, trace.events, key=lambda line: line.time_s)
    out = io.StringIO()
    writer = csv.DictWriter(out, columns)
    writer.writeheader()
    for line in lines:
        cells = {name: _cell(value) for name, value in line.model_dump(exclude_none=True).items()}
        writer.writerow({"event": "price", **cells})
    if trace.end_s is not None:
        writer.writerow({"event": "end", "time_s": _cell(max(trace.end_s, trace.duration_s))})
    write_output(path, out.getvalue())


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else repr(value).removesuffix(".0")
