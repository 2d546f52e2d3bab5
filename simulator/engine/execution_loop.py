"""The compiled loop behind :mod:`simulator.engine.execution`: many workers, node links and cores that they share.

A *lane* is one stage of one replica, numbered (P - 1 - s) * D + d: the order in which stages decide at one instant.
A *channel* carries the messages of one direction from one lane: number = lane for activations (to the next stage)
and L + lane for gradients (to the stage before); with redundant backwards also 2L + lane for copies of gradients (to
the predecessor of the stage before). Every lane and channel has one key, of its next event: (time, kind, number), where
ends of tasks come before ends of transmissions, and these before decisions; a tournament tree finds the smallest key.
What is left of a transmission is counted in 1/2520 ns, so that it is exact for up to ten messages on a link.
Definitions are untyped, as numba requires.
"""

from __future__ import annotations

import numpy as np

from simulator.engine.compilation import entry, inlined, loop
from simulator.engine.execution_period import keep, num_repeats, skip
from simulator.engine.redundant_loop import COPY, SINCE, catch_up, use_wait

_NEVER = 2**62
_IDLE, _QUEUED = 0, 1
_F, _R, _B = 70, 82, 66  # ASCII
_TASK_ENDS, _SENT, _DECIDES = 0, 1, 2
_ACT, _GRAD = 0, 1
SHARE_UNIT = 2520

STAGE_PROGRESS = np.dtype(
    [
        (name, np.int64)
        for name in (
            "task",
            "stage",
            "replica",
            "count",
            "window",
            "again",
            "num_f",
            "num_r",
            "num_b",
            "begun",
            "position",
            "seen_f",
            "seen_r",
            "seen_b",
            "act_known",
            "grad_known",
            "copies_known",
        )
    ]
)
"""``num_*``: tasks begun; ``position``: of the order's first task that has not begun; ``seen_*``: tasks before it."""

CHANNEL = np.dtype(
    [
        (name, np.int64)
        for name in ("receiver", "out", "into", "handed", "sent", "busy", "left", "since", "share", "free", "last")
    ]
)
"""``out`` and ``into``: nodes whose links the messages use; -1: no link is shared. ``handed``: messages handed over;
``sent``: those sent. ``left``: what was left at ``since`` of the message in transmission, at 1/``share`` of the
bandwidth. ``free``: when an unshared channel has sent all; ``last``: arrival of the last message."""


@inlined
def _key(instant, kind, number, bits):  # type: ignore[no-untyped-def]
    return (((instant << 2) | kind) << bits) | number


@loop
def _set(tree, number, key):  # type: ignore[no-untyped-def]
    at = (len(tree) >> 1) + number
    tree[at] = key
    at >>= 1
    while at >= 1:
        least = min(tree[2 * at], tree[2 * at + 1])
        if tree[at] == least:
            break
        tree[at] = least
        at >>= 1


@loop
def _arrive(lanes, channels, arrivals, latencies, tree, c, leaves, bits):  # type: ignore[no-untyped-def]
    """Record that a message was sent: set its arrival time at the receiver, which wakes up then if it is idle."""
    mine, mask = channels[c], arrivals.shape[2] - 1
    kind = _ACT if c < len(lanes) else _GRAD
    arrival = max(mine.last, leaves + latencies[c, min(mine.sent, latencies.shape[1] - 1)])
    mine.last = arrival
    mine.sent += 1
    other = lanes[mine.receiver]
    if kind == _ACT:
        arrivals[_ACT, mine.receiver, other.act_known & mask] = arrival
        other.act_known += 1
    elif c >= 2 * len(lanes):
        arrivals[COPY, mine.receiver, other.copies_known & mask] = arrival
        other.copies_known += 1
        return
    else:
        arrivals[_GRAD, mine.receiver, other.grad_known & mask] = arrival
        other.grad_known += 1
    if other.task == _IDLE:
        key = _key(arrival, _DECIDES, mine.receiver, bits)
        if key < tree[(len(tree) >> 1) + mine.receiver]:
            _set(tree, mine.receiver, key)


@loop
def _reshare(channels, busy, tree, num_lanes, c, now, bits):  # type: ignore[no-untyped-def]
    """Update the bandwidth share of a message in transmission: 1/n with n messages on the busier of its two links."""
    mine = channels[c]
    share = max(busy[0, mine.out], busy[1, mine.into])
    if share != mine.share:
        if mine.share > 0:
            mine.left -= (now - mine.since) * SHARE_UNIT // mine.share
        mine.since, mine.share = now, share
        end = now + max(np.int64(0), (mine.left * share + SHARE_UNIT - 1) // SHARE_UNIT)
        _set(tree, num_lanes + c, _key(end, _SENT, num_lanes + c, bits))


@loop
def _reshare_both(channels, busy, leaving, entering, tree, num_lanes, c, now, bits):  # type: ignore[no-untyped-def]
    """Update the shares of all channels on either link of channel c, after it began or ended a transmission."""
    out, into = channels[c].out, channels[c].into
    for at in range(leaving[out, 0]):
        other = leaving[out, 1 + at]
        if channels[other].busy:
            _reshare(channels, busy, tree, num_lanes, other, now, bits)
    for at in range(entering[into, 0]):
        other = entering[into, 1 + at]
        if channels[other].busy:
            _reshare(channels, busy, tree, num_lanes, other, now, bits)


@loop
def _transmit(channels, wires, busy, leaving, entering, tree, num_lanes, c, now, bits):  # type: ignore[no-untyped-def]
    mine = channels[c]
    mine.busy, mine.left, mine.share = 1, wires[c] * SHARE_UNIT, 0
    busy[0, mine.out] += 1
    busy[1, mine.into] += 1
    _reshare_both(channels, busy, leaving, entering, tree, num_lanes, c, now, bits)


@loop
def _hand_over(lanes, channels, arrivals, latencies, wires, busy, leaving, entering, tree, c, now, bits):  # type: ignore[no-untyped-def]
    """Send a message, at once or after the channel's earlier ones."""
    mine = channels[c]
    mine.handed += 1
    if mine.out < 0:
        mine.free = max(mine.free, now) + wires[c]
        _arrive(lanes, channels, arrivals, latencies, tree, c, mine.free, bits)
    elif mine.busy == 0:
        _transmit(channels, wires, busy, leaving, entering, tree, len(lanes), c, now, bits)


@loop
def _due(me, orders):  # type: ignore[no-untyped-def]
    while True:
        due = orders[me.stage, me.replica, me.position]
        if due == _F and me.seen_f < me.num_f:
            me.seen_f += 1
        elif due == _R and me.seen_r < me.num_r:
            me.seen_r += 1
        elif due == _B and me.seen_b < me.num_b:
            me.seen_b += 1
        else:
            return due
        me.position += 1


@loop
def _next_letter(lanes, arrivals, orders, lane, num_stages, strict, now):  # type: ignore[no-untyped-def]
    """Decide like ``ScheduleCursor.next_task``; return (letter or 0, when to decide again)."""
    me, mask, never = lanes[lane], arrivals.shape[2] - 1, np.int64(_NEVER)
    if me.num_b == me.count:
        return 0, never
    act, grad = never, never
    if me.num_f < me.count:
        if me.stage == 0:
            act = np.int64(0)
        elif me.act_known > me.num_f:
            act = arrivals[_ACT, lane, me.num_f & mask]
    if me.num_b < me.num_f:
        if me.stage == num_stages - 1:
            grad = np.int64(0)
        elif me.grad_known > me.num_b:
            grad = arrivals[_GRAD, lane, me.num_b & mask]
    recomputed = me.again == 0 or me.num_r > me.num_b
    if me.again != 0 and recomputed:
        return (_B if grad <= now else 0), grad
    if strict == 0 and grad <= now:
        return (_B if recomputed else _R), now
    due = _due(me, orders)
    if due == _F:
        if act <= now:
            return _F, now
        return 0, (act if strict != 0 else min(act, grad))
    if due == _B and grad <= now:
        return _B, now
    if strict == 0 and act <= now and me.num_f - me.num_b < me.window:
        return _F, now
    if due == _R:
        return _R, now
    if strict != 0:
        return 0, grad
    # a forward may come first, but only where the window has room
    return 0, (min(act, grad) if me.num_f - me.num_b < me.window else grad)


@loop
def _begin(lanes, arrivals, tasks, extra, letters, starts, tree, lane, letter, now, num_stages, bits):  # type: ignore[no-untyped-def]
    me, last = lanes[lane], tasks.shape[2] - 1
    if extra is not None:
        now = catch_up(lanes, arrivals, extra, lane, letter, now, num_stages)
    if letters.shape[2] > 0:
        letters[me.stage, me.replica, me.begun] = letter
        starts[me.stage, me.replica, me.begun] = now
    me.begun += 1
    me.task = letter
    if letter == _F:
        end = now + tasks[0, lane, min(me.num_f, last)]
        me.num_f += 1
    elif letter == _R:
        end = now + tasks[1, lane, min(me.num_r, last)]
        me.num_r += 1
    else:
        end = now + tasks[2, lane, min(me.num_b, last)]
        me.num_b += 1
    _set(tree, lane, _key(end, _TASK_ENDS, lane, bits))


@loop
def _redone(lanes, arrivals, extra, redone, num_stages):  # type: ignore[no-untyped-def]
    """Run the remaining redundant tasks; return 1."""
    for lane in range(len(lanes)):
        me = lanes[lane]
        redone[me.stage, me.replica] = use_wait(lanes, arrivals, extra, lane, np.int64(_NEVER), num_stages)
    return 1


@entry
@loop
def execution_loop(  # type: ignore[no-untyped-def]
    lanes,
    channels,
    tasks,
    extra,
    latencies,
    wires,
    orders,
    common,
    arrivals,
    busy,
    leaving,
    entering,
    tree,
    queue,
    old,
    ended,
    redone,
    letters,
    starts,
    num_stages,
    slots,
    strict,
    bits,
):
    """Simulate to the end, or as far as ``common`` allows. Allocates nothing.

    Returns 1; 0: deadlock; -1: a time is too late to fit into a key. A simulation that stopped before its end can be
    continued, with other numbers of micro-batches and orders, if no tasks wait for a slot.

    Args:
        lanes: ``STAGE_PROGRESS``[L], with stage, replica, count, window and again set.
        channels: ``CHANNEL``[2L or 3L], with receiver, out and into set.
        tasks: int64[3, L, n] of F, R and B by micro-batch; n = 1: the same for all.
        extra: Redundant tasks, see :mod:`simulator.engine.redundant_loop`; None has a compiled version of its own.
        latencies: int64[2L or 3L, n], latencies of messages after the wire.
        wires: int64[2L or 3L], time on the wire of a lone message; at least 1 where it is shared.
        orders: uint8[P, D, longest] letters.
        common: int64[L, 2]: how many first letters, and forwards among them, each lane has in common with other orders.
            The simulation stops before the first decision that may depend on later letters.
        arrivals: int64[2 or 3, L, 2^k], more than any lane can have in flight.
        busy: int64[2, number of nodes]: messages leaving and entering.
        leaving: int64[number of nodes, 1 + most]: how many channels leave, and which.
        entering: As ``leaving``.
        tree: int64[2^k], 2^k >= 6L or 8L: tournament tree; at first, all ``_NEVER``.
        queue: int64[L, 2].
        old: Like (lanes, channels, arrivals, tree), to detect repeating periods when no letters are kept.
        ended: int64[P, D], result: end of the last backward.
        redone: int64[P, D], result: end of the last redundant task too.
        letters: uint8[P, D, 3n], result; n = 0: not kept.
        starts: int64[P, D, 3n], result; n = 0: not kept.
        bits: Number of bits of a lane's or channel's number.
    """
    num_lanes = len(lanes)
    head, waiting, running, left = 0, 0, 0, 0
    is_new = tree[1] == _NEVER
    for lane in range(num_lanes):
        me = lanes[lane]
        left += me.count - me.num_b + (me.task == _B)
        running += me.task > _QUEUED
        if is_new and me.stage == 0:
            _set(tree, lane, _key(np.int64(0), _DECIDES, lane, bits))
    state = (lanes, channels, arrivals, tree)
    copies = len(channels) > 2 * num_lanes
    skips = letters.shape[2] == 0 and tasks.shape[2] == 1 and latencies.shape[1] == 1 and extra is None
    old_now, next_kept = np.int64(-1), 1
    number_mask = (np.int64(1) << bits) - 1
    latest = np.int64(1) << (60 - bits)
    while True:
        if left == 0 and (not copies or tree[1] == _NEVER):  # copies may still be on their way
            return 1 if extra is None else _redone(lanes, arrivals, extra, redone, num_stages)
        key = tree[1]
        if key == _NEVER:
            return 0
        now, number = key >> (bits + 2), key & number_mask
        if now > latest:
            return -1
        kind = (key >> bits) & 3
        if kind == _SENT:
            c = number - num_lanes
            mine = channels[c]
            mine.busy = 0
            busy[0, mine.out] -= 1
            busy[1, mine.into] -= 1
            _set(tree, number, np.int64(_NEVER))
            _arrive(lanes, channels, arrivals, latencies, tree, c, now, bits)
            _reshare_both(channels, busy, leaving, entering, tree, num_lanes, c, now, bits)
            if mine.sent < mine.handed:
                _transmit(channels, wires, busy, leaving, entering, tree, num_lanes, c, now, bits)
            continue
        me = lanes[number]
        if kind == _TASK_ENDS:
            if skips and number == 0 and me.task == _B and waiting == 0 and me.num_b < me.count:
                for lane in range(num_lanes):
                    if lanes[lane].num_b < lanes[lane].count:
                        _due(lanes[lane], orders)
                repeats = num_repeats(state, now, old, old_now, orders, common, bits) if old_now >= 0 else 0
                if repeats > (latest - now) // (now - old_now):
                    return -1
                if repeats > 0:
                    left -= num_lanes * skip(state, now, old, old_now, repeats, bits)
                    old_now, next_kept = np.int64(-1), 2 * me.num_b
                    continue
                if me.num_b >= next_kept:
                    keep(state, old)
                    old_now, next_kept = now, next_kept + next_kept // 2 + 1
            channel = -1
            if me.task == _F and me.stage < num_stages - 1:
                channel = number
            elif me.task == _B:
                left -= 1
                ended[me.stage, me.replica] = now
                if me.stage > 0:
                    channel = num_lanes + number
            copied = False
            if extra is not None:
                extra[1][SINCE, number, 0] = now
                copied = copies and channel >= num_lanes
            me.task = _IDLE
            running -= 1
            _set(tree, number, _key(now, _DECIDES, number, bits))
            if channel >= 0:
                _hand_over(
                    lanes, channels, arrivals, latencies, wires, busy, leaving, entering, tree, channel, now, bits
                )
            if copied:
                channel += num_lanes
                _hand_over(
                    lanes, channels, arrivals, latencies, wires, busy, leaving, entering, tree, channel, now, bits
                )
            continue
        if waiting > 0 and running < slots:
            granted, letter = queue[head, 0], queue[head, 1]
            head, waiting, running = (head + 1) % num_lanes, waiting - 1, running + 1
            _begin(lanes, arrivals, tasks, extra, letters, starts, tree, granted, letter, now, num_stages, bits)
            continue
        if me.num_f >= common[number, 1]:
            return 1
        letter, wake = _next_letter(lanes, arrivals, orders, number, num_stages, strict, now)
        if me.position >= common[number, 0]:
            return 1
        if letter == 0:
            _set(tree, number, _NEVER if wake == _NEVER else _key(wake, _DECIDES, number, bits))
        elif running < slots:
            running += 1
            _begin(lanes, arrivals, tasks, extra, letters, starts, tree, number, letter, now, num_stages, bits)
        else:
            place = (head + waiting) % num_lanes
            queue[place, 0], queue[place, 1] = number, letter
            waiting += 1
            me.task = _QUEUED
            _set(tree, number, np.int64(_NEVER))
