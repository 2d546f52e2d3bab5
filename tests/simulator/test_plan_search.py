"""No plan has a better neighbour: another slope, schedule, m, cut, depth, or number of replicas or GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from morph.contract.plan import Plan
from morph.contract.profile import Profile, load_profile
from simulator import plan, plan_table, simulate, synthetic_profile
from simulator.costs.answer import bound_ns, deal
from simulator.costs.bounds import lower_bound_ns, pipe_of
from simulator.costs.finish import finish
from simulator.costs.memory import spans
from simulator.costs.outcome import ShapeSimulator
from simulator.costs.stage_costs import SectionCosts, stage_costs
from simulator.engine.local_loop import play
from simulator.engine.pipeline import run_pipeline
from simulator.engine.schedules import fixed_order, recomputes, stage_windows
from simulator.engine.times import StageTimes
from simulator.inputs.conditions import Conditions
from simulator.inputs.layout import lone_workers
from simulator.search.moves import moved_bounds_ns
from simulator.search.moves import neighbours as moved_cuts
from simulator.search.partition import bounds_ns
from simulator.search.setting import SCHEDULES, Rule, Setting
from tests.grids import IS_LONG
from tests.seeds import each_seed

pytestmark = pytest.mark.slow

GPT2 = Path(__file__).parents[2] / "configs" / "profiles" / "gpt2-2.5b.json"


def random_profile(
    seed: int, num_sections: int | None = None, batch_size: int | None = None, **changes: Any
) -> Profile:
    rng = np.random.default_rng(seed)
    count = num_sections or int(rng.integers(2, 6))
    given: dict[str, Any] = {
        "num_sections": count,
        "forward_s": [float(value) for value in rng.uniform(0.002, 0.01, count)],
        "batch_size": batch_size or int(rng.choice([4, 8, 12])),
        "micro_batch_sizes": (1, 2, 4),
        "overhead_s": float(rng.choice([0.0, 0.002])),
        "latency_s": float(rng.choice([0.0, 0.5, 1, 2, 4])) * 0.006,
        "bandwidth_bytes_per_s": float(rng.choice([1e7, 3e7, 1e9])),
        "parameter_bytes": int(rng.choice([10_000, 1_000_000])),
        "tied": bool(rng.integers(2)),
    }
    return synthetic_profile(**(given | changes))


def neighbours(profile: Profile, best: Plan, num_gpus: int) -> Iterator[dict[str, Any]]:
    """Yield alternatives that differ from a plan in one property, as arguments of ``simulate``."""
    cuts = [stage.first_section for stage in best.stages]
    same: dict[str, Any] = {
        "boundaries": cuts,
        "num_replicas": best.num_replicas,
        "micro_batch_size": best.micro_batch_size,
        "recompute": best.stages[0].recompute,
        "schedule": best.schedule,
    }
    for slope in range(1, max(2, best.micro_batches_per_replica[0])):
        yield from (same | {"schedule": schedule, "window_slope": slope} for schedule in ("varuna", "1f1b"))
    yield same | {"schedule": "gpipe"}
    yield same | {"recompute": not same["recompute"]}
    for m in profile.micro_batch_sizes:
        if best.num_replicas <= profile.job.batch_size // m:
            yield same | {"micro_batch_size": m}
    for place, step in product(range(1, len(cuts)), (-1, 1)):
        moved = [*cuts[:place], cuts[place] + step, *cuts[place + 1 :]]
        if sorted(set(moved)) == moved and moved[-1] < profile.num_sections:
            yield same | {"boundaries": moved}
    del same["boundaries"]
    for depth in {best.pipeline_depth - 1, best.pipeline_depth, best.pipeline_depth + 1} - {
        0,
        profile.num_sections + 1,
    }:
        for replicas in range(1, min(num_gpus // depth, best.num_micro_batches) + 1):
            yield same | {"num_stages": depth, "num_replicas": replicas}


@given(st.integers(0, 100_000))
@example(627)  # a cut that is faster only with wider windows
@example(4995)
@example(5814)  # followed a lot faster than planned
@settings(max_examples=15, deadline=None)
def test_no_plan_is_more_than_1_percent_slower_than_any_neighbour(seed: int) -> None:
    check_neighbours(random_profile(seed), 2 + seed % 5)


# Two cuts that are faster only if moved together; slopes of windows between those that are always tried.
@pytest.mark.parametrize("seed", [176, 1356, 1922])
def test_no_plan_of_a_larger_job_is_either(seed: int) -> None:
    check_neighbours(*larger_job(seed))


@given(st.integers(0, 100_000))
@example(609)  # 1.3 %: the one of 3,200 that is not within 1 %
@settings(max_examples=8, deadline=None)
def test_no_plan_of_a_larger_job_is_2_percent_slower_than_neighbours(seed: int) -> None:
    check_neighbours(*larger_job(seed), tolerated=1.02)


def larger_job(seed: int) -> tuple[Profile, int]:
    rng = np.random.default_rng(seed + 10**6)
    profile = random_profile(seed, int(rng.integers(2, 9)), int(rng.choice([24, 48, 64])))
    return profile, int(rng.integers(2, 17))


def check_neighbours(profile: Profile, num_gpus: int, tolerated: float = 1.01) -> None:
    best = plan(profile, num_gpus=num_gpus, num_runners_up=0).best
    for other in neighbours(profile, best, num_gpus):
        assert best.expected.mini_batch_s <= tolerated * simulate(profile, **other).expected.mini_batch_s, other


@pytest.mark.parametrize("forwards", [2, 4, 8])
@pytest.mark.parametrize("recompute", [True, False])
def test_late_messages_make_windows_as_steep_as_it_takes(forwards: int, recompute: bool) -> None:
    profile = random_profile(3, 8, 64, micro_batch_size=1, latency_s=0.006 * forwards)
    best = plan(profile, num_gpus=8, pipeline_depth=8, recompute=recompute).best
    cuts = [stage.first_section for stage in best.stages]
    others = [{"schedule": "gpipe"}, {"schedule": "1f1b"}, *({"window_slope": slope} for slope in (1, 2, 4, 8, 16, 63))]
    for other in others:
        found = simulate(profile, boundaries=cuts, recompute=recompute, **other)  # type: ignore[arg-type]
        assert best.expected.mini_batch_s <= 1.01 * found.expected.mini_batch_s, other


def test_windows_are_judged_over_the_links_that_messages_share() -> None:
    profile = load_profile(GPT2)
    link = profile.inter_node
    ten = {
        kind: tuple(
            entry.model_copy(update={"time": entry.time.model_copy(update={"median_s": 10 * entry.time.median_s})})
            for entry in getattr(link, kind)
        )
        for kind in ("activation", "gradient")
    }
    narrow = profile.model_copy(update={"inter_node": link.model_copy(update=ten)})
    best = plan(narrow, num_gpus=8, recompute=True, num_runners_up=0).best
    cuts = [stage.first_section for stage in best.stages]
    shape = {"boundaries": cuts, "num_replicas": best.num_replicas, "micro_batch_size": best.micro_batch_size}
    for slope in (1, 2, 4, 8):
        other = simulate(narrow, window_slope=slope, **shape)  # type: ignore[arg-type]
        if other.expected.peak_memory_bytes <= (profile.environment.device_memory_bytes or 0):
            assert best.expected.mini_batch_s <= 1.01 * other.expected.mini_batch_s


@each_seed(40)
def test_hardly_any_windows_beat_those_of_the_best_slope(seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth, count = int(rng.integers(2, 4)), int(rng.integers(3, 6))
    profile = random_profile(seed, depth, count, micro_batch_sizes=(1,))
    found = simulate(profile, boundaries=range(depth), share_links=False)
    sections = SectionCosts(profile, 1)

    def time_ns(windows: tuple[int, ...]) -> int:
        costs = stage_costs(sections, range(depth), windows, "varuna")
        last_backward_ns = run_pipeline(costs.times, (count,)).last_backward_ns
        return finish(costs, last_backward_ns, costs.to_come_ns[:, None]).mini_batch_ns

    best = min(time_ns((*windows, 1)) for windows in product(range(1, count + 1), repeat=depth - 1))
    assert time_ns(tuple(found.costs.times.window.tolist())) <= 1.05 * best


def test_gpipe_goes_in_rounds_where_memory_does_not_hold_all_micro_batches() -> None:
    profile = load_profile(GPT2)  # a V100 with 16 GiB
    shape: dict[str, Any] = {"num_gpus": 100, "schedule": "gpipe", "micro_batch_size": 4, "recompute": True}
    best = plan(profile, **shape, num_runners_up=0).best
    assert best.expected.peak_memory_bytes <= (profile.environment.device_memory_bytes or 0)
    tight = synthetic_profile(num_sections=4, batch_size=64, micro_batch_size=1, parameter_bytes=1000)
    needed = simulate(tight, num_stages=4, schedule="gpipe", window_slope=8).expected.peak_memory_bytes
    shape = {"num_gpus": 4, "pipeline_depth": 4, "schedule": "gpipe", "recompute": True}
    few = plan(tight, memory_bytes=needed, **shape).best
    assert {stage.window for stage in few.stages} == {8}
    assert few.orders[64][1] == ("F" * 8 + "RB" * 8) * 8
    assert {stage.window for stage in plan(tight, **shape).best.stages} == {64}


def test_a_round_that_is_not_full_comes_last() -> None:
    assert fixed_order("gpipe", 0, 2, 5, False, 2) == "FFBBFFBBFB"
    assert fixed_order("gpipe", 0, 2, 5, False) == "FFFFFBBBBB"


def _orders(count: int) -> list[str]:
    """Return every order of a stage's forwards and backwards."""
    found = [("", 0, 0)]
    for _ in range(2 * count):
        found = [(text + "F", begun + 1, done) for text, begun, done in found if begun < count] + [
            (text + "B", begun, done + 1) for text, begun, done in found if done < begun
        ]
    return [text for text, _, _ in found]


def _best_of_all_orders_ns(times: StageTimes, count: int) -> int:
    """Return the time of the best order of each stage's tasks, with unlimited memory."""
    orders, again, counts = _orders(count), times.recompute.tolist(), np.array([count])
    letters = np.zeros((2, len(orders), 3 * count), np.uint8)
    for place, order in enumerate(orders):
        for row, text in enumerate((order, order.replace("B", "RB"))):
            letters[row, place, : len(text)] = np.frombuffer(text.encode(), np.uint8)
    ended = [
        ends.max()
        for chosen in product(range(len(orders)), repeat=times.num_stages)
        for over, ends, *_ in (
            play(times.packed, counts, letters[np.array(again, int), list(chosen)][None], False, False, False),
        )
        if over
    ]
    return int(min(ended))


def test_some_schedule_is_nearly_as_fast_as_the_best_of_all_task_orders() -> None:
    ratios = []
    for seed in range(150 if IS_LONG else 40):
        rng = np.random.default_rng(seed)
        depth, again = int(rng.integers(2, 4)), bool(rng.integers(2))
        count = int(rng.integers(2, 6)) if depth == 2 else int(rng.integers(2, 5))
        forward_ns = np.rint(1e6 * (1 + rng.choice([0.0, 0.6, 2.0]) * rng.uniform(0, 1, depth))).astype(np.int64)
        link_ns = np.full(depth, int(1e6 * rng.choice([0, 0.1, 0.5, 1, 2])))
        times = StageTimes(
            forward_ns=forward_ns,
            recompute_ns=forward_ns,
            backward_ns=np.rint(forward_ns * rng.choice([1.0, 1.5, 2.0])).astype(np.int64),
            activation_ns=link_ns,
            gradient_ns=link_ns,
            window=np.ones(depth, np.int64),
            recompute=np.array(recomputes("varuna", depth, again)),
        )
        found = []
        for schedule, slope in product(SCHEDULES, range(1, count + 1)):
            window = np.array(stage_windows(schedule, depth, count, slope))
            found.append(run_pipeline(replace(times, window=window), (count,), schedule=schedule).makespan_ns)
        ratios.append(min(found) / _best_of_all_orders_ns(times, count))
    assert max(ratios) <= 1.03
    assert np.mean(np.array(ratios) <= 1.0001) >= 0.95


def test_a_wider_window_lets_1f1b_warm_up_with_more_forwards() -> None:
    profile = synthetic_profile(
        num_sections=2, batch_size=6, micro_batch_sizes=(1,), activation_bytes_per_sample=100_000_000
    )
    given: dict[str, Any] = {"num_stages": 2, "recompute": False}
    plain, eager = (simulate(profile, **given, schedule="1f1b", window_slope=slope).plan for slope in (1, 4))
    assert [stage.window for stage in plain.stages] == [2, 1]
    assert eager.orders[6][0] == "FFFFFBFBBBBB"
    assert [stage.window for stage in eager.stages] == [5, 1]
    # the bytes of more activations in flight
    assert eager.expected.peak_memory_bytes > plain.expected.peak_memory_bytes


def test_the_bound_for_any_cut_is_that_of_the_best_cut() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        num_sections, count = int(rng.integers(1, 7)), int(rng.integers(1, 9))
        profile = random_profile(seed, num_sections, count, micro_batch_sizes=(1,))
        for recompute in (True, False):
            costs = SectionCosts(profile, 1, recompute=recompute)
            bounds = bounds_ns(costs, "varuna", count, 0)
            for depth in range(1, num_sections + 1):
                cuts = [(0, *rest) for rest in combinations(range(1, num_sections), depth - 1)]
                stages = [stage_costs(costs, cut, [count] * depth, "varuna").times for cut in cuts]
                none = np.zeros(depth, np.int64)
                best = min(
                    lower_bound_ns(pipe_of(one, none), one.window, count, latency=False, window=False) for one in stages
                )
                assert bounds[depth] == best


@each_seed(20)
def test_no_cut_beats_the_bound_with_its_first_stages_reduction(seed: int) -> None:
    num_sections = 2 + seed % 4
    profile = random_profile(seed, num_sections, 12)
    for recompute, depth in product((True, False), range(1, num_sections + 1)):
        setting = Setting(profile, 1, recompute, SCHEDULES, None)
        for replicas, rest in product((1, 2, 3, 5), combinations(range(1, num_sections), depth - 1)):
            counts = deal(12, replicas)
            costs = stage_costs(setting.sections, (0, *rest), [counts[0]] * depth, "varuna")
            bound = setting.bound_ns(depth, counts[0]) + setting.first_reduce_ns(depth, replicas)
            assert bound <= bound_ns(costs, counts, Conditions())


@each_seed(20)
def test_no_cut_that_fits_beats_the_bound_within_memory(seed: int) -> None:
    num_sections, rng = 2 + seed % 4, np.random.default_rng(seed)
    profile = random_profile(seed, num_sections, 12)
    for recompute, grouped in ((True, False), (True, True), (False, False)):
        free = Setting(profile, 1, recompute, SCHEDULES, None, grouped=grouped)
        memory_bytes = int(free.least_bytes(num_sections, 12) * rng.uniform(1, 2))
        setting = Setting(profile, 1, recompute, SCHEDULES, memory_bytes, grouped=grouped)
        for depth, most in product(range(1, num_sections + 1), (2, 3, 6, 12)):
            layout, simulator = lone_workers(depth), ShapeSimulator(Conditions())
            for schedule, slope in product(SCHEDULES, (1, 2)):
                for rest in combinations(range(1, num_sections), depth - 1):
                    costs = setting.stages(Rule(schedule, slope), most, layout, (0, *rest))
                    if costs is not None:
                        counts = (most,) * (12 // most)
                        assert setting.least_ns(depth, most) <= simulator.planned(costs, counts).mini_batch_ns


@pytest.mark.parametrize("recompute", [True, False])
@each_seed(30)
def test_the_bound_of_a_moved_cut_is_that_of_its_widest_windows(seed: int, recompute: bool) -> None:
    rng = np.random.default_rng(seed)
    depth, num_sections, counts = int(rng.integers(2, 5)), int(rng.integers(5, 8)), deal(12, int(rng.integers(1, 4)))
    profile = random_profile(seed, num_sections, 12, tied=seed % 3 > 0)
    if seed % 3 == 2:  # bounded by the second and the fifth section, which a boundary may cross
        units = [
            unit.model_copy(update={"sections": (1, 4)}) if len(unit.sections) > 1 else unit for unit in profile.units
        ]
        profile = profile.model_copy(update={"units": tuple(units)})
    sections = SectionCosts(profile, 1, recompute=recompute)
    shared = {section for unit in sections.shared_units for section in unit.sections}
    base = (0, *sorted(rng.choice(np.arange(1, num_sections), depth - 1, replace=False).tolist()))
    single, conditions = len(counts) == 1, Conditions(all_reduce="late" if seed % 5 == 0 else "overlapped")
    memory, cuts = sections.memory(single=single), moved_cuts(base, num_sections, rows=True)
    costs = stage_costs(sections, base, [counts[0]] * depth, "varuna", single=single)
    least = int(costs.with_windows("varuna", [1] * depth).memory_bytes.max())
    for memory_bytes in (2**40, int(least * rng.uniform(0.9, 1.6))):
        bounds = moved_bounds_ns(costs, cuts, counts, memory_bytes, conditions).tolist()
        for cut, bound in zip(cuts.tolist(), bounds, strict=True):
            windows = np.minimum(counts[0], memory.most_windows(*spans(cut, num_sections), recompute, memory_bytes))
            if windows.min() < 1:
                assert bound == 2**62
                continue
            exact = bound_ns(stage_costs(sections, cut, windows.tolist(), "varuna"), counts, conditions)
            crossed = {min(pair) for pair in zip(cut, base, strict=True) if len(set(pair)) > 1}
            assert bound <= exact if crossed & shared else bound == exact, (cut, base, windows, bound, exact)


def test_a_cut_without_windows_of_the_wanted_schedule_is_avoided() -> None:
    shape: dict[str, Any] = {"micro_batch_sizes": (1,), "parameter_bytes": 1000, "activation_bytes_per_sample": 10**7}
    profile = random_profile(972, 4, 4, overhead_s=0.0, **shape)
    given: dict[str, Any] = {"schedule": "1f1b", "recompute": False}
    least = simulate(profile, num_stages=3, **given).expected.peak_memory_bytes
    for memory_bytes in range(least, least + 15_000_000, 1_000_000):
        best = plan(profile, num_gpus=3, pipeline_depth=3, memory_bytes=memory_bytes, **given).best
        assert best.expected.peak_memory_bytes <= memory_bytes


def test_m_recompute_and_windows_are_chosen_together() -> None:
    profile = load_profile(GPT2.with_name("bert-large.json"))
    stored, either = (plan(profile, num_gpus=16, recompute=flag, num_runners_up=0).best for flag in (False, None))
    assert stored.expected.examples_per_s > 440  # 247 with the m that the knee alone would give
    assert either.expected.examples_per_s >= stored.expected.examples_per_s


@pytest.mark.parametrize("seed", range(6 if IS_LONG else 3))
def test_a_table_has_the_m_that_trying_every_m_would_choose(seed: int) -> None:
    profile, size = random_profile(seed), 3 if seed % 3 == 0 else None
    options: dict[str, Any] = {} if size is None else {"num_gpus_per_node": size}
    tables = [plan_table(profile, 7, micro_batch_size=m, **options) for m in profile.micro_batch_sizes]
    best = max(tables, key=lambda table: sum(plan.expected.examples_per_s for plan in table.values()))
    assert plan_table(profile, 7, **options) == best


@pytest.mark.parametrize("seed", range(3 if IS_LONG else 1))
def test_no_other_number_of_replicas_is_cheaper_or_faster(seed: int) -> None:
    profile = random_profile(seed, batch_size=12)
    aims: list[dict[str, Any]] = [
        {"objective": "usd_per_example", "usd_per_gpu_hour": 1.0},
        {"objective": "progress", "revocations_per_hour": 20.0},
    ]
    for aim in aims:
        best = plan(profile, num_gpus=12, num_runners_up=0, **aim).values[0]
        each = [plan(profile, num_gpus=12, num_replicas=d, num_runners_up=0, **aim).values[0] for d in range(1, 13)]
        assert best == (min(each) if aim["objective"] == "usd_per_example" else max(each))
