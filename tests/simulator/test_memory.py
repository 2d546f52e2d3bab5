"""A stage's memory, compared with written-out sums; and plans limited by both memories."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from morph.contract.errors import PlanError
from morph.contract.profile import Environment, Profile, UnitProfile
from simulator import plan, simulate, synthetic_profile
from simulator.costs.memory import StageMemory
from simulator.costs.stage_costs import SectionCosts, stage_costs
from simulator.inputs.request import MemoryRules, RedundancyName
from simulator.search.partition import least_bytes, partition_table

NOTHING_MORE = MemoryRules(keeps_sums=False, copies_sums=False, changes=False, saves=False)
M = 2
PEAKS = (3_000_000, 900_000, 7_000_000, 1_200_000, 2_500_000)


def profile_of(tied: bool = True, **environment: Any) -> Profile:
    """Return a profile of five unequal sections, of which the first and the last share a unit."""
    profile = synthetic_profile(
        num_sections=5, parameter_bytes=[4_000_000, 8_000, 12_000_000, 400_000, 2_000_000], batch_size=8, tied=tied
    )
    sections = tuple(
        section.model_copy(
            update={
                "peak_bytes": {M: peak},
                "reduced_bytes": section.parameter_bytes + 8,
                "finish_bytes": 100 * section.index,
                "step_bytes": 7_000_000 - section.index,
                "activation_bytes_per_sample": 300_000 + 1000 * section.index,
            }
        )
        for section, peak in zip(profile.sections, PEAKS, strict=True)
    )
    made: Environment = profile.environment.model_copy(update=environment)
    return profile.model_copy(update={"sections": sections, "environment": made})


def needed(profile: Profile, stage: range, window: int, *, recompute: bool, single: bool) -> int:
    """Return the bytes on one device, added section by section."""
    sections = [profile.sections[index] for index in stage]
    last = profile.num_sections - 1
    shared = 0 in stage and last in stage

    def held(part: str) -> int:
        total = sum(getattr(section, part) for section in sections)
        unit = profile.units[-1].parameter_bytes
        scale = {"parameter_bytes": 1, "reduced_bytes": 1, "optimizer_bytes": 2, "gradient_bytes": 2}[part]
        assert len(profile.units[-1].sections) == 2
        return total - (unit * scale if shared else 0)

    border = [M * section.output_bytes_per_sample for section in profile.sections]
    stored = border[stage.start - 1] if stage.start else 0
    kept = [
        M * section.activation_bytes_per_sample + (0 if section.index else M * section.input_bytes_per_sample)
        for section in sections
    ]
    batch = [0 if section.index else M * section.input_bytes_per_sample for section in sections]
    backward = max(
        sum(kept[:at]) + max(section.peak_bytes[M] + batch[at], kept[at]) + border[section.index]
        for at, section in enumerate(sections)
    )
    state = held("parameter_bytes") + held("optimizer_bytes")
    computing = state + held("gradient_bytes") + 3 * (stored + border[stage.stop - 1]) + window * stored + backward
    if not recompute:
        computing += (window - 1) * sum(kept)
    means = held("reduced_bytes") + max(section.finish_bytes for section in sections)
    if not single:
        first = max(sections[0].peak_bytes[M] + batch[0], kept[0]) + border[stage.start]
        means += 2 * max(section.gradient_bytes for section in sections) + first
    updating = state + held("reduced_bytes") + max(section.step_bytes for section in sections)
    return max(computing, state + held("gradient_bytes") + means, updating)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_each_stage_needs_its_fullest_moment(recompute: bool, single: bool) -> None:
    profile = profile_of()
    costs = SectionCosts(profile, M, recompute=recompute, rules=NOTHING_MORE)
    again = (recompute, False)
    for cut, windows in product(range(1, 5), [(2, 1), (4, 3)]):
        stages = stage_costs(costs, (0, cut), windows, "varuna", single=single)
        assert stages.memory_bytes.tolist() == [
            needed(profile, sections, window, recompute=recomputes, single=single)
            for sections, window, recomputes in zip((range(cut), range(cut, 5)), windows, again, strict=True)
        ]
        for number in range(2):
            assert sum(stages.memory_parts(number)[1].values()) == stages.memory_bytes[number]
    least = int(least_bytes(costs, "varuna", num_micro_batches=8, single=single)[2])
    fullest = [
        int(stage_costs(costs, (0, cut), (2, 1), "varuna", single=single).memory_bytes.max()) for cut in range(1, 5)
    ]
    assert least == min(fullest)
    assert partition_table(costs, "varuna", num_micro_batches=8, memory_bytes=least, single=single).fits(2)
    assert not partition_table(costs, "varuna", num_micro_batches=8, memory_bytes=least - 1, single=single).fits(2)


def test_a_unit_that_sections_of_one_stage_share_counts_once() -> None:
    profile = profile_of()
    (whole,) = simulate(profile, num_stages=1, changes=False, micro_batch_size=M).costs.memory_bytes
    apart = simulate(profile_of(tied=False), num_stages=1, changes=False, micro_batch_size=M).costs.memory_bytes[0]
    shared = profile.units[-1].parameter_bytes
    # parameters and mean gradients, optimizer state and sums at twice that, and two copies of a checkpoint
    assert whole - apart == pytest.approx(shared * (1 + 1 + 2 + 2) + 2 * shared * (1 + 2), abs=10)


def test_frozen_weights_of_a_stage_are_held_at_every_moment() -> None:
    frozen = [5_000, 0, 900_000_000, 70, 6_000]
    profile = profile_of()
    sections = zip(profile.sections, frozen, strict=True)
    more = tuple(section.model_copy(update={"constant_bytes": size}) for section, size in sections)
    held = profile.model_copy(update={"sections": more})
    begin, end, window = np.array([0, 2]), np.array([2, 5]), np.array([3, 1])
    for single, recompute in product((True, False), (True, False)):
        without, having = (
            StageMemory(one, M, MemoryRules(), single=single).device_bytes(begin, end, window, np.array(recompute))
            for one in (profile, held)
        )
        assert (having - without).tolist() == [sum(frozen[:2]), sum(frozen[2:])]


def test_old_and_new_units_coexist_in_a_change_of_shape() -> None:
    costs = SectionCosts(profile_of(), M, rules=replace(NOTHING_MORE, changes=True))
    stages = stage_costs(costs, (0, 2), (2, 1), "varuna")
    state = [
        sum(section.parameter_bytes + section.optimizer_bytes for section in costs.profile.sections[first:end])
        for first, end in ((0, 2), (2, 5))
    ]
    whole = sum(state) - 3 * costs.profile.units[-1].parameter_bytes
    moments = costs.memory(single=True).moments(*stages.spans, stages.times.window, stages.times.recompute)
    assert moments["changing"]["old and new units"].tolist() == [2 * state[0], whole]
    (one,) = stage_costs(costs, (0,), (1,), "varuna").memory.moments(
        np.array([0]), np.array([5]), np.array([1]), np.array([False])
    )["changing"]["old and new units"]
    assert one == whole


def test_a_stage_of_one_replica_is_followed_where_the_run_says_so() -> None:
    shape: dict[str, Any] = {"num_stages": 2, "micro_batch_size": M, "changes": False}
    profile = profile_of(tied=False)
    alone = simulate(profile, **shape, redundancy="off").costs
    followed = simulate(profile, **shape, redundancy="state").costs
    spans = zip((0, followed.boundaries[1]), (followed.boundaries[1], 5), strict=True)
    more = [sum(4 * s.parameter_bytes + 8 for s in profile.sections[first:end]) for first, end in spans]
    assert (followed.memory_bytes - alone.memory_bytes).tolist() == more
    twice = simulate(profile, **shape, num_replicas=2, redundancy="state").costs.memory_bytes
    assert twice.tolist() == simulate(profile, **shape, num_replicas=2).costs.memory_bytes.tolist()


def test_the_context_and_what_the_allocator_keeps_come_on_top() -> None:
    shape: dict[str, Any] = {"num_stages": 2, "micro_batch_size": M}
    bare = simulate(profile_of(host_memory_bytes=2**40), **shape)
    real = profile_of(host_memory_bytes=2**40, context_bytes=10_000_001, allocator_permille=60)
    found = simulate(real, **shape)
    expected = [size + -(-size * 60 // 1000) + 10_000_001 for size in bare.costs.memory_bytes.tolist()]
    assert found.costs.memory_bytes.tolist() == expected
    assert found.costs.memory_parts(0)[1]["allocator and context"] == expected[0] - bare.costs.memory_bytes[0]
    given: dict[str, Any] = {"num_gpus": 2, "pipeline_depth": 2, "micro_batch_size": M, "schedule": "varuna"}
    costs = SectionCosts(real, M)
    least = int(least_bytes(costs, "varuna", num_micro_batches=4)[2])
    assert plan(real, memory_bytes=least, **given).best.expected.peak_memory_bytes <= least
    with pytest.raises(PlanError, match="at least"):
        plan(real, memory_bytes=least - 1, **given, recompute=True)


def test_device_and_host_are_two_memories_where_the_device_has_its_own() -> None:
    shape: dict[str, Any] = {"num_stages": 2, "micro_batch_size": M}
    together, apart = simulate(profile_of(), **shape), simulate(profile_of(host_memory_bytes=2**40), **shape)
    assert not together.costs.host_bytes.any()
    assert (apart.costs.memory_bytes < together.costs.memory_bytes).all()
    assert (apart.costs.host_bytes > 0).all()
    fullest = int(apart.costs.host_bytes.max())
    assert apart.expected.host_memory_bytes == fullest
    roomy = profile_of(host_memory_bytes=fullest)
    assert plan(roomy, num_gpus=2, micro_batch_size=M, pipeline_depth=2, memory_bytes=10**12).best.num_workers == 2
    short = simulate(profile_of(host_memory_bytes=2_000_000), **shape)  # ``simulate`` allows shapes that do not fit
    assert short.expected.peak_memory_bytes == apart.expected.peak_memory_bytes
    with pytest.raises(PlanError, match=r"host_memory_bytes: .*checkpoint copies"):
        plan(profile_of(host_memory_bytes=2_000_000), num_gpus=2, micro_batch_size=M, memory_bytes=10**12)


def test_mailboxes_between_devices_are_counted_where_they_may_be_used() -> None:
    shape: dict[str, Any] = {"num_stages": 3, "micro_batch_size": M}
    own, one = profile_of(host_memory_bytes=2**40), 32 * 2**20

    def taken(links: str, *, changes: bool) -> list[int]:
        staged, found = (simulate(own, **shape, links=some, changes=changes).costs for some in ("staged", links))
        assert found.host_bytes.tolist() == staged.host_bytes.tolist()
        return [int(size) for size in found.memory_bytes - staged.memory_bytes]

    assert taken("ipc", changes=False) == taken("auto", changes=False) == [one, 2 * one, one]
    assert taken("ipc", changes=True) == 3 * [2 * one], "a worker keeps those of the place that it had before"
    together = simulate(profile_of(), **shape, links="ipc").costs
    assert together.memory_bytes.tolist() == simulate(profile_of(), **shape).costs.memory_bytes.tolist()


def test_buffers_of_nccl_are_counted_for_each_ring_of_a_worker() -> None:
    ring, shape = 256 * 2**20, {"num_stages": 3, "micro_batch_size": M}
    profile = profile_of(host_memory_bytes=2**40)
    environment = profile.environment.model_copy(update={"ring_bytes": ring})
    own = profile.model_copy(update={"environment": environment, "units": ()})
    unit = UnitProfile(id="tied", sections=(0, own.num_sections - 1), parameter_bytes=8)
    tied = own.model_copy(update={"units": (unit,)})

    def taken(profile: Profile, **more: Any) -> list[int]:
        gloo, found = (simulate(profile, **shape, rings=some, **more).costs for some in ("gloo", "nccl"))
        assert (
            simulate(profile, **shape, rings="auto", **more).costs.memory_bytes.tolist() == found.memory_bytes.tolist()
        )
        return [int(size) // ring for size in found.memory_bytes - gloo.memory_bytes]

    assert taken(own) == [0, 0, 0], "one replica reduces nothing"
    assert taken(own, num_replicas=2) == [1, 1, 1]
    assert taken(tied) == [1, 0, 1]
    assert taken(tied, num_replicas=2) == [2, 1, 2]
    assert "NCCL" in simulate(own, **shape, num_replicas=2, rings="nccl").costs.memory_parts(0)[1]


def test_received_sums_of_nccl_rings_count_as_at_most_two_pieces() -> None:
    profile = profile_of(host_memory_bytes=2**40)

    def received(num_replicas: int, gradient_bytes: int) -> int:
        sections = tuple(one.model_copy(update={"gradient_bytes": gradient_bytes}) for one in profile.sections)
        own = profile.model_copy(update={"sections": sections, "units": ()})
        memory = StageMemory(own, M, MemoryRules(rings_on_device=True), single=num_replicas == 1)
        ends = np.zeros(1, np.int64), np.array([own.num_sections])
        found = memory.moments(*ends, np.ones(1, np.int64), np.zeros(1, np.bool_))["reducing"]
        return int(found["received sums"][0])

    assert received(2, 1000) == 2 * 1000, "a unit that is smaller than a piece is one"
    assert received(2, 2**30) == 2 * 128 * 2**20
    assert received(1, 2**30) == 0


def test_an_optimizer_in_host_memory_takes_no_device_memory() -> None:
    shape: dict[str, Any] = {"num_stages": 2, "micro_batch_size": M}
    profile = profile_of(host_memory_bytes=2**40)
    moved = profile.model_copy(update={"optimizer_in_host_memory": True})
    on_device, in_host = simulate(profile, **shape).costs, simulate(moved, **shape).costs
    assert (in_host.memory_bytes < on_device.memory_bytes).all()
    assert (in_host.host_bytes > on_device.host_bytes).all()
    assert "optimizer state" not in in_host.memory_parts(0)[1]


def test_a_plan_that_does_not_fit_is_refused_with_its_largest_part() -> None:
    given: dict[str, Any] = {"num_gpus": 2, "micro_batch_size": M, "memory_bytes": 1_000_000}
    with pytest.raises(PlanError, match=r"memory_bytes: .*while .*, .* GiB are checkpoint copies"):
        plan(profile_of(), **given)
    apart = profile_of(host_memory_bytes=2**40)
    with pytest.raises(PlanError, match=r"memory_bytes: .*while gradients are reduced, .* GiB are optimizer state"):
        plan(apart, **given)
    with pytest.raises(
        PlanError, match=r"^host_memory_bytes: .*\(1024 GiB each, and 8.38\S+ GiB of host memory for each"
    ):
        plan(profile_of(host_memory_bytes=9), **given | {"memory_bytes": 2**40})


def test_a_plan_says_what_its_fullest_stage_holds() -> None:
    best = plan(profile_of(), num_gpus=2, micro_batch_size=M).best.expected
    assert sum(best.memory_parts_bytes.values()) == best.peak_memory_bytes
    assert best.memory_moment in ("computing", "reducing", "updating", "changing")


def test_a_reduced_step_that_is_given_up_has_its_sums_twice() -> None:
    rules = replace(NOTHING_MORE, keeps_sums=True)
    stages = stage_costs(SectionCosts(profile_of(tied=False), M, rules=rules), (0, 2), (2, 1), "varuna", single=False)
    moments = stages.memory.moments(*stages.spans, stages.times.window, stages.times.recompute)
    sections = stages.sections.profile.sections
    for number, (first, end) in enumerate(((0, 2), (2, 5))):
        held = sections[first:end]
        expected = sum(
            s.parameter_bytes + s.optimizer_bytes + 2 * s.gradient_bytes + (s.reduced_bytes or 0) for s in held
        )
        assert sum(int(part[number]) for part in moments["giving up"].values()) == expected
    assert "giving up" not in stages.sections.memory(single=True).moments(
        *stages.spans, stages.times.window, stages.times.recompute
    )


def test_no_plan_is_refused_for_the_room_of_kept_sums() -> None:
    profile = profile_of(tied=False)
    shape: dict[str, Any] = {"num_stages": 2, "num_replicas": 2, "micro_batch_size": M}
    names: tuple[RedundancyName, ...] = ("off", "auto", "salvage")
    off, auto, salvage = (simulate(profile, **shape, redundancy=name).expected for name in names)
    assert auto.peak_memory_bytes == off.peak_memory_bytes
    assert auto.memory_with_sums_bytes == salvage.peak_memory_bytes > auto.peak_memory_bytes
    given: dict[str, Any] = {"num_gpus": 4, "num_replicas": 2, "memory_bytes": auto.peak_memory_bytes}
    tight, free = (plan(profile, **given, micro_batch_size=M, redundancy=name).best for name in ("auto", "off"))
    assert tight.expected.mini_batch_s == free.expected.mini_batch_s
    assert tight.expected.memory_with_sums_bytes > auto.peak_memory_bytes
    with pytest.raises(PlanError, match="memory_bytes"):
        plan(profile, **given, micro_batch_size=M, redundancy="salvage")
