"""Detects periods in the execution of orders, so that whole periods can be skipped exactly.

A state is (lanes, channels, arrivals, tree) of ``execution_loop`` when lane 0 ends a backward. Two states are equal if
everything that determines the future is equal relative to the time and to the micro-batches begun; messages that have
arrived count as arriving now. After equal states the same happens again, as long as the orders repeat and forwards are
left.
"""

from __future__ import annotations

from simulator.engine.compilation import loop

_NEVER = 2**62


@loop
def _copy_messages(lanes, arrivals, to, moved, later):  # type: ignore[no-untyped-def]
    """Copy the arrivals of unused messages, shifted by so many micro-batches and ns."""
    mask = arrivals.shape[2] - 1
    for n in range(len(lanes)):
        for j in range(lanes[n].num_f, lanes[n].act_known):
            to[0, n, (j + moved) & mask] = arrivals[0, n, j & mask] + later
        for j in range(lanes[n].num_b, lanes[n].grad_known):
            to[1, n, (j + moved) & mask] = arrivals[1, n, j & mask] + later


@loop
def keep(state, old):  # type: ignore[no-untyped-def]
    """Remember this state."""
    for n in range(len(state[0])):
        old[0][n] = state[0][n]
    for c in range(len(state[1])):
        old[1][c] = state[1][c]
    _copy_messages(state[0], state[2], old[2], 0, 0)
    for number in range(len(state[3])):
        old[3][number] = state[3][number]


@loop
def _same_lane(state, now, old, old_now, moved, n):  # type: ignore[no-untyped-def]
    lanes, arrivals, old_lanes, old_arrivals = state[0], state[2], old[0], old[2]
    me, other, mask = lanes[n], old_lanes[n], arrivals.shape[2] - 1
    if me.task != other.task or me.num_f - other.num_f != moved or me.num_b - other.num_b != moved:
        return False
    if me.num_r - other.num_r != moved * me.again or me.num_r - me.seen_r != other.num_r - other.seen_r:
        return False
    if me.num_f - me.seen_f != other.num_f - other.seen_f or me.num_b - me.seen_b != other.num_b - other.seen_b:
        return False
    for kind in range(2):
        begun = me.num_f if kind == 0 else me.num_b
        known = me.act_known if kind == 0 else me.grad_known
        if known > 0 and known - (other.act_known if kind == 0 else other.grad_known) != moved:
            return False
        for j in range(begun, known):
            before = max(old_now, old_arrivals[kind, n, (j - moved) & mask])
            if max(now, arrivals[kind, n, j & mask]) - before != now - old_now:
                return False
    return True


@loop
def _same_channel(mine, other, now, old_now, moved):  # type: ignore[no-untyped-def]
    if mine.handed == 0:
        return True
    if mine.busy != other.busy or mine.handed - other.handed != moved or mine.sent - other.sent != moved:
        return False
    later = now - old_now
    if mine.busy and (mine.share != other.share or mine.left != other.left or mine.since - other.since != later):
        return False
    if max(now, mine.free) - max(old_now, other.free) != later:
        return False
    return max(now, mine.last) - max(old_now, other.last) == later


@loop
def num_repeats(state, now, old, old_now, orders, common, bits):  # type: ignore[no-untyped-def]
    """Return how often the period since the old state surely repeats, by letters ``common`` to other orders."""
    lanes, channels, tree = state[0], state[1], state[3]
    num_keys, half = len(lanes) + len(channels), len(tree) >> 1
    moved, shift = lanes[0].num_b - old[0][0].num_b, (now - old_now) << (bits + 2)
    for number in range(half, half + num_keys):
        key, before = tree[number], old[3][number]
        if key != before + shift and not (key == _NEVER and before == _NEVER):
            return 0
    for n in range(len(lanes)):
        if not _same_lane(state, now, old, old_now, moved, n):
            return 0
    for c in range(len(channels)):
        if not _same_channel(channels[c], old[1][c], now, old_now, moved):
            return 0
    repeats = lanes[0].count
    for n in range(len(lanes)):
        me, length = lanes[n], lanes[n].position - old[0][n].position
        repeats = min(repeats, (me.count - 1 - me.num_f) // moved)
        alike, most = 0, min(repeats * length + 1, min(orders.shape[2], common[n, 0]) - me.position)
        while alike < most:
            at = me.position + alike
            if orders[me.stage, me.replica, at] != orders[me.stage, me.replica, at - length]:
                break
            alike += 1
        repeats = min(repeats, (alike - 1) // length)  # the letter after the last period is read, too
    return max(0, repeats)


@loop
def skip(state, now, old, old_now, repeats, bits):  # type: ignore[no-untyped-def]
    """Advance by so many periods since the old state, which is overwritten. Return the micro-batches of each lane."""
    lanes, channels, arrivals, tree = state
    moved = repeats * (lanes[0].num_b - old[0][0].num_b)
    later = repeats * (now - old_now)
    _copy_messages(lanes, arrivals, old[2], moved, later)
    for n in range(len(lanes)):
        me, other = lanes[n], old[0][n]
        me.position += repeats * (me.position - other.position)
        me.begun += moved * (2 + me.again)
        me.num_f += moved
        me.seen_f += moved
        me.num_r += moved * me.again
        me.seen_r += moved * me.again
        me.num_b += moved
        me.seen_b += moved
        me.act_known += moved * (me.act_known > 0)
        me.grad_known += moved * (me.grad_known > 0)
    _copy_messages(lanes, old[2], arrivals, 0, 0)
    for c in range(len(channels)):
        mine = channels[c]
        if mine.handed > 0:
            mine.handed += moved
            mine.sent += moved
            mine.since += later
            mine.free += later
            mine.last += later
    for number in range(len(tree)):
        if tree[number] != _NEVER:
            tree[number] += later << (bits + 2)
    return moved
