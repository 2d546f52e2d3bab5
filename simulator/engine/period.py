"""Finds out that a pipeline repeats itself, so that the compiled loop can skip whole periods exactly.

Two states are the same when everything that the rules look at is the same relative to stage 0's clock and
micro-batch. What has arrived already counts as arriving now.
"""

from __future__ import annotations

from simulator.engine.compiling import loop
from simulator.engine.stage_progress import ACT, EARLY, GRAD


@loop
def same(lanes, arrivals, old_lanes, old_arrivals):  # type: ignore[no-untyped-def]
    """Whether this state is the old one, later and some micro-batches on: everything that the rules look at."""
    last, mask = len(lanes) - 1, arrivals.shape[1] - 1
    later, moved = lanes[0].clock - old_lanes[0].clock, lanes[0].num_b - old_lanes[0].num_b
    if moved <= 0:
        return False
    for s in range(last + 1):
        me, old = lanes[s], old_lanes[s]
        if me.clock - old.clock != later or me.num_f - old.num_f != moved or me.num_b - old.num_b != moved:
            return False
    for s in range(last + 1):
        me, old = lanes[s], old_lanes[s]
        if max(me.act_free, me.clock) - max(old.act_free, old.clock) != later:
            return False
        if max(me.grad_free, me.clock) - max(old.grad_free, old.clock) != later:
            return False
        if s > 0:
            for j in range(me.num_f, lanes[s - 1].num_f):
                before = max(old.clock, old_arrivals[s, (j - moved) & mask, ACT])
                if max(me.clock, arrivals[s, j & mask, ACT]) - before != later:
                    return False
        if s < last:
            for j in range(me.num_b, lanes[s + 1].num_b):
                for kind in (GRAD, EARLY):
                    before = max(old.clock, old_arrivals[s, (j - moved) & mask, kind])
                    if max(me.clock, arrivals[s, j & mask, kind]) - before != later:
                        return False
    return True


@loop
def keep(lanes, arrivals, old_lanes, old_arrivals):  # type: ignore[no-untyped-def]
    """Remember this state."""
    last, mask = len(lanes) - 1, arrivals.shape[1] - 1
    for s in range(last + 1):
        old_lanes[s] = lanes[s]
        if s > 0:
            for j in range(lanes[s].num_f, lanes[s - 1].num_f):
                old_arrivals[s, j & mask, ACT] = arrivals[s, j & mask, ACT]
        if s < last:
            for j in range(lanes[s].num_b, lanes[s + 1].num_b):
                old_arrivals[s, j & mask, GRAD] = arrivals[s, j & mask, GRAD]
                old_arrivals[s, j & mask, EARLY] = arrivals[s, j & mask, EARLY]
