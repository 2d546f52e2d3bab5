"""The compiled loop for fixed orders (GPipe, 1F1B): each stage as far as its inputs are known, in turns."""

from __future__ import annotations

import numpy as np

from simulator.engine.compiling import loop
from simulator.engine.stage_progress import ACT, GRAD, B, F, R


@loop
def _follow_order(rules, lanes, arrivals, letters, starts, s, last, fixed):  # type: ignore[no-untyped-def]
    """Play stage s in its fixed order until an input is unknown: tasks begun."""
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
    """Play to the end: (whether it came to one, 0). Allocates nothing."""
    last = len(rules) - 1
    while lanes[0].num_b < count:
        begun = 0
        for s in range(last + 1):
            begun += _follow_order(rules, lanes, arrivals, letters, starts, s, last, fixed)
        for s in range(last - 1, 0, -1):
            begun += _follow_order(rules, lanes, arrivals, letters, starts, s, last, fixed)
        if begun == 0:
            return False, np.int64(0)
    return True, np.int64(0)
