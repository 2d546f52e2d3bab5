"""Reductions beside the last backward: to the nanosecond as a SimPy model of stages and their links."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
import simpy

from morph.contract.profile import Profile
from simulator import simulate, synthetic_profile
from simulator.costs.answer import Simulation
from simulator.costs.finish import Finish
from simulator.inputs.jitter import Luck
from tests.seeds import each_seed


def random_job(rng: np.random.Generator, *, jitter: float = 0.0) -> Profile:
    """Six sections, with units of the first and the last, and of the second and the third section."""
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
    """Of workers that may share nodes, and may be slower by whole factors."""
    depth, replicas = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    given: dict[str, Any] = [{}, {"num_gpus_per_node": 3}, {"slow": {(depth - 1, replicas - 1): 2.0}}][rng.integers(3)]
    cuts = sorted(rng.choice(np.arange(1, 6), depth - 1, replace=False).tolist())
    return simulate(random_job(rng, **more), boundaries=[0, *cuts], num_replicas=replicas, **given)


class SimPyModel:
    """Each worker's last backward goes through its sections; each stage's link takes one section's units at a time."""

    def __init__(self, found: Simulation, last_backward_ns: np.ndarray, section_ns: np.ndarray) -> None:
        self.env, self.reduced = simpy.Environment(), found.costs.reduced
        self.num_replicas = last_backward_ns.shape[1]
        num_sections = found.costs.sections.num_sections
        self.passed = [[self.env.event() for _ in range(self.num_replicas)] for _ in range(num_sections)]
        self.links = [simpy.Resource(self.env) for _ in self.reduced.begin]
        self.alone_ns: dict[int, int] = {}
        self.tied: list[tuple[tuple[int, ...], int, int]] = []
        owned = []
        for stage, (first, end) in enumerate(zip(*found.costs.spans, strict=True)):
            for replica in range(self.num_replicas):
                worker = range(end - 1, first - 1, -1), replica, int(last_backward_ns[stage, replica])
                self.env.process(self.backward(*worker, section_ns[:, replica]))
            owned.append(self.env.process(self.own(stage, range(end - 1, first - 1, -1), int(first))))
        self.env.process(self.together(owned))
        self.env.run()

    def backward(
        self, sections: Sequence[int], replica: int, end_ns: int, section_ns: np.ndarray
    ) -> Generator[Any, Any, None]:
        yield self.env.timeout(end_ns - int(section_ns[list(sections)].sum()))
        for section in sections:
            yield self.env.timeout(int(section_ns[section]))
            self.passed[section][replica].succeed()

    def ar_ns(self, ring: int, num_bytes: float) -> int:
        return int(self.reduced.all_reduce.times_ns(ring, np.array([num_bytes]))[0])

    def own(self, stage: int, sections: Sequence[int], first: int) -> Generator[Any, Any, None]:
        sums = self.reduced.sum_bytes
        for section in sections:
            yield simpy.AllOf(self.env, self.passed[section])
            behind, without = (self.ar_ns(self.num_replicas, sums[k] - sums[first]) for k in (section + 1, section))
            with self.links[stage].request() as turn:
                yield turn
                yield self.env.timeout(behind - without)
        self.alone_ns[stage] = int(self.env.now)

    def together(self, owned: Sequence[simpy.Process]) -> Generator[Any, Any, None]:
        done = list(owned)
        for stages, num_bytes in self.reduced.tied:
            done_here = self.env.process(self.ring(stages, num_bytes, [done[stage] for stage in stages]))
            for stage in stages:
                done[stage] = done_here
        yield simpy.AllOf(self.env, done)

    def ring(
        self, stages: tuple[int, ...], num_bytes: float, before: Sequence[simpy.Process]
    ) -> Generator[Any, Any, None]:
        yield simpy.AllOf(self.env, before)
        begun_ns = int(self.env.now)
        yield self.env.timeout(self.ar_ns(self.num_replicas * len(stages), num_bytes))
        self.tied.append((stages, begun_ns, int(self.env.now) - begun_ns))


def finished(found: Simulation, luck: Luck | None = None) -> tuple[Finish, np.ndarray]:
    counts = found.plan.micro_batches_per_replica
    played = found.rehearsal.played(found.costs, counts, luck)
    return found.rehearsal.finished(found.costs, counts, played, luck), played.last_backward_ns


@pytest.mark.slow
@each_seed(80)
def test_reductions_end_when_the_simpy_model_ends_them(seed: int) -> None:
    found = random_simulation(np.random.default_rng(seed))
    after, last_backward_ns = finished(found)
    section_ns = np.diff(found.costs.sections.backward_sum_ns)[:, None] * np.ones(last_backward_ns.shape[1], np.int64)
    for stage, replica, factor in found.rehearsal.conditions.slow:
        section_ns[found.costs.reduced.stage == stage, replica] *= int(factor)
    model = SimPyModel(found, last_backward_ns, section_ns)
    assert after.reduced_ns.tolist() == [model.alone_ns[stage] for stage in range(len(last_backward_ns))]
    assert sorted(after.tied) == sorted(model.tied)
    assert after.prepared_ns == model.env.now
    rows = found.timeline[found.timeline["task"] == "all_reduce"]
    ends_s = rows.groupby("stage")["end_s"].max()
    shared = {stage for stages, _, _ in model.tied for stage in stages}
    for stage in set(ends_s.index) - shared:
        assert after.reduced_ns[stage] == max(round(ends_s[stage] * 1e9), after.last_ready_ns[stage])


@each_seed(20)
def test_drawn_backwards_are_drawn_section_by_section(seed: int) -> None:
    """Of the last micro-batch of each replica; a draw is no whole number of nanoseconds."""
    found = random_simulation(np.random.default_rng(seed), jitter=0.3)
    counts, costs = found.plan.micro_batches_per_replica, found.costs
    luck = Luck(costs.sections.profile, 1, sum(counts), 7, 0)
    after, last_backward_ns = finished(found, luck)
    section_ns = np.diff(luck.task_sums_ns("backward"), axis=0)[:, np.cumsum(counts) - 1]
    for stage, replica, factor in found.rehearsal.conditions.slow:
        section_ns[costs.reduced.stage == stage, replica] *= factor
    model = SimPyModel(found, last_backward_ns, np.rint(section_ns))
    assert after.prepared_ns == pytest.approx(model.env.now, abs=2 * costs.sections.num_sections)


def test_what_is_exposed_is_the_most_of_any_suffix() -> None:
    """Backwards of 4 ms, 16 MB each at 1 GB/s both ways: every section behind the last adds 12 ms."""
    profile = synthetic_profile(
        num_sections=3, forward_s=0.002, overhead_s=0.0, batch_size=4, micro_batch_size=1, parameter_bytes=8_000_000
    )
    parts = simulate(profile, num_stages=1, num_replicas=2).expected.parts_s
    assert parts["all_reduce"] == pytest.approx(3 * 0.016 + 0.0004 - 2 * 0.004)
    late = simulate(profile, num_stages=1, num_replicas=2, all_reduce="late").expected.parts_s
    assert late["all_reduce"] == pytest.approx(3 * 0.016 + 0.0004)
    light = profile.model_copy(update={"accumulator_bytes_per_parameter": 1})
    assert simulate(light, num_stages=1, num_replicas=2).expected.parts_s["all_reduce"] == pytest.approx(0.002 + 0.0004)


def test_one_replica_reduces_nothing() -> None:
    assert simulate(synthetic_profile(micro_batch_size=2), num_stages=3).expected.parts_s["all_reduce"] == 0
