"""Which P x D, and which stages, for so many GPUs (Varuna, section 4.4)."""

from __future__ import annotations

from dataclasses import dataclass

from morph.contract.errors import PlanError
from morph.contract.plan import Plan, Schedule
from morph.contract.profile import Profile
from simulator.answer import Simulation, describe
from simulator.conditions import Conditions
from simulator.sweep import Sweep

NUM_RUNNERS_UP = 5


@dataclass(frozen=True)
class PlanChoice:
    """The answer for one number of GPUs.

    ``best_simulation`` has the explanation, ladder and timeline of ``best``. ``num_shapes`` counts the shapes
    looked at; those whose lower bound was beaten already were not simulated.
    """

    best: Plan
    runners_up: tuple[Plan, ...]
    best_simulation: Simulation
    num_gpus: int
    num_shapes: int


def plan(
    profile: Profile,
    *,
    num_gpus: int,
    memory_bytes: int | None = None,
    schedule: Schedule = "varuna",
    micro_batch_size: int | None = None,
    compute_slots: int | None = None,
    pipeline_depth: int | None = None,
    num_replicas: int | None = None,
    num_runners_up: int = NUM_RUNNERS_UP,
    recompute: bool = True,
) -> PlanChoice:
    """Find the shape with the most examples per second.

    Every P from the smallest that fits in memory to min(K, G) is looked at, each with D = min(G // P, N).

    Args:
        profile: What calibration measured.
        num_gpus: G.
        memory_bytes: Of one device; None: no limit.
        schedule: "varuna", "gpipe" or "1f1b".
        micro_batch_size: m; None: fixed by the job, else chosen. It does not depend on G.
        compute_slots: Tasks that can run at once on all workers together; None: one device per worker.
        pipeline_depth: Only this P.
        num_replicas: Only this D.
        num_runners_up: How many of the next best shapes to return.
        recompute: False: no stage runs the forward again; each keeps the activations in flight.

    Raises:
        PlanError: naming the argument and what would do, for example the least number of GPUs.
    """
    conditions = Conditions(compute_slots=compute_slots)
    sweep = Sweep(profile, schedule, memory_bytes, micro_batch_size, conditions, recompute=recompute)
    depths = sweep.depths(num_gpus, pipeline_depth, num_replicas)
    shapes = [(depth, num_replicas or min(num_gpus // depth, sweep.total)) for depth in depths]
    ranked = sweep.best(shapes, 1 + num_runners_up)
    simulations = [describe(one, sweep.rehearsal) for one in ranked]
    return PlanChoice(
        best=simulations[0].plan,
        runners_up=tuple(simulation.plan for simulation in simulations[1:]),
        best_simulation=simulations[0],
        num_gpus=num_gpus,
        num_shapes=len(shapes),
    )


def plan_table(
    profile: Profile,
    max_gpus: int,
    *,
    memory_bytes: int | None = None,
    schedule: Schedule = "varuna",
    micro_batch_size: int | None = None,
    compute_slots: int | None = None,
    recompute: bool = True,
) -> dict[int, Plan]:
    """The best plan for every number of GPUs from 1 to ``max_gpus``; a number with which nothing fits is absent.

    Each entry is what :func:`plan` answers for that number; all of them have the same m.

    Raises:
        PlanError: ``max_gpus`` below 1, or a micro-batch size that cannot be.
    """
    if max_gpus < 1:
        raise PlanError("is too small", field="max_gpus", value=max_gpus, allowed="1 or more")
    conditions = Conditions(compute_slots=compute_slots)
    sweep = Sweep(profile, schedule, memory_bytes, micro_batch_size, conditions, recompute=recompute)
    described: dict[tuple[int, int], Plan] = {}
    plans: dict[int, Plan] = {}
    for num_gpus in range(1, max_gpus + 1):
        shapes = [(depth, min(num_gpus // depth, sweep.total)) for depth in sweep.fitting if depth <= num_gpus]
        if not shapes:
            continue
        one = sweep.best(shapes, 1)[0]
        shape = (one.costs.times.num_stages, len(one.counts))
        if shape not in described:
            described[shape] = describe(one, sweep.rehearsal).plan
        plans[num_gpus] = described[shape]
    return plans
