"""Readers for published formats of spot traces; errors name file and line.

- Morph's own CSV (``morph.contract.trace``).
- Events: lines ``time_ms,add|remove,node`` without a header (Bamboo, AWS).
- Counts: lines ``YYYY-MM-DD, HH:MM:SS, VMs`` (Bamboo, GCP). A line that is out of order in time only repeats known
  counts, and is ignored.
- Availability: JSON ``{"metadata": {"gap_seconds": g}, "data": [VMs, ...], "prices": [usd_per_h, ...]}``, one file for
  each zone and instance type, named ``ZONE_TYPE.json`` (SkyPilot's spot traces); ``prices`` may be absent.

Counts do not identify VMs: these get invented names, and lost ones are drawn with a fixed seed. So lifetimes in such
traces are not real, and losses are a lower bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from morph.contract import ranges
from morph.contract.errors import TraceError
from morph.contract.trace import MOST_S, UNKNOWN, Trace, TraceEvent, TracePrice, check_order, parse_trace, trace_text

MOST_VMS = 100_000
_EVENTS = re.compile(r"\s*\d+(\.\d+)?\s*,\s*(add|remove)\s*,.*")
_COUNTS = re.compile(r"\s*\d{4}-\d\d-\d\d\s*,\s*\d\d:\d\d:\d\d\s*,.*")
_NODE = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ZoneAndType:
    """Facts about VMs that a file does not contain."""

    zone: str = UNKNOWN
    instance_type: str = UNKNOWN


def import_trace(path: Path, place: ZoneAndType = ZoneAndType(), seed: int = 0) -> Trace:
    """Read one file of any of the formats; it begins at time 0.

    ``place`` has facts that the file does not contain. ``seed`` draws which VM is lost, where there is only their
    number. A TraceError names file, line (or entry), field, value and what is allowed.
    """
    text = trace_text(path)
    first = next((line for line in text.splitlines() if line.strip()), "")
    if "time_s" in first:
        return parse_trace(text.splitlines(keepends=True), str(path))
    if first.lstrip().startswith("{"):
        return _from_json(text, path, place, seed)
    readers: tuple[tuple[re.Pattern[str], Callable[..., Trace]], ...] = (
        (_EVENTS, _from_events),
        (_COUNTS, _from_counts),
    )
    for form, read in readers:
        if form.fullmatch(first):
            return read(list(_lines(text, path)), place, path, seed)
    raise TraceError(
        "is in no known format",
        source=f"{path}, line 1",
        value=first[:80],
        allowed="a header with time_s, time_ms,add|remove,node, YYYY-MM-DD, HH:MM:SS, VMs, or JSON with gap_seconds",
    )


def merged(traces: Sequence[tuple[str, Trace]]) -> Trace:
    """Combine several traces that begin together into one cluster; with several, nodes are named after their traces."""
    if len(traces) == 1:
        return traces[0][1]
    events = [
        event.model_copy(update={"node_id": f"{name}.{event.node_id}"})
        for name, trace in traces
        for event in trace.events
    ]
    prices = [price for _, trace in traces for price in trace.prices]
    return Trace(
        events=tuple(sorted(events, key=lambda event: event.time_s)),
        prices=tuple(sorted(prices, key=lambda price: price.time_s)),
        end_s=max((trace.end_s for _, trace in traces if trace.end_s is not None), default=None),
    )


def name_of(path: Path) -> str:
    """Return a name for the nodes of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem) or "trace"


def _lines(text: str, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each line and its cells; empty lines are ignored."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{path}, line {number}", [cell.strip() for cell in line.split(",")]


def _cells(where: str, cells: list[str], num: int, form: str) -> list[str]:
    if len(cells) != num:
        raise TraceError("wrong number of columns", source=where, value=",".join(cells)[:80], allowed=form)
    return cells


def _from_events(lines: list[tuple[str, list[str]]], place: ZoneAndType, path: Path, seed: int) -> Trace:
    del seed
    events: list[tuple[str, TraceEvent]] = []
    for where, line in lines:
        time_ms, event, node = _cells(where, line, 3, "time_ms,add|remove,node")
        time_s = _number(time_ms, where, "time_ms", "milliseconds, 0 or more", MOST_S * 1000) / 1000
        if event not in ("add", "remove"):
            raise TraceError("is not an event", source=where, field="event", value=event, allowed="'add' or 'remove'")
        if _NODE.fullmatch(node) is None:
            raise TraceError("is not a name", source=where, field="node", value=node, allowed="letters, digits, . _ -")
        fields = {"time_s": time_s, "event": event, "node_id": node}
        events.append((where, TraceEvent.model_validate(fields | _told(place, path))))
    check_order(events, "ms")
    return Trace(events=tuple(event for _, event in events)).from_first_event()


def _from_counts(lines: list[tuple[str, list[str]]], place: ZoneAndType, path: Path, seed: int) -> Trace:
    seen: list[tuple[float, int]] = []
    for where, line in lines:
        date, clock, count = _cells(where, line, 3, "YYYY-MM-DD, HH:MM:SS, VMs")
        try:
            time_s = (datetime.fromisoformat(f"{date} {clock}") - datetime(1970, 1, 1)).total_seconds()
        except ValueError as error:
            allowed = "YYYY-MM-DD, HH:MM:SS"
            raise TraceError("is not a time", source=where, value=f"{date}, {clock}", allowed=allowed) from error
        seen.append((time_s, _count(count, where)))
    kept: list[tuple[float, int]] = []
    for time_s, vms in reversed(seen):
        if not kept or time_s < kept[-1][0]:
            kept.append((time_s, vms))
    kept.reverse()
    counts = [(time_s - kept[0][0], vms) for time_s, vms in kept]
    return Trace(events=tuple(_of_counts(counts, place, path, seed)), end_s=counts[-1][0])


def _from_json(text: str, path: Path, place: ZoneAndType, seed: int) -> Trace:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"is not JSON: {error.msg}", source=f"{path}, line {error.lineno}") from error
    except RecursionError as error:
        raise TraceError("is nested too deeply", source=str(path)) from error
    metadata = content.get("metadata")
    gap = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if isinstance(gap, bool) or not isinstance(gap, int | float) or not 0 < gap <= 1e6:
        allowed = "seconds, more than 0, at most 1000000"
        raise TraceError(
            "is missing or wrong", source=str(path), field="metadata.gap_seconds", value=gap, allowed=allowed
        )
    data, prices = content.get("data"), content.get("prices") or []
    if not isinstance(data, list) or not data:
        raise TraceError(
            "is missing or empty", source=str(path), field="data", allowed="a list with the VMs of each time"
        )
    if not isinstance(prices, list) or len(prices) not in (0, len(data)):
        value = len(prices) if isinstance(prices, list) else prices
        raise TraceError(
            "are not as many", source=str(path), field="prices", value=value, allowed=f"{len(data)}, as data"
        )
    zone, _, instance = path.stem.partition("_")
    known = ZoneAndType(
        place.zone if place.zone != UNKNOWN else zone or UNKNOWN,
        place.instance_type if place.instance_type != UNKNOWN else instance or UNKNOWN,
    )
    counts = [(number * gap, _count(count, f"{path}, data[{number}]")) for number, count in enumerate(data)]
    usd = [
        _number(price, f"{path}, prices[{number}]", "prices", str(ranges.USD_PER_HOUR))
        for number, price in enumerate(prices)
    ]
    changed = [number for number, price in enumerate(usd) if not number or price != usd[number - 1]]
    return Trace(
        events=tuple(_of_counts(counts, known, path, seed)),
        prices=tuple(
            TracePrice(time_s=number * gap, usd_per_h=usd[number], **_told(known, path)) for number in changed
        ),
        end_s=len(data) * gap,
    )


def _of_counts(counts: Sequence[tuple[float, int]], place: ZoneAndType, path: Path, seed: int) -> Iterator[TraceEvent]:
    """Yield events for changing counts: rises add VMs with new names, falls take existing ones."""
    rng, living, num_added = np.random.default_rng(seed), list[str](), 0
    for time_s, count in counts:
        while len(living) < count:
            living.append(f"g{num_added}")
            num_added += 1
            yield TraceEvent(time_s=time_s, event="add", node_id=living[-1], **_told(place, path))
        while len(living) > count:
            node = living.pop(int(rng.integers(len(living))))
            yield TraceEvent(time_s=time_s, event="remove", node_id=node, **_told(place, path))


def _told(place: ZoneAndType, path: Path) -> dict[str, Any]:
    return {"zone": place.zone, "instance_type": place.instance_type, "source": path.name}


def _count(value: object, where: str) -> int:
    number = _number(value, where, "VMs", f"a whole number, 0 to {MOST_VMS}")
    if number != int(number) or number > MOST_VMS:
        raise TraceError("is not a VM count", source=where, value=value, allowed=f"a whole number, 0 to {MOST_VMS}")
    return int(number)


def _number(value: object, where: str, field: str, allowed: str, most: float = ranges.USD_PER_HOUR.high) -> float:
    try:
        number = float("nan") if isinstance(value, bool) or value is None else float(str(value))
    except ValueError:
        number = float("nan")
    if not 0 <= number <= most:
        raise TraceError("is not a number", source=where, field=field, value=value, allowed=allowed)
    return number


def part_of(trace: Trace, start_s: float, end_s: float) -> Trace:
    """Return the part of a trace between two times, beginning at 0, when its existing VMs and prices appear."""
    there: dict[str, TraceEvent] = {}
    usd: dict[tuple[str, str], TracePrice] = {}
    for event in trace.events:
        if event.time_s > start_s:
            break
        if event.event == "add":
            there[event.node_id] = event
        else:
            del there[event.node_id]
    for price in trace.prices:
        if price.time_s <= start_s:
            usd[price.zone, price.instance_type] = price
    later = [event for event in trace.events if start_s < event.time_s <= end_s]
    prices = [*usd.values(), *(price for price in trace.prices if start_s < price.time_s <= end_s)]
    if start_s >= trace.duration_s or not (there or any(event.event == "add" for event in later)):
        allowed = f"a part of 0 to {trace.duration_s / 3600:.4g} h in which a VM is there"
        raise TraceError(
            "holds no VM", field="trace", value=f"{start_s / 3600:g} h to {end_s / 3600:g} h", allowed=allowed
        )
    events = []
    for event in (*there.values(), *later):
        since_s = max(0.0, event.time_s - start_s)
        update = {"time_s": since_s, "notice_s": None if event.notice_s is None else min(event.notice_s, since_s)}
        events.append(event.model_copy(update=update))
    moved = [price.model_copy(update={"time_s": max(0.0, price.time_s - start_s)}) for price in prices]
    return Trace(events=tuple(events), prices=tuple(moved), end_s=min(end_s, trace.duration_s) - start_s)
