"""The planner's answer for one number or pool of GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from morph.contract.plan import Plan
from simulator.costs.answer import Simulation
from simulator.costs.zone_traffic import bytes_between_zones, usd_between_zones
from simulator.inputs.request import ObjectiveName, PlanRequest
from simulator.inputs.stock import usd_per_h_in_use

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class PlanChoice:
    """The answer for one number of GPUs.

    ``simulations`` has the explanation, time breakdown and timeline of ``best`` and of each of the ``runners_up``, in
    their order. ``values`` has the objective's value for each: examples per second, dollars per example, or examples
    per second with pauses. ``num_shapes`` counts the shapes that were considered, including those that were not
    simulated because their lower bound was too high. ``usd_per_h`` is the price of the GPUs that ``best`` uses, or of
    the whole nodes of several GPUs, if all have a price. ``zone_bytes`` are the bytes that a mini-batch of ``best``
    sends from one zone to another, and ``zone_usd_per_h`` is their price. ``least_s`` returns a lower bound (s) of the
    mini-batch over all plans (see :mod:`simulator.search.proof`); None: there is none under this request.
    """

    simulations: tuple[Simulation, ...]
    values: tuple[float, ...]
    objective: ObjectiveName
    num_gpus: int
    num_shapes: int
    usd_per_h: float | None = None
    zone_bytes: float = 0.0
    zone_usd_per_h: float = 0.0
    least_s: Callable[[], float] | None = field(default=None, compare=False, repr=False)

    @property
    def best(self) -> Plan:
        """The best plan."""
        return self.simulations[0].plan

    @property
    def runners_up(self) -> tuple[Plan, ...]:
        """The next best plans, of other shapes."""
        return tuple(simulation.plan for simulation in self.simulations[1:])

    @property
    def best_simulation(self) -> Simulation:
        """The simulation of the best plan."""
        return self.simulations[0]

    @property
    def num_idle(self) -> int:
        """The number of GPUs that the best plan leaves idle."""
        return self.num_gpus - self.best.num_workers

    def reordered(
        self, request: PlanRequest, simulations: Iterable[Simulation], values: Iterable[float], **changes: Any
    ) -> PlanChoice:
        """Return a copy of this answer with these simulations, the best first; its prices are recomputed from that."""
        kept = tuple(simulations)
        return replace(
            self,
            simulations=kept,
            values=tuple(values),
            usd_per_h=usd_per_h_in_use(request, kept[0].plan),
            zone_bytes=bytes_between_zones(kept[0].kinds),
            zone_usd_per_h=zone_usd_per_h(request, kept[0]),
            **changes,
        )

    def worse(self, place: int) -> float:
        """Return the share by which a simulation is worse than the best by the objective; negative: better."""
        more, less = self.values[0], self.values[place]
        if self.objective == "usd_per_example":
            more, less = less, more
        return more / less - 1 if less else math.inf

    @cached_property
    def gap(self) -> float | None:
        """No plan trains more than this share faster; None: nothing is proved. May take seconds for a pool of types."""
        return None if self.least_s is None else self.best.expected.mini_batch_s / self.least_s() - 1

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The best shape and the runners-up, one row each; columns as in :func:`plan_frame`."""
        from simulator.search.frames import plans_frame  # pandas is slow to import

        frame = plans_frame((self.num_gpus, plan) for plan in (self.best, *self.runners_up))
        if self.objective != "examples_per_s":
            frame[self.objective] = self.values
        return frame


def zone_usd_per_h(request: PlanRequest, simulation: Simulation) -> float:
    """Return the price, USD per hour, of the data sent from one zone to another."""
    price = request.zone_usd_per_gb
    return usd_between_zones(simulation.kinds, price) * 3600 / simulation.expected.mini_batch_s if price else 0.0
