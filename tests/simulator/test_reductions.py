"""Reductions during the last backward equal those of the reference engine to the nanosecond."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from morph.contract.profile import Profile
from simulator import simulate, synthetic_profile
from simulator.costs.answer import Simulation
from simulator.costs.finish import Finish
from simulator.costs.outcome import EngineName, engine_of
from simulator.costs.worker_times import to_come_ns as to_come_ns_of
from simulator.inputs.jitter import JitterDraw
from tests.seeds import each_seed


def random_job(rng: np.random.Generator, *, jitter: float = 0.0) -> Profile:
    """Return a job of six sections, with shared units of the first and last, and of the second and third section."""
    profile = synthetic_profile(
        num_sections=6,
        forward_s=[float(value) / 1e6 for value in rng.integers(100, 9000, 6)],
        overhead_s=0.0,
        parameter_bytes=[int(value) * 4000 for value in rng.integers(0, 4000, 6)],
        bandwidth_bytes_per_s=float(rng.choice([1e8, 1e9, 1e10])),
        batch_size=int(rng.integers(4, 12)),
        micro_batch_size=1,
        tied=bool(rng.integers(2)),
        jitter=jitter,
    )
    if rng.integers(2):
        units = [
            unit.model_copy(update={"sections": (1, 2)}) if unit.sections == (2,) else unit for unit in profile.units
        ]
        profile = profile.model_copy(update={"units": tuple(units)})
    return profile


def random_simulation(rng: np.random.Generator, **more: Any) -> Simulation:
    """Return a simulation of workers that may share nodes, and may be slower by whole factors."""
    depth, replicas = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    given: dict[str, Any] = [{}, {"num_gpus_per_node": 3}, {"slow": {(depth - 1, replicas - 1): 2.0}}][rng.integers(3)]
    cuts = sorted(rng.choice(np.arange(1, 6), depth - 1, replace=False).tolist())
    return simulate(random_job(rng, **more), boundaries=[0, *cuts], num_replicas=replicas, **given)


def finished(found: Simulation, jitter: JitterDraw | None = None, engine: EngineName = "compiled") -> Finish:
    counts, shape_simulator = (
        found.plan.micro_batches_per_replica,
        replace(found.shape_simulator, engine=engine_of(engine)),
    )
    return shape_simulator.finished(
        found.costs, counts, found.shape_simulator.played(found.costs, counts, jitter), jitter
    )


def assert_same_end(one: Finish, other: Finish) -> None:
    for field in fields(Finish):
        first, second = (getattr(finish, field.name) for finish in (one, other))
        assert first == second if field.name == "tied" else np.array_equal(first, second), field.name


@pytest.mark.slow
@each_seed(40, in_long=80)
def test_reductions_end_when_the_reference_engine_ends_them(seed: int) -> None:
    found = random_simulation(np.random.default_rng(seed))
    after = finished(found)
    assert_same_end(after, finished(found, engine="reference"))
    rows = found.timeline[found.timeline["task"] == "all_reduce"]
    ends_s = rows.groupby("stage")["end_s"].max()
    shared = {stage for stages, _, _ in after.tied for stage in stages}
    for stage in set(ends_s.index) - shared:
        assert after.reduced_ns[stage] == max(round(ends_s[stage] * 1e9), after.last_ready_ns[stage])


@each_seed(20)
def test_drawn_backwards_are_drawn_section_by_section(seed: int) -> None:
    found = random_simulation(np.random.default_rng(seed), jitter=0.3)
    counts, costs = found.plan.micro_batches_per_replica, found.costs
    jitter = JitterDraw(costs.sections.profile, 1, sum(counts), 7, 0)
    assert_same_end(finished(found, jitter), finished(found, jitter, "reference"))
    section_ns = np.diff(jitter.task_sums_ns("backward"), axis=0)[:, np.cumsum(counts) - 1]
    for stage, replica, factor in found.shape_simulator.conditions.slow:
        section_ns[costs.reduced.stage == stage, replica] *= factor
    to_come_ns = to_come_ns_of(costs, counts, found.shape_simulator.conditions, jitter)
    for stage, (first, end) in enumerate(zip(*costs.spans, strict=True)):
        behind_ns = np.cumsum(section_ns[first:end], axis=0) - section_ns[first:end]
        assert to_come_ns[first:end] == pytest.approx(behind_ns, abs=1), stage


def test_the_exposed_reduction_is_the_longest_of_any_suffix() -> None:
    """Backwards take 4 ms; 16 MB each travel at 1 GB/s both ways: each section behind the last adds 12 ms."""
    profile = synthetic_profile(
        num_sections=3, forward_s=0.002, overhead_s=0.0, batch_size=4, micro_batch_size=1, parameter_bytes=8_000_000
    )
    parts = simulate(profile, num_stages=1, num_replicas=2).expected.parts_s
    assert parts["all_reduce"] == pytest.approx(3 * 0.016 + 0.0004 - 2 * 0.004)
    late = simulate(profile, num_stages=1, num_replicas=2, all_reduce="late").expected.parts_s
    assert late["all_reduce"] == pytest.approx(3 * 0.016 + 0.0004)
    light = profile.model_copy(update={"accumulator_bytes_per_parameter": 1})
    assert simulate(light, num_stages=1, num_replicas=2).expected.parts_s["all_reduce"] == pytest.approx(0.002 + 0.0004)
