"""What a step's counts cost on a device, part by part."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device_budget import (
    DEVICES,
    PAGEABLE_SHARE,
    SYNC_S,
    Rates,
    asked_s,
    boundary_s,
    budget,
    exposed_s,
    profile_s,
    ring_s,
)
from benchmarks.device_steps.counting import Counts, Site
from benchmarks.device_steps.steps import Shape

HERE = Path(__file__).resolve().parent
RATES = Rates(1e12, 1e9, 1e8, 1e6, 0.5)
COPY = Site("to host", pinned=False, file="f", function="g")
PINNED = Site("to host", pinned=True, file="f", function="g")
SYNC = Site("sync", pinned=False, file="f", function="g")


def counts(num: int) -> Counts:
    """Of so many micro-batches, with what a step does once."""
    return Counts(
        sites=Counter({COPY: num + 1, PINNED: num, SYNC: 2 * num}),
        site_bytes=Counter({COPY: 1_000_000 * num + 500_000, PINNED: 10**9, SYNC: 8}),
        touched_bytes=Counter({"compute": 10**12, "accumulate": 2_000_000 * num, "update": 3_000_000}),
        host_touched_bytes=Counter({"accumulate": 10_000_000 * num, "compute": 10**12}),
        wire_bytes=Counter({"act broadcast": 2_000 * num, "grad broadcast": 1_000 * num, "ring allreduce": 4_000_000}),
        matmul_flops=Counter({"compute": 5 * 10**9 * num}),
    )


class Job:
    shape = Shape(2, 4, 1)

    def count(self, stage: int, num: int) -> Counts:
        return counts(num)

    def stage_sections(self) -> list[range]:
        return [range(4), range(4, 8)]


@pytest.mark.parametrize(("work_s", "beside_s", "parts", "left_s"), [(4, 2, 4, 2.5), (1, 2, 4, 0.25), (4, 2, 1, 4)])
def test_what_goes_part_by_part_beside_something_is_exposed_as_its_longest_suffix(
    work_s: float, beside_s: float, parts: int, left_s: float
) -> None:
    suffixes = [(work_s * k - beside_s * (k - 1)) / parts for k in range(1, parts + 1)]
    assert exposed_s(work_s, beside_s, parts) == pytest.approx(max(suffixes)) == left_s


def test_a_reduction_begins_beside_the_last_backward_and_host_passes_go_beside_its_wire() -> None:
    job: Any = Job()
    for compute_s in (1e-3, 0.9, 60.0):
        parts = budget(job, 0, "first", 4, RATES, compute_s).parts_s
        assert parts["reduction"] == pytest.approx(exposed_s(6.0, compute_s * 2 / 3, 4))
        assert parts["host passes"] == pytest.approx(exposed_s(4 * 1e-3, 6.0, 4))


def test_pinned_copies_cost_the_host_nothing_and_pageable_ones_their_bytes() -> None:
    found = asked_s(counts(1), RATES)
    assert found["host copies"] == pytest.approx(1_500_000 / (1e8 * PAGEABLE_SHARE))
    assert found["syncs"] == pytest.approx(2 * SYNC_S)
    assert found["passes"] == pytest.approx(5e-3)
    assert found["host passes"] == pytest.approx(1e-3)


def test_a_ring_carries_all_but_its_share_twice_and_a_scattered_sum_once() -> None:
    assert ring_s(counts(1), RATES, 4) == pytest.approx(4 * 2 * 0.75)
    scattered = Counts(wire_bytes=Counter({"ring _reduce_scatter_base": 4_000_000, "act broadcast": 10**9}))
    assert ring_s(scattered, RATES, 4) == pytest.approx(4 * 0.75)
    assert ring_s(counts(1), RATES, 1) == 0.0


def test_a_wire_between_stages_costs_only_what_outlasts_the_rest_of_a_micro_batch() -> None:
    assert boundary_s(counts(1), RATES) == pytest.approx(2e-3)
    job: Any = Job()
    quick = budget(job, 0, "first", 10, RATES, compute_s=1e-6)
    slow = budget(job, 0, "first", 10, RATES, compute_s=1.0)
    assert slow.parts_s["boundary wire"] == 0.0
    each_s = sum(asked_s(counts(2), RATES).values()) - sum(asked_s(counts(1), RATES).values())
    assert quick.parts_s["boundary wire"] == pytest.approx(10 * max(0.0, 2e-3 - 1e-6 - each_s))
    assert slow.parts_s["host copies"] == pytest.approx((10 * 1_000_000 + 500_000) / 5e7)


def test_compute_comes_from_matrix_products_where_no_profile_tells() -> None:
    job: Any = Job()
    assert budget(job, 0, "first", 4, RATES, None).parts_s["compute"] == pytest.approx(4 * 5e9 / 5e11)
    assert budget(job, 0, "first", 4, RATES, 1e9).ratio == pytest.approx(1.0, abs=1e-6)


def test_a_profiles_times_are_dealt_to_stages_with_the_forward_twice_where_they_recompute() -> None:
    path = HERE.parents[1] / "configs/profiles/gpt2-2.5b.json"
    plain = profile_s(path, 54, Shape(9, 4, 4))
    again = profile_s(path, 54, Shape(9, 4, 4, recompute=True))
    assert len(plain) == 9
    assert all(0 < one < two < 2 * one for one, two in zip(plain, again, strict=True))


def test_a_newer_device_has_no_lower_rate() -> None:
    old, middle, new = (DEVICES[name] for name in ("v100", "a100", "h100"))
    for field in ("peak_flops_per_s", "memory_bytes_per_s", "pcie_bytes_per_s", "wire_bytes_per_s"):
        assert getattr(old, field) < getattr(middle, field) < getattr(new, field)
