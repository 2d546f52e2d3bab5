from itertools import combinations, product

import numpy as np
import pytest

from morph.contract.profile import Profile
from simulator.costs.stage_costs import SectionCosts, stage_costs
from simulator.engine.schedules import stage_windows
from simulator.inputs.synthetic import synthetic_profile
from simulator.search.partition import least_bytes, partition_table
from simulator.search.setting import SCHEDULES, Rule, Setting
from tests.seeds import each_seed


def _random_profile(seed: int) -> Profile:
    rng = np.random.default_rng(seed)
    return synthetic_profile(
        num_sections=7,
        forward_s=[float(value) for value in rng.uniform(0.001, 0.01, 7)],
        parameter_bytes=[int(value) for value in rng.integers(1, 20, 7) * 1_000_000],
        boundary_bytes_per_sample=500_000,
        batch_size=16,
    )


def _brute_force(costs: SectionCosts, num_stages: int, slope: int, limit: int) -> int | None:
    best = None
    for cuts in combinations(range(1, costs.num_sections), num_stages - 1):
        stages = stage_costs(costs, (0, *cuts), stage_windows("varuna", num_stages, 8, slope), "varuna")
        if stages.memory_bytes.max() > limit:
            continue
        times = stages.times
        slowest = int((times.forward_ns + times.backward_ns + times.recompute_ns * times.recompute).max())
        best = slowest if best is None else min(best, slowest)
    return best


@each_seed(12)
@pytest.mark.parametrize("limit_share", [None, 0.2, 0.35, 0.5])
def test_the_partition_is_as_good_as_trying_every_cut(seed: int, limit_share: float | None) -> None:
    costs = SectionCosts(_random_profile(seed), 2)
    whole = stage_costs(costs, (0,), (1,), "varuna").memory_bytes[0]
    limit = None if limit_share is None else int(limit_share * whole)
    for slope in (1, 4):
        table = partition_table(costs, "varuna", num_micro_batches=8, slope=slope, memory_bytes=limit)
        for depth in range(1, 8):
            expected = _brute_force(costs, depth, slope, 2**62 if limit is None else limit)
            assert table.fits(depth) == (expected is not None)
            if expected is not None:
                assert table.bottleneck_ns[depth] == expected
                stages = stage_costs(costs, table.boundaries(depth), stage_windows("varuna", depth, 8, slope), "varuna")
                assert limit is None or stages.memory_bytes.max() <= limit
                assert len(stages.boundaries) == depth


def test_the_least_memory_is_just_enough() -> None:
    costs = SectionCosts(_random_profile(3), 2)
    least = int(least_bytes(costs, "varuna", num_micro_batches=8)[3])
    assert partition_table(costs, "varuna", num_micro_batches=8, memory_bytes=least).fits(3)
    assert not partition_table(costs, "varuna", num_micro_batches=8, memory_bytes=least - 1).fits(3)


def test_the_last_stage_takes_more_sections_since_it_does_not_recompute() -> None:
    costs = SectionCosts(synthetic_profile(num_sections=13), 2)
    forward_ns = int(costs.forward_sum_ns[1])
    table = partition_table(costs, "varuna", num_micro_batches=8)
    assert table.boundaries(4) == (0, 3, 6, 9)
    assert table.bottleneck_ns[4] == 3 * (1 + 1 + 2) * forward_ns == 4 * (1 + 2) * forward_ns
    assert partition_table(costs, "gpipe", num_micro_batches=8).bottleneck_ns[4] == 4 * (1 + 1 + 2) * forward_ns


@each_seed(6)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_a_setting_has_room_where_some_cut_fits(seed: int, grouped: bool, single: bool) -> None:
    profile, fitting = _random_profile(seed), set()
    free = Setting(profile, 1, True, SCHEDULES, None)
    most = free.num_micro_batches if single else free.num_micro_batches // 2
    limit = int(least_bytes(free.sections, "varuna", num_micro_batches=most, single=single)[3])
    setting = Setting(profile, 1, True, SCHEDULES, limit, grouped=grouped)
    for schedule, slope, depth in product(SCHEDULES, (1, 2, 3, most), range(1, 8)):
        table = partition_table(
            setting.sections,
            schedule,
            num_micro_batches=most,
            slope=slope,
            memory_bytes=setting.memory_bytes,
            single=single,
        )
        assert setting.has_room(Rule(schedule, slope), depth, most) == table.fits(depth), (schedule, slope, depth)
        fitting.add(table.fits(depth))
    assert fitting == {False, True}
