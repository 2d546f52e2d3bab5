"""One mini-batch of one shape: how long, where the time goes, and what limits it (Varuna, section 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from morph.contract import ranges
from morph.contract.errors import PlanError
from morph.contract.plan import Plan
from morph.contract.profile import Profile
from simulator.costs.answer import Simulation, deal, describe
from simulator.costs.outcome import EngineName, ShapeSimulator, engine_of
from simulator.costs.stage_costs import stage_costs
from simulator.inputs.conditions import check_slow
from simulator.inputs.layout import lay_out, placed
from simulator.inputs.placement import Placement, node_sizes
from simulator.inputs.request import PlanRequest
from simulator.search.micro_batch import knee_micro_batch_size, num_micro_batches
from simulator.search.setting import Setting
from simulator.search.windows import Trial


def simulate(
    profile: Profile,
    request: PlanRequest = PlanRequest(),  # noqa: B008 (frozen)
    *,
    boundaries: Sequence[int] | None = None,
    num_stages: int | None = None,
    window_slope: int | None = None,
    engine: EngineName = "compiled",
    **more: Any,
) -> Simulation:
    """Simulate one mini-batch of one shape: Varuna's schedule and recompute, and one replica, unless asked otherwise.

    Args:
        profile: What calibration measured.
        request: D, m, schedule, recompute and the conditions. Without an m the knee counts where the job has none (see
            :mod:`simulator.search.micro_batch`).
        boundaries: First section of each stage, beginning with 0; or give ``num_stages``.
        num_stages: P; the stages are then balanced exactly.
        window_slope: In-flight window slope, of GPipe the number of rounds; None: the smallest windows that are within
            1 % of the fastest.
        engine: "reference" plays the shape as SimPy processes, some thousand times slower and to the same nanosecond
            (:mod:`simulator.engine.reference`); windows are chosen with the compiled loops all the same.
        more: Fields of the request, in place of its own.

    Raises:
        PlanError: naming the argument, its value and what is allowed.
    """
    played_by = engine_of(engine)
    request = replace(request, **more)
    profile = request.on_its_host(profile)
    num_replicas = 1 if request.num_replicas is None else request.num_replicas
    ranges.check_counts(window_slope=window_slope)
    m = knee_micro_batch_size(profile, request.micro_batch_size)
    total = num_micro_batches(profile, m)
    _check_shape(profile, boundaries, num_stages, num_replicas, total)
    depth = len(boundaries) if boundaries is not None else (num_stages or 1)
    sizes = request.num_gpus_per_node
    conditions = request.conditions(None if sizes is None else node_sizes(depth * num_replicas, sizes))
    check_slow(conditions.slow, depth, num_replicas)
    shape_simulator = ShapeSimulator(conditions)
    trial = Trial(
        Setting(
            profile, m, request.recompute is not False, (request.schedule or "varuna",), None, request.memory_rules
        ),
        shape_simulator,
        lay_out(profile.contention, depth, num_replicas, conditions),
        depth,
        deal(total, num_replicas),
        None if boundaries is None else tuple(boundaries),
        window_slope,
        moves=False,
    )
    best = trial.best()
    if not played_by.skips:
        shape_simulator = ShapeSimulator(conditions, played_by)
        best = shape_simulator.full(best.costs, best.counts)
    return describe(best, shape_simulator)


def simulate_plan(
    profile: Profile,
    plan: Plan,
    request: PlanRequest = PlanRequest(),  # noqa: B008 (frozen)
    *,
    engine: EngineName = "compiled",
    **more: Any,
) -> Simulation:
    """Simulate one mini-batch of a plan as it stands, with its own cuts, schedule, windows, recompute and its groups.

    Args:
        profile: What calibration measured; its model is the plan's.
        plan: Anything but its expectation counts.
        request: The conditions; what it says of shapes, schedules and nodes is left aside. With ``compute_slots`` all
            workers are on one machine, whatever the plan's nodes.
        engine: As :func:`simulate`.
        more: Fields of the request, in place of its own.

    Raises:
        PlanError: as :func:`simulate`.
    """
    request = replace(request, **more)
    profile = request.on_its_host(profile)
    boundaries = tuple(stage.first_section for stage in plan.stages)
    depth, counts = plan.pipeline_depth, plan.micro_batches_per_replica
    _check_shape(profile, boundaries, None, plan.num_replicas, num_micro_batches(profile, plan.micro_batch_size))
    on_nodes = bool(plan.placement) and request.compute_slots is None
    conditions = request.conditions(plan.node_sizes if on_nodes else None)
    check_slow(conditions.slow, depth, plan.num_replicas)
    layout = (
        placed(profile.contention, Placement(plan.node_sizes, plan.placement))
        if on_nodes
        else lay_out(profile.contention, depth, plan.num_replicas, conditions)
    )
    recompute = any(stage.recompute for stage in plan.stages)
    setting = Setting(profile, plan.micro_batch_size, recompute, (plan.schedule,), None, request.memory_rules)
    windows = tuple(stage.window for stage in plan.stages)
    live = tuple((stage.live_sections or len(stage.sections)) * stage.recompute for stage in plan.stages)
    costs = stage_costs(
        setting.sections, boundaries, windows, plan.schedule, layout, single=len(counts) == 1, live=live
    )
    shape_simulator = ShapeSimulator(conditions, engine_of(engine))
    return describe(shape_simulator.full(costs, counts), shape_simulator)


def _check_shape(
    profile: Profile, boundaries: Sequence[int] | None, num_stages: int | None, num_replicas: int, total: int
) -> None:
    sections = profile.num_sections
    if (boundaries is None) == (num_stages is None):
        raise PlanError("give either boundaries or num_stages", field="num_stages", value=num_stages)
    if num_stages is not None and num_stages not in ranges.Range(1, sections, whole=True):
        raise PlanError(
            "the model cannot be cut so",
            field="pipeline_depth",
            value=num_stages,
            allowed=f"1 to {sections} (its sections)",
        )
    if boundaries is not None:
        cuts = list(boundaries)
        whole = cuts[:1] == [0] and all(cut in ranges.COUNT for cut in cuts[1:])
        if not whole or cuts != sorted(set(cuts)) or cuts[-1] >= sections:
            allowed = f"first sections of the stages, growing, from 0 to at most {sections - 1}"
            raise PlanError("is not a cut", field="boundaries", value=cuts, allowed=allowed)
    if num_replicas not in ranges.Range(1, total, whole=True):
        raise PlanError(
            "replicas cannot share the micro-batches",
            field="num_replicas",
            value=num_replicas,
            allowed=f"1 to {total} (micro-batches in a mini-batch)",
        )
