"""A spot trace: when VMs come and go. CSV with header ``time_s,event,node_id,zone,instance_type,source``.

Only the first three columns are required; lines are in time order.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from morph.contract.base import Value, first_problem
from morph.contract.errors import TraceError

HEADER = ("time_s", "event", "node_id", "zone", "instance_type", "source")


class TraceEvent(Value):
    """One VM comes (``add``) or is revoked without warning (``remove``)."""

    time_s: Annotated[float, Field(ge=0)]
    event: Literal["add", "remove"]
    node_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    zone: str = "unknown"
    instance_type: str = "unknown"
    source: str = ""


class Trace(Value):
    """Events in time order; a node is added before it is removed, and each at most once at a time."""

    events: tuple[TraceEvent, ...]

    @property
    def duration_s(self) -> float:
        """Time of the last event."""
        return self.events[-1].time_s if self.events else 0.0

    @property
    def max_nodes(self) -> int:
        """The largest number of VMs at once."""
        count = most = 0
        for event in self.events:
            count += 1 if event.event == "add" else -1
            most = max(most, count)
        return most

    def scaled(self, factor: float) -> Trace:
        """The same trace with every time multiplied by ``factor`` (0.01 = a hundred times faster)."""
        return Trace(events=tuple(event.model_copy(update={"time_s": event.time_s * factor}) for event in self.events))


def parse_trace(lines: Iterable[str], source: str) -> Trace:
    """Parse the CSV form; ``source`` names the file in errors.

    Raises:
        TraceError: naming file, line, field, value and what is allowed.
    """
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
    events: list[TraceEvent] = []
    alive: set[str] = set()
    for row in reader:
        where = f"{source}, line {reader.line_num}"
        if None in row or None in row.values():
            raise TraceError("wrong number of columns", source=where, allowed=f"{len(columns)} columns")
        try:
            event = TraceEvent.model_validate(row)
        except ValidationError as error:
            field, problem, value = first_problem(error)
            raise TraceError(problem, source=where, field=field, value=value) from error
        if events and event.time_s < events[-1].time_s:
            raise TraceError(
                "time steps back",
                source=where,
                field="time_s",
                value=event.time_s,
                allowed=f"at least {events[-1].time_s}",
            )
        if (event.node_id in alive) == (event.event == "add"):
            state = "already there" if event.event == "add" else "not there"
            raise TraceError(f"node is {state}", source=where, field="node_id", value=event.node_id)
        (alive.add if event.event == "add" else alive.discard)(event.node_id)
        events.append(event)
    if not events:
        raise TraceError("holds no events", source=source)
    return Trace(events=tuple(events))


def load_trace(path: Path) -> Trace:
    """Read a trace file.

    Raises:
        TraceError: naming file, line, field, value and what is allowed.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return parse_trace(lines, str(path))
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror}", source=str(path)) from error
    except UnicodeDecodeError as error:
        raise TraceError("is not UTF-8 text", source=str(path)) from error


def write_trace(trace: Trace, path: Path) -> None:
    """Write the CSV form; times in full, so that reading it gives the same trace."""
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(HEADER)
        for event in trace.events:
            time_s = repr(event.time_s).removesuffix(".0")
            writer.writerow([time_s, event.event, event.node_id, event.zone, event.instance_type, event.source])
