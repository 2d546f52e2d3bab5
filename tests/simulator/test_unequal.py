"""Pipelines of several kinds side by side: the time of a mini-batch, and the best combinations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations, product
from typing import Literal

import numpy as np
import pytest

from morph.contract.errors import PlanError
from morph.contract.plan import Plan
from morph.contract.pool import Pool
from morph.contract.profile import Contention, LinkProfile, Profile
from simulator import (
    PlanRequest,
    Simulation,
    plan,
    plan_table,
    pool_plan_table,
    simulate,
    simulate_plan,
    synthetic_profile,
)
from simulator.costs.answer import SimulatedKind, deal, describe_kinds
from simulator.costs.joined_sections import JoinedSections
from simulator.costs.outcome import EngineName, Kind, ShapeSimulator, engine_of, together
from simulator.costs.stage_costs import SectionCosts, stage_costs
from simulator.engine.schedules import stage_windows
from simulator.inputs.conditions import Conditions
from simulator.inputs.layout import placed
from simulator.inputs.node_types import of_pool_type
from simulator.inputs.placement import Placement
from simulator.inputs.synthetic import with_type
from simulator.search.mix_search import Chosen, Search
from simulator.search.mixes import Mixes
from simulator.search.pipelines import Stages
from simulator.search.pools import Pools
from simulator.search.purchases import cheapest_enough
from tests.seeds import each_seed
from tests.simulator.test_reductions import random_job

WORTH = PlanRequest().worth


def sections_of(profile: Profile, cuts: Sequence[int], types: Sequence[str]) -> SectionCosts:
    """Of stages on one type of node, or each on its own."""
    if len(set(types)) == 1:
        return SectionCosts(of_pool_type(profile, types[0]), 1)
    names = list(dict.fromkeys(types))
    lengths = np.diff([*cuts, profile.num_sections])
    places = np.repeat([names.index(name) for name in types], lengths)
    return JoinedSections([SectionCosts(of_pool_type(profile, name), 1) for name in names], places)


def mix(
    profile: Profile,
    kinds: Sequence[tuple[Sequence[int], Sequence[int], Sequence[str]]],
    conditions: Conditions = Conditions(),  # noqa: B008 (frozen)
    engine: EngineName = "compiled",
) -> Simulation:
    """Return a plan of kinds, each (first sections, micro-batches of each pipeline, node type of each stage)."""
    given = []
    for cuts, counts, types in kinds:
        sections = sections_of(profile, cuts, types)
        windows = stage_windows("varuna", len(cuts), max(counts), 1)
        costs = stage_costs(sections, cuts, windows, "varuna", single=len(kinds) == 1 == len(counts))
        given.append(Kind(ShapeSimulator(conditions, engine_of(engine)), costs, tuple(counts)))
    return describe_kinds(
        [
            SimulatedKind(outcome, kind.simulator, tuple(types))
            for outcome, kind, (_, _, types) in zip(together(given), given, kinds, strict=True)
        ]
    )


def over_zones(rng: np.random.Generator, profile: Profile) -> Profile:
    """Return a profile with links between zones, which may be slower than those between nodes."""
    link = LinkProfile.of(float(rng.choice([0.0, 0.002, 0.02])), float(rng.choice([1e7, 1e8])))
    return profile.model_copy(update={"between_zones": link})


def random_mix(rng: np.random.Generator, num_sections: int = 6) -> list[tuple[list[int], tuple[int, ...], list[str]]]:
    """Return two or three kinds of pipelines on two types in two zones, or with stages on any of these."""
    found = []
    for _ in range(int(rng.integers(2, 4))):
        depth = int(rng.integers(1, num_sections))
        cuts = sorted(rng.choice(np.arange(1, num_sections), depth - 1, replace=False).tolist())
        counts = tuple(int(value) for value in rng.integers(1, 5, int(rng.integers(1, 3))))
        types = rng.choice(["@a", "t4@a", "@b", "t4@b"], depth if rng.integers(2) else 1).tolist()
        found.append(([0, *cuts], counts, types * (depth // len(types))))
    return found


@each_seed(15, in_long=200)
def test_mixes_take_as_long_as_in_the_reference_engine(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile, kinds = over_zones(rng, with_type(random_job(rng), "t4", 2.5)), random_mix(rng)
    conditions = Conditions(all_reduce="late" if rng.integers(4) == 0 else "overlapped")
    assert mix(profile, kinds, conditions).plan == mix(profile, kinds, conditions, "reference").plan


@each_seed(10)
def test_equal_pipelines_given_as_kinds_take_as_long(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_job(rng)
    ((cuts, _, _), *_), counts = random_mix(rng), deal(profile.job.batch_size, int(rng.integers(2, 4)))
    types = [""] * len(cuts)
    whole, parted = (
        mix(profile, kinds)
        for kinds in ([(cuts, counts, types)], [(cuts, counts[:1], types), (cuts, counts[1:], types)])
    )
    same = simulate(profile, boundaries=cuts, num_replicas=len(counts), window_slope=1)
    assert same.plan.expected == whole.plan.expected
    before, after = whole.plan.expected, parted.plan.expected
    assert (after.mini_batch_s, after.lower_bound_s) == (before.mini_batch_s, before.lower_bound_s)
    assert after.parts_s == pytest.approx(before.parts_s)
    assert parted.breakdown_s == pytest.approx(whole.breakdown_s)


@each_seed(10)
def test_unequal_plans_are_simulated_as_they_stand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile, kinds = over_zones(rng, with_type(random_job(rng), "t4", 2.5)), random_mix(rng)
    profile = profile.model_copy(
        update={"job": profile.job.model_copy(update={"batch_size": sum(sum(counts) for _, counts, _ in kinds)})}
    )
    found = mix(profile, kinds)
    again = simulate_plan(profile, found.plan)
    assert again.plan == found.plan
    assert again.expected.lower_bound_s <= again.expected.mini_batch_s
    assert sum(again.breakdown_s.values()) == pytest.approx(again.expected.mini_batch_s)
    assert sum(again.expected.parts_s.values()) == pytest.approx(again.expected.mini_batch_s)
    tasks = again.timeline.groupby(["stage", "replica", "task"])
    begins_s, ends_s = tasks["start_s"].min().unstack(), tasks["end_s"].max().unstack()
    assert len(begins_s) == again.plan.num_workers
    assert begins_s["forward"].min() == 0
    assert (ends_s["optimizer"] <= again.expected.mini_batch_s + begins_s["forward"] + 1e-12).all(), "begins again then"
    first_s = min(kind.outcome.after.optimizer_ns for kind in again.kinds) / 1e9
    assert ends_s["commit"].to_numpy() == pytest.approx(again.expected.mini_batch_s - first_s)


@pytest.mark.parametrize("engine", ["compiled", "reference"])
def test_no_worker_waits_for_the_optimizer_step_of_a_slower_type(engine: EngineName) -> None:
    """Optimizer steps take 0.4 and 0.8 s, a micro-batch 0.6 and 1.2 s; with one each on T4s, V100s are through last."""
    profile = synthetic_profile(num_sections=4, forward_s=0.05, overhead_s=0, optimizer_step_s=0.1, latency_s=0)
    profile = with_type(profile, "t4", 2.0)
    fast = ([0], (4,), [""])
    fast_s, slow_s = (mix(profile, [kind]).expected.mini_batch_s for kind in (fast, ([0], (2,), ["t4"])))
    assert (fast_s, slow_s) == pytest.approx((2.8, 3.2), rel=1e-3)
    lightly, evenly = (mix(profile, [fast, ([0], (number,), ["t4"])], engine=engine) for number in (1, 2))
    assert lightly.expected.mini_batch_s == pytest.approx(fast_s, abs=0.02)
    assert evenly.expected.mini_batch_s == pytest.approx(slow_s, abs=0.02)
    begins_s = evenly.timeline.groupby("replica")["start_s"].min().tolist()
    assert begins_s == pytest.approx([0, 0.4])


def test_an_explanation_is_of_the_kind_of_pipeline_that_is_through_last() -> None:
    profile = synthetic_profile(num_sections=4, forward_s=0.05, overhead_s=0, latency_s=0, parameter_bytes=1000)
    kinds = [([0], (5,), [""]), ([0, 1, 2, 3], (2,), ["t4"] * 4)]
    found = mix(with_type(profile, "t4", 10.0), kinds)
    assert "2 micro-batches per replica are few for 4 stages" in found.explanation


def test_slow_workers_of_an_unequal_plan_are_those_of_its_stages() -> None:
    profile = synthetic_profile(num_sections=4, batch_size=6, micro_batch_size=1)
    plan = mix(profile, [([0, 2], (2,), ["", ""]), ([0], (2, 2), [""])]).plan
    alone = simulate_plan(profile, plan).expected.mini_batch_s
    assert simulate_plan(profile, plan, slow={1: 1.5}).expected.mini_batch_s == alone  # not the slowest pipeline's
    assert simulate_plan(profile, plan, slow={2: 1.5}).expected.mini_batch_s > 1.2 * alone
    shared = [simulate_plan(profile, plan, compute_slots=slots).expected.mini_batch_s for slots in (2, 4)]
    assert shared[0] > shared[1] >= alone
    with pytest.raises(PlanError, match="simulated for equal pipelines"):
        simulate_plan(profile, plan, jitter_seed=1)


def random_pool(rng: np.random.Generator) -> tuple[Profile, dict[str, int]]:
    """Draw a small job and a few GPUs of one or two types or zones, few enough for a brute-force search."""
    count = int(rng.integers(2, 6))
    profile = synthetic_profile(
        num_sections=count,
        forward_s=[float(value) for value in rng.uniform(0.002, 0.01, count)],
        batch_size=int(rng.choice([4, 8, 12])),
        micro_batch_sizes=(1,),
        overhead_s=float(rng.choice([0.0, 0.002])),
        latency_s=float(rng.choice([0.0, 0.001, 0.004])),
        bandwidth_bytes_per_s=float(rng.choice([1e7, 1e8, 1e9])),
        parameter_bytes=int(rng.choice([10_000, 100_000])),
        tied=bool(rng.integers(2)),
    )
    counts = {"": int(rng.integers(1, 5)), "t4": int(rng.integers(1, 4))}
    if rng.integers(3) == 0:
        counts = {"": int(rng.integers(3, 8))}
    slower, limit = float(rng.uniform(1.2, 3)), None
    if len(counts) > 1 and rng.integers(2):  # a model that few GPUs hold
        stages = np.zeros(1, np.int64), np.array([count]), np.ones(1, np.int64), np.ones(1, np.bool_)
        limit = int(rng.uniform(0.4, 1.1) * int(SectionCosts(profile, 1).memory(single=True).device_bytes(*stages)[0]))
        environment = profile.environment.model_copy(update={"device_memory_bytes": limit})
        profile = profile.model_copy(update={"environment": environment})
    if len(counts) > 1 and rng.integers(3) == 0:
        of_zones = [("@a", "t4@b"), ("@a", "@b")][int(rng.integers(2))]
        counts, profile = dict(zip(of_zones, counts.values(), strict=True)), over_zones(rng, profile)
    return with_type(profile, "t4", slower, limit), counts


@each_seed(20)
def test_the_cheapest_gpus_that_are_enough_are_those_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, int(rng.integers(1, 4))).tolist()
    done = [np.append(0, np.cumsum(rng.integers(0, 6, length))) for length in lengths]
    usd_per_h, total = rng.uniform(0.1, 2, len(done)).tolist(), int(rng.integers(1, 40))
    enough = {
        gpus: float(np.dot(gpus, usd_per_h))
        for gpus in product(*(range(len(each)) for each in done))
        if sum(int(each[number]) for each, number in zip(done, gpus, strict=True)) >= total
    }
    found = cheapest_enough(done, total, usd_per_h)
    assert (found is None) == (not enough)
    assert found is None or enough[found] == pytest.approx(min(enough.values()))


@pytest.mark.parametrize("objective", ["examples_per_s", "usd_per_example"])
def test_large_pools_of_three_types_are_answered_after_few_trials(
    objective: Literal["examples_per_s", "usd_per_example"], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = synthetic_profile(num_sections=24, batch_size=4096, micro_batch_sizes=(1, 2), micro_batch_size=2)
    profile = with_type(with_type(profile, "t4", 2.0), "k80", 3.0)
    pool, numbers, play = {"": 400, "t4": 300, "k80": 300}, list[int](), Mixes.played

    def count(mixes: Mixes, chosen: Chosen, totals: tuple[int, ...], stages: Stages) -> tuple[int, int]:
        numbers.append(len(chosen))
        return play(mixes, chosen, totals, stages)

    monkeypatch.setattr(Mixes, "played", count)
    price = {"": 1.0, "t4": 0.3, "k80": 0.25} if objective == "usd_per_example" else None
    found = plan(profile, pool=pool, objective=objective, usd_per_gpu_hour=price, num_runners_up=0, schedule="varuna")
    assert 0 < len(numbers) < 2_000
    assert found.best.num_workers <= 1000


@pytest.mark.slow
@each_seed(2, in_long=100)
def test_no_gpu_and_no_type_of_gpu_makes_a_plan_slower(seed: int) -> None:
    """This ignores the gain that unequal pipelines must have before they replace equal ones."""
    rng = np.random.default_rng(seed)
    profile, counts = random_pool(rng)
    table = pool_plan_table(profile, counts)
    if Pool.of(counts) not in table:
        with pytest.raises(PlanError, match=r"fits on no type|does not fit"):
            plan(profile, pool=counts)
        return
    whole = table[Pool.of(counts)].expected.mini_batch_s
    assert whole * WORTH <= min(plan.expected.mini_batch_s for plan in table.values())
    for pool, found in table.items():
        assert Pool.counting(pool_of(found)).fits_in(pool)
        alone = plan(profile, pool=pool, schedule=found.schedule).best.expected.mini_batch_s
        assert alone * WORTH <= found.expected.mini_batch_s, pool
    roomy = profile.environment.model_copy(update={"device_memory_bytes": None})
    profile = profile.model_copy(update={"environment": roomy})
    numbers = plan_table(profile, 6, unequal=True)
    times = [each.expected.mini_batch_s for each in numbers.values()]
    assert all(more * WORTH <= fewer for fewer, more in pairwise(times))
    for number, found in numbers.items():
        alone = plan(profile, num_gpus=number, unequal=True).best.expected.mini_batch_s
        assert alone * WORTH <= found.expected.mini_batch_s, number


def pool_of(found: Plan) -> list[str]:
    return [
        found.stages[stage].node_type for replica in range(found.num_replicas) for stage in found.stages_of(replica)
    ]


def test_a_second_type_of_gpus_trains_as_much_more_as_it_can() -> None:
    profile = with_type(synthetic_profile(num_sections=8, batch_size=256, micro_batch_size=1, overhead_s=0), "t4", 2.0)
    alone = plan(profile, pool={"": 4}).best.expected.examples_per_s
    both = plan(profile, pool={"": 4, "t4": 4}).best
    assert both.expected.examples_per_s > 1.4 * alone
    for replica, share in enumerate(both.micro_batches_per_replica):
        speed = sum(0.5 if both.stages[stage].node_type == "t4" else 1.0 for stage in both.stages_of(replica))
        assert share / 256 == pytest.approx(speed / 6, rel=0.1), "shares go by speed"
    assert simulate_plan(profile, both).plan == both
    cheap = plan(profile, pool={"": 4, "t4": 4}, objective="usd_per_example", usd_per_gpu_hour={"": 1.0, "t4": 0.1})
    assert set(pool_of(cheap.best)) == {"t4"}
    assert cheap.values[0] == pytest.approx(0.1 * cheap.best.num_workers / 3600 / cheap.best.expected.examples_per_s)


def test_memory_is_that_of_each_type() -> None:
    profile = with_type(synthetic_profile(num_sections=4, parameter_bytes=40_000_000), "t4", 2.0, 3 * 2**28)
    found = plan(profile, pool={"": 1, "t4": 4}).best
    depths = {found.stages[found.stages_of(d)[0]].node_type: len(found.stages_of(d)) for d in range(found.num_replicas)}
    assert depths[""] == 1
    assert depths["t4"] > 1, "a small device holds no whole model"
    with pytest.raises(PlanError, match=r"allowed: at least .*, or at least \d+ GPUs"):
        plan(profile, pool={"t4": 1})
    small = with_type(profile, "k80", 3.0, 3 * 2**28)
    with pytest.raises(PlanError, match=r"fits on no type.*allowed: k80=\d, or t4=\d"):
        plan(small, pool={"t4": 1, "k80": 1})
    with pytest.raises(PlanError, match="is not a type of this profile"):
        plan(profile, pool={"a100": 1})


def test_stages_cost_what_they_do_on_their_own_type() -> None:
    """But for messages between two types, which take as long as on the slower one, and memory for reductions."""
    profile = with_type(synthetic_profile(num_sections=6, batch_size=8, micro_batch_size=1), "t4", 2.5, 2**31)
    slow = synthetic_profile(num_sections=6, batch_size=8, micro_batch_size=1, latency_s=0.02).inter_node
    environment = profile.node_types[0].environment.model_copy(
        update={"context_bytes": 10**8, "allocator_permille": 50}
    )
    other = profile.node_types[0].model_copy(update={"inter_node": slow, "environment": environment})
    profile = profile.model_copy(update={"node_types": (other,), "all_reduce": ()})
    cuts, types = (0, 1, 3, 4), ["", "t4", "t4", ""]
    joined, *alone = (
        stage_costs(sections_of(profile, cuts, each), cuts, (4, 3, 2, 1), "varuna", single=False)
        for each in (types, [""] * 4, ["t4"] * 4)
    )
    own = [alone[name == "t4"] for name in types]
    for stage, costs in enumerate(own):
        for field in ("forward_ns", "recompute_ns", "backward_ns"):
            assert getattr(joined.times, field)[stage] == getattr(costs.times, field)[stage]
        assert joined.memory_bytes[stage] == costs.memory_bytes[stage]
        assert joined.memory_parts(stage) == costs.memory_parts(stage)
        assert joined.optimizer_ns[stage] == costs.optimizer_ns[stage]
        behind = own[min(stage + 1, 3)]
        slower = max(costs.times.activation_ns[stage], behind.times.activation_ns[stage])
        assert joined.times.activation_ns[stage] == slower
        ends = [*cuts[1:], 6]
        in_stage = slice(cuts[stage], ends[stage])
        assert (joined.reduced.remaining_ns(3)[in_stage] == costs.reduced.remaining_ns(3)[in_stage]).all()
    assert alone[0].times.activation_ns[0] < joined.times.activation_ns[0] == alone[1].times.activation_ns[0]


def test_a_model_that_fits_on_neither_type_alone_is_trained_on_both_and_a_refusal_says_so() -> None:
    profile = synthetic_profile(num_sections=6, parameter_bytes=40_000_000, batch_size=16, micro_batch_size=1)
    environment = profile.environment.model_copy(update={"device_memory_bytes": 2**30})
    profile = with_type(profile.model_copy(update={"environment": environment}), "t4", 2.0, 2**30)
    needed = next(number for number in range(2, 7) if number in plan_table(profile, 6))
    pool = {"": needed - 1, "t4": 1}
    found = plan(profile, pool=pool).best
    assert (found.pool, found.shape) == (Pool.of(pool), f"{needed}x1")
    assert simulate_plan(profile, found).plan == found
    assert pool_plan_table(profile, pool)[Pool.of(pool)].expected == found.expected
    with pytest.raises(PlanError, match=r"fits on no type .*, nor in pipelines over two") as refused:
        plan(profile, pool={"": 1, "t4": needed - 2})
    named = str(refused.value).split("or ")[-1]
    assert plan(profile, pool=Pool.parse(named)).best.pool == Pool.parse(named)
    cheap = plan(profile, pool=pool, objective="usd_per_example", usd_per_gpu_hour={"": 1.0, "t4": 0.1})
    assert cheap.best.pool == Pool.of(pool)
    with pytest.raises(PlanError, match="on one type of GPU"):
        simulate_plan(profile, found, jitter_seed=1)


def random_nodes(rng: np.random.Generator, most: int) -> tuple[int, ...]:
    """Return nodes of one to three GPUs; some nodes have several."""
    sizes = [int(rng.integers(2, 4))]
    while sum(sizes) < most and rng.integers(4):
        sizes.append(int(rng.integers(1, min(3, most - sum(sizes)) + 1)))
    return tuple(sizes)


def with_inner_links(rng: np.random.Generator, profile: Profile) -> Profile:
    """Return a profile with faster links inside nodes, and tasks that are slower beside others."""
    inner = synthetic_profile(latency_s=0.0001, bandwidth_bytes_per_s=1e10).intra_node
    factor = float(rng.choice([1.0, 1.2]))
    contention = (Contention(num_busy=3, factor=factor),) if factor > 1 else ()
    return profile.model_copy(update={"intra_node": inner, "contention": contention})


def fastest_on_nodes(profile: Profile, sizes: tuple[int, ...], request: PlanRequest) -> int:
    """Return the best of every multiset of pipelines, wherever their stages are, with every share.

    Cuts ignore shared nodes.
    """
    mixes = Pools(profile, request, [""]).mixes(1, "varuna")
    gpus, total, best = sum(sizes), mixes.total, 2**62
    slots = [node for node, size in enumerate(sizes) for _ in range(size)]
    simulator = ShapeSimulator(request.conditions(sizes))
    for chosen in Search(mixes.types, (gpus,)).all_mixes():
        depths = [depth for (_, depth), number in chosen for _ in range(number)]
        shares = [each for each in product(range(1, total), repeat=len(depths)) if sum(each) == total]
        for nodes in set(permutations(slots, sum(depths))):
            places, first = [], 0
            for depth in depths:
                places.append(Placement(sizes, (nodes[first : first + depth],)))
                first += depth
            for counts in shares:
                kinds = []
                for depth, place, count in zip(depths, places, counts, strict=True):
                    alone = mixes.types[0].costs(depth, count, "best")
                    assert alone is not None
                    layout = placed(profile.contention, place, places)
                    windows = stage_windows("varuna", depth, count, 1)
                    there = stage_costs(alone.sections, alone.boundaries, windows, "varuna", layout, single=False)
                    kinds.append(Kind(simulator, there, (count,)))
                best = min(best, together(kinds)[0].mini_batch_ns)
    return best


@pytest.mark.slow
@each_seed(6, in_long=100)
def test_unequal_plans_on_nodes_are_hardly_slower_than_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = with_inner_links(rng, random_pool(rng)[0])
    job = profile.job.model_copy(update={"batch_size": 4})
    profile, sizes = profile.model_copy(update={"job": job}), random_nodes(rng, 4)
    request = PlanRequest(schedule="varuna", recompute=True, num_gpus_per_node=sizes, share_links=False)
    found = plan(profile, request, unequal=True).best.expected.mini_batch_s
    assert found * 1e9 <= 1.02 * fastest_on_nodes(profile, sizes, request)


@each_seed(6, in_long=100)
def test_unequal_plans_on_nodes_are_not_slower_and_simulated_as_given(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile, sizes = with_inner_links(rng, random_pool(rng)[0]), random_nodes(rng, 9)
    equal, found = (plan(profile, num_gpus_per_node=sizes, unequal=unequal).best for unequal in (False, True))
    assert found == equal or found.expected.mini_batch_s < equal.expected.mini_batch_s * WORTH
    assert found.node_sizes == sizes
    assert simulate_plan(profile, found).expected.mini_batch_s == found.expected.mini_batch_s


def test_a_pool_of_nodes_of_several_gpus() -> None:
    profile = synthetic_profile(num_sections=6, batch_size=48, micro_batch_size=1, latency_s=0.002)
    profile = with_type(with_inner_links(np.random.default_rng(0), profile), "t4", 2.0)
    pool = {"": 7, "t4": 5}
    found = plan(profile, pool=pool, num_gpus_per_node=4).best
    alone = plan(profile, num_gpus=7, num_gpus_per_node=4, unequal=True).best.expected.examples_per_s
    assert found.expected.examples_per_s > 1.15 * alone
    assert found.node_sizes == (4, 3, 4, 1)
    for row, replica in zip(found.placement, range(found.num_replicas), strict=True):
        of_type = found.stages[found.stages_of(replica)[0]].node_type
        assert all((node < 2) == (of_type == "") for node in row), "a pipeline is on nodes of its type"
    assert simulate_plan(profile, found).expected.mini_batch_s == found.expected.mini_batch_s
    with pytest.raises(PlanError, match="allowed: one number for all types"):
        plan(profile, pool=pool, num_gpus_per_node=(4, 3, 5))
    with pytest.raises(PlanError, match="a pool without nodes"):
        pool_plan_table(profile, pool, num_gpus_per_node=4)
