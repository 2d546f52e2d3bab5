"""Conditions that slow workers down: shared cores and nodes, slow workers, varying times, a late all-reduce."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from morph.contract.errors import PlanError
from morph.contract.profile import Contention, NodeTypeProfile, Profile, SendTime, Timing, load_profile
from simulator import Simulation, plan, simulate, synthetic_profile
from simulator.inputs.jitter import JitterDraw, drawn_ns, message_quantiles_ns
from simulator.inputs.layout import slowdown
from simulator.inputs.node_types import of_node_type

MEASURED = (Contention(num_busy=2, factor=1.2), Contention(num_busy=4, factor=1.6))


def crowded(**changes: object) -> Profile:
    settings: dict[str, object] = {"batch_size": 32, "micro_batch_size": 2, "parameter_bytes": 1000}
    return synthetic_profile(**(settings | changes)).model_copy(update={"contention": MEASURED})  # type: ignore[arg-type]


def worker_s(simulation: Simulation) -> float:
    """Return the seconds of all workers' tasks in a mini-batch."""
    parts = simulation.expected.parts_s
    return (parts["forward"] + parts["recompute"] + parts["backward"]) * simulation.plan.num_workers


@pytest.mark.parametrize(("num_busy", "factor"), [(1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (9, 1.6)])
def test_the_slowdown_is_linear_between_measured_numbers_and_constant_beyond(num_busy: int, factor: float) -> None:
    assert slowdown(MEASURED, num_busy) == pytest.approx(factor)
    assert slowdown((), num_busy) == 1.0


@pytest.mark.parametrize(("shape", "slots", "factor"), [((2, 1), 4, 1.2), ((2, 2), 2, 1.2), ((3, 2), 4, 1.6)])
def test_workers_on_shared_cores_are_slower_by_as_many_as_can_compute(
    shape: tuple[int, int], slots: int, factor: float
) -> None:
    alone = simulate(crowded(), num_stages=shape[0], num_replicas=shape[1])
    shared = simulate(crowded(), num_stages=shape[0], num_replicas=shape[1], compute_slots=slots)
    assert worker_s(shared) == pytest.approx(factor * worker_s(alone))
    assert shared.expected.parts_s["optimizer"] == pytest.approx(factor * alone.expected.parts_s["optimizer"])
    assert shared.expected.parts_s["commit"] == alone.expected.parts_s["commit"]
    assert shared.expected.lower_bound_s <= shared.expected.mini_batch_s
    assert sum(shared.breakdown_s.values()) == pytest.approx(shared.expected.mini_batch_s)


def test_workers_on_one_node_are_slower_and_others_are_not() -> None:
    alone, node = (simulate(crowded(), num_stages=4, num_gpus_per_node=size) for size in (1, 4))
    assert worker_s(node) == pytest.approx(1.6 * worker_s(alone))
    mixed = simulate(crowded(), num_stages=3, num_replicas=2, num_gpus_per_node=(3, 1, 1, 1))
    frame = mixed.timeline.assign(length=lambda rows: rows["end_s"] - rows["start_s"])
    lengths = frame[(frame["task"] == "forward") & (frame["stage"] == 1)].groupby("replica")["length"].median()
    assert lengths[0] == pytest.approx(1.4 * lengths[1])


def test_stages_on_one_node_talk_over_its_inner_links() -> None:
    profile = synthetic_profile(batch_size=32, micro_batch_size=2, latency_s=0.01)
    apart, together = (simulate(profile, num_stages=4, num_gpus_per_node=size) for size in (1, 4))
    assert together.expected.mini_batch_s < apart.expected.mini_batch_s
    assert together.plan.placement == ((0, 0, 0, 0),)
    assert apart.plan.placement == ((0, 1, 2, 3),)
    split = simulate(profile, num_stages=4, num_gpus_per_node=(3, 1))
    assert together.expected.mini_batch_s < split.expected.mini_batch_s < apart.expected.mini_batch_s


def test_nodes_of_one_gpu_are_the_same_as_no_nodes() -> None:
    profile = synthetic_profile(batch_size=30, micro_batch_size=2, tied=True)
    plain, nodes = (simulate(profile, num_stages=3, num_replicas=2, num_gpus_per_node=size) for size in (None, 1))
    assert nodes.expected == plain.expected
    assert nodes.plan.orders == plain.plan.orders


def test_rings_that_share_a_node_use_the_measurement_with_as_many_in_flight() -> None:
    profile = synthetic_profile(batch_size=16, micro_batch_size=2)
    entries = [
        entry.model_copy(update={"in_flight": k, "time": Timing(median_s=k * 0.05, mad_s=0, num_samples=1)})
        for entry in profile.all_reduce
        for k in (1, 4)
    ]
    profile = profile.model_copy(update={"all_reduce": tuple(entries)})
    apart, together = (
        simulate(profile, num_stages=4, num_replicas=2, num_gpus_per_node=size).expected.parts_s["all_reduce"]
        for size in (1, 4)
    )
    assert (apart, together) == (pytest.approx(0.05), pytest.approx(0.2))


def test_messages_that_share_a_link_take_longer_than_with_links_of_their_own() -> None:
    heavy = synthetic_profile(
        batch_size=32, micro_batch_size=2, boundary_bytes_per_sample=2_000_000, bandwidth_bytes_per_s=4e8
    )
    own, shared = (simulate(heavy, num_stages=5, share_links=share) for share in (False, True))
    assert shared.expected.mini_batch_s > 1.03 * own.expected.mini_batch_s
    assert shared.breakdown_s["shared_links"] > 0
    assert sum(shared.breakdown_s.values()) == pytest.approx(shared.expected.mini_batch_s)


def test_a_wire_that_is_slower_than_the_stages_is_named_as_the_limit() -> None:
    narrow = synthetic_profile(
        batch_size=64, micro_batch_size=2, boundary_bytes_per_sample=8_000_000, bandwidth_bytes_per_s=2e8
    )
    got = simulate(narrow, num_stages=4, share_links=False, window_slope=4)
    assert "bandwidth" in got.explanation
    assert got.expected.lower_bound_s <= got.expected.mini_batch_s
    # 32 micro-batches of 16 MB over 200 MB/s
    assert got.expected.mini_batch_s > 32 * 0.08


# ---- slow workers ----


def test_one_slow_worker_holds_everybody_up() -> None:
    profile = synthetic_profile(batch_size=64, micro_batch_size=1, parameter_bytes=1000)
    usual = simulate(profile, num_stages=4, num_replicas=2)
    slow = simulate(profile, num_stages=4, num_replicas=2, slow={(2, 1): 1.5})
    every = simulate(profile, num_stages=4, num_replicas=2, slow={2: 1.5})
    assert 1.2 * usual.expected.mini_batch_s < slow.expected.mini_batch_s < 1.6 * usual.expected.mini_batch_s
    assert slow.expected.mini_batch_s == pytest.approx(every.expected.mini_batch_s, rel=0.01)
    assert "slow worker" in slow.explanation
    frame = slow.timeline.assign(length=lambda rows: rows["end_s"] - rows["start_s"])
    lengths = frame[(frame["task"] == "backward") & (frame["stage"] == 2)].groupby("replica")["length"].median()
    assert lengths[1] == pytest.approx(1.5 * lengths[0])


@pytest.mark.parametrize("where", [4, -1, (0, 2), (0, -1)])
def test_a_slow_worker_that_the_shape_lacks_is_refused(where: int | tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="no such worker"):
        simulate(synthetic_profile(micro_batch_size=2), num_stages=4, num_replicas=2, slow={where: 2.0})


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_factor_is_refused(factor: float) -> None:
    with pytest.raises(PlanError, match="is not a factor"):
        simulate(synthetic_profile(micro_batch_size=2), num_stages=2, slow={0: factor})


# ---- overlap ----


def test_without_overlap_both_ends_of_a_message_are_busy_for_all_of_it() -> None:
    def seconds(depth: int, num_micro_batches: int, overlap: str = "none") -> float:
        profile = synthetic_profile(num_sections=3, batch_size=num_micro_batches, micro_batch_size=1, latency_s=0.02)
        answer = simulate(profile, num_stages=depth, schedule="1f1b", recompute=False, overlap=overlap)
        assert answer.expected.lower_bound_s <= answer.expected.mini_batch_s
        assert (answer.breakdown_s["messages"] > 0) == (depth > 1) if overlap == "none" else True
        return answer.expected.mini_batch_s

    message_s, task_s = 0.02 + 65_536 / 1e9, 0.002 + 0.0005
    assert seconds(3, 41) - seconds(3, 40) == pytest.approx(3 * task_s + 4 * message_s)  # the middle worker has four
    assert seconds(2, 1) - seconds(2, 1, "full") == pytest.approx(2 * message_s)
    assert seconds(1, 8) == seconds(1, 8, "full")


# ---- all-reduce ----


def test_a_late_all_reduce_waits_for_the_last_backward_of_all() -> None:
    profile = synthetic_profile(batch_size=16, micro_batch_size=2, parameter_bytes=20_000_000)
    early, late = (
        simulate(profile, num_stages=4, num_replicas=2, all_reduce=start) for start in ("overlapped", "late")
    )
    section_s = early.costs.sections.backward_sum_ns[1] / 1e9  # of two workers in each stage
    for got in (early, late):
        frame = got.timeline
        last = frame[frame["task"] == "backward"].groupby(["stage", "replica"])["end_s"].max().groupby("stage").max()
        begins = frame[frame["task"] == "all_reduce"].groupby("stage")["start_s"].min()
        assert begins.tolist() == pytest.approx([last.max()] * 4 if got is late else (last - section_s).tolist())
    assert late.expected.mini_batch_s >= early.expected.mini_batch_s + section_s


# ---- jitter ----


def test_draws_follow_the_piecewise_linear_quantile_function() -> None:
    timing = Timing(median_s=0.002, mad_s=0.001, num_samples=9, quantiles_s=(0.001, 0.002, 0.007))
    drawn = drawn_ns(timing, np.array([0.0, 0.25, 0.5, 0.75, 0.999999]))
    assert drawn == pytest.approx([1e6, 1.5e6, 2e6, 4.5e6, 7e6], rel=1e-4)
    assert drawn_ns(Timing(median_s=0.002, mad_s=0, num_samples=1), np.array([0.1])) == pytest.approx([2e6])
    many = drawn_ns(timing, np.random.default_rng(0).random(200_000))
    assert many.mean() == pytest.approx((1.5e6 + 4.5e6) / 2, rel=0.01)


def test_quantiles_of_a_message_lie_between_those_of_the_sizes_around_it() -> None:
    times = [
        SendTime(size_bytes=100, time=Timing(median_s=1e-3, mad_s=0, num_samples=1, quantiles_s=(1e-3, 1e-3, 2e-3))),
        SendTime(size_bytes=300, time=Timing(median_s=3e-3, mad_s=0, num_samples=1, quantiles_s=(3e-3, 3e-3, 6e-3))),
    ]
    assert message_quantiles_ns(times, 200) == pytest.approx([2e6, 2e6, 4e6])
    assert message_quantiles_ns(times, 500) == pytest.approx([5e6, 5e6, 10e6])


def test_the_same_seed_draws_the_same_mini_batches_and_another_seed_others() -> None:
    profile = synthetic_profile(batch_size=32, micro_batch_size=2, jitter=0.5)

    def draws(seed: int) -> tuple[float, ...]:
        spread = simulate(profile, num_stages=3, num_replicas=2, jitter_seed=seed, num_draws=6).jitter
        assert spread.p5_s <= spread.mean_s <= spread.p95_s
        return spread.draws_s

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len(set(draws(1))) == 6


@pytest.mark.slow
def test_jitter_costs_time_and_is_a_step_of_the_ladder() -> None:
    profiles = [synthetic_profile(batch_size=64, micro_batch_size=2, jitter=jitter) for jitter in (0.01, 0.9)]
    usual = simulate(profiles[0], num_stages=4).expected.mini_batch_s
    calm, wild = (simulate(profile, num_stages=4, jitter_seed=0) for profile in profiles)
    assert calm.expected.mini_batch_s == pytest.approx(usual, rel=0.01)
    assert wild.expected.mini_batch_s > 1.02 * usual
    assert wild.breakdown_s["jitter"] > 0
    assert sum(wild.breakdown_s.values()) == pytest.approx(wild.expected.mini_batch_s)


def test_a_lone_worker_with_jitter_takes_the_sum_of_its_draws() -> None:
    profile = synthetic_profile(num_sections=3, batch_size=8, micro_batch_size=1, jitter=0.5)
    got = simulate(profile, num_stages=1, jitter_seed=4, num_draws=2)
    jitter = JitterDraw(profile, 1, 8, 4, 1)
    work_s = sum(float(jitter.task_sums_ns(kind)[-1].sum()) for kind in ("forward", "backward")) / 1e9
    assert got.jitter.draws_s[1] == pytest.approx(work_s + 3 * 0.001 + 0.002, abs=1e-6)


def test_shapes_are_compared_under_the_same_luck() -> None:
    profile = synthetic_profile(num_sections=4, batch_size=8, micro_batch_size=1, jitter=0.5)
    one, other = (JitterDraw(profile, 1, 8, 7, 0) for _ in range(2))
    assert (one.task_sums_ns("forward") == other.task_sums_ns("forward")).all()
    assert (one.task_sums_ns("forward") != one.task_sums_ns("recompute")).any()


def test_jitter_without_quantiles_is_refused() -> None:
    with pytest.raises(PlanError, match="no quantiles"):
        simulate(synthetic_profile(micro_batch_size=2), num_stages=2, jitter_seed=1)


@pytest.mark.slow
def test_a_plan_under_jitter_has_the_least_mean_of_the_candidates() -> None:
    profile = synthetic_profile(batch_size=48, micro_batch_size=2, jitter=0.9, latency_s=0.002)
    choice = plan(profile, num_gpus=6, jitter_seed=2, num_draws=3, schedule="varuna", recompute=True)
    means = [
        simulate(profile, num_stages=depth, num_replicas=6 // depth, jitter_seed=2, num_draws=3).expected.mini_batch_s
        for depth in range(1, 7)
    ]
    assert choice.best.expected.mini_batch_s <= min(means)
    assert choice.best_simulation.jitter is not None


# ---- node types, contradictions ----


def test_another_node_type_brings_its_own_times() -> None:
    profile = crowded()
    slower = {
        m: Timing(median_s=2 * t.median_s, mad_s=0, num_samples=1) for m, t in profile.sections[0].forward.items()
    }
    other = NodeTypeProfile(
        name="old",
        environment=profile.environment,
        forward=(slower,) * 8,
        backward=tuple(section.backward for section in profile.sections),
        optimizer_step=tuple(section.optimizer_step for section in profile.sections),
    )
    both = profile.model_copy(update={"node_types": (other,)})
    usual, old = (simulate(of_node_type(both, name), num_stages=1).expected.parts_s for name in (None, "old"))
    assert old["forward"] == pytest.approx(2 * usual["forward"])
    assert old["backward"] == pytest.approx(usual["backward"])
    assert of_node_type(both, "old").contention == ()
    with pytest.raises(PlanError, match=r"was not measured \(got 'new'\); allowed: old"):
        of_node_type(both, "new")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"compute_slots": 2, "num_gpus_per_node": 2}, "compute_slots"),
        ({"num_gpus_per_node": 0}, "num_gpus_per_node"),
        ({"num_gpus_per_node": (1, 1)}, "num_gpus"),
        ({"jitter_seed": -1}, "jitter_seed"),
        ({"jitter_seed": 1, "num_draws": 0}, "num_draws"),
        ({"overlap": "half"}, "overlap"),
        ({"overlap": "none", "compute_slots": 2}, "overlap"),
        ({"overlap": "none", "redundant_computation": "eflb"}, "overlap"),
    ],
)
def test_conditions_that_cannot_be_are_refused(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        simulate(synthetic_profile(micro_batch_size=2), num_stages=3, **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_windows_are_judged_with_the_links_that_the_gpus_of_a_node_share() -> None:
    profile = load_profile(Path(__file__).parents[2] / "configs/profiles/gpt2-2.5b.json")

    def rate(slope: int | None) -> float:
        return simulate(
            profile, num_stages=9, num_replicas=4, micro_batch_size=4, window_slope=slope, num_gpus_per_node=4
        ).expected.examples_per_s

    assert rate(None) >= 0.99 * max(rate(slope) for slope in (1, 2, 4)) > 1.05 * rate(1)
