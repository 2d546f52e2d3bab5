import re
from typing import Any

import numpy as np
import pytest

from morph.contract.errors import PlanError
from morph.contract.plan import Schedule
from simulator import PlanRequest, plan, simulate, simulate_plan, synthetic_profile
from simulator.search.planner import advice
from tests.seeds import each_seed

SHAPES = [(1, 1), (1, 3), (2, 2), (3, 2), (4, 1), (8, 3)]


@pytest.mark.parametrize(("num_stages", "num_replicas"), SHAPES)
@pytest.mark.parametrize("schedule", ["varuna", "gpipe", "1f1b"])
@pytest.mark.parametrize("slots", [None, 2])
def test_parts_and_ladder_add_up_to_the_mini_batch_above_its_bound(
    num_stages: int, num_replicas: int, schedule: Schedule, slots: int | None
) -> None:
    profile = synthetic_profile(tied=True, batch_size=40, micro_batch_size=2, latency_s=0.002)
    got = simulate(profile, num_stages=num_stages, num_replicas=num_replicas, schedule=schedule, compute_slots=slots)
    expected = got.expected
    assert sum(expected.parts_s.values()) == pytest.approx(expected.mini_batch_s)
    assert sum(got.breakdown_s.values()) == pytest.approx(expected.mini_batch_s)
    assert expected.lower_bound_s <= expected.mini_batch_s * (1 + 1e-12)
    assert expected.examples_per_s == pytest.approx(40 / expected.mini_batch_s)
    assert got.explanation.endswith(".")


def test_cached_results_of_one_shape_change_no_answer_for_another() -> None:
    asked: list[dict[str, Any]] = [
        {"num_stages": 3, "num_replicas": 3},
        {"num_stages": 2},
        {"num_stages": 3, "recompute": False},
        {"num_stages": 3, "num_replicas": 2, "schedule": "gpipe"},
        {"boundaries": (0, 1, 4)},
        {"num_stages": 3, "num_replicas": 3, "slow": {0: 1.4}},
    ]
    kept = synthetic_profile(tied=True, batch_size=40, micro_batch_size=2)
    for fields in asked * 2:
        fresh = synthetic_profile(tied=True, batch_size=40, micro_batch_size=2)
        got, expected = simulate(kept, **fields), simulate(fresh, **fields)
        assert (got.plan, got.explanation, got.breakdown_s) == (
            expected.plan,
            expected.explanation,
            expected.breakdown_s,
        )


_CONDITIONS: list[dict[str, Any]] = [
    {},
    {"num_gpus_per_node": 3},
    {"share_links": False},
    {"slow": {0: 1.4}},
    {"all_reduce": "late"},
    {"compute_slots": 3},
    {"overlap": "none", "num_gpus_per_node": 2},
]


@pytest.mark.slow
@each_seed(40, in_long=240)
def test_every_part_of_a_shape_equals_the_reference_engine(seed: int) -> None:
    rng = np.random.default_rng(seed)
    conditions: list[dict[str, Any]] = [
        *_CONDITIONS,
        {"jitter_seed": seed, "num_draws": 2},
        {"jitter_seed": seed, "num_draws": 2, "overlap": "none"},
        {"jitter_seed": seed, "num_draws": 2, "num_gpus_per_node": 2, "slow": {(0, 0): 1.5}},
        {"redundant_computation": "eflb"},
        {"redundant_computation": "efeb", "recompute": False},
    ]
    profile = synthetic_profile(
        num_sections=6,
        forward_s=[float(value) for value in rng.uniform(0.001, 0.01, 6)],
        parameter_bytes=[int(value) * 1_000_000 for value in rng.integers(1, 50, 6)],
        bandwidth_bytes_per_s=float(rng.choice([1e7, 1e9])),
        latency_s=float(rng.choice([0.0, 0.02])),
        batch_size=int(rng.integers(4, 14)),
        micro_batch_size=1,
        tied=bool(rng.integers(2)),
        jitter=0.3,
    )
    cuts = sorted(rng.choice(np.arange(1, 6), int(rng.integers(0, 4)), replace=False).tolist())
    given: dict[str, Any] = {
        "boundaries": [0, *cuts],
        "num_replicas": int(rng.integers(1, 4)),
        "schedule": ["varuna", "varuna", "gpipe", "1f1b"][rng.integers(4)],
        "window_slope": [None, None, 2][rng.integers(3)],
        **conditions[seed % len(conditions)],
    }
    compiled, reference = (simulate(profile, **given, engine=engine) for engine in ("compiled", "reference"))
    assert reference.plan == compiled.plan
    assert reference.breakdown_s == compiled.breakdown_s
    assert reference.explanation == compiled.explanation
    assert reference.jitter == compiled.jitter
    assert reference.timeline.equals(compiled.timeline)
    again = simulate_plan(profile, compiled.plan, engine="reference", compute_slots=1)
    assert again.plan == simulate_plan(profile, compiled.plan, compute_slots=1).plan


def test_an_unknown_engine_and_too_large_shapes_are_refused() -> None:
    with pytest.raises(PlanError, match=r"is unknown .*compiled, reference"):
        simulate(synthetic_profile(), num_stages=2, engine="fast")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"engine: would play 300000 tasks.*at most 262144"):
        simulate(synthetic_profile(batch_size=50_000, micro_batch_size=1), num_stages=2, engine="reference")


def test_a_lone_worker_takes_the_sum_of_its_parts() -> None:
    profile = synthetic_profile(num_sections=4, forward_s=0.002, overhead_s=0.0, batch_size=10, micro_batch_size=2)
    expected = simulate(profile, num_stages=1).expected
    assert expected.mini_batch_s == pytest.approx(10 * 4 * 0.002 * 3 + 4 * 0.001 + 0.002)
    assert expected.parts_s["bubble"] == pytest.approx(0, abs=1e-9)
    assert expected.parts_s["recompute"] == expected.parts_s["all_reduce"] == 0


def test_the_larger_replica_sets_the_time() -> None:
    profile = synthetic_profile(batch_size=10, micro_batch_size=2, parameter_bytes=0)
    uneven = simulate(profile, num_stages=2, num_replicas=2, window_slope=2)
    assert uneven.plan.micro_batches_per_replica == (3, 2)
    alone = simulate(
        synthetic_profile(batch_size=6, micro_batch_size=2, parameter_bytes=0), num_stages=2, window_slope=2
    )
    assert uneven.expected.mini_batch_s == pytest.approx(alone.expected.mini_batch_s)
    assert set(uneven.plan.orders) == {2, 3}


def test_a_tied_unit_is_reduced_over_every_stage_that_holds_it() -> None:
    sizes = {"batch_size": 8, "micro_batch_size": 2, "parameter_bytes": 8_000_000}
    loose = simulate(synthetic_profile(**sizes), num_stages=2)  # type: ignore[arg-type]
    tied = simulate(synthetic_profile(tied=True, **sizes), num_stages=2)  # type: ignore[arg-type]
    assert loose.expected.parts_s["all_reduce"] == 0
    # 8 MB of float32 parameters, 8 bytes each in the accumulator, over the ring of both stages.
    assert tied.expected.parts_s["all_reduce"] == pytest.approx(2 * (0.0002 + 16_000_000 / 2 / 1e9), rel=0.01)
    assert simulate(synthetic_profile(tied=True, **sizes), num_stages=1).expected.parts_s["all_reduce"] == 0  # type: ignore[arg-type]


def test_memory_counts_the_window_of_stored_inputs() -> None:
    profile = synthetic_profile(num_sections=4, batch_size=64, micro_batch_size=2, parameter_bytes=4000)
    narrow, wide = (simulate(profile, num_stages=4, window_slope=slope, changes=False) for slope in (1, 4))
    assert [stage.window for stage in narrow.plan.stages] == [4, 3, 2, 1]
    assert [stage.window for stage in wide.plan.stages] == [13, 9, 5, 1]
    more = wide.costs.memory_bytes - narrow.costs.memory_bytes
    stored = [(b - a) * 2 * 65_536 for a, b in [(3, 9), (2, 5), (1, 1)]]
    assert more.tolist() == [0, *stored]  # no stage comes before the first one, which reads its batch again


def test_the_timeline_holds_each_task_once_and_ends_with_the_mini_batch() -> None:
    got = simulate(synthetic_profile(batch_size=20, micro_batch_size=2, tied=True), num_stages=3, num_replicas=3)
    counts = got.timeline.groupby(["replica", "task"]).size()
    for replica, micro_batches in enumerate(got.plan.micro_batches_per_replica):
        assert counts[replica, "forward"] == counts[replica, "backward"] == 3 * micro_batches
        assert counts[replica, "recompute"] == 2 * micro_batches
    assert got.timeline["end_s"].max() == pytest.approx(got.expected.mini_batch_s)


def test_a_slow_network_makes_steeper_windows_pay() -> None:
    fast = simulate(synthetic_profile(batch_size=64, micro_batch_size=1, latency_s=0.02), num_stages=6)
    assert fast.plan.stages[0].window > 6


def test_shared_cores_make_it_slower_and_are_named_as_the_cause() -> None:
    profile = synthetic_profile(batch_size=40, micro_batch_size=2)
    own, shared = (simulate(profile, num_stages=3, num_replicas=2, compute_slots=slots) for slots in (None, 2))
    assert shared.expected.mini_batch_s > 1.5 * own.expected.mini_batch_s
    assert "cores" in shared.explanation
    assert shared.plan.orders == own.plan.orders


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"num_stages": 9}, "pipeline_depth"),
        ({"num_stages": 0}, "pipeline_depth"),
        ({"num_stages": 2, "num_replicas": 33}, "num_replicas"),
        ({"boundaries": [0, 0]}, "boundaries"),
        ({"boundaries": [1, 3]}, "boundaries"),
        ({"num_stages": 2, "compute_slots": 0}, "compute_slots"),
        ({"num_stages": 2, "micro_batch_size": 3}, "micro_batch_size"),
        ({}, "num_stages"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        simulate(synthetic_profile(micro_batch_size=2), **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("schedule", ["varuna", "gpipe", "1f1b"])
@pytest.mark.parametrize("nodes", [None, (2, 1, 3, 2)])
def test_a_plan_as_it_stands_takes_what_it_was_expected_to_take(
    recompute: bool, schedule: Schedule, nodes: tuple[int, ...] | None
) -> None:
    profile = synthetic_profile(num_sections=6, batch_size=40, micro_batch_size=2, latency_s=0.002)
    request = PlanRequest(
        schedule=schedule, recompute=recompute, pipeline_depth=3, num_replicas=2, num_gpus_per_node=nodes
    )
    found = plan(profile, request, num_gpus=8).best
    assert any(stage.recompute for stage in found.stages) == recompute
    assert simulate_plan(profile, found).plan == found
    shared = simulate_plan(profile, found, compute_slots=2)
    assert [stage.window for stage in shared.plan.stages] == [stage.window for stage in found.stages]
    assert (shared.expected.parts_s["recompute"] > 0) == recompute
    assert shared.expected.mini_batch_s > found.expected.mini_batch_s


def test_messages_between_workers_that_share_one_core_take_it() -> None:
    profile = synthetic_profile(num_sections=3, batch_size=8, micro_batch_size=1, latency_s=0.002)
    alone = simulate(profile, num_stages=1, recompute=False).expected.parts_s
    found = simulate(profile, num_stages=3, recompute=False, compute_slots=1)
    times = found.costs.times
    messages_s = 8 * int((times.activation_ns + times.gradient_ns)[:-1].sum()) / 1e9
    assert messages_s > 8 * 4 * 0.002
    assert found.expected.mini_batch_s >= alone["forward"] + alone["backward"] + messages_s


@pytest.mark.parametrize(("num_stages", "num_replicas", "slots"), [(2, 2, 2), (2, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_reductions_take_the_cores_that_workers_share(num_stages: int, num_replicas: int, slots: int) -> None:
    """``tied``: the first and the last stage reduce a shared unit over a ring of both, even with one replica."""
    little, much = (
        simulate(
            synthetic_profile(parameter_bytes=size, tied=True),
            num_stages=num_stages,
            num_replicas=num_replicas,
            compute_slots=slots,
        )
        for size in (4, 400_000_000)
    )
    reduced = much.costs.reduced
    cores_ns = sum(reduced.latest(reduced.remaining_ns(num_replicas))) * min(num_replicas, slots)
    for stages, duration_ns in reduced.tied_ns(num_replicas):
        cores_ns += duration_ns * min(num_replicas * len(stages), slots)
    assert cores_ns > 0
    longer_s = much.expected.mini_batch_s - much.expected.parts_s["optimizer"]
    longer_s -= little.expected.mini_batch_s - little.expected.parts_s["optimizer"]
    assert longer_s >= 0.99 * cores_ns / slots / 1e9


def test_with_a_core_for_each_worker_reductions_are_beside_the_backward() -> None:
    profile = synthetic_profile(parameter_bytes=400_000_000)
    own, enough, few = (simulate(profile, num_stages=1, num_replicas=4, compute_slots=slots) for slots in (None, 4, 3))
    assert enough.expected.mini_batch_s == own.expected.mini_batch_s < few.expected.mini_batch_s


# ---- advice and descriptions ----


def test_the_explanation_for_one_replica_names_shared_weights_not_replicas() -> None:
    profile = synthetic_profile(tied=True, batch_size=40, micro_batch_size=2, parameter_bytes=400_000_000)
    alone, two = (simulate(profile, num_stages=4, num_replicas=count) for count in (1, 2))
    assert max(alone.breakdown_s, key=lambda step: alone.breakdown_s[step]) == "all_reduce"
    assert "weights that several stages share" in alone.explanation
    assert "replica" not in alone.explanation
    assert "all-reduce over 2 replicas" in two.explanation


@pytest.mark.parametrize(("num_stages", "num_replicas"), [*SHAPES, (8, 1), (1, 8), (5, 2), (2, 4)])
@pytest.mark.parametrize("parameter_bytes", [1_000, 400_000_000])
@pytest.mark.parametrize("latency_s", [0.0, 0.02])
def test_advice_helps_by_its_amount_and_without_it_no_shape_helps(
    num_stages: int, num_replicas: int, parameter_bytes: int, latency_s: float
) -> None:
    profile = synthetic_profile(
        tied=True, batch_size=40, micro_batch_size=2, latency_s=latency_s, parameter_bytes=parameter_bytes
    )
    request = PlanRequest(num_replicas=num_replicas)
    here = simulate(profile, request, num_stages=num_stages)
    said = advice(profile, request, here)
    found = re.fullmatch(r"With (\d+) workers?, -P (\d+) -D (\d+) would take .*, (\d+)% less\.", said)
    if found:
        count, depth, replicas, percent = map(int, found.groups())
        followed = simulate(profile, num_stages=depth, num_replicas=replicas)
        assert depth * replicas <= count == num_stages * num_replicas
        assert round(100 * (1 - followed.expected.mini_batch_s / here.expected.mini_batch_s)) == percent >= 1
    else:
        assert said.startswith("The planner finds no faster shape for ")
        workers = num_stages * num_replicas
        shapes = [(p, d) for p in range(1, min(8, workers) + 1) for d in range(1, min(20, workers // p) + 1)]
        others_s = [simulate(profile, num_stages=p, num_replicas=d).expected.mini_batch_s for p, d in shapes]
        assert min(others_s) > 0.98 * here.expected.mini_batch_s


def test_findings_about_one_shape_are_not_compared_with_others() -> None:
    profile = synthetic_profile(batch_size=40, micro_batch_size=2)
    for more in ({"slow": {0: 2.0}}, {"redundant_computation": "eflb"}):
        request = PlanRequest(**more)
        assert advice(profile, request, simulate(profile, request, num_stages=3)) == ""
