"""The times of every worker of a shape, from its costs, its conditions and the jitter of a draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simulator.costs.memory import next_activations
from simulator.costs.stage_costs import StageCosts
from simulator.engine.execution import ShapeTimes
from simulator.engine.times import Floats, Ints, StageTimes
from simulator.inputs.conditions import Conditions
from simulator.inputs.jitter import JitterDraw, MeanJitter

_TASKS = ("forward", "recompute", "backward")
_MESSAGES = ("activation", "gradient")


def worker_times(
    costs: StageCosts, counts: Sequence[int], conditions: Conditions, jitter: JitterDraw | MeanJitter | None = None
) -> ShapeTimes:
    """Return the times of every stage s of every replica d: of a draw of ``jitter``; None: medians."""
    num_replicas = len(counts)
    slower = _slower(costs, num_replicas, conditions)
    tasks = _medians(costs) if jitter is None else _drawn_tasks(costs, counts, jitter)
    wires = {kind: _by_worker(costs, f"{kind}_wire_ns", num_replicas) for kind in _MESSAGES}
    if jitter is None:
        totals = {kind: _by_worker(costs, f"{kind}_ns", num_replicas)[:, :, None] for kind in _MESSAGES}
    else:
        totals = {kind: _drawn_messages(costs, counts, jitter, kind) for kind in _MESSAGES}
    handled = _handled_ns(totals, conditions)
    if not conditions.overlaps:  # then messages are part of the tasks at both ends
        totals, wires = ({kind: np.zeros_like(times[kind]) for kind in _MESSAGES} for times in (totals, wires))
    return ShapeTimes(
        **{
            f"{kind}_ns": np.maximum(1, np.rint(tasks[kind] * slower + handled.get(kind, 0))).astype(np.int64)
            for kind in _TASKS
        },
        **{f"{kind}_ns": np.maximum(0, totals[kind] - wires[kind][:, :, None]) for kind in _MESSAGES},
        **{f"{kind}_wire_ns": wires[kind] for kind in _MESSAGES},
        node=costs.layout.node(num_replicas),
        recompute=costs.times.recompute,
        share_links=conditions.share_links and conditions.overlaps,
        **_redundant_times(costs, tasks, slower, conditions),
    )


def _handled_ns(totals: Mapping[str, Ints], conditions: Conditions) -> dict[str, Floats]:
    """Return the time that messages add to the tasks of their workers, at either end, [P, D, 1 or most].

    On one machine it is half of each message, which occupies the cores. Otherwise it is 0, or, where nothing overlaps,
    the whole message: the sender is busy until the message is sent, then the receiver until it has arrived.
    """
    if conditions.compute_slots is None and conditions.overlaps:
        return {}
    num_parts = 1 if conditions.compute_slots is None else 2
    taken = {kind: times / num_parts for kind, times in totals.items()}
    behind = {kind: np.zeros_like(times) for kind, times in taken.items()}
    for kind, times in taken.items():
        times[-1] = 0  # the last stage has no next one
        behind[kind][1:] = times[:-1]
    return {
        "forward": taken["activation"] + behind["activation"],
        "backward": taken["gradient"] + behind["gradient"],
    }


def _redundant_times(
    costs: StageCosts, tasks: Mapping[str, Ints | Floats], slower: Floats, conditions: Conditions
) -> dict[str, Ints]:
    """Return the times of the next stage's tasks at each worker's own speed; see :mod:`simulator.costs.redundant`."""
    if not conditions.eager or costs.times.num_stages == 1:
        return {}
    next_stage = {kind: np.roll(times, -1, axis=0) * slower for kind, times in tasks.items()}
    if conditions.redundant_computation == "eflb":
        swap = swap_ns(costs)[:, None, None]
        return {
            "redundant_forward_ns": np.maximum(1, np.rint(np.maximum(next_stage["forward"], swap))).astype(np.int64)
        }
    again = np.roll(costs.times.recompute, -1)[:, None, None]
    backward = next_stage["backward"] + again * next_stage["recompute"]
    both = {"redundant_forward_ns": next_stage["forward"], "redundant_backward_ns": backward}
    return {name: np.maximum(1, np.rint(times)).astype(np.int64) for name, times in both.items()}


def swap_ns(costs: StageCosts) -> Floats:
    """Return the time to copy the next stage's activations to host memory or back: [P]; 0 where it recomputes."""
    speed = costs.sections.profile.host_copy_bytes_per_s
    return next_activations(costs.memory, *costs.spans, costs.times.recompute) / speed * 1e9 if speed else np.zeros(1)


def to_come_ns(
    costs: StageCosts, counts: Sequence[int], conditions: Conditions, jitter: JitterDraw | MeanJitter | None = None
) -> Ints:
    """Return the part of each replica's last backward after each section's: int64[K, D]; 0 if reductions wait."""
    if conditions.all_reduce == "late":
        return np.zeros((costs.sections.num_sections, len(counts)), np.int64)
    sums: Floats | Ints = costs.sections.backward_sum_ns[:, None]
    again: Floats | Ints = costs.sections.forward_sum_ns[:, None]
    if jitter is not None:
        sums, again = (jitter.task_sums_ns(kind)[:, np.cumsum(counts) - 1] for kind in ("backward", "recompute"))
    slower, first = _slower(costs, len(counts), conditions)[costs.reduced.stage, :, 0], costs.reduced.first
    behind = sums[:-1] - sums[first] + (again[costs.group_start] - again[first])
    to_come: Ints = np.rint(behind * slower).astype(np.int64)
    return to_come


def _slower(costs: StageCosts, num_replicas: int, conditions: Conditions) -> Floats:
    """Return how many times slower each worker is than a healthy one alone: [P, D, 1]."""
    slower = np.empty((costs.times.num_stages, num_replicas))
    slower[:] = costs.layout.slowdown
    for stage, replica, factor in conditions.slow:
        slower[stage, slice(None) if replica is None else replica] *= factor
    return slower[:, :, None]


def _medians(costs: StageCosts) -> dict[str, Ints]:
    """Return the median times of each task: [P, 1, 1]."""
    return {kind: getattr(costs.alone, f"{kind}_ns")[:, None, None] for kind in _TASKS}


def _ends(costs: StageCosts) -> tuple[Ints, Ints]:
    begin = np.asarray(costs.boundaries, np.int64)
    return begin, np.append(begin[1:], costs.sections.num_sections)


def _dealt(values: Floats, counts: Sequence[int]) -> Floats:
    """Distribute [P, N] values by micro-batch of the mini-batch to [P, D, most] by micro-batch of each replica."""
    dealt = np.zeros((len(values), len(counts), max(counts)))
    first = 0
    for replica, count in enumerate(counts):
        dealt[:, replica, :count] = values[:, first : first + count]
        first += count
    return dealt


def _drawn_tasks(costs: StageCosts, counts: Sequence[int], jitter: JitterDraw | MeanJitter) -> dict[str, Floats]:
    begin, end = _ends(costs)
    sums = {kind: jitter.task_sums_ns(kind) for kind in _TASKS}
    times = {kind: total[end] - total[begin] for kind, total in sums.items()}
    rerun = sums["recompute"][costs.last_group] - sums["recompute"][begin]
    times |= {"recompute": times["recompute"] - rerun, "backward": times["backward"] + rerun}
    return {kind: _dealt(total, counts) for kind, total in times.items()}


def _by_worker(costs: StageCosts, name: str, num_replicas: int) -> Ints:
    """Return message times over the link from each worker to its next stage: [P, D]."""
    _, end = _ends(costs)
    between: Ints = getattr(costs.sections.inter_node, name)[end - 1]
    within: Ints = getattr(costs.sections.intra_node, name)[end - 1]
    chosen = np.empty((len(end), num_replicas), np.int64)
    chosen[:] = np.where(costs.layout.inside, within[:, None], between[:, None])
    return chosen


def _drawn_messages(costs: StageCosts, counts: Sequence[int], jitter: JitterDraw | MeanJitter, kind: str) -> Ints:
    """Return drawn message times: [P, D, most]."""
    _, end = _ends(costs)
    sections = costs.sections
    inside = np.broadcast_to(costs.layout.inside, (len(end), len(counts)))
    by_link = []
    for link in (sections.profile.inter_node, sections.profile.intra_node):
        times = [jitter.message_ns(kind, last, link, float(sections.sent_bytes[last])) for last in (end - 1).tolist()]
        by_link.append(_dealt(np.stack(times), counts))
    return np.rint(np.where(inside[:, :, None], by_link[1], by_link[0])).astype(np.int64)


def recomputes_in_time(times: StageTimes) -> bool:
    """Whether a recompute that begins with the next stage's backward ends before the gradient arrives.

    If not, executing an order is faster than the rules that made it: an idle worker begins the recompute without
    waiting for the next stage to begin its backward.
    """
    late = times.recompute_ns[:-1] > times.backward_ns[1:] + times.gradient_ns[:-1]
    return not bool((late & times.recompute[:-1]).any())


def is_plain(costs: StageCosts, counts: Sequence[int], conditions: Conditions) -> bool:
    """Whether the pipelines of this shape run exactly as :func:`run_pipeline` plays them."""
    slots = conditions.compute_slots
    crowded = slots is not None and slots < costs.times.num_stages * len(counts)
    if conditions.slow or conditions.eager or not conditions.overlaps or crowded:
        return False
    if not costs.layout.alike or not recomputes_in_time(costs.times):
        return False
    shares = conditions.share_links and max(int(wire.max(initial=0)) for wire in costs.times.wires_ns) > 0
    return not shares or bool(costs.layout.inside[:-1].all()) or costs.times.num_stages == 1
