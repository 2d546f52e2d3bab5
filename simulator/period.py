"""Finds out that a pipeline repeats itself, so that the compiled loop can skip whole periods exactly.

After an instant in which stage 0 ends a backward, the state of one replica is compared with earlier ones,
relative to the clock and to stage 0's micro-batch index. A cheap hash of what the stages are doing is looked
up first; only where it was seen before is everything hashed that is on its way, and a period is believed
when that hash comes back too.
"""

from __future__ import annotations

import numpy as np

from simulator.compiling import compiled, inlined, loop

_SNAPSHOTS = 64  # the longest period looked for, in micro-batches


_QUICK, _WHOLE, _CLOCK, _BACKWARDS = 0, 1, 2, 3


@compiled
def new_memory(num_lanes):  # type: ignore[no-untyped-def]
    """Ring buffers of the last states: (quick hash, whole hash, clock, backwards) and tasks begun by each lane."""
    return np.zeros((_SNAPSHOTS, 4), np.int64), np.zeros((_SNAPSHOTS, num_lanes), np.int64)


@inlined
def _mix(h, word):  # type: ignore[no-untyped-def]
    h = (h ^ word) * np.int64(-7046029254386353131)
    return h ^ (h >> np.int64(29))


@loop
def _quick_hash(lanes, keys, now, bits):  # type: ignore[no-untyped-def]
    base = lanes[len(keys) - 1].num_b
    h = np.int64(1469598103934665603)
    for lane in range(len(keys)):
        me = lanes[lane]
        counts = ((me.num_f - base) << 21) + ((me.num_b - base) << 1)
        h = _mix(h, ((counts + me.recomputed) << 8) + me.task)
        if me.task != 0:
            h = _mix(h, (keys[lane] >> (bits + 1)) - now)
    return h


@loop
def _whole_hash(lanes, arrivals, h, now):  # type: ignore[no-untyped-def]
    """Extend the quick hash by everything that is on its way or waits to be taken; never 0."""
    mask = arrivals.shape[2] - 1
    for lane in range(len(lanes)):
        me = lanes[lane]
        h = _mix(h, max(np.int64(0), me.act_known - me.num_f))
        for j in range(me.num_f, me.act_known):
            h = _mix(h, max(np.int64(0), arrivals[0, lane, j & mask] - now))
        for j in range(me.num_b, me.grad_known):
            h = _mix(h, max(np.int64(0), arrivals[1, lane, j & mask] - now))
    return h if h != 0 else np.int64(1)


@loop
def find_period(lanes, keys, arrivals, hashes, positions, num_kept, now, bits):  # type: ignore[no-untyped-def]
    """Remember the state after ``now``: (period in micro-batches or 0, its ns, where the earlier one is kept)."""
    quick, whole = _quick_hash(lanes, keys, now, bits), np.int64(0)
    backwards = lanes[len(keys) - 1].num_b
    for back in range(1, min(num_kept, _SNAPSHOTS) + 1):
        at = (num_kept - back) % _SNAPSHOTS
        if hashes[at, _QUICK] == quick:
            if whole == 0:
                whole = _whole_hash(lanes, arrivals, quick, now)
            if hashes[at, _WHOLE] == whole:
                return backwards - hashes[at, _BACKWARDS], now - hashes[at, _CLOCK], at
    at = num_kept % _SNAPSHOTS
    hashes[at, _QUICK], hashes[at, _WHOLE], hashes[at, _CLOCK], hashes[at, _BACKWARDS] = quick, whole, now, backwards
    for lane in range(len(keys)):
        positions[at, lane] = lanes[lane].position
    return np.int64(0), np.int64(0), 0
