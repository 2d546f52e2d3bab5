"""The compiled loop behind :mod:`simulator.engine`: integer ns, no heap.

A *lane* is one stage of one replica, numbered (P - 1 - s) * D + d: the order in which stages decide. Each
lane has one packed key (instant, task ends before decisions, lane), so the next event is the least key.
State lives in structured arrays: numba counts references of every array that it takes out of a tuple.
The untyped definitions are numba's dialect; :func:`play` is their typed face.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.compiling import compiled, inlined, loop
from simulator.period import find_period, new_memory

_NEVER = 2**62
_IDLE, _QUEUED = 0, 1
_F, _R, _B = 70, 82, 66  # ASCII
_ACT, _GRAD = 0, 1

STAGE = np.dtype(
    [(name, np.int64) for name in ("forward", "recompute", "backward", "activation", "gradient", "window", "again")]
)
"""One stage, as in :class:`simulator.engine.StageTimes`."""

# Forwards begun, backwards ended, tasks begun; activations and gradients whose arrival is known; the queue's entry.
_LANE = np.dtype(
    [
        (name, np.int64)
        for name in ("task", "stage", "replica", "num_f", "num_b", "recomputed", "position", "act_known", "grad_known")
    ]
)


@inlined
def _key(instant, deciding, lane, bits):  # type: ignore[no-untyped-def]
    if instant == _NEVER:
        return np.int64(_NEVER)
    return (((instant << 1) | deciding) << bits) | lane


@inlined
def _choose(stages, lanes, arrivals, lane, count, now):  # type: ignore[no-untyped-def]
    """Apply the rules: (letter to run now or 0, when to look again)."""
    me, mask = lanes[lane], arrivals.shape[2] - 1
    s, num_f, num_b, wake, early = me.stage, me.num_f, me.num_b, np.int64(_NEVER), False
    if num_b < num_f:
        due = wake
        if s == len(stages) - 1:
            due = np.int64(0)
        elif me.grad_known > num_b:
            due = arrivals[_GRAD, lane, num_b & mask]
        if me.recomputed or not stages[s].again:
            if due <= now:
                return _B, wake
            if me.recomputed:
                return 0, due
            wake = due
        elif due <= now:
            return _R, due
        elif due != _NEVER:
            wake = due - stages[s].recompute
            if wake <= now:
                early, wake = True, due
    if num_f < count and num_f - num_b < stages[s].window:
        if s == 0:
            return _F, wake
        if me.act_known > num_f:
            arrival = arrivals[_ACT, lane, num_f & mask]
            if arrival <= now:
                return _F, wake
            wake = min(wake, arrival)
    if early:
        return _R, wake
    return 0, wake


@inlined
def _follow(stages, lanes, arrivals, lane, letter, now):  # type: ignore[no-untyped-def]
    """The next letter of a fixed order if its input is there: (letter or 0, when to look again)."""
    me, mask, arrival = lanes[lane], arrivals.shape[2] - 1, np.int64(0)
    if letter == _F and me.stage > 0:
        arrival = arrivals[_ACT, lane, me.num_f & mask] if me.act_known > me.num_f else np.int64(_NEVER)
    elif letter == _B and me.stage < len(stages) - 1:
        arrival = arrivals[_GRAD, lane, me.num_b & mask] if me.grad_known > me.num_b else np.int64(_NEVER)
    return (int(letter) if arrival <= now else 0), arrival


@inlined
def _next_letter(stages, lanes, arrivals, lane, counts, fixed, now):  # type: ignore[no-untyped-def]
    replica, at = lanes[lane].replica, lanes[lane].position
    if fixed.shape[2] == 0:
        return _choose(stages, lanes, arrivals, lane, counts[replica], now)
    stage = lanes[lane].stage
    if at == fixed.shape[2] or fixed[stage, replica, at] == 0:
        return 0, np.int64(_NEVER)
    return _follow(stages, lanes, arrivals, lane, fixed[stage, replica, at], now)


@inlined
def _start(stages, lanes, keys, arrivals, lane, letter, now, num_replicas, bits):  # type: ignore[no-untyped-def]
    """Begin a task; tell the neighbour when its input will arrive, and wake it in time if it is idle."""
    me, mask = lanes[lane], arrivals.shape[2] - 1
    s = me.stage
    me.task = letter
    me.position += 1
    if letter == _R:
        keys[lane] = _key(now + stages[s].recompute, 0, lane, bits)
        return
    other, wake = lane, np.int64(_NEVER)
    if letter == _F:
        end = now + stages[s].forward
        me.num_f += 1
        if s < len(stages) - 1:
            other = lane - num_replicas
            wake = end + stages[s].activation
            arrivals[_ACT, other, lanes[other].act_known & mask] = wake
            lanes[other].act_known += 1
    else:
        end = now + stages[s].backward
        if s > 0:
            other = lane + num_replicas
            wake = end + stages[s - 1].gradient
            arrivals[_GRAD, other, lanes[other].grad_known & mask] = wake
            lanes[other].grad_known += 1
            if stages[s - 1].again:
                wake = max(now, wake - stages[s - 1].recompute)
    keys[lane] = _key(end, 0, lane, bits)
    if other != lane and lanes[other].task == _IDLE:
        keys[other] = min(keys[other], _key(wake, 1, other, bits))


@inlined
def _end(lanes, keys, lane, now, bits):  # type: ignore[no-untyped-def]
    me = lanes[lane]
    if me.task == _B:
        me.num_b += 1
        me.recomputed = 0
    elif me.task == _R:
        me.recomputed = 1
    me.task = _IDLE
    keys[lane] = _key(now, 1, lane, bits)


@compiled
def _set_up(lanes, keys, num_stages, num_replicas, bits):  # type: ignore[no-untyped-def]
    for lane in range(len(lanes)):
        lanes[lane].stage = num_stages - 1 - lane // num_replicas
        lanes[lane].replica = lane % num_replicas
        keys[lane] = _key(0, 1, lane, bits) if lanes[lane].stage == 0 else np.int64(_NEVER)


@inlined
def _note(lanes, lane, letter, now, letters, starts):  # type: ignore[no-untyped-def]
    me = lanes[lane]
    if letters.shape[2] > 0:
        letters[me.stage, me.replica, me.position] = letter
    if starts.shape[2] > 0:
        starts[me.stage, me.replica, me.position] = now


@loop
def _loop(counts, stages, lanes, keys, arrivals, queue, fixed, slots, skip, bits, kept, memory):  # type: ignore[no-untyped-def]
    """Play to the end: (whether it came to one, ns skipped). Allocates nothing."""
    ended, letters, starts, jump = kept
    hashes, positions = memory
    num_replicas, num_lanes = len(counts), len(lanes)
    head, waiting, running, shift = 0, 0, 0, np.int64(0)
    left, first_stage_done, num_kept = counts.sum(), np.int64(-1), 0
    while left > 0:
        key = np.int64(_NEVER)
        for other in range(num_lanes):
            key = min(key, keys[other])
        now = key >> (bits + 1)
        if skip and 0 <= first_stage_done < now:
            period, duration, at = find_period(
                lanes, keys, arrivals, hashes, positions, num_kept, first_stage_done, bits
            )
            num_kept += 1
            first_stage_done = np.int64(-1)
            if period > 0:
                repeats = max(0, (counts[0] - 1 - lanes[num_lanes - 1].num_f) // period)
                counts[0] -= repeats * period
                left -= repeats * period
                shift = repeats * duration
                for lane in range(num_lanes):
                    s = lanes[lane].stage
                    jump[s, 0], jump[s, 1], jump[s, 2] = positions[at, lane], lanes[lane].position, repeats
                skip = False
        if key == _NEVER:
            break
        lane = key & ((1 << bits) - 1)
        if (key >> bits) & 1 == 0:
            if lanes[lane].task == _B:
                ended[lanes[lane].stage, lanes[lane].replica] = now
                if lanes[lane].stage == 0:
                    left -= 1
                    first_stage_done = now
            _end(lanes, keys, lane, now, bits)
            running -= 1
            continue
        if waiting > 0 and running < slots:
            granted, letter = queue[head, 0], queue[head, 1]
            head, waiting, running = (head + 1) % num_lanes, waiting - 1, running + 1
            _note(lanes, granted, letter, now, letters, starts)
            _start(stages, lanes, keys, arrivals, granted, letter, now, num_replicas, bits)
            continue  # the start may let a later stage decide first
        letter, wake = _next_letter(stages, lanes, arrivals, lane, counts, fixed, now)
        if letter == 0:
            keys[lane] = _key(wake, 1, lane, bits)
        elif running < slots:
            running += 1
            _note(lanes, lane, letter, now, letters, starts)
            _start(stages, lanes, keys, arrivals, lane, letter, now, num_replicas, bits)
        else:
            place = (head + waiting) % num_lanes
            queue[place, 0], queue[place, 1] = lane, letter
            waiting += 1
            lanes[lane].task, keys[lane] = _QUEUED, np.int64(_NEVER)
    return left == 0, shift


@compiled
def _play(counts_in, stages, lanes, fixed, slots, skip, keep_orders, keep_times):  # type: ignore[no-untyped-def]
    num_stages, num_replicas, num_lanes = len(stages), len(counts_in), len(lanes)
    bits = 1
    while (1 << bits) < num_lanes:
        bits += 1
    counts = counts_in.copy()
    most = counts.max()
    reach = most if fixed.shape[2] > 0 else min(most, stages["window"].max())
    size = 1
    while size < reach + 1:
        size *= 2
    arrivals = np.empty((2, num_lanes, size), np.int64)
    keys = np.empty(num_lanes, np.int64)
    _set_up(lanes, keys, num_stages, num_replicas, bits)
    ended = np.zeros((num_stages, num_replicas), np.int64)
    letters = np.zeros((num_stages, num_replicas, 3 * most if keep_orders else 0), np.uint8)
    starts = np.zeros((num_stages, num_replicas, 3 * most if keep_times else 0), np.int64)
    queue = np.zeros((num_lanes, 2), np.int64)
    jump = np.zeros((num_stages, 3), np.int64)
    kept = (ended, letters, starts, jump)
    over, shift = _loop(
        counts, stages, lanes, keys, arrivals, queue, fixed, slots, skip, bits, kept, new_memory(num_lanes)
    )
    ended += shift
    lengths = np.zeros((num_stages, num_replicas), np.int64)
    for lane in range(num_lanes):
        lengths[lanes[lane].stage, lanes[lane].replica] = lanes[lane].position
    return over, ended, letters, lengths, starts, jump


def play(counts: Any, stages: Any, fixed: Any, slots: int, skip: bool, keep_orders: bool, keep_times: bool) -> Any:
    """Run the loop; see :func:`simulator.engine.run_pipeline`.

    Args:
        counts: int64[D].
        stages: Structured array of ``STAGE``, length P.
        fixed: uint8[P, D, n] order letters, n = 0 to apply the rules.
        slots: Tasks at once.
        skip: Look for periods; only for one replica without limit on slots.
        keep_orders: Return letters.
        keep_times: Return starts.

    Returns:
        (whether it came to an end, last backward ends int64[P, D], letters uint8[P, D, 3n], how many of them
        int64[P, D], starts int64[P, D, 3n], skipped periods int64[P, 3]: first letter, end, repeats).
    """
    lanes = np.zeros(len(stages) * len(counts), _LANE)
    return _play(counts, stages, lanes, fixed, slots, skip, keep_orders, keep_times)
