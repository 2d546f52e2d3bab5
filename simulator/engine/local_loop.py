"""The compiled loop behind ``engine``: one pipeline, each stage on a clock of its own, no event queue.

A stage is played ahead as long as nothing unknown can change its next decision: a message of a task that a neighbour
has not begun cannot arrive before the neighbour's clock plus the times of that task and message (conservative
simulation: Chandy and Misra 1979). A recompute and the backward that must follow it count as one task. Stages take
turns down the pipeline; the order of the turns does not change the result. After each round the state is compared with
an earlier one (chosen by Brent's algorithm), relative to stage 0's clock and micro-batch; if they are equal, whole
periods are skipped.

Definitions are untyped, as numba requires; :func:`play` is their typed interface.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.engine.compilation import compiled, entry, loop
from simulator.engine.times import ACT, EARLY, GRAD, STAGE_PROGRESS, B, F, R

SEEKS, ROUNDS, LIMIT, LEFT_OUT, SHIFT = range(5)
"""Indices of how far skipping is: whether a period is still sought, rounds so far, in which round the state is kept
next, micro-batches skipped, and ns skipped."""
_NEVER = 2**62


@loop
def same(lanes, arrivals, old_lanes, old_arrivals):  # type: ignore[no-untyped-def]
    """Whether this state equals the old one in all that the rules read, shifted in time and micro-batches."""
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
    """Copy this state, to compare later ones with it."""
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


@loop
def _execute_order(rules, lanes, arrivals, letters, starts, s, last, fixed):  # type: ignore[no-untyped-def]
    """Play stage s in its fixed order until an input is unknown; return the number of tasks begun."""
    me, mine, mask = lanes[s], rules[s], arrivals.shape[1] - 1
    begun = 0
    while me.position < fixed.shape[1] and fixed[s, me.position] != 0:
        letter, instant = fixed[s, me.position], me.clock
        if letter == F and s > 0:
            if lanes[s - 1].num_f <= me.num_f:
                break
            instant = max(instant, arrivals[s, me.num_f & mask, ACT])
        elif letter == B and s < last:
            if lanes[s + 1].num_b <= me.num_b:
                break
            instant = max(instant, arrivals[s, me.num_b & mask, GRAD])
        if letters.shape[1] > 0:
            letters[s, me.position] = letter
        if starts.shape[1] > 0:
            starts[s, me.position] = instant
        if letter == F:
            me.clock = instant + mine.forward
            if s < last:
                leaves = max(me.clock, me.act_free)
                me.act_free = leaves + mine.act_wire
                arrivals[s + 1, me.num_f & mask, ACT] = leaves + mine.activation
            me.num_f += 1
        elif letter == R:
            me.clock = instant + mine.recompute
        else:
            me.clock = instant + mine.backward
            if s > 0:
                leaves = max(me.clock, me.grad_free)
                me.grad_free = leaves + mine.grad_wire
                arrivals[s - 1, me.num_b & mask, GRAD] = leaves + mine.gradient
            me.num_b += 1
        me.position += 1
        begun += 1
    return begun


@loop
def play_orders(rules, lanes, arrivals, letters, starts, count, fixed):  # type: ignore[no-untyped-def]
    """Play to the end; return whether there was no deadlock. Allocates nothing."""
    last = len(rules) - 1
    while lanes[0].num_b < count:
        begun = 0
        for s in range(last + 1):
            begun += _execute_order(rules, lanes, arrivals, letters, starts, s, last, fixed)
        for s in range(last - 1, 0, -1):
            begun += _execute_order(rules, lanes, arrivals, letters, starts, s, last, fixed)
        if begun == 0:
            return False
    return True


@loop
def _apply_rules(rules, lanes, arrivals, letters, starts, s, last, count, branch, only_known):  # type: ignore[no-untyped-def]
    """Play stage s by the rules until a decision depends on unknown inputs; return the number of tasks begun.

    ``branch``: stage 0 decides no more once it has begun that many forwards. ``only_known``: begin one task, assuming
    that unknown inputs arrive later than all known ones.
    """
    # Everything is copied into local variables first: the compiler cannot know that the arrays do not overlap.
    me, mine, mask = lanes[s], rules[s], arrivals.shape[1] - 1
    clock, num_f, num_b, act_free, grad_free = me.clock, me.num_f, me.num_b, me.act_free, me.grad_free
    window, again = mine.window, mine.again
    keep_letters, keep_starts = letters.shape[1] > 0, starts.shape[1] > 0
    is_first, is_last = s == 0, s == last
    # What the neighbours begin next cannot arrive before these instants.
    next_grad = next_early = next_act = np.int64(_NEVER)
    act_known = grad_known = np.int64(0)
    if not is_last:
        grad_known = lanes[s + 1].num_b
        if not only_known:
            next_early = lanes[s + 1].clock
            next_grad = next_early + mine.grad_after
            next_early += mine.early_after
    if not is_first:
        act_known = lanes[s - 1].num_f
        if not only_known:
            next_act = lanes[s - 1].clock + mine.act_after
    begun_before = num_f + num_b
    while num_b < count and not (is_first and num_f == branch):
        # When the next recompute or backward could begin, and the gradient arrives: known, or a lower bound.
        back, grad, back_known = np.int64(_NEVER), np.int64(_NEVER), True
        if num_b < num_f:
            if is_last:
                back = grad = clock
            elif grad_known > num_b:
                grad = arrivals[s, num_b & mask, GRAD]
                back = max(clock, arrivals[s, num_b & mask, EARLY])
            else:
                back_known = False
                grad = next_grad
                back = max(clock, next_early)
        fore, fore_known = np.int64(_NEVER), True
        if num_f < count and num_f - num_b < window:
            if is_first:
                fore = clock
            elif act_known > num_f:
                fore = max(clock, arrivals[s, num_f & mask, ACT])
            else:
                fore_known = False
                fore = max(clock, next_act)
        if back < fore or (back == fore and grad <= back):
            if back >= _NEVER:
                break
            if not back_known:
                clock = back
                break
            if again:
                at = num_f + 2 * num_b
                if keep_letters:
                    letters[s, at], letters[s, at + 1] = R, B
                if keep_starts:
                    starts[s, at] = back
                back = max(back + mine.recompute, grad)
                if keep_starts:
                    starts[s, at + 1] = back
            else:
                if keep_letters:
                    letters[s, num_f + num_b] = B
                if keep_starts:
                    starts[s, num_f + num_b] = back
            clock = back + mine.backward
            if not is_first:
                leaves = max(clock, grad_free)
                grad_free = leaves + mine.grad_wire
                arrival = leaves + mine.gradient
                arrivals[s - 1, num_b & mask, GRAD] = arrival
                arrivals[s - 1, num_b & mask, EARLY] = max(back, arrival - mine.recompute_before)
            num_b += 1
        else:
            if fore >= _NEVER:
                break
            if not fore_known:
                if num_f < branch:  # otherwise shorter plays have ended here
                    clock = fore
                break
            at = num_f + num_b * (1 + again)
            if keep_letters:
                letters[s, at] = F
            if keep_starts:
                starts[s, at] = fore
            clock = fore + mine.forward
            if not is_last:
                leaves = max(clock, act_free)
                act_free = leaves + mine.act_wire
                arrivals[s + 1, num_f & mask, ACT] = leaves + mine.activation
            num_f += 1
        if only_known:
            break
    me.clock, me.num_f, me.num_b, me.act_free, me.grad_free = clock, num_f, num_b, act_free, grad_free
    return num_f + num_b - begun_before


@loop
def _first_known(rules, lanes, arrivals, last, count):  # type: ignore[no-untyped-def]
    """Return the stage with the earliest task whose input is known; -1 if there is none."""
    mask = arrivals.shape[1] - 1
    first, stage = np.int64(_NEVER), -1
    for s in range(last, -1, -1):
        me = lanes[s]
        instant = np.int64(_NEVER)
        if me.num_b < me.num_f and (s == last or lanes[s + 1].num_b > me.num_b):
            instant = me.clock if s == last else max(me.clock, arrivals[s, me.num_b & mask, EARLY])
        if me.num_f < count and me.num_f - me.num_b < rules[s].window and (s == 0 or lanes[s - 1].num_f > me.num_f):
            instant = min(instant, me.clock if s == 0 else max(me.clock, arrivals[s, me.num_f & mask, ACT]))
        if instant < first:
            first, stage = instant, s
    return stage


@loop
def _play_rules(rules, state, old_lanes, old_arrivals, count, branch):  # type: ignore[no-untyped-def]
    """Play to the end, or until all depends on stage 0 beyond its forward number ``branch``, for several counts of at
    least that many. Return whether there was no deadlock. Allocates nothing.
    """
    lanes, arrivals, letters, starts, jump, skipping = state
    last = len(rules) - 1
    count, branch = count - skipping[LEFT_OUT], branch - skipping[LEFT_OUT]
    while lanes[0].num_b < count:
        begun = 0
        for s in range(last + 1):
            begun += _apply_rules(rules, lanes, arrivals, letters, starts, s, last, count, branch, False)
        if begun == 0:
            if lanes[0].num_f == branch:
                return True
            s = _first_known(rules, lanes, arrivals, last, count)
            if s < 0:
                return False
            _apply_rules(rules, lanes, arrivals, letters, starts, s, last, count, branch, True)
        if not skipping[SEEKS]:
            continue
        skipping[ROUNDS] += 1
        if skipping[ROUNDS] > 1 and same(lanes, arrivals, old_lanes, old_arrivals):
            moved = lanes[0].num_b - old_lanes[0].num_b
            repeats = max(0, (min(count, branch) - 1 - lanes[0].num_f) // moved)
            skipping[LEFT_OUT] = repeats * moved
            skipping[SHIFT] = repeats * (lanes[0].clock - old_lanes[0].clock)
            skipping[SEEKS] = 0
            count, branch = count - repeats * moved, branch - repeats * moved
            for s in range(last + 1):
                me, old, letters_of_b = lanes[s], old_lanes[s], 1 + rules[s].again
                jump[s, 0] = old.num_f + old.num_b * letters_of_b
                jump[s, 1] = me.num_f + me.num_b * letters_of_b
                jump[s, 2] = repeats
        elif skipping[ROUNDS] == skipping[LIMIT]:
            keep(lanes, arrivals, old_lanes, old_arrivals)
            skipping[LIMIT] *= 2
    return True


@loop
def _copy_next(lanes, arrivals, letters, starts, jump, skipping, n):  # type: ignore[no-untyped-def]
    """Copy the state of play n to the next one. Numba takes seconds to compile an assignment of slices."""
    for s in range(lanes.shape[1]):
        lanes[n + 1, s] = lanes[n, s]
        for j in range(arrivals.shape[2]):
            for kind in range(3):
                arrivals[n + 1, s, j, kind] = arrivals[n, s, j, kind]
        for at in range(letters.shape[2]):
            letters[n + 1, s, at] = letters[n, s, at]
        for at in range(starts.shape[2]):
            starts[n + 1, s, at] = starts[n, s, at]
        for at in range(3):
            jump[n + 1, s, at] = jump[n, s, at]
    for at in range(skipping.shape[1]):
        skipping[n + 1, at] = skipping[n, at]


@entry
@compiled
def _play(rules, counts, fixed, skip, keep_orders, keep_times):  # type: ignore[no-untyped-def]
    num_stages, plain, most = len(rules), fixed.shape[2] == 0, counts[-1]
    widest = most
    if plain:
        widest = np.int64(0)
        for s in range(num_stages):
            widest = max(widest, rules[s].window)
    size = 1
    while size < min(most, widest) + 1:
        size *= 2
    lanes = np.zeros((len(counts), num_stages), STAGE_PROGRESS)
    arrivals = np.empty((len(counts), num_stages, size, 3), np.int64)
    letters = np.zeros((len(counts), num_stages, 3 * most if keep_orders else 0), np.uint8)
    starts = np.zeros((len(counts), num_stages, 3 * most if keep_times else 0), np.int64)
    jump = np.zeros((len(counts), num_stages, 3), np.int64)
    skipping = np.zeros((len(counts), 5), np.int64)
    old_lanes, old_arrivals = np.zeros_like(lanes[0]), np.empty_like(arrivals[0])
    ended = np.zeros((len(counts), num_stages), np.int64)
    lengths = np.zeros((len(counts), num_stages), np.int64)
    skipping[0, SEEKS], skipping[0, LIMIT] = skip, 1
    over, latest = True, len(counts) - 1
    for n in range(len(counts)):
        if not plain:
            over &= play_orders(rules, lanes[n], arrivals[n], letters[n], starts[n], counts[n], fixed[n])
        else:
            state = lanes[n], arrivals[n], letters[n], starts[n], jump[n], skipping[n]
            if n < latest:
                over &= _play_rules(rules, state, old_lanes, old_arrivals, counts[latest], counts[n])
                _copy_next(lanes, arrivals, letters, starts, jump, skipping, n)
                skipping[n, SEEKS] = 0
            over &= _play_rules(rules, state, old_lanes, old_arrivals, counts[n], np.int64(_NEVER))
        for s in range(num_stages):
            me = lanes[n, s]
            ended[n, s] = me.clock + skipping[n, SHIFT]
            lengths[n, s] = me.num_f + me.num_b * (1 + rules[s].again) if plain else me.position
    return over, ended, letters, lengths, starts, jump


def play(rules: Any, counts: Any, fixed: Any, skip: bool, keep_orders: bool, keep_times: bool) -> Any:
    """Run the loop; see :func:`simulator.engine.pipeline.run_pipeline`.

    Args:
        rules: Structured array of ``STAGE``, length P.
        counts: Micro-batches: int64[C], ascending. Under the rules, what their plays have in common is played once.
        fixed: uint8[C, P, n] order letters, n = 0 to apply the rules.
        skip: Look for periods (only under the rules, and not with ``keep_times``).
        keep_orders: Return letters.
        keep_times: Return starts.

    Returns:
        (whether there was no deadlock, ends of last backwards int64[C, P], letters uint8[C, P, 3n], numbers of letters
        int64[C, P], starts int64[C, P, 3n], skipped periods int64[C, P, 3]: first letter, end, repeats).
    """
    return _play(rules, counts, fixed, skip, keep_orders, keep_times)
