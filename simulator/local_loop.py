"""The compiled loop behind :mod:`simulator.engine`: one pipeline, each stage on a clock of its own, no event queue.

A stage is played ahead as far as nothing that is still unknown can change its next decision: what a neighbour has
not begun yet cannot arrive before that neighbour's clock and the times of its task and message have passed
(conservative simulation: Chandy and Misra 1979). Stages take turns, up and down the pipeline; the order of the
turns does not change the result. After each round the whole state is held against an earlier one, relative to
stage 0's clock and micro-batch; when it comes back, whole periods are skipped (:func:`_same`, Brent's algorithm).
The untyped definitions are numba's dialect; :func:`play` is their typed face.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.compiling import compiled, inlined, loop

_NEVER = 2**62
_F, _R, _B = 70, 82, 66  # ASCII
_ACT, _GRAD, _EARLY = 0, 1, 2

_STAGE_FIELDS = ("forward", "recompute", "backward", "activation", "gradient")
STAGE = np.dtype([(name, np.int64) for name in (*_STAGE_FIELDS, "activation_wire", "gradient_wire", "window", "again")])
"""One stage, as in :class:`simulator.engine.StageTimes`."""

# Instant before which no task begins; forwards and backwards begun, tasks begun; activations and gradients whose
# arrival is known; when the last activation and gradient have left for good.
_LANE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "clock",
            "num_f",
            "num_b",
            "recomputed",
            "position",
            "act_known",
            "grad_known",
            "act_free",
            "grad_free",
        )
    ]
)


@inlined
def _begin(stages, lanes, arrivals, letters, starts, s, letter, now):  # type: ignore[no-untyped-def]
    """Run a task and tell the neighbour when its input arrives."""
    me, mine, mask = lanes[s], stages[s], arrivals.shape[2] - 1
    if letters.shape[1] > 0:
        letters[s, me.position] = letter
    if starts.shape[1] > 0:
        starts[s, me.position] = now
    me.position += 1
    if letter == _R:
        me.recomputed = 1
        me.clock = now + mine.recompute
    elif letter == _F:
        end = now + mine.forward
        me.clock = end
        me.num_f += 1
        if s + 1 < len(stages):
            other, leaves = lanes[s + 1], max(end, me.act_free)
            me.act_free = leaves + mine.activation_wire
            arrivals[_ACT, s + 1, other.act_known & mask] = leaves + mine.activation
            other.act_known += 1
    else:
        end = now + mine.backward
        me.clock = end
        me.num_b += 1
        me.recomputed = 0
        if s > 0:
            other, before, leaves = lanes[s - 1], stages[s - 1], max(end, me.grad_free)
            me.grad_free = leaves + before.gradient_wire
            arrival = leaves + before.gradient
            place = other.grad_known & mask
            arrivals[_GRAD, s - 1, place] = arrival
            arrivals[_EARLY, s - 1, place] = max(now, arrival - before.recompute)
            other.grad_known += 1


@loop
def _apply_rules(stages, lanes, arrivals, letters, starts, s, count, only_known):  # type: ignore[no-untyped-def]
    """Play stage s by the rules until a decision hangs on what is unknown: tasks begun.

    ``only_known``: begin one task, taking what is unknown for later than all that is known.
    """
    me, mine, last, mask = lanes[s], stages[s], len(stages) - 1, arrivals.shape[2] - 1
    begun = 0
    while me.num_b < count:
        now = me.clock
        again = mine.again != 0 and me.recomputed == 0
        # When the next recompute or backward could begin, and the gradient be there: known, or a lower bound.
        back, grad, back_known = np.int64(_NEVER), np.int64(_NEVER), True
        if me.num_b < me.num_f:
            if s == last:
                back = grad = now
            elif me.grad_known > me.num_b:
                grad = arrivals[_GRAD, s, me.num_b & mask]
                back = max(now, arrivals[_EARLY, s, me.num_b & mask] if again else grad)
            elif not only_known:
                back_known = False
                begins = lanes[s + 1].clock
                grad = begins + stages[s + 1].backward + mine.gradient
                back = max(now, max(begins, grad - mine.recompute) if again else grad)
        fore, fore_known = np.int64(_NEVER), True
        if me.recomputed == 0 and me.num_f < count and me.num_f - me.num_b < mine.window:
            if s == 0:
                fore = now
            elif me.act_known > me.num_f:
                fore = max(now, arrivals[_ACT, s, me.num_f & mask])
            elif not only_known:
                fore_known = False
                fore = max(now, lanes[s - 1].clock + stages[s - 1].forward + stages[s - 1].activation)
        backward_first = back < fore or (back == fore and grad <= back)
        instant = back if backward_first else fore
        if instant == _NEVER:
            break
        if not (back_known if backward_first else fore_known):
            me.clock = instant
            break
        letter = _F if not backward_first else (_R if again else _B)
        _begin(stages, lanes, arrivals, letters, starts, s, letter, instant)
        begun += 1
        if only_known:
            break
    return begun


@loop
def _first_known(stages, lanes, arrivals, count):  # type: ignore[no-untyped-def]
    """The stage with the earliest task whose input is known; -1 if there is none."""
    last, mask = len(stages) - 1, arrivals.shape[2] - 1
    first, found = np.int64(_NEVER), -1
    for s in range(last, -1, -1):
        me = lanes[s]
        instant = np.int64(_NEVER)
        if me.num_b < me.num_f and (s == last or me.grad_known > me.num_b):
            instant = me.clock
            if s < last:
                again = stages[s].again != 0 and me.recomputed == 0
                instant = max(instant, arrivals[_EARLY if again else _GRAD, s, me.num_b & mask])
        room = me.recomputed == 0 and me.num_f < count and me.num_f - me.num_b < stages[s].window
        if room and (s == 0 or me.act_known > me.num_f):
            arrival = me.clock if s == 0 else max(me.clock, arrivals[_ACT, s, me.num_f & mask])
            instant = min(instant, arrival)
        if instant < first:
            first, found = instant, s
    return found


@loop
def _follow_order(stages, lanes, arrivals, letters, starts, s, fixed):  # type: ignore[no-untyped-def]
    """Play stage s in its fixed order until an input is unknown: tasks begun."""
    me, last, mask = lanes[s], len(stages) - 1, arrivals.shape[2] - 1
    begun = 0
    while me.position < fixed.shape[1] and fixed[s, me.position] != 0:
        letter, instant = fixed[s, me.position], me.clock
        if letter == _F and s > 0:
            if me.act_known <= me.num_f:
                break
            instant = max(instant, arrivals[_ACT, s, me.num_f & mask])
        elif letter == _B and s < last:
            if me.grad_known <= me.num_b:
                break
            instant = max(instant, arrivals[_GRAD, s, me.num_b & mask])
        _begin(stages, lanes, arrivals, letters, starts, s, letter, instant)
        begun += 1
    return begun


@loop
def _same(lanes, arrivals, old_lanes, old_arrivals):  # type: ignore[no-untyped-def]
    """Whether this state is the old one, later and some micro-batches on: everything that the rules look at."""
    last, mask = len(lanes) - 1, arrivals.shape[2] - 1
    later, moved = lanes[0].clock - old_lanes[0].clock, lanes[0].num_b - old_lanes[0].num_b
    if moved <= 0:
        return False
    for s in range(last + 1):
        me, old = lanes[s], old_lanes[s]
        if me.clock - old.clock != later or me.num_f - old.num_f != moved or me.num_b - old.num_b != moved:
            return False
        if me.recomputed != old.recomputed:
            return False
        if s > 0 and me.act_known - old.act_known != moved:
            return False
        if s < last and me.grad_known - old.grad_known != moved:
            return False
    for s in range(last + 1):
        me, old = lanes[s], old_lanes[s]
        if max(me.act_free, me.clock) - max(old.act_free, old.clock) != later:
            return False
        if max(me.grad_free, me.clock) - max(old.grad_free, old.clock) != later:
            return False
        for j in range(me.num_f, me.act_known):
            before = max(old.clock, old_arrivals[_ACT, s, (j - moved) & mask])
            if max(me.clock, arrivals[_ACT, s, j & mask]) - before != later:
                return False
        for j in range(me.num_b, me.grad_known):
            for kind in (_GRAD, _EARLY):
                before = max(old.clock, old_arrivals[kind, s, (j - moved) & mask])
                if max(me.clock, arrivals[kind, s, j & mask]) - before != later:
                    return False
    return True


@loop
def _keep(lanes, arrivals, old_lanes, old_arrivals):  # type: ignore[no-untyped-def]
    mask = arrivals.shape[2] - 1
    for s in range(len(lanes)):
        me = lanes[s]
        old_lanes[s] = me
        for j in range(me.num_f, me.act_known):
            old_arrivals[_ACT, s, j & mask] = arrivals[_ACT, s, j & mask]
        for j in range(me.num_b, me.grad_known):
            old_arrivals[_GRAD, s, j & mask] = arrivals[_GRAD, s, j & mask]
            old_arrivals[_EARLY, s, j & mask] = arrivals[_EARLY, s, j & mask]


@loop
def _play_rules(stages, lanes, arrivals, old_lanes, old_arrivals, letters, starts, jump, count, skip):  # type: ignore[no-untyped-def]
    """Play to the end: (whether it came to one, ns skipped). Allocates nothing."""
    last, shift = len(stages) - 1, np.int64(0)
    rounds, limit = 0, 1
    while lanes[0].num_b < count:
        begun = 0
        for s in range(last, -1, -1):
            begun += _apply_rules(stages, lanes, arrivals, letters, starts, s, count, False)
        for s in range(1, last):
            begun += _apply_rules(stages, lanes, arrivals, letters, starts, s, count, False)
        if begun == 0:
            s = _first_known(stages, lanes, arrivals, count)
            if s < 0:
                return False, shift
            _apply_rules(stages, lanes, arrivals, letters, starts, s, count, True)
        if not skip:
            continue
        rounds += 1
        if rounds > 1 and _same(lanes, arrivals, old_lanes, old_arrivals):
            moved = lanes[0].num_b - old_lanes[0].num_b
            repeats = max(0, (count - 1 - lanes[0].num_f) // moved)
            count -= repeats * moved
            shift = repeats * (lanes[0].clock - old_lanes[0].clock)
            for s in range(last + 1):
                jump[s, 0], jump[s, 1], jump[s, 2] = old_lanes[s].position, lanes[s].position, repeats
            skip = False
        elif rounds == limit:
            _keep(lanes, arrivals, old_lanes, old_arrivals)
            limit *= 2
    return True, shift


@loop
def _play_orders(stages, lanes, arrivals, letters, starts, count, fixed):  # type: ignore[no-untyped-def]
    last = len(stages) - 1
    while lanes[0].num_b < count:
        begun = 0
        for s in range(last + 1):
            begun += _follow_order(stages, lanes, arrivals, letters, starts, s, fixed)
        for s in range(last - 1, 0, -1):
            begun += _follow_order(stages, lanes, arrivals, letters, starts, s, fixed)
        if begun == 0:
            return False, np.int64(0)
    return True, np.int64(0)


@compiled
def _play(stages, lanes, old_lanes, count, fixed, skip, keep_orders, keep_times):  # type: ignore[no-untyped-def]
    num_stages = len(stages)
    reach = count if fixed.shape[1] > 0 else min(count, stages["window"].max())
    size = 1
    while size < reach + 1:
        size *= 2
    arrivals = np.empty((3, num_stages, size), np.int64)
    letters = np.zeros((num_stages, 3 * count if keep_orders else 0), np.uint8)
    starts = np.zeros((num_stages, 3 * count if keep_times else 0), np.int64)
    jump = np.zeros((num_stages, 3), np.int64)
    if fixed.shape[1] > 0:
        over, shift = _play_orders(stages, lanes, arrivals, letters, starts, count, fixed)
    else:
        old_arrivals = np.empty_like(arrivals)
        over, shift = _play_rules(stages, lanes, arrivals, old_lanes, old_arrivals, letters, starts, jump, count, skip)
    ended, lengths = np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64)
    for s in range(num_stages):
        ended[s], lengths[s] = lanes[s].clock + shift, lanes[s].position
    return over, ended, letters, lengths, starts, jump


def play(stages: Any, count: int, fixed: Any, skip: bool, keep_orders: bool, keep_times: bool) -> Any:
    """Run the loop; see :func:`simulator.engine.run_pipeline`.

    Args:
        stages: Structured array of ``STAGE``, length P.
        count: Micro-batches.
        fixed: uint8[P, n] order letters, n = 0 to apply the rules.
        skip: Look for periods (only under the rules, and not with ``keep_times``).
        keep_orders: Return letters.
        keep_times: Return starts.

    Returns:
        (whether it came to an end, last backward ends int64[P], letters uint8[P, 3n], how many of them int64[P],
        starts int64[P, 3n], skipped periods int64[P, 3]: first letter, end, repeats).
    """
    lanes, old_lanes = np.zeros(len(stages), _LANE), np.zeros(len(stages), _LANE)
    return _play(stages, lanes, old_lanes, count, fixed, skip, keep_orders, keep_times)
