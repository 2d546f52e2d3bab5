"""Stages that recompute their sections in groups: their memory and times, and when the planner uses them."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from manager.rehearsal.device import EmulationOptions, emulated_device
from morph.contract.errors import PlanError
from morph.contract.plan import Plan, StagePlan
from morph.contract.profile import Profile
from morph.runtime.emulation.clock import JitterDraw
from morph.runtime.emulation.workload import stage_memory, task_times
from simulator import PlanRequest, plan, simulate, simulate_plan, synthetic_profile
from simulator.costs.answer import bound_ns, deal
from simulator.costs.stage_costs import SectionCosts, stage_costs
from simulator.engine import reference
from simulator.engine.pipeline import run_pipeline
from simulator.inputs.conditions import Conditions
from simulator.inputs.request import MemoryRules
from simulator.render.tables import shape_lines
from simulator.search.moves import moved_bounds_ns, neighbours
from simulator.search.partition import least_bytes, partition_table
from simulator.search.sweep import Sweep
from tests.seeds import each_seed
from tests.simulator.test_engine import assert_alike
from tests.simulator.test_memory import M, profile_of

NOTHING_MORE = MemoryRules(keeps_sums=False, copies_sums=False, changes=False, saves=False)
STEEP = 8_000_000
"""Bytes of a sample's activations in a section, which are most of a stage's memory."""


def random_profile(seed: int, num_sections: int | None = None, **changes: Any) -> Profile:
    rng = np.random.default_rng(seed)
    drawn = int(rng.integers(2, 6))
    count = num_sections or drawn
    given: dict[str, Any] = {
        "num_sections": count,
        "forward_s": [float(value) for value in rng.uniform(0.002, 0.01, count)],
        "batch_size": int(rng.choice([4, 8, 12])),
        "micro_batch_sizes": (1, 2, 4),
        "overhead_s": float(rng.choice([0.0, 0.002])),
        "latency_s": float(rng.choice([0.0, 0.5, 1, 2, 4])) * 0.006,
        "bandwidth_bytes_per_s": float(rng.choice([1e7, 3e7, 1e9])),
        "parameter_bytes": int(rng.choice([10_000, 300_000])),
        "activation_bytes_per_sample": int(rng.choice([1_000_000, 5_000_000])),
        "tied": bool(rng.integers(2)),
    }
    return synthetic_profile(**(given | changes))


def in_groups(found: Plan, sizes: tuple[int | None, ...]) -> Plan:
    """Return the plan with groups of this many sections; None: stages without groups."""
    stages = [
        stage if size is None else stage.model_copy(update={"recompute": True, "live_sections": size})
        for stage, size in zip(found.stages, sizes, strict=True)
    ]
    return found.model_copy(update={"stages": tuple(stages)})


def tight_profile(**changes: Any) -> Profile:
    given: dict[str, Any] = {"num_sections": 8, "batch_size": 16, "micro_batch_size": 1, "parameter_bytes": 10_000}
    return synthetic_profile(**(given | {"activation_bytes_per_sample": STEEP} | changes))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
def test_a_stage_holds_the_input_of_each_group_and_the_activations_of_one(size: int) -> None:
    profile = profile_of(tied=False)
    sections, window = profile.sections, 3
    costs = stage_costs(SectionCosts(profile, M, rules=NOTHING_MORE), (0,), (window,), "gpipe", live=(size,))
    border = [M * section.output_bytes_per_sample for section in sections]
    batch = [0 if section.index else M * section.input_bytes_per_sample for section in sections]
    kept = [M * section.activation_bytes_per_sample + own for section, own in zip(sections, batch, strict=True)]
    groups = StagePlan(first_section=0, end_section=5, window=window, recompute=True, live_sections=size).groups
    assert [section for group in groups for section in group] == list(range(5))
    stored = sum(border[group[0] - 1] for group in groups if group[0])
    backward = max(
        sum(kept[group[0] : at]) + max(sections[at].peak_bytes[M] + batch[at], kept[at]) + border[at]
        for group in groups
        for at in group
    )
    state = sum(each.parameter_bytes + each.optimizer_bytes + each.gradient_bytes for each in sections)
    moments = costs.memory.moments(*costs.spans, costs.times.window, costs.times.recompute, costs.live)
    assert sum(int(np.max(part)) for part in moments["computing"].values()) == state + window * stored + backward
    assert sum(costs.memory_parts(0)[1].values()) == costs.memory_bytes[0]


def test_the_recompute_runs_the_last_group_again_and_the_backward_the_others() -> None:
    profile = synthetic_profile(num_sections=6, forward_s=[0.001 * (1 + n) for n in range(6)], overhead_s=0.0)
    found = simulate(profile, boundaries=(0, 5), micro_batch_size=1).plan
    whole, grouped = (simulate_plan(profile, one).costs for one in (found, in_groups(found, (2, None))))
    assert grouped.times.recompute_ns[0] == 9_000_000  # sections 3 and 4
    assert (grouped.times.backward_ns - whole.times.backward_ns).tolist() == [6_000_000, 0]
    assert (grouped.times.forward_ns == whole.times.forward_ns).all()
    more = grouped.to_come_ns - whole.to_come_ns
    assert more.tolist() == [0, 1_000_000, 1_000_000, 6_000_000, 6_000_000, 0]  # forwards of earlier groups


@each_seed(40)
def test_an_emulated_stage_takes_what_is_simulated_and_holds_one_group(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(seed, num_sections=6, micro_batch_sizes=(1,))
    sizes = (int(rng.integers(1, 5)), int(rng.integers(1, 4)))
    found = in_groups(simulate(profile, boundaries=(0, 4), micro_batch_size=1).plan, sizes)
    costs = simulate_plan(profile, found).costs
    device = emulated_device(profile, 1, (2,), EmulationOptions())
    for number, stage in enumerate(found.stages):
        times = task_times(device, stage.groups, JitterDraw(None, 0, 6, 1), [0])
        assert times.forward_s[0] * 1e9 == pytest.approx(costs.times.forward_ns[number], abs=4)
        assert times.recompute_s[0] * 1e9 == pytest.approx(costs.times.recompute_ns[number], abs=4)
        assert times.backward_s.sum() * 1e9 == pytest.approx(costs.times.backward_ns[number], abs=4)
        behind = np.cumsum(times.backward_s[:, 0])[:-1] * 1e9
        expected = costs.to_come_ns[stage.first_section + 1 : stage.end_section]
        assert behind == pytest.approx(expected, abs=4)
        memory = stage_memory(device, stage.groups)
        empty = memory.peak_bytes
        memory.use(0, 1)
        largest = max(len(group) for group in stage.groups)
        assert memory.peak_bytes - empty == largest * device.sections[0].activation_bytes


@each_seed(60, in_long=100)
def test_every_task_starts_when_the_reference_engine_starts_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(seed, num_sections=6, micro_batch_sizes=(1,))
    cuts = (0, *sorted(rng.choice(np.arange(1, 6), int(rng.integers(0, 3)), replace=False).tolist()))
    sizes, counts = rng.integers(0, 4, len(cuts)).tolist(), tuple(rng.integers(1, 9, 2).tolist())
    windows = [int(rng.choice([1, 2])) * (len(cuts) - 1 - stage) + 1 for stage in range(len(cuts))]
    times = stage_costs(SectionCosts(profile, 1), cuts, windows, "varuna", live=sizes).times
    assert_alike(run_pipeline(times, counts, keep_times=True), reference.run_pipeline(times, counts))


@each_seed(40)
def test_plans_in_groups_respect_bounds_and_their_parts_add_up(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(seed, num_sections=6, jitter=0.3 if seed % 4 == 0 else 0.0)
    found = simulate(profile, boundaries=(0, 3), num_replicas=1 + seed % 3, micro_batch_size=1).plan
    sizes = tuple(int(size) for size in rng.integers(1, 4, 2))
    jitter: dict[str, Any] = {"jitter_seed": seed, "num_draws": 3} if seed % 4 == 0 else {}
    slow = {(0, 0): 1.5} if seed % 3 == 0 else None
    one = simulate_plan(profile, in_groups(found, sizes), slow=slow, **jitter)
    assert one.expected.lower_bound_s <= one.expected.mini_batch_s
    assert sum(one.breakdown_s.values()) == pytest.approx(one.expected.mini_batch_s)
    assert sum(one.expected.parts_s.values()) == pytest.approx(one.expected.mini_batch_s)
    if not jitter and slow is None:
        assert one.timeline["end_s"].max() == pytest.approx(one.expected.mini_batch_s)


@each_seed(20)
def test_the_partition_in_groups_is_as_good_as_trying_every_cut(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(seed, num_sections=5, micro_batch_sizes=(1,), batch_size=8)
    costs = SectionCosts(profile, 1, grouped=True)
    memory = costs.memory(single=True)
    depth = int(rng.integers(1, 5))
    least = int(least_bytes(costs, "varuna", num_micro_batches=8)[depth])
    limit = int(least * rng.uniform(0.97, 1.5))
    best = 2**62
    for rest in combinations(range(1, 5), depth - 1):
        cuts, windows = (0, *rest), [min(8, depth - stage) for stage in range(depth)]
        whole = stage_costs(costs, cuts, windows, "varuna")
        fitting = memory.fitting_sizes(*whole.spans, whole.times.window, whole.times.recompute, limit)
        found = stage_costs(costs, cuts, windows, "varuna", live=fitting.tolist())
        if found.fits(limit):
            times = found.times
            slowest = times.forward_ns + times.recompute_ns * times.recompute + times.backward_ns
            best = min(best, int(slowest.max()))
    table = partition_table(costs, "varuna", num_micro_batches=8, memory_bytes=limit)
    assert table.bottleneck_ns[depth] == best
    assert (best < 2**62) == (limit >= least)


@pytest.mark.slow
@each_seed(8, in_long=20)
def test_no_groups_are_faster_than_the_bound_of_a_moved_cut(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(seed, num_sections=6, batch_size=12, micro_batch_sizes=(1,))
    counts, sections = deal(12, int(rng.integers(1, 4))), SectionCosts(profile, 1, grouped=True)
    single, base = len(counts) == 1, (0, 2, 4)
    costs, cuts = stage_costs(sections, base, [counts[0]] * 3, "varuna", single=single), neighbours(base, 6)
    limit = int(costs.memory_bytes.max() * rng.uniform(0.4, 1.1))
    bounds = moved_bounds_ns(costs, cuts, counts, limit, Conditions())
    for cut, bound in zip(cuts.tolist(), bounds.tolist(), strict=True):
        lengths = np.diff([*cut, 6]).tolist()
        for sizes in product(*(range(length + 1) for length in lengths)):
            for width in (1, 2, 4, counts[0]):
                windows = [min(width, counts[0])] * 2 + [1]
                one = stage_costs(sections, cut, windows, "varuna", single=single, live=sizes)
                if one.fits(limit):
                    assert bound <= bound_ns(one, counts, Conditions()), (cut, sizes, windows)


def test_plans_have_no_groups_where_memory_is_ample() -> None:
    for seed in range(12):
        profile, num_gpus = random_profile(seed), 2 + seed % 5
        free = plan(profile, num_gpus=num_gpus, num_runners_up=0).best
        for recompute in (None, True):
            ample = plan(profile, num_gpus=num_gpus, memory_bytes=2**40, recompute=recompute, num_runners_up=0).best
            assert not any(stage.live_sections for stage in ample.stages)
            assert recompute or ample == free


@pytest.mark.slow
@each_seed(6, in_long=12)
def test_plans_are_never_slower_than_without_groups(seed: int) -> None:
    profile = random_profile(seed)
    free = plan(profile, num_gpus=4, num_runners_up=0).best.expected
    for share in (0.3, 0.5, 0.8):
        request = PlanRequest(memory_bytes=int(share * free.peak_memory_bytes))
        sweep = Sweep(profile, request, request.conditions(None))
        whole, either = (each.fastest(4, each.depths(4), 1) for each in (sweep.without_groups(), sweep))
        if whole:
            assert either[0].mini_batch_ns <= whole[0].mini_batch_ns
            if not either[0].costs.live.any():
                assert either[0].mini_batch_ns == whole[0].mini_batch_ns


def test_a_plan_that_needs_groups_fits_is_faster_and_says_so() -> None:
    profile = tight_profile()
    whole = simulate(profile, num_stages=1).expected.peak_memory_bytes
    stored = plan(profile, num_gpus=4, memory_bytes=whole // 3, recompute=False, num_runners_up=0).best
    choice = plan(profile, num_gpus=4, memory_bytes=whole // 3, num_runners_up=0)
    best = choice.best
    assert best.expected.peak_memory_bytes <= whole // 3
    assert any(stage.live_sections for stage in best.stages)
    assert best.expected.mini_batch_s <= stored.expected.mini_batch_s
    again = simulate_plan(profile, best)
    assert (again.plan.stages, again.plan.expected, again.plan.orders) == (best.stages, best.expected, best.orders)
    assert any("run again group by group" in line for line in shape_lines(profile, choice.best_simulation))
    ample = plan(profile, num_gpus=4, num_runners_up=0).best_simulation
    assert not any("group by group" in line for line in shape_lines(profile, ample))


def test_a_job_that_fits_in_no_groups_is_refused_with_what_would_do() -> None:
    given: dict[str, Any] = {"num_gpus": 2, "pipeline_depth": 2, "num_runners_up": 0}
    profile = tight_profile()
    with pytest.raises(PlanError) as caught:
        plan(profile, memory_bytes=1_000_000, **given)
    least = int(str(caught.value).split(" bytes)")[0].split("(")[-1])
    assert plan(profile, memory_bytes=least, **given).best.expected.peak_memory_bytes <= least
    with pytest.raises(PlanError, match="memory_bytes"):
        plan(profile, memory_bytes=least - 1, **given)


# 18 and 84: a cut that memory makes less even, and steeper windows; 156: gradients that are reduced sooner.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(10), 18, 84, 156])
def test_no_groups_make_the_stages_of_a_plan_more_than_1_percent_faster(seed: int) -> None:
    profile = random_profile(seed)
    num_gpus = 2 + seed % 5
    free = plan(profile, num_gpus=num_gpus, num_runners_up=0).best
    limit = int(free.expected.peak_memory_bytes * np.random.default_rng(seed + 7).uniform(0.2, 1))
    try:
        best = plan(profile, num_gpus=num_gpus, memory_bytes=limit, num_runners_up=0).best
    except PlanError:
        return
    assert best.expected.peak_memory_bytes <= limit
    lengths = [len(stage.sections) for stage in best.stages]
    cuts = [stage.first_section for stage in best.stages]
    shape: dict[str, Any] = {"boundaries": cuts, "num_replicas": best.num_replicas}
    shape["micro_batch_size"] = best.micro_batch_size
    slopes = range(1, best.micro_batches_per_replica[0] + 1)
    for schedule, slope in product(("varuna", "gpipe", "1f1b"), slopes):
        one = simulate(profile, **shape, schedule=schedule, window_slope=slope).plan
        for sizes in product(*((None, *range(1, length)) for length in lengths)):
            other = simulate_plan(profile, in_groups(one, sizes)).expected
            if other.peak_memory_bytes <= limit:
                assert best.expected.mini_batch_s <= 1.01 * other.mini_batch_s, (schedule, slope, sizes)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_groups_of_no_sections_are_refused(size: object) -> None:
    with pytest.raises(ValidationError, match="live_sections"):
        StagePlan.model_validate(
            {"first_section": 0, "end_section": 2, "window": 1, "recompute": True, "live_sections": size}
        )
