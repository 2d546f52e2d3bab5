"""Cuts with one boundary, or several in a row, one section away, and how fast stages cut so could be at best."""

from __future__ import annotations

import numpy as np

from simulator.answers.costs import SectionCosts, StageCosts, link_times
from simulator.playing.times import Ints

_NEVER = 2**62


def neighbours(boundaries: tuple[int, ...], num_sections: int, *, rows: bool = False) -> Ints:
    """Every cut with one boundary, or with ``rows`` several in a row, one section to the left or right: int64[M, P]."""
    starts = np.array(boundaries, np.int64)
    places = np.arange(1, len(starts))
    first, last = np.triu_indices(len(places)) if rows else (places - 1, places - 1)
    where = np.arange(len(starts))
    steps = ((where >= places[first, None]) & (where <= places[last, None])).astype(np.int64)
    cuts = np.concatenate([starts - steps, starts + steps])
    lengths = np.diff(cuts, axis=1, append=num_sections)
    return cuts[(lengths > 0).all(axis=1)]


def moved_bounds_ns(costs: StageCosts, cuts: Ints, counts: tuple[int, ...], memory_bytes: int | None) -> Ints:
    """What no windows that fit in memory make faster, of each of the cuts next to these stages: int64[M].

    As :func:`simulator.answers.bounds.lower_bound_ns`, of many cuts at once; 2**62 where a stage does not fit.
    """
    sections, layout, most = costs.sections, costs.layout, max(counts)
    end = np.concatenate([cuts[:, 1:], np.full((len(cuts), 1), sections.num_sections)], axis=1)
    forward = sections.forward_sum_ns[end] - sections.forward_sum_ns[cuts]
    backward = sections.backward_sum_ns[end] - sections.backward_sum_ns[cuts]
    activation, gradient, activation_wire, gradient_wire = (
        link_times(sections, f"{name}_ns", end - 1, layout, False)[:, :-1]
        for name in ("activation", "gradient", "activation_wire", "gradient_wire")
    )
    zero = np.zeros((len(cuts), 1), np.int64)
    head = np.concatenate([zero, np.cumsum(forward[:, :-1] + activation, axis=1)], axis=1)
    back = np.concatenate([zero, np.cumsum(backward[:, :-1] + gradient, axis=1)], axis=1)
    tail = back + np.maximum.accumulate(_reduce_ns(costs, cuts, end, len(counts)) - back, axis=1)
    work = forward * (1 + costs.times.recompute) + backward
    trips = np.cumsum((forward + backward + np.concatenate([activation + gradient, zero], axis=1))[:, ::-1], axis=1)
    trip = trips[:, ::-1]
    busy = most * work
    busy[:, :-1] = np.maximum(busy[:, :-1], trip[:, :-1] + (most - 1) * np.maximum(activation_wire, gradient_wire))
    windows = np.full_like(cuts, most) if memory_bytes is None else _most_windows(sections, cuts, end, memory_bytes)
    busy = np.maximum(busy, ((most - 1) // np.maximum(1, windows) + 1) * trip)
    optimizer = sections.optimizer_sum_ns[end] - sections.optimizer_sum_ns[cuts]
    bounds: Ints = (head + busy + tail).max(axis=1) + sections.commit_ns + optimizer.max(axis=1)
    return np.where((windows >= 1).all(axis=1), bounds, _NEVER)


def _reduce_ns(costs: StageCosts, cuts: Ints, end: Ints, num_replicas: int) -> Ints:
    """AR of each stage; what several sections hold counts where none of these moves."""
    sections, base = costs.sections, np.array(costs.boundaries, np.int64)
    shared = [section for unit in sections.shared_units for section in unit.sections]
    stays = ~((cuts != base) & np.isin(np.minimum(cuts, base), shared)).any(axis=1)
    sums = sections.own_reduced_sum_bytes
    together = costs.private_bytes - (sums[np.append(base[1:], sections.num_sections)] - sums[base])
    private = sums[end] - sums[cuts] + stays[:, None] * together
    reduce: Ints = costs.all_reduce.times_ns(num_replicas, private.ravel()).reshape(cuts.shape)
    for stages, duration in costs.tied_reduce_ns(num_replicas):
        reduce[:, list(stages)] += stays[:, None] * duration
    return reduce


def _most_windows(sections: SectionCosts, cuts: Ints, end: Ints, memory_bytes: int) -> Ints:
    """Of each stage the largest window that fits in memory; below 1 where none does: as most_windows of many cuts."""
    num_cuts, num_sections = len(cuts), sections.num_sections
    rows = cuts + num_sections * np.arange(num_cuts)[:, None]
    peak = np.maximum.reduceat(np.tile(sections.peak_sum_bytes, num_cuts), rows.ravel()).reshape(cuts.shape)
    held = sections.held_sum_bytes[end] - sections.held_sum_bytes[cuts]
    before, each = sections.activation_sum_bytes[cuts], sections.input_bytes[cuts]
    room = memory_bytes - (held + each + peak - before)
    if not sections.recompute:
        each = each + sections.activation_sum_bytes[end] - before
    windows: Ints = np.where(room < 0, 0, 1 + room // np.maximum(1, each))
    return windows
