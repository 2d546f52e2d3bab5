"""Neighbouring cuts, with one boundary or several adjacent ones moved by one section, and lower bounds for them."""

from __future__ import annotations

import numpy as np

from simulator.costs.memory import NEVER
from simulator.costs.stage_costs import StageCosts, link_times
from simulator.engine.schedules import recomputes
from simulator.engine.times import Ints
from simulator.inputs.conditions import Conditions


def neighbours(boundaries: tuple[int, ...], num_sections: int, *, rows: bool = False) -> Ints:
    """Return all cuts with one boundary, or with ``rows`` several adjacent ones, moved by one section: int64[M, P]."""
    starts = np.array(boundaries, np.int64)
    places = np.arange(1, len(starts))
    first, last = np.triu_indices(len(places)) if rows else (places - 1, places - 1)
    where = np.arange(len(starts))
    steps = ((where >= places[first, None]) & (where <= places[last, None])).astype(np.int64)
    cuts = np.concatenate([starts - steps, starts + steps])
    lengths = np.diff(cuts, axis=1, append=num_sections)
    return cuts[(lengths > 0).all(axis=1)]


def moved_bounds_ns(
    costs: StageCosts, cuts: Ints, counts: tuple[int, ...], memory_bytes: int | None, conditions: Conditions
) -> Ints:
    """Return a lower bound, over all windows that fit in memory, for each neighbouring cut: int64[M].

    The bound of a cut is :func:`simulator.costs.bounds.lower_bound_ns`, or 2**62 if a stage does not fit.
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
    tail = back + np.maximum.accumulate(_exposed_ns(costs, cuts, len(counts), conditions) - back, axis=1)
    again = np.array(recomputes(costs.schedule, len(costs.boundaries), sections.recompute), np.bool_)
    work = forward * (1 + again) + backward
    trips = np.cumsum((forward + backward + np.concatenate([activation + gradient, zero], axis=1))[:, ::-1], axis=1)
    trip = trips[:, ::-1]
    busy = most * work
    busy[:, :-1] = np.maximum(busy[:, :-1], trip[:, :-1] + (most - 1) * np.maximum(activation_wire, gradient_wire))
    windows = np.full_like(cuts, most)
    if memory_bytes is not None:
        memory = sections.memory(single=len(counts) == 1)
        windows = memory.most_windows(cuts, end, sections.recompute, memory.usable_bytes(memory_bytes))
    busy = np.maximum(busy, ((most - 1) // np.maximum(1, windows) + 1) * trip)
    optimizer = sections.optimizer_sum_ns[end] - sections.optimizer_sum_ns[cuts]
    bounds: Ints = (head + busy + tail).max(axis=1) + sections.commit_ns + optimizer.max(axis=1)
    return np.where((windows >= 1).all(axis=1), bounds, NEVER)


def _exposed_ns(costs: StageCosts, cuts: Ints, num_replicas: int, conditions: Conditions) -> Ints:
    """Return the exposed part of each stage's all-reduces; shared units count only if none of their sections moves."""
    sections, reduced, base = costs.sections, costs.reduced, np.array(costs.boundaries, np.int64)
    shared = [section for unit in sections.shared_units for section in unit.sections]
    stays = ~((cuts != base) & np.isin(np.minimum(cuts, base), shared)).any(axis=1)[:, None]
    rows, every = np.arange(len(cuts))[:, None], np.arange(sections.num_sections)
    is_first = np.zeros((len(cuts), sections.num_sections), np.bool_)
    is_first[rows, cuts] = True
    first = np.maximum.accumulate(np.where(is_first, every, 0), axis=1)
    sums = np.where(stays, reduced.sum_bytes, sections.own_reduced_sum_bytes)
    sizes = sums[:, 1:] - sums[rows, first]
    exposed = reduced.all_reduce.by_section_ns(num_replicas, sizes)
    if conditions.all_reduce != "late":
        sums = sections.backward_sum_ns + sections.forward_sum_ns * sections.grouped  # complete sooner with groups
        exposed = exposed - (sums[:-1] - sums[first])
    begins = (cuts + rows * sections.num_sections).ravel()
    latest: Ints = np.maximum.reduceat(exposed.ravel(), begins).reshape(cuts.shape)
    for stages, duration in reduced.tied_ns(num_replicas):
        latest[:, list(stages)] += stays * duration
    return latest
