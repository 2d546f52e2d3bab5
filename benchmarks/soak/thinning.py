"""From a spot trace of many nodes to one for a few local VMs: the same moments, fewer nodes. Pure."""

from __future__ import annotations

import random

from morph.contract.trace import Trace, TraceEvent


def first_hours(trace: Trace, hours: float) -> Trace:
    """The trace from its first event on, cut off after so many hours."""
    start_s = trace.events[0].time_s
    kept = (event for event in trace.events if event.time_s - start_s <= hours * 3600)
    end_s = min(hours * 3600, trace.duration_s - start_s)
    events = tuple(event.model_copy(update={"time_s": event.time_s - start_s}) for event in kept)
    return Trace(events=events, end_s=end_s)


def thinned(trace: Trace, max_vms: int, seed: int) -> Trace:
    """Keep the nodes of a moment's removal, all of them or none, with the probability of ``max_vms`` over the peak.

    So times stay, and what is revoked together still is. Nodes that are never removed are kept or not one by one, the
    first one always; a node that comes while ``max_vms`` are there is left out.
    """
    chooser = random.Random(seed)
    share = min(1.0, max_vms / trace.max_nodes)
    removed_s = _removal_times(trace)
    wanted: dict[float, bool] = {}
    kept: set[str] = set()
    events: list[TraceEvent] = []
    for index, event in enumerate(trace.events):
        if event.event == "add":
            together_s = removed_s.get(index, -1.0 - index)
            if together_s not in wanted:
                wanted[together_s] = not events or chooser.random() < share
            if wanted[together_s] and len(kept) < max_vms:
                kept.add(event.node_id)
                events.append(event)
        elif event.node_id in kept:
            kept.discard(event.node_id)
            events.append(event)
    return Trace(events=tuple(events), end_s=trace.end_s)


def _removal_times(trace: Trace) -> dict[int, float]:
    """When the node that comes with an event is removed, by the event's index; absent: never."""
    coming: dict[str, int] = {}
    times: dict[int, float] = {}
    for index, event in enumerate(trace.events):
        if event.event == "add":
            coming[event.node_id] = index
        else:
            times[coming.pop(event.node_id)] = event.time_s
    return times


def describe(trace: Trace) -> str:
    """One line on how much happens in a trace."""
    removals: dict[float, int] = {}
    for event in trace.events:
        if event.event == "remove":
            removals[event.time_s] = removals.get(event.time_s, 0) + 1
    count = sum(removals.values())
    together = sum(number for number in removals.values() if number > 1)
    return (
        f"{len(trace.events) - count} VMs come, {count} are revoked ({together} of them two or more at once, "
        f"at most {max(removals.values(), default=0)}), at most {trace.max_nodes} at a time"
    )
