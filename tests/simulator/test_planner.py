import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from morph.contract.errors import PlanError
from morph.contract.plan import Plan, load_plan
from morph.contract.profile import Contention, Profile
from simulator import plan, plan_table, simulate, synthetic_profile
from simulator.costs.stage_costs import SectionCosts
from simulator.search.partition import least_bytes
from tests.grids import IS_LONG
from tests.seeds import each_seed


def _profile(**changes: object):  # type: ignore[no-untyped-def]
    settings: dict[str, object] = {"tied": True, "batch_size": 48, "parameter_bytes": 8_000_000}
    return synthetic_profile(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_gpus", [1, 2, 5, 6, pytest.param(13, marks=pytest.mark.slow)])
def test_the_best_plan_is_the_fastest_of_all_shapes_simulated(num_gpus: int) -> None:
    profile = _profile()
    choice = plan(profile, num_gpus=num_gpus, schedule="varuna")
    rates = [
        simulate(
            profile, num_stages=depth, num_replicas=count, micro_batch_size=m, recompute=recompute
        ).expected.examples_per_s
        for depth in range(1, min(8, num_gpus) + 1)
        for count in range(1, num_gpus // depth + 1)
        for m in profile.micro_batch_sizes
        for recompute in (True, False)
        if count <= profile.job.batch_size // m
    ]
    assert choice.best.expected.examples_per_s >= max(rates) * (1 - 1e-9)
    assert choice.best.num_workers <= num_gpus
    ranked = [choice.best, *choice.runners_up]
    assert [one.expected.examples_per_s for one in ranked] == sorted(
        (one.expected.examples_per_s for one in ranked), reverse=True
    )
    assert len({one.shape for one in ranked}) == len(ranked) == min(6, num_gpus, 8)


def test_a_gpu_that_only_makes_the_reduction_longer_is_left_idle() -> None:
    profile = _profile(batch_size=6, num_sections=1)  # for 6 micro-batches, 3 replicas take as long as 4 or 5
    choice = plan(profile, num_gpus=5, micro_batch_size=1)
    assert (choice.best.shape, choice.num_idle) == ("1x3", 2)
    assert choice.runners_up == ()
    assert plan_table(profile, 5, micro_batch_size=1)[5].shape == "1x3"


def test_a_job_that_fits_on_one_gpu_only_without_replicas_is_planned() -> None:
    profile = _profile(num_sections=1, activation_bytes_per_sample=50_000_000, parameter_bytes=4_000_000)
    given: dict[str, object] = {"micro_batch_size": 1, "memory_bytes": 102_000_000}
    choice = plan(profile, num_gpus=2, **given)  # type: ignore[arg-type]
    assert (choice.best.shape, choice.num_idle) == ("1x1", 1)
    assert "2 replicas of this depth do not fit" in choice.best_simulation.explanation
    assert {each.shape for each in plan_table(profile, 3, **given).values()} == {"1x1"}  # type: ignore[arg-type]


def _limited(seed: int, **changes: object) -> tuple[Profile, int]:
    """Return a random job, and a device memory that just suffices for some shape of it."""
    rng = np.random.default_rng(seed)
    num_sections = int(rng.integers(1, 7))
    given: dict[str, object] = {
        "num_sections": num_sections,
        "forward_s": [float(value) for value in rng.uniform(0.0005, 0.01, num_sections)],
        "batch_size": int(rng.integers(1, 6)) * 4,
        "micro_batch_sizes": (1, 2, 4),
        "latency_s": float(rng.uniform(0.0, 0.01)),
        "bandwidth_bytes_per_s": float(rng.choice([1e7, 1e9])),
        "parameter_bytes": int(rng.choice([1000, 1_000_000, 8_000_000])),
        "activation_bytes_per_sample": int(rng.choice([1_000_000, 50_000_000])),
    }
    profile = _profile(**(given | changes))
    shape = {"num_stages": int(rng.integers(1, num_sections + 1)), "num_replicas": int(rng.integers(1, 3))}
    somehow = simulate(profile, micro_batch_size=1, recompute=bool(rng.integers(2)), **shape)  # type: ignore[arg-type]
    return profile, somehow.expected.peak_memory_bytes


@pytest.mark.slow
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([None, 2, 3, 5]))
@settings(max_examples=25 if IS_LONG else 6, deadline=None)
def test_more_gpus_never_make_the_best_plan_slower(seed: int, limited: bool, num_gpus_per_node: int | None) -> None:
    profile, memory_bytes = _limited(seed)
    if seed % 2:
        slower = (Contention(num_busy=2, factor=1.2), Contention(num_busy=4, factor=1.6))
        profile = profile.model_copy(update={"contention": slower})
    given: dict[str, Any] = {
        "memory_bytes": memory_bytes if limited else None,
        "num_gpus_per_node": num_gpus_per_node,
    }
    rates: list[float] = []
    for num_gpus in range(1, 10):
        try:
            best = plan(profile, num_gpus=num_gpus, num_runners_up=0, **given).best
        except PlanError:
            assert not rates, f"{num_gpus - 1} GPUs were enough"
        else:
            rates.append(best.expected.examples_per_s)
    assert rates == sorted(rates)
    table = [each.expected.examples_per_s for each in plan_table(profile, 9, **given).values()]
    assert (len(table), table) == (len(rates), sorted(table))


@pytest.mark.slow
def test_pruning_by_the_lower_bound_loses_no_runner_up() -> None:
    rng = np.random.default_rng(5)
    profile = _profile(num_sections=12, forward_s=[float(v) for v in rng.uniform(0.001, 0.01, 12)], latency_s=0.01)
    few, all_of_them = plan(profile, num_gpus=24, num_runners_up=3), plan(profile, num_gpus=24, num_runners_up=99)
    assert [few.best, *few.runners_up] == [all_of_them.best, *all_of_them.runners_up][:4]


def test_a_plan_survives_its_file() -> None:
    best = plan(_profile(), num_gpus=6).best
    assert Plan.model_validate_json(best.model_dump_json()) == best
    assert best.fingerprint == _profile().job.fingerprint


@pytest.mark.parametrize(
    ("num_sections", "given"),
    [
        pytest.param(8, {}, marks=pytest.mark.slow),
        pytest.param(4, {"compute_slots": 2}, marks=pytest.mark.slow),
        (8, {"num_gpus_per_node": 4, "micro_batch_size": 2}),
    ],
)
def test_the_table_answers_what_plan_answers_for_each_number_of_gpus(num_sections: int, given: dict[str, Any]) -> None:
    profile = _profile(batch_size=24, num_sections=num_sections, latency_s=0.004)
    table = plan_table(profile, 7, **given)
    assert set(table) == set(range(1, 8))
    for num_gpus, best in table.items():
        again = given | {"micro_batch_size": best.micro_batch_size}
        assert best == plan(profile, num_gpus=num_gpus, num_runners_up=0, **again).best


@pytest.mark.slow
def test_the_table_has_the_best_micro_batch_size_for_its_range() -> None:
    profile = _profile(overhead_s=0.004)
    rates = {
        m: {
            gpus: plan(profile, num_gpus=gpus, micro_batch_size=m, num_runners_up=0).best.expected.examples_per_s
            for gpus in range(1, 15)
        }
        for m in profile.micro_batch_sizes
    }
    for least, most in ((1, 2), (12, 14), (1, 14)):
        totals = {m: sum(of_m[gpus] for gpus in range(least, most + 1)) for m, of_m in rates.items()}
        table = plan_table(profile, most, min_gpus=least)
        assert {one.micro_batch_size for one in table.values()} == {max(totals, key=lambda m: totals[m])}


@pytest.mark.slow
@each_seed(3, in_long=12)
def test_the_table_answers_what_plan_answers_where_busy_cores_hinder_each_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_sections = int(rng.integers(2, 5))
    profile = _profile(
        batch_size=6,
        parameter_bytes=int(rng.choice([1000, 200_000, 2_000_000])),
        num_sections=num_sections,
        forward_s=[float(value) for value in rng.uniform(0.0005, 0.01, num_sections)],
    )
    slower = tuple(Contention(num_busy=count, factor=factor) for count, factor in ((2, 1.25), (4, 1.8), (8, 2.1)))
    profile = profile.model_copy(update={"contention": slower})
    given = {"compute_slots": int(rng.integers(4, 6)), "micro_batch_size": 1}
    table = plan_table(profile, 8, **given)
    assert table == {gpus: plan(profile, num_gpus=gpus, num_runners_up=0, **given).best for gpus in table}


def test_the_table_leaves_out_numbers_of_gpus_that_cannot_hold_the_job() -> None:
    whole = simulate(_profile(), num_stages=1).expected.peak_memory_bytes
    table = plan_table(_profile(), 6, memory_bytes=whole // 2)
    assert 1 not in table
    assert 6 in table
    assert all(one.expected.peak_memory_bytes <= whole // 2 for one in table.values())
    assert len({one.micro_batch_size for one in table.values()}) == 1


def test_no_table_entry_fits_when_memory_is_far_too_small() -> None:
    assert plan_table(_profile(), 4, memory_bytes=1000) == {}


def test_a_costly_all_reduce_makes_the_pipeline_deeper() -> None:
    light = plan(_profile(parameter_bytes=1_000), num_gpus=8).best
    heavy = plan(_profile(parameter_bytes=400_000_000, forward_s=0.01), num_gpus=8).best
    assert heavy.pipeline_depth > light.pipeline_depth


def test_a_wanted_depth_or_replica_count_is_kept() -> None:
    assert plan(_profile(), num_gpus=6, pipeline_depth=3).best.shape == "3x2"
    assert plan(_profile(), num_gpus=6, num_replicas=2).best.num_replicas == 2
    slow_sums = _profile(parameter_bytes=400_000_000)  # fewer replicas would be faster
    assert plan(slow_sums, num_gpus=6, num_replicas=3).best.num_replicas == 3
    assert plan(_profile(), num_gpus=6, pipeline_depth=2, num_replicas=1).best.shape == "2x1"


def test_a_single_simulation_takes_the_knee_of_the_micro_batch_sizes() -> None:
    def knee(**changes: object) -> int:
        return simulate(_profile(**changes), num_stages=2).plan.micro_batch_size

    # F(m)/m improves by more than 5 % per doubling up to m = 4 with this overhead.
    assert knee(overhead_s=0.0006) == 4
    assert knee(overhead_s=0.0) == 1
    assert knee(overhead_s=0.1, batch_size=12) == 4
    assert knee(micro_batch_size=8) == 8


def test_the_jobs_micro_batch_size_is_kept_unless_one_is_wanted() -> None:
    assert plan(_profile(micro_batch_size=8), num_gpus=2).best.micro_batch_size == 8
    assert plan(_profile(micro_batch_size=8), num_gpus=2, micro_batch_size=2).best.micro_batch_size == 2


def test_less_memory_makes_the_micro_batch_smaller() -> None:
    profile = _profile(overhead_s=0.1, activation_bytes_per_sample=50_000_000)
    roomy = plan(profile, num_gpus=8).best
    assert roomy.micro_batch_size > 2
    least = simulate(profile, num_stages=8, micro_batch_size=2, window_slope=1).expected.peak_memory_bytes
    assert plan(profile, num_gpus=8, memory_bytes=least).best.micro_batch_size <= 2


@pytest.mark.parametrize(
    ("arguments", "field", "says"),
    [
        ({"num_gpus": 0}, "num_gpus", "a whole number from 1 to 100000"),
        ({"num_gpus": True}, "num_gpus", "(got True)"),
        ({"num_gpus": "4"}, "num_gpus", "(got '4')"),
        ({"num_gpus": 10**20}, "num_gpus", "1 to 100000"),
        ({"num_gpus_per_node": ["1", 2]}, "num_gpus_per_node", "of each a whole number"),
        ({"num_gpus": 4, "num_gpus_per_node": 1.5}, "num_gpus_per_node", "a whole number"),
        ({"num_gpus": 4, "pipeline_depth": 9}, "pipeline_depth", "1 to 4"),
        ({"num_gpus": 20, "pipeline_depth": 9}, "pipeline_depth", "1 to 8"),
        ({"num_gpus": 4, "pipeline_depth": True}, "pipeline_depth", "1 to 4"),
        ({"num_gpus": 4, "num_replicas": "2"}, "num_replicas", "1 to 4"),
        ({"num_gpus": 4, "num_replicas": 5}, "num_replicas", "1 to 4"),
        ({"num_gpus": 4, "micro_batch_size": 5}, "micro_batch_size", "1, 2, 4, 8, 16"),
        ({"num_gpus": 4, "memory_bytes": 1000}, "memory_bytes", "bytes) per device"),
        ({"num_gpus": 4, "micro_batch_size": True}, "micro_batch_size", "a whole number"),
        ({"num_gpus": 4, "num_runners_up": -1}, "num_runners_up", "from 0"),
        ({"num_gpus": 4, "memory_bytes": 0}, "memory_bytes", "from 1 to 1125899906842624"),
        ({"num_gpus": 4, "memory_bytes": True}, "memory_bytes", "(got True)"),
        ({"num_gpus": 4, "memory_bytes": "9"}, "memory_bytes", "a whole number"),
        ({"num_gpus": 4, "memory_bytes": 2e9}, "memory_bytes", "a whole number"),
        ({"num_gpus": 4, "memory_bytes": 2**60}, "memory_bytes", "to 1125899906842624"),
        ({"num_gpus": 4, "objective": "usd_per_example", "usd_per_gpu_hour": "1"}, "usd_per_gpu_hour", "(got '1')"),
        ({"num_gpus": 4, "compute_slots": 0}, "compute_slots", "from 1 to 100000"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_would_do(
    arguments: dict[str, object], field: str, says: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(_profile(), **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert says in str(caught.value)


def test_a_batch_that_m_does_not_divide_is_refused_with_alternatives() -> None:
    with pytest.raises(PlanError, match="allowed: 1, 2, 4") as caught:
        plan(_profile(batch_size=12), num_gpus=2, micro_batch_size=8)
    assert caught.value.value == 8
    with pytest.raises(PlanError, match="no measured micro-batch size divides"):
        plan(_profile(batch_size=9, micro_batch_sizes=(2, 4)), num_gpus=2)


def test_a_refusal_of_too_few_gpus_says_how_many_suffice() -> None:
    given = {"micro_batch_size": 1, "schedule": "varuna", "recompute": True}
    limit = int(least_bytes(SectionCosts(_profile(), 1), "varuna", num_micro_batches=48)[3])
    with pytest.raises(PlanError, match="at least 3 GPUs"):
        plan(_profile(), num_gpus=2, memory_bytes=limit, **given)  # type: ignore[arg-type]
    assert plan(_profile(), num_gpus=3, memory_bytes=limit, **given).best.pipeline_depth == 3  # type: ignore[arg-type]


@given(st.integers(0, 10_000), st.sampled_from([0.1, 0.3, 0.7, 2.0]), st.sampled_from([0.1, 0.3, 0.7, 2.0]))
@settings(max_examples=100 if IS_LONG else 12, deadline=None)
def test_each_remedy_that_a_refusal_names_suffices_exactly(seed: int, device: float, host: float) -> None:
    profile, memory_bytes = _limited(seed)
    fixed: dict[str, Any] = [{}, {"pipeline_depth": 1}, {"num_replicas": 2}][seed % 3]
    environment = {"host_memory_bytes": 2**40}
    roomy = profile.model_copy(update={"environment": profile.environment.model_copy(update=environment)})
    whole = simulate(roomy, num_stages=1, micro_batch_size=1).expected.host_memory_bytes
    asked: dict[str, Any] = {
        "num_gpus": 2,
        "memory_bytes": int(device * memory_bytes),
        "host_memory_bytes": int(host * whole),
    }

    def planned(given: dict[str, Any]) -> str:
        try:
            plan(roomy, num_runners_up=0, **given, **fixed)
        except PlanError as error:
            return str(error)
        return ""

    for way in filter(None, planned(asked).rpartition("allowed: ")[2].split(", or ")):
        found = {
            "num_gpus": re.search(r"at least (\d+) GPUs", way),
            "memory_bytes": re.search(r"\((\d+) bytes\) per device", way),
            "host_memory_bytes": re.search(r"\((\d+) bytes\) of host memory", way),
        }
        cure = {name: int(match[1]) for name, match in found.items() if match}
        assert cure
        assert not planned(asked | cure), way
        for name, value in cure.items():
            assert planned(asked | cure | {name: value - 1}), (way, name)
        in_gib = re.findall(r"at least (\S+) GiB \((\d+) bytes\)", way)
        assert all(int(size) <= int(float(gib) * 2**30) <= int(size) * 1.01 + 1 for gib, size in in_gib)


@pytest.mark.parametrize("nodes", [4, (4, 4, 1, 1, 1), (3, 3, 3)])
def test_the_best_plan_on_nodes_is_the_fastest_of_all_simulated(nodes: int | tuple[int, ...]) -> None:
    profile = _profile(latency_s=0.004, micro_batch_size=2)
    num_gpus = 11 if isinstance(nodes, int) else sum(nodes)
    choice = plan(profile, num_gpus=num_gpus, num_gpus_per_node=nodes)
    sizes = choice.best.node_sizes
    assert sum(sizes) == num_gpus
    rates = [
        simulate(
            profile, num_stages=depth, num_replicas=num_gpus // depth, num_gpus_per_node=sizes
        ).expected.examples_per_s
        for depth in range(1, 9)
    ]
    assert choice.best.expected.examples_per_s >= max(rates) * (1 - 1e-9)
    assert choice.num_idle == num_gpus - choice.best.num_workers


def test_nodes_alone_say_how_many_gpus_there_are() -> None:
    choice = plan(_profile(), num_gpus_per_node=(1, 4, 2))
    assert choice.num_gpus == 7
    for arguments in ({}, {"num_gpus_per_node": 4}, {"num_gpus": 6, "num_gpus_per_node": (1, 4, 2)}):
        with pytest.raises(PlanError) as caught:
            plan(_profile(), **arguments)  # type: ignore[arg-type]
        assert caught.value.field == "num_gpus"


def test_shapes_that_memory_forbids_are_reported() -> None:
    profile = _profile(parameter_bytes=1000, activation_bytes_per_sample=10_000_000, micro_batch_size=1)
    whole = simulate(profile, num_stages=1).expected.peak_memory_bytes
    roomy = plan(profile, num_gpus=6, memory_bytes=10 * whole)
    tight = plan(profile, num_gpus=6, memory_bytes=whole // 2, recompute=False)
    assert "Memory" not in roomy.best_simulation.explanation + plan(profile, num_gpus=6).best_simulation.explanation
    assert roomy.best.pipeline_depth == 1 < tight.best.pipeline_depth
    assert "Memory limits it" in tight.best_simulation.explanation
    assert "pipelines as shallow as 1 do not fit" in tight.best_simulation.explanation


def test_windows_that_memory_forbids_are_named() -> None:
    profile = _profile(
        num_sections=4, micro_batch_size=1, latency_s=0.02, boundary_bytes_per_sample=2_000_000, parameter_bytes=1000
    )
    free = simulate(profile, num_stages=4)
    narrow = simulate(profile, num_stages=4, window_slope=1)
    assert free.plan.stages[0].window > narrow.plan.stages[0].window
    limit = narrow.expected.peak_memory_bytes
    choice = plan(profile, num_gpus=4, memory_bytes=limit, pipeline_depth=4, schedule="varuna", recompute=True)
    assert choice.best.stages[0].window == narrow.plan.stages[0].window
    assert "windows as steep as the links want do not fit" in choice.best_simulation.explanation


def test_without_a_limit_the_devices_own_memory_is_the_limit() -> None:
    profile = _profile(micro_batch_size=1)
    needed = plan(profile, num_gpus=1).best.expected.peak_memory_bytes
    environment = profile.environment.model_copy(update={"device_memory_bytes": needed - 1})
    known = profile.model_copy(update={"environment": environment})
    known_choice, limited = plan(known, num_gpus=6), plan(profile, num_gpus=6, memory_bytes=needed - 1)
    assert [known_choice.best, *known_choice.runners_up] == [limited.best, *limited.runners_up]
    assert 1 not in plan_table(known, 6)
    assert 1 in plan_table(known, 6, memory_bytes=needed)
    with pytest.raises(PlanError, match="at least 2 GPUs"):
        plan(known, num_gpus=1)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"max_gpus": True}, "max_gpus"),
        ({"max_gpus": 10**9}, "max_gpus"),
        ({"max_gpus": 4, "min_gpus": "1"}, "min_gpus"),
        ({"max_gpus": 4, "pipeline_depth": 0}, "pipeline_depth"),
        ({"max_gpus": 4, "most_replicas": 1.5}, "most_replicas"),
        ({"max_gpus": 4, "memory_bytes": True}, "memory_bytes"),
    ],
)
def test_a_table_for_an_invalid_number_is_refused(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_table(_profile(), **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [("micro_batch_size", True), ("num_replicas", "1"), ("num_micro_batches", 16.0), ("num_micro_batches", 10**20)],
)
def test_a_plan_file_is_strict_about_its_numbers(name: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    content = json.loads(plan(_profile(), num_gpus=4).best.model_dump_json())
    path.write_text(json.dumps({**content, name: value}))
    with pytest.raises(PlanError, match=name):
        load_plan(path)
