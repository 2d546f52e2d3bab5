"""Simulates one mini-batch of one shape: its time, its breakdown, and what limits it (Varuna, section 4.4)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from morph.contract import ranges
from morph.contract.errors import PlanError
from morph.contract.plan import PipelineKind, Plan, StagePlan
from morph.contract.profile import Profile
from simulator.costs.answer import SimulatedKind, Simulation, deal, describe, describe_kinds
from simulator.costs.joined_sections import JoinedSections
from simulator.costs.outcome import EngineName, Kind, ShapeOutcome, ShapeSimulator, engine_of, together
from simulator.costs.stage_costs import SectionCosts, StageCosts, stage_costs
from simulator.inputs.conditions import Conditions, check_slow, check_slow_of_plan
from simulator.inputs.layout import Layout, lay_out, placed
from simulator.inputs.node_types import of_pool_type
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
    """Simulate one mini-batch of one shape. The defaults are Varuna's schedule, recompute and one replica.

    Args:
        request: D, m, schedule, recompute and the conditions. If neither the request nor the job gives m, m is the
            knee (see :mod:`simulator.search.micro_batch`).
        boundaries: First section of each stage, beginning with 0. Give either ``boundaries`` or ``num_stages``.
        num_stages: P; the stages are then balanced exactly.
        window_slope: Slope of in-flight windows, or for GPipe the number of rounds; None: the smallest windows that
            take at most 1 % longer than the fastest.
        engine: "reference" plays the shape as SimPy processes, about a thousand times slower, with the same result to
            the nanosecond (:mod:`simulator.engine.reference`); windows are still chosen with the compiled loops.
        more: Fields of a request, which replace those of ``request``.

    Raises:
        PlanError: an argument is wrong; the message names the argument, its value and what is allowed.
    """
    played_by = engine_of(engine)
    request = replace(request, **more)
    profile = request.applied_to(profile)
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
        _setting(profile, m, request),
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


_latest: list[tuple[Profile, tuple[object, ...], Setting]] = []


def _setting(profile: Profile, m: int, request: PlanRequest) -> Setting:
    """Return the setting for a profile and m, and keep the latest: callers ask for several shapes of one profile."""
    given = (m, request.recompute is not False, (request.schedule or "varuna",), None, request.memory_rules)
    for latest, arguments, setting in _latest[:]:
        if latest is profile and arguments == given:
            return setting.without_stages()
    setting = Setting(profile, *given)
    _latest[:] = [(profile, given, setting)]
    return setting.without_stages()


def simulate_plan(
    profile: Profile,
    plan: Plan,
    request: PlanRequest = PlanRequest(),  # noqa: B008 (frozen)
    *,
    engine: EngineName = "compiled",
    **more: Any,
) -> Simulation:
    """Simulate one mini-batch of a given plan, with its own cuts, schedule, windows and recompute groups.

    Args:
        plan: Its expected times are ignored.
        request: The conditions; its shapes, schedules and nodes are ignored. With ``compute_slots`` all workers are on
            one machine, whatever nodes the plan has; of unequal pipelines each kind is then estimated with its own
            cores, in proportion to its workers. The stages in ``slow`` are those of the plan.
        more: Fields of a request, which replace those of ``request``.
    """
    request = replace(request, **more)
    on_nodes = bool(plan.placement) and request.compute_slots is None
    conditions = request.conditions(plan.node_sizes if on_nodes else None)
    if len(plan.pipeline_kinds) > 1 or any(len(_types(plan, replica)) > 1 for replica in range(plan.num_replicas)):
        _check_unequal(conditions)
    check_slow_of_plan(conditions.slow, plan)
    total = num_micro_batches(profile, plan.micro_batch_size)
    kinds, stage, replica, nodes = [], 0, 0, _nodes(plan) if on_nodes else []
    for number, kind in enumerate(plan.pipeline_kinds):
        stages = plan.stages[stage : stage + kind.num_stages]
        slow = tuple((s - stage, d, factor) for s, d, factor in conditions.slow if 0 <= s - stage < kind.num_stages)
        here = replace(
            conditions,
            slow=tuple((s, None if d is None else d - replica, factor) for s, d, factor in slow),
            compute_slots=_slots(conditions.compute_slots, kind, plan),
        )
        types = _types(plan, replica)
        on_types = [request.applied_to(of_pool_type(profile, name)) for name in types]
        measured = on_types[0]
        _check_shape(measured, [each.first_section for each in stages], None, plan.num_replicas, total)
        layout = (
            placed(measured.contention, nodes[number], nodes if len(nodes) > 1 else ())
            if on_nodes
            else lay_out(measured.contention, kind.num_stages, kind.num_replicas, here)
        )
        costs = _costs_as_planned(dict(zip(types, on_types, strict=True)), plan, stages, request, layout)
        kinds.append(Kind(ShapeSimulator(here, engine_of(engine)), costs, kind.micro_batches))
        stage, replica = stage + kind.num_stages, replica + kind.num_replicas
    if len(kinds) == 1:
        only = kinds[0]
        outcomes: tuple[ShapeOutcome, ...] = (only.simulator.full(only.costs, only.counts),)
    else:
        outcomes = together(kinds)
    first = itertools.accumulate((kind.num_stages for kind in plan.pipeline_kinds), initial=0)
    return describe_kinds(
        [
            SimulatedKind(outcome, kind.simulator, tuple(stage.node_type for stage in plan.stages[start:end]))
            for outcome, kind, (start, end) in zip(outcomes, kinds, itertools.pairwise(first), strict=True)
        ]
    )


def _nodes(plan: Plan) -> list[Placement]:
    rows = iter(plan.placement)
    return [
        Placement(plan.node_sizes, tuple(itertools.islice(rows, kind.num_replicas))) for kind in plan.pipeline_kinds
    ]


def _types(plan: Plan, replica: int) -> list[str]:
    """Return the types of GPU of one pipeline, in the order of its stages."""
    return list(dict.fromkeys(plan.stages[stage].node_type for stage in plan.stages_of(replica)))


def _costs_as_planned(
    profiles: Mapping[str, Profile], plan: Plan, stages: Sequence[StagePlan], request: PlanRequest, layout: Layout
) -> StageCosts:
    """Return the costs of the stages of one kind of pipeline; ``profiles`` has a profile for each type of node."""
    recompute, m, rules = any(stage.recompute for stage in stages), plan.micro_batch_size, request.memory_rules
    on_types = [SectionCosts(each, m, recompute=recompute, rules=rules) for each in profiles.values()]
    sections = on_types[0]
    if len(on_types) > 1:
        places = [list(profiles).index(stage.node_type) for stage in stages]
        sections = JoinedSections(on_types, np.repeat(places, [len(stage.sections) for stage in stages]))
    windows = tuple(stage.window for stage in stages)
    live = tuple((stage.live_sections or len(stage.sections)) * stage.recompute for stage in stages)
    boundaries = tuple(stage.first_section for stage in stages)
    return stage_costs(sections, boundaries, windows, plan.schedule, layout, single=plan.num_replicas == 1, live=live)


def _slots(slots: int | None, kind: PipelineKind, plan: Plan) -> int | None:
    """Return the cores of one kind of pipeline if all kinds share them: in proportion to its workers, at least one."""
    num_workers = kind.num_stages * kind.num_replicas
    return None if slots is None else max(1, round(slots * num_workers / plan.num_workers))


def _check_unequal(conditions: Conditions) -> None:
    """Refuse, with a PlanError, conditions under which pipelines of several kinds interact before they reduce."""
    off, redundant = Conditions().redundant_computation, conditions.redundant_computation
    given = {"jitter_seed": (conditions.jitter_seed, None), "redundant_computation": (redundant, off)}
    for field, (value, plain) in given.items():
        if value != plain:
            raise PlanError(
                "is simulated for equal pipelines on one type of GPU",
                field=field,
                value=value,
                allowed=f"{plain} for this plan",
            )


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
