"""Redundant forwards (FRC) and backwards (BRC) of the next stage, which a worker runs while it waits (Bamboo, 5.2).

A worker's own tasks take precedence: they interrupt a redundant task, which continues later. No events are needed: in a
wait the only new inputs are copies of gradients, whose arrivals are known, so the use of a wait is computed at its end.
Redundant tasks that do not fit in waits delay the worker: an own task begins only when at most ``LAG`` redundant tasks
of its kind whose inputs have arrived are left (the paper runs the FRC of one micro-batch during the forward of the
next).

``extra`` is (lengths int64[1 or 2, L, n] of FRC and, if eager, BRC, by micro-batch, n = 1: equal for all; progress
int64[3, L, 2]: tasks done and ns spent on the next, and since when a worker waits; spans int64[2, L, n, 2], result:
first begin and end of each, n = 0: not requested). Definitions are untyped, as numba requires.
"""

from __future__ import annotations

import numpy as np

from simulator.engine.compilation import loop

FRC, BRC, SINCE = 0, 1, 2
COPY = 2
"""Kind of arrival: a copy, for a BRC, of the gradient that the next stage receives."""
LAG = 1
_NEVER = 2**62
_R, _B = 82, 66  # ASCII


@loop
def _input_ns(lanes, arrivals, extra, lane, kind, num_stages):  # type: ignore[no-untyped-def]
    """Return when the input of the next redundant task arrives; ``never``: not known."""
    me, done, never = lanes[lane], extra[1][kind, lane, 0], np.int64(_NEVER)
    if kind == FRC:
        return np.int64(0) if done < me.num_f else never
    if kind >= len(extra[0]) or done >= extra[1][FRC, lane, 0]:
        return never
    if me.stage == num_stages - 2:
        return np.int64(0)  # the last stage has the loss
    return arrivals[COPY, lane, done & (arrivals.shape[2] - 1)] if done < me.copies_known else never


@loop
def _run(extra, lane, kind, begin, until):  # type: ignore[no-untyped-def]
    """Run the next redundant task of this kind until ``until`` at most; return when it stops."""
    lengths, progress, spans = extra
    done = progress[kind, lane, 0]
    if spans.shape[2] > 0 and progress[kind, lane, 1] == 0:
        spans[kind, lane, done, 0] = begin
    end = begin + lengths[kind, lane, min(done, lengths.shape[2] - 1)] - progress[kind, lane, 1]
    if end > until:
        progress[kind, lane, 1] += until - begin
        return until
    progress[kind, lane, 0] += 1
    progress[kind, lane, 1] = 0
    if spans.shape[2] > 0:
        spans[kind, lane, done, 1] = end
    return end


@loop
def use_wait(lanes, arrivals, extra, lane, until, num_stages):  # type: ignore[no-untyped-def]
    """Use a worker's wait for redundant tasks, forwards first; return when they stopped, or the wait began."""
    begin = extra[1][SINCE, lane, 0]
    while begin < until:
        kind = FRC
        instant = _input_ns(lanes, arrivals, extra, lane, FRC, num_stages)
        if instant > begin:
            kind = BRC
            instant = _input_ns(lanes, arrivals, extra, lane, BRC, num_stages)
        instant = max(begin, instant)
        if instant >= until:
            break
        begin = _run(extra, lane, kind, instant, until)
    return begin


@loop
def catch_up(lanes, arrivals, extra, lane, letter, now, num_stages):  # type: ignore[no-untyped-def]
    """End a worker's wait for its own task; return when that begins, after overdue redundant tasks."""
    me = lanes[lane]
    use_wait(lanes, arrivals, extra, lane, now, num_stages)
    if letter == _R:
        return now
    kind, begun = (BRC, me.num_b) if letter == _B else (FRC, me.num_f)
    begins = now
    while extra[1][kind, lane, 0] < begun - LAG and _input_ns(lanes, arrivals, extra, lane, kind, num_stages) <= now:
        begins = _run(extra, lane, kind, begins, np.int64(_NEVER))
    return begins
