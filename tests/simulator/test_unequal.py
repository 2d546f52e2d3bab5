"""Pipelines of several kinds side by side: what a mini-batch takes, and which of them are best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from morph.contract.errors import PlanError
from morph.contract.profile import NodeTypeProfile, Profile
from simulator import Simulation, simulate, simulate_plan, synthetic_profile
from simulator.costs.answer import SimulatedKind, deal, describe_kinds
from simulator.costs.outcome import EngineName, Kind, ShapeSimulator, engine_of, together
from simulator.costs.stage_costs import SectionCosts, stage_costs
from simulator.engine.schedules import stage_windows
from simulator.inputs.conditions import Conditions, of_pool_type
from tests.seeds import each_seed
from tests.simulator.test_reductions import random_job


def with_type(profile: Profile, name: str, slower: float, memory_bytes: int | None = None) -> Profile:
    """The profile with a type of node on which every section takes so much longer."""
    environment = profile.environment.model_copy(update={"device": name, "device_memory_bytes": memory_bytes})
    added = NodeTypeProfile(
        name=name,
        environment=environment,
        forward=tuple({m: t.longer(slower) for m, t in section.forward.items()} for section in profile.sections),
        backward=tuple({m: t.longer(slower) for m, t in section.backward.items()} for section in profile.sections),
        optimizer_step=tuple(section.optimizer_step.longer(slower) for section in profile.sections),
    )
    return profile.model_copy(update={"node_types": (*profile.node_types, added)})


def mix(
    profile: Profile,
    kinds: Sequence[tuple[Sequence[int], Sequence[int], str]],
    conditions: Conditions = Conditions(),  # noqa: B008 (frozen)
    engine: EngineName = "compiled",
) -> Simulation:
    """Of (first sections, micro-batches of each pipeline, type of node) for each kind."""
    given = []
    for cuts, counts, node_type in kinds:
        sections = SectionCosts(of_pool_type(profile, node_type), 1)
        windows = stage_windows("varuna", len(cuts), max(counts), 1)
        costs = stage_costs(sections, cuts, windows, "varuna", single=len(kinds) == 1 == len(counts))
        given.append(Kind(ShapeSimulator(conditions, engine_of(engine)), costs, tuple(counts)))
    return describe_kinds(
        [
            SimulatedKind(outcome, kind.simulator, node_type)
            for outcome, kind, (_, _, node_type) in zip(together(given), given, kinds, strict=True)
        ]
    )


def random_mix(rng: np.random.Generator, num_sections: int = 6) -> list[tuple[list[int], tuple[int, ...], str]]:
    """Two or three kinds of pipelines of two types."""
    found = []
    for _ in range(int(rng.integers(2, 4))):
        depth = int(rng.integers(1, num_sections))
        cuts = sorted(rng.choice(np.arange(1, num_sections), depth - 1, replace=False).tolist())
        counts = tuple(int(value) for value in rng.integers(1, 5, int(rng.integers(1, 3))))
        found.append(([0, *cuts], counts, str(rng.choice(["", "t4"]))))
    return found


@each_seed(30, in_long=200)
def test_mixes_take_as_long_as_in_the_reference_engine(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile, kinds = with_type(random_job(rng), "t4", 2.5), random_mix(rng)
    conditions = Conditions(all_reduce="late" if rng.integers(4) == 0 else "overlapped")
    assert mix(profile, kinds, conditions).plan == mix(profile, kinds, conditions, "reference").plan


@each_seed(20)
def test_equal_pipelines_told_as_kinds_take_as_long(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_job(rng)
    ((cuts, _, _), *_), counts = random_mix(rng), deal(profile.job.batch_size, int(rng.integers(2, 4)))
    whole, parted = (
        mix(profile, kinds) for kinds in ([(cuts, counts, "")], [(cuts, counts[:1], ""), (cuts, counts[1:], "")])
    )
    same = simulate(profile, boundaries=cuts, num_replicas=len(counts), window_slope=1)
    assert same.plan.expected == whole.plan.expected
    before, after = whole.plan.expected, parted.plan.expected
    assert (after.mini_batch_s, after.lower_bound_s) == (before.mini_batch_s, before.lower_bound_s)
    assert after.parts_s == pytest.approx(before.parts_s)
    assert parted.breakdown_s == pytest.approx(whole.breakdown_s)


@each_seed(20)
def test_unequal_plans_are_simulated_as_they_stand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile, kinds = with_type(random_job(rng), "t4", 2.5), random_mix(rng)
    profile = profile.model_copy(
        update={"job": profile.job.model_copy(update={"batch_size": sum(sum(counts) for _, counts, _ in kinds)})}
    )
    found = mix(profile, kinds)
    again = simulate_plan(profile, found.plan)
    assert again.plan == found.plan
    assert again.expected.lower_bound_s <= again.expected.mini_batch_s
    assert sum(again.breakdown_s.values()) == pytest.approx(again.expected.mini_batch_s)
    assert sum(again.expected.parts_s.values()) == pytest.approx(again.expected.mini_batch_s)
    ends = again.timeline.groupby("task")["end_s"].max()
    assert ends["optimizer"] <= again.expected.mini_batch_s + 1e-12
    assert ends["commit"] == pytest.approx(
        again.expected.mini_batch_s - again.kinds[0].outcome.after.optimizer_ns / 1e9
    )
    workers = again.timeline[["replica", "stage"]].drop_duplicates()
    assert len(workers) == again.plan.num_workers


def test_slow_workers_of_an_unequal_plan_are_those_of_its_stages() -> None:
    profile = synthetic_profile(num_sections=4, batch_size=6, micro_batch_size=1)
    plan = mix(profile, [([0, 2], (2,), ""), ([0], (2, 2), "")]).plan
    alone = simulate_plan(profile, plan).expected.mini_batch_s
    assert simulate_plan(profile, plan, slow={1: 1.5}).expected.mini_batch_s == alone  # not the slowest pipeline's
    assert simulate_plan(profile, plan, slow={2: 1.5}).expected.mini_batch_s > 1.2 * alone
    shared = [simulate_plan(profile, plan, compute_slots=slots).expected.mini_batch_s for slots in (2, 4)]
    assert shared[0] > shared[1] >= alone
    with pytest.raises(PlanError, match="simulated for equal pipelines"):
        simulate_plan(profile, plan, jitter_seed=1)
