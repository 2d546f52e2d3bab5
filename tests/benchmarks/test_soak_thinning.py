"""Fewer nodes of a spot trace, at the same moments."""

from __future__ import annotations

import pytest

from benchmarks.soak.thinning import describe, first_hours, thinned
from morph.contract.trace import Trace, TraceEvent
from simulator import spot_model

MODEL = spot_model(32, losses_per_vm_h=1.35, bulk_share=0.7, initial=24, least=4)
TRACE = MODEL.draw(3, 8000)


def removals(trace: Trace) -> dict[float, set[str]]:
    found: dict[float, set[str]] = {}
    for event in trace.events:
        if event.event == "remove":
            found.setdefault(event.time_s, set()).add(event.node_id)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_there_are_never_more_than_asked_for_and_every_event_is_one_of_the_trace(seed: int) -> None:
    kept = thinned(TRACE, 6, seed)
    assert 1 <= kept.max_nodes <= 6
    assert set(kept.events) <= set(TRACE.events)
    assert kept == thinned(TRACE, 6, seed)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_revoked_together_stays_together_as_far_as_there_is_room(seed: int) -> None:
    whole, room = removals(TRACE), thinned(TRACE, TRACE.max_nodes, seed)
    assert room == TRACE
    kept = removals(thinned(TRACE, 8, seed))
    assert kept
    assert all(nodes <= whole[time_s] for time_s, nodes in kept.items())
    assert any(len(nodes) > 1 for nodes in kept.values())


def test_a_part_begins_at_its_first_event_and_ends_after_its_hours() -> None:
    late = Trace(events=tuple(event.model_copy(update={"time_s": event.time_s + 500}) for event in TRACE.events))
    part = first_hours(late, 1.0)
    assert part.events[0].time_s == 0
    assert 3000 < part.duration_s <= 3600


def test_the_description_counts_what_goes_together() -> None:
    events = [TraceEvent(time_s=0, event="add", node_id=name) for name in "abc"]
    events += [TraceEvent(time_s=5, event="remove", node_id=name) for name in "ab"]
    events.append(TraceEvent(time_s=6, event="remove", node_id="c"))
    assert describe(Trace(events=tuple(events))) == (
        "3 VMs come, 3 are revoked (2 of them two or more at once, at most 2), at most 3 at a time"
    )
