"""Chooses among the plans that a search found: the fastest may gain too little for its complexity or its memory.

A forecast is as uncertain as the times that it is made of, and so is that of memory. So plans whose forecasts differ by
less than the error of the times count as equally good. Of these a plan is preferred that leaves the memory margin on
each device, then the one with fewest kinds of pipelines, then the best by the request's objective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from morph.contract.profile import Profile
from simulator.costs.answer import Simulation
from simulator.costs.joined_sections import JoinedSections
from simulator.inputs.request import PlanRequest
from simulator.search.choice import PlanChoice

LEAST_TIME_ERROR = 0.01
"""Expected times are never more exact than this: about twice the worst error of emulated runs (docs/benchmarks.md)."""
MEMORY_ERROR = 0.08
"""The most by which a stage's expected memory was below the measured, as a share of the latter (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Errors:
    """The error of a profile's times, and that of the memory expected from it, each as a share."""

    time: float
    memory: float = MEMORY_ERROR

    @classmethod
    def of(cls, profile: Profile) -> Errors:
        """Return the errors that a profile itself shows.

        The error of the times is the spread (median absolute deviation) of one pass through the model, whose sections
        vary independently.
        """
        size = profile.micro_batch_sizes[-1]
        times = [tasks[size] for section in profile.sections for tasks in (section.forward, section.backward)]
        whole_s = sum(timing.median_s for timing in times)
        spread_s = math.sqrt(sum(timing.mad_s**2 for timing in times))
        return cls(max(LEAST_TIME_ERROR, spread_s / whole_s if whole_s else 0.0))


def room_left(simulation: Simulation, memory_bytes: int | None = None) -> tuple[float, int | None]:
    """Return the share of memory that is left on the fullest device, and this device's memory; 1 and None: no limit.

    ``memory_bytes``: the requested limit of a device; None: the profile's.
    """
    found: tuple[float, int | None] = (1.0, None)
    for costs in (kind.outcome.costs for kind in simulation.kinds):
        sections = costs.sections
        limits = [memory_bytes or sections.profile.environment.device_memory_bytes] * len(costs.memory_bytes)
        if isinstance(sections, JoinedSections):
            limits = [sections.limits[place] for place in sections.type_of[list(costs.boundaries)]]
        for limit, needed in zip(limits, costs.memory_bytes.tolist(), strict=True):
            if limit is not None and (found[1] is None or 1 - needed / limit < found[0]):
                found = 1 - needed / limit, limit
    return found


def preferred(choice: PlanChoice, request: PlanRequest, errors: Errors) -> PlanChoice:
    """Return the answer with the preferred plan as the best, and the plans that it replaces as the next."""

    def key(place: int) -> tuple[bool, int, int]:
        simulation = choice.simulations[place]
        short = room_left(simulation, request.memory_bytes)[0] < errors.memory
        return short, len(simulation.plan.pipeline_kinds), place

    near = [place for place in range(len(choice.values)) if choice.worse(place) <= errors.time]
    first = min(near, key=key)
    if not first:
        return choice
    order = [first, *(place for place in range(len(choice.values)) if place != first)]
    return choice.reordered(
        request, (choice.simulations[place] for place in order), (choice.values[place] for place in order)
    )
