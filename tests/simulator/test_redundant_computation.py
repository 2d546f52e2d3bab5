"""Redundant computation in the answers: its cost in time and memory, and what it saves after a loss."""

from __future__ import annotations

from dataclasses import replace

import pytest

from morph.contract.errors import PlanError
from morph.contract.profile import Profile
from simulator import Simulation, plan, simulate, synthetic_profile
from simulator.costs.redundant import mean_pause_ns
from simulator.inputs.conditions import RedundantName

MODES: tuple[RedundantName, ...] = ("lflb", "eflb", "efeb")


def profile(**changes: object) -> Profile:
    given: dict[str, object] = {"num_sections": 8, "batch_size": 64, "micro_batch_size": 2, "parameter_bytes": 8000}
    return synthetic_profile(**(given | changes)).model_copy(update={"host_copy_bytes_per_s": 1e12})  # type: ignore[arg-type]


def by_mode(of: Profile, **more: object) -> dict[str, Simulation]:
    given: dict[str, object] = {"num_stages": 4, "num_replicas": 2, "schedule": "1f1b", "recompute": False}
    return {
        mode: simulate(of, redundant_computation=mode, **(given | more))  # type: ignore[arg-type]
        for mode in ("off", *MODES)
    }


def test_redundant_computation_takes_longer_and_pauses_less() -> None:
    found = by_mode(profile())
    steps_s = {mode: of.expected.mini_batch_s for mode, of in found.items()}
    assert steps_s["off"] == steps_s["lflb"] < steps_s["eflb"] < steps_s["efeb"]
    pauses_s = [found[mode].mean_pause_s for mode in MODES]
    assert pauses_s == sorted(pauses_s, reverse=True)
    # a backward takes two forwards: without the forwards two thirds are left, and what is lost between F and B
    assert pauses_s[1] / pauses_s[0] == pytest.approx(2 / 3, abs=0.05)
    assert pauses_s[2] < pauses_s[1] / 4
    assert ["redundant" in found[mode].expected.parts_s for mode in MODES] == [False, True, True]
    with pytest.raises(PlanError, match="nobody takes over"):
        _ = found["off"].mean_pause_s


def test_forwards_that_fit_into_the_waits_of_uneven_stages_cost_next_to_nothing() -> None:
    even, uneven = (
        by_mode(profile(forward_s=forward_s), boundaries=[0, 2, 4, 6], num_stages=None)
        for forward_s in (0.004, (0.001,) * 2 + (0.002,) * 2 + (0.004,) * 2 + (0.008,) * 2)
    )
    more = [of["eflb"].expected.mini_batch_s / of["off"].expected.mini_batch_s - 1 for of in (even, uneven)]
    assert more[0] > 0.2
    assert more[1] < 0.06


def test_a_forward_that_waits_for_host_memory_takes_as_long_as_the_copy() -> None:
    fast = by_mode(profile())
    slow = by_mode(profile().model_copy(update={"host_copy_bytes_per_s": 1e8}))  # 40 ms for 2 sections of 2 samples
    assert slow["eflb"].expected.parts_s["redundant"] == pytest.approx(16 * 0.04, rel=0.01)
    assert slow["eflb"].expected.mini_batch_s > 1.7 * fast["eflb"].expected.mini_batch_s
    assert slow["eflb"].mean_pause_s > fast["eflb"].mean_pause_s
    assert slow["efeb"].expected.mini_batch_s == fast["efeb"].expected.mini_batch_s


def test_the_next_stage_s_layers_and_the_activations_of_its_forwards_are_counted() -> None:
    found = by_mode(profile())
    parts = {mode: of.costs.redundant_parts for mode, of in found.items()}
    stage_bytes = 2 * 8000 * 3  # parameters and two moments of two sections
    assert not parts["off"]
    assert parts["lflb"]["redundant layers"].tolist() == [stage_bytes] * 4
    assert set(parts["lflb"]) == {"redundant layers"}
    each = 2 * 2 * 1_000_000  # samples times sections
    samples = 2 * 65_536  # the last stage reads these from the data for the first one
    assert parts["eflb"]["redundant activations"].tolist() == [2 * each] * 3 + [2 * (each + samples)]
    # as many micro-batches as the next stage has in flight, and one more
    assert parts["efeb"]["redundant activations"].tolist() == [4 * each, 3 * each, 2 * each, 5 * (each + samples)]
    for of in found.values():
        assert sum(of.expected.memory_parts_bytes.values()) == of.expected.peak_memory_bytes
    host = {mode: of.expected.host_memory_bytes - found["off"].expected.host_memory_bytes for mode, of in found.items()}
    assert host["eflb"] - host["lflb"] == 16 * each
    assert host["lflb"] == 16 * 2 * 2 * 65_536
    assert host["efeb"] == 0


def test_a_forward_of_a_stage_that_recomputes_leaves_nothing_and_shortens_no_pause() -> None:
    found = by_mode(profile(), schedule="gpipe", recompute=True)
    assert found["eflb"].expected.mini_batch_s > found["lflb"].expected.mini_batch_s
    assert found["eflb"].costs.redundant_parts["redundant activations"].tolist() == [0] * 4
    eager = found["eflb"]
    counts, conditions = eager.plan.micro_batches_per_replica, eager.shape_simulator.conditions
    played = eager.shape_simulator.played(eager.costs, counts, keep_times=True)
    whole_ns = eager.shape_simulator.finished(eager.costs, counts, played).mini_batch_ns
    lazy_ns = mean_pause_ns(eager.costs, counts, replace(conditions, redundant_computation="lflb"), played, whole_ns)
    assert eager.mean_pause_s == lazy_ns / 1e9
    assert "lflb does without" in found["eflb"].explanation
    assert "lflb does without" not in by_mode(profile())["eflb"].explanation


def test_the_timeline_has_every_redundant_task() -> None:
    frame = by_mode(profile())["efeb"].timeline
    counts = frame[(frame.replica == 0) & (frame.stage == 1)].task.value_counts()
    assert counts["redundant_forward"] == counts["redundant_backward"] == counts["forward"] == 16
    assert (frame.end_s > frame.start_s).all()


def test_redundant_tasks_have_drawn_times_and_a_single_stage_has_none() -> None:
    drawn = by_mode(profile(jitter=0.3), jitter_seed=1, num_draws=3)
    assert (
        drawn["efeb"].expected.mini_batch_s > drawn["eflb"].expected.mini_batch_s > drawn["off"].expected.mini_batch_s
    )
    assert drawn["efeb"].expected.parts_s["redundant"] > 2.5 * drawn["eflb"].expected.parts_s["redundant"]
    alone = by_mode(profile(), num_stages=1)
    assert len({of.expected.mini_batch_s for of in alone.values()}) == 1
    with pytest.raises(PlanError, match="nobody takes over"):
        _ = alone["eflb"].mean_pause_s


def test_redundant_computation_is_refused_where_it_cannot_be_simulated() -> None:
    with pytest.raises(PlanError, match="one shape at a time"):
        plan(profile(), num_gpus=4, redundant_computation="eflb")
    with pytest.raises(PlanError, match="redundant_computation"):
        simulate(profile(), num_stages=2, redundant_computation="efl")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="device each"):
        simulate(profile(), num_stages=2, redundant_computation="eflb", compute_slots=1)
