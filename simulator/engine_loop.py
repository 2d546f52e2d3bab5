"""The compiled loop behind :mod:`simulator.engine`: integer ns, no heap, one scan over the lanes per instant.

A *lane* is one stage of one replica, numbered s * D + d. The untyped definitions are numba's dialect;
:func:`play` is their typed face.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

_NEVER = 2**62
_IDLE, _QUEUED = 0, 1
_F, _R, _B = 70, 82, 66  # ASCII
_SNAPSHOTS = 64  # the longest period looked for, in micro-batches

compiled: Any = njit(cache=True, nogil=True)


class Stages(NamedTuple):
    """Arrays of length P, as in :class:`simulator.engine.StageTimes`."""

    forward: Any
    recompute: Any
    backward: Any
    activation: Any
    gradient: Any
    window: Any
    again: Any


class Lanes(NamedTuple):
    """The state: arrays of length P * D.

    ``act_at[lane, j & mask]`` is when the activation of micro-batch j arrives, known for j < ``act_known``;
    so for gradients. ``num_f`` counts forwards begun, ``num_b`` backwards ended, ``position`` tasks begun.
    ``next_at`` is when the running task ends, or when an idle lane should look again.
    """

    task: Any
    next_at: Any
    num_f: Any
    num_b: Any
    recomputed: Any
    act_at: Any
    act_known: Any
    grad_at: Any
    grad_known: Any
    position: Any
    queue: Any


@compiled
def _choose(stages, lanes, lane, s, count, now):  # type: ignore[no-untyped-def]
    """Apply the rules: (letter to run now or 0, when to look again)."""
    last = len(stages.forward) - 1
    mask = lanes.act_at.shape[1] - 1
    num_f, num_b, wake = lanes.num_f[lane], lanes.num_b[lane], np.int64(_NEVER)
    if num_b < num_f:
        known = s == last or lanes.grad_known[lane] > num_b
        due = wake
        if known:
            due = lanes.grad_at[lane, num_b & mask] if s < last else np.int64(0)
        if lanes.recomputed[lane] or not stages.again[s]:
            if due <= now:
                return _B, wake
            if lanes.recomputed[lane]:
                return 0, due
            wake = due
        elif known:
            wake = due - stages.recompute[s]
            if wake <= now:
                return _R, wake
    if num_f < count and num_f - num_b < stages.window[s]:
        if s == 0:
            return _F, wake
        if lanes.act_known[lane] > num_f:
            arrival = lanes.act_at[lane, num_f & mask]
            if arrival <= now:
                return _F, wake
            wake = min(wake, arrival)
    return 0, wake


@compiled
def _follow(stages, lanes, lane, s, letter, now):  # type: ignore[no-untyped-def]
    """The next letter of a fixed order if its input is there: (letter or 0, when to look again)."""
    mask = lanes.act_at.shape[1] - 1
    arrival = np.int64(0)
    if letter == _F and s > 0:
        index = lanes.num_f[lane]
        arrival = lanes.act_at[lane, index & mask] if lanes.act_known[lane] > index else np.int64(_NEVER)
    elif letter == _B and s < len(stages.forward) - 1:
        index = lanes.num_b[lane]
        arrival = lanes.grad_at[lane, index & mask] if lanes.grad_known[lane] > index else np.int64(_NEVER)
    return (int(letter) if arrival <= now else 0), arrival


@compiled
def _start(stages, lanes, lane, s, num_replicas, letter, now):  # type: ignore[no-untyped-def]
    """Begin a task; tell the neighbour when its input will arrive, and wake it in time if it is idle."""
    mask = lanes.act_at.shape[1] - 1
    lanes.task[lane] = letter
    lanes.position[lane] += 1
    if letter == _R:
        lanes.next_at[lane] = now + stages.recompute[s]
        return
    other, wake = lane, np.int64(_NEVER)
    if letter == _F:
        end = now + stages.forward[s]
        lanes.num_f[lane] += 1
        if s < len(stages.forward) - 1:
            other = lane + num_replicas
            wake = end + stages.activation[s]
            lanes.act_at[other, lanes.act_known[other] & mask] = wake
            lanes.act_known[other] += 1
    else:
        end = now + stages.backward[s]
        if s > 0:
            other = lane - num_replicas
            due = end + stages.gradient[s - 1]
            lanes.grad_at[other, lanes.grad_known[other] & mask] = due
            lanes.grad_known[other] += 1
            wake = max(now, due - stages.recompute[s - 1]) if stages.again[s - 1] else due
    lanes.next_at[lane] = end
    if lanes.task[other] == _IDLE and wake < lanes.next_at[other]:
        lanes.next_at[other] = wake


@compiled
def _end(lanes, lane):  # type: ignore[no-untyped-def]
    if lanes.task[lane] == _B:
        lanes.num_b[lane] += 1
        lanes.recomputed[lane] = False
    elif lanes.task[lane] == _R:
        lanes.recomputed[lane] = True
    lanes.task[lane] = _IDLE


@compiled
def _mix(h, word):  # type: ignore[no-untyped-def]
    h = (h ^ word) * np.int64(-7046029254386353131)
    return h ^ (h >> np.int64(29))


@compiled
def _fingerprint(lanes, num_stages, now):  # type: ignore[no-untyped-def]
    """Hash of one replica's whole state relative to the clock and to stage 0's backward count."""
    mask = lanes.act_at.shape[1] - 1
    base = lanes.num_b[0]
    h = np.int64(1469598103934665603)
    for s in range(num_stages):
        h = _mix(h, lanes.num_f[s] - base)
        h = _mix(h, ((lanes.num_b[s] - base) << 9) + (np.int64(lanes.recomputed[s]) << 8) + lanes.task[s])
        if lanes.task[s] != _IDLE:
            h = _mix(h, lanes.next_at[s] - now)
        for j in range(lanes.num_f[s], lanes.act_known[s]):
            h = _mix(h, max(np.int64(0), lanes.act_at[s, j & mask] - now))
        for j in range(lanes.num_b[s], lanes.grad_known[s]):
            h = _mix(h, max(np.int64(0), lanes.grad_at[s, j & mask] - now))
    return h


@compiled
def _new_lanes(num_lanes, num_replicas, reach):  # type: ignore[no-untyped-def]
    size = 1
    while size < reach + 1:
        size *= 2
    next_at = np.full(num_lanes, np.int64(_NEVER))
    next_at[:num_replicas] = 0
    return Lanes(
        np.zeros(num_lanes, np.int64),
        next_at,
        np.zeros(num_lanes, np.int64),
        np.zeros(num_lanes, np.int64),
        np.zeros(num_lanes, np.bool_),
        np.zeros((num_lanes, size), np.int64),
        np.zeros(num_lanes, np.int64),
        np.zeros((num_lanes, size), np.int64),
        np.zeros(num_lanes, np.int64),
        np.zeros(num_lanes, np.int64),
        np.zeros((num_lanes, 2), np.int64),
    )


@compiled
def _decide(stages, lanes, counts, fixed, slots, now, running, head, waiting, letters, starts):  # type: ignore[no-untyped-def]
    """Grant slots to those who queue, then let every idle lane that is due choose. Returns the queue's state."""
    num_stages, num_replicas = len(stages.forward), len(counts)
    num_lanes = num_stages * num_replicas
    is_fixed, keep_orders, keep_times = fixed.shape[2] > 0, letters.shape[2] > 0, starts.shape[2] > 0
    queue = lanes.queue
    turn = -waiting
    while turn < num_lanes:
        if turn < 0:
            turn += 1
            if running >= slots:
                continue
            lane, letter = queue[head, 0], queue[head, 1]
            s = lane // num_replicas
            head = (head + 1) % num_lanes
            waiting -= 1
        else:
            s = num_stages - 1 - turn // num_replicas
            lane = s * num_replicas + turn % num_replicas
            turn += 1
            if lanes.next_at[lane] > now or lanes.task[lane] != _IDLE:
                continue
            replica = lane - s * num_replicas
            if is_fixed:
                at = lanes.position[lane]
                letter, wake = 0, np.int64(_NEVER)
                if at < fixed.shape[2] and fixed[s, replica, at] != 0:
                    letter, wake = _follow(stages, lanes, lane, s, fixed[s, replica, at], now)
            else:
                letter, wake = _choose(stages, lanes, lane, s, counts[replica], now)
            if letter == 0:
                lanes.next_at[lane] = wake
                continue
            if running >= slots:
                place = (head + waiting) % num_lanes
                queue[place, 0], queue[place, 1] = lane, letter
                waiting += 1
                lanes.task[lane], lanes.next_at[lane] = _QUEUED, np.int64(_NEVER)
                continue
        replica = lane - s * num_replicas
        if keep_orders:
            letters[s, replica, lanes.position[lane]] = letter
        if keep_times:
            starts[s, replica, lanes.position[lane]] = now
        running += 1
        _start(stages, lanes, lane, s, num_replicas, letter, now)
    return running, head, waiting


@compiled
def _play(counts_in, stages, fixed, slots, skip, keep_orders, keep_times):  # type: ignore[no-untyped-def]
    num_stages, num_replicas = len(stages.forward), len(counts_in)
    num_lanes = num_stages * num_replicas
    counts = counts_in.copy()
    most = counts.max()
    reach = most if fixed.shape[2] > 0 else min(most, stages.window.max())
    lanes = _new_lanes(num_lanes, num_replicas, reach)
    ended = np.zeros((num_stages, num_replicas), np.int64)
    letters = np.zeros((num_stages, num_replicas, 3 * most if keep_orders else 0), np.uint8)
    starts = np.zeros((num_stages, num_replicas, 3 * most if keep_times else 0), np.int64)
    jump = np.zeros((num_stages, 3), np.int64)
    hashes = np.zeros((_SNAPSHOTS, 3), np.int64)
    positions = np.zeros((_SNAPSHOTS, num_stages), np.int64)
    num_hashes = running = head = waiting = 0
    shift = np.int64(0)
    left = counts.sum()
    while left > 0:
        now = lanes.next_at.min()
        if now == _NEVER:
            break
        first_stage_done = False
        for lane in range(num_lanes):
            if lanes.next_at[lane] == now and lanes.task[lane] > _QUEUED:
                if lanes.task[lane] == _B:
                    ended[lane // num_replicas, lane % num_replicas] = now
                    if lane < num_replicas:
                        left -= 1
                        first_stage_done = True
                _end(lanes, lane)
                running -= 1
        running, head, waiting = _decide(
            stages, lanes, counts, fixed, slots, now, running, head, waiting, letters, starts
        )
        if skip and first_stage_done:
            h = _fingerprint(lanes, num_stages, now)
            for back in range(1, min(num_hashes, _SNAPSHOTS) + 1):
                at = (num_hashes - back) % _SNAPSHOTS
                if hashes[at, 0] != h:
                    continue
                period = lanes.num_b[0] - hashes[at, 2]
                repeats = (counts[0] - 1 - lanes.num_f[0]) // period
                if repeats > 0:
                    counts[0] -= repeats * period
                    left -= repeats * period
                    shift = repeats * (now - hashes[at, 1])
                    for s in range(num_stages):
                        jump[s, 0], jump[s, 1], jump[s, 2] = positions[at, s], lanes.position[s], repeats
                skip = False
                break
            at = num_hashes % _SNAPSHOTS
            hashes[at, 0], hashes[at, 1], hashes[at, 2] = h, now, lanes.num_b[0]
            positions[at] = lanes.position[:num_stages]
            num_hashes += 1
    ended += shift
    return left == 0, ended, letters, lanes.position.copy().reshape(num_stages, num_replicas), starts, jump


play: Any = _play
