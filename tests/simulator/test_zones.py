"""Zones in plans: slower links between them, and the price of data that goes from one to another."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from morph.contract.errors import PlanError
from morph.contract.pool import Pool, type_and_zone
from morph.contract.profile import LinkProfile, Profile
from simulator import PlanChoice, plan, simulate_plan, synthetic_profile
from simulator.costs.zone_traffic import bytes_between_zones
from simulator.inputs.request import PlanRequest
from simulator.inputs.stock import Stock
from tests.seeds import each_seed
from tests.simulator.test_unequal import WORTH, mix, over_zones, random_pool

LATENCY_S, BYTES_PER_S = 0.01, 1e6
NUM_BYTES = 1_000_000
"""Of the model's parameters, float32."""


def job(**given: Any) -> Profile:
    """Return a job of two sections of 10 ms and 20 ms, with links between zones that are slower than those within."""
    given = {"num_sections": 2, "forward_s": 0.01, "overhead_s": 0, "latency_s": 0, "optimizer_step_s": 0.0} | given
    profile = synthetic_profile(
        **given, parameter_bytes=NUM_BYTES // 2, bandwidth_bytes_per_s=1e12, boundary_bytes_per_sample=100_000
    )
    return profile.model_copy(update={"between_zones": LinkProfile.of(LATENCY_S, BYTES_PER_S)})


def test_a_name_of_a_pool_has_a_type_and_a_zone() -> None:
    assert type_and_zone("v100@us-east-1a") == ("v100", "us-east-1a")
    assert (type_and_zone("v100"), type_and_zone("@b")) == (("v100", ""), ("", "b"))
    pool = Pool.parse("v100@b=2,t4@a=3,@b=1")
    assert pool.zones == ("a", "b")
    assert str(Stock.of(PlanRequest(), None, pool).within({"b"}).pool) == "@b=1,v100@b=2"


def test_a_message_between_zones_takes_as_long_as_their_link() -> None:
    """One micro-batch: forward, message, forward, backward, message, backward."""
    profile = job(batch_size=1, micro_batch_size=1)
    within, across = (mix(profile, [([0, 1], (1,), types)]) for types in (["@a", "@a"], ["@a", "@b"]))
    more_s = across.expected.mini_batch_s - within.expected.mini_batch_s
    assert more_s == pytest.approx(2 * (LATENCY_S + 0.1), rel=1e-5)
    assert simulate_plan(profile, across.plan).plan == across.plan


def test_a_reduction_over_zones_sends_all_its_messages_between_them() -> None:
    profile = job(batch_size=2, micro_batch_size=1)
    within, across = (mix(profile, [([0], (1,), [first]), ([0], (1,), ["@b"])]) for first in ("@b", "@a"))
    sums = NUM_BYTES // 4 * profile.accumulator_bytes_per_parameter
    last = sums / 2  # of the first section: the second one's are sent during its backward
    hidden_s = min(0.02, 2 * (LATENCY_S + last / 2 / BYTES_PER_S))
    more_s = across.expected.mini_batch_s - within.expected.mini_batch_s
    assert more_s == pytest.approx(2 * (LATENCY_S + sums / 2 / BYTES_PER_S) - hidden_s, rel=0.01)


def test_bytes_between_zones_are_those_of_messages_and_of_shares_of_reductions() -> None:
    profile = job(batch_size=6, micro_batch_size=1)
    sums_and_means = NUM_BYTES // 4 * (profile.accumulator_bytes_per_parameter + 4)
    crossing = mix(profile, [([0, 1], (6,), ["@a", "@b"])])
    assert bytes_between_zones(crossing.kinds) == 6 * 2 * 100_000
    apart = mix(profile, [([0], (3,), ["@a"]), ([0], (3,), ["@b"])])
    assert bytes_between_zones(apart.kinds) == pytest.approx(sums_and_means)  # half of it each way
    three = mix(profile, [([0], (2,), ["@a"]), ([0], (2, 2), ["@b"])])
    assert bytes_between_zones(three.kinds) == pytest.approx(sums_and_means * (9 - 1 - 4) / 3)
    both = mix(profile, [([0, 1], (3,), ["@a", "@b"]), ([0], (3,), ["@a"])])
    assert bytes_between_zones(both.kinds) == pytest.approx(3 * 2 * 100_000 + sums_and_means / 2)
    alone = mix(profile, [([0], (3,), ["@b"]), ([0, 1], (3,), ["@b", "@b"])])
    assert bytes_between_zones(alone.kinds) == 0


def cost(choice: PlanChoice) -> float:
    """Return the dollars of an example, of GPUs and data."""
    assert choice.usd_per_h is not None
    return (choice.usd_per_h + choice.zone_usd_per_h) / 3600 / choice.best.expected.examples_per_s


@pytest.mark.slow
@each_seed(4, in_long=100)
def test_no_zone_makes_a_plan_slower_and_none_makes_it_dearer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile, _ = random_pool(rng)
    roomy = profile.environment.model_copy(update={"device_memory_bytes": None})
    profile = over_zones(rng, profile.model_copy(update={"environment": roomy}))
    counts = {"@a": int(rng.integers(1, 4)), "@b": int(rng.integers(1, 3)), "t4@b": int(rng.integers(1, 3))}
    price = {"": 1.0, "t4": 0.3, "zone_usd_per_gb": float(rng.choice([0.0, 0.1, 10.0]))}
    usd: dict[str, Any] = {"zone_usd_per_gb": price.pop("zone_usd_per_gb"), "usd_per_gpu_hour": price}
    fastest = plan(profile, pool=counts)
    cheapest = plan(profile, pool=counts, objective="usd_per_example", **usd)
    assert cheapest.values[0] == pytest.approx(cost(cheapest))
    for numbers in product(*(range(number + 1) for number in counts.values())):
        if any(numbers):
            fewer = dict(zip(counts, numbers, strict=True))
            found = plan(profile, pool=fewer, **usd)
            assert fastest.best.expected.mini_batch_s * WORTH <= found.best.expected.mini_batch_s, fewer
            assert cheapest.values[0] * WORTH <= cost(found), fewer


def test_dear_data_and_slow_links_keep_a_job_in_one_zone() -> None:
    profile = job(num_sections=4, batch_size=32, micro_batch_size=1)
    pool = {"@a": 2, "@b": 2}
    near = plan(profile, pool=pool, zone_gbit_per_s=10, zone_latency_ms=0.1).best
    assert near.pool == Pool.of(pool)
    assert plan(profile, pool=pool, zone_gbit_per_s=0.0001, zone_latency_ms=100).best.pool.num_gpus == 2
    usd: dict[str, Any] = {"objective": "usd_per_example", "usd_per_gpu_hour": {"": 0.5}}
    assert plan(profile, pool=pool, zone_usd_per_gb=100, **usd).zone_bytes == 0
    with pytest.raises(PlanError, match="zone_gbit_per_s"):
        plan(profile, pool=pool, zone_gbit_per_s=0)
    with pytest.raises(PlanError, match="zone_usd_per_gb"):
        plan(profile, pool=pool, zone_usd_per_gb=-1)


def test_a_budget_pays_for_data_between_zones_too() -> None:
    """GPUs at 1 dollar: where data costs more than a GPU, as many are bought in one zone."""
    profile = job(num_sections=4, batch_size=64, micro_batch_size=1)
    given: dict[str, Any] = {"pool": {"@a": 3, "@b": 3}, "usd_per_gpu_hour": {"": 1.0}, "zone_gbit_per_s": 10}
    free = plan(profile, budget_usd_per_h=4, **given)
    assert set(free.best.pool.types) == {"@a", "@b"}
    for price in (0.001, 0.01, 0.1, 1.0):
        for budget in (2.5, 4.0, 6.0):
            found = plan(profile, budget_usd_per_h=budget, zone_usd_per_gb=price, **given)
            assert found.usd_per_h is not None
            assert found.usd_per_h + found.zone_usd_per_h <= budget * (1 + 1e-9)
            alone = plan(profile, pool={"@a": min(3, int(budget))})
            assert found.best.expected.mini_batch_s * WORTH <= alone.best.expected.mini_batch_s, (price, budget)
    dear = plan(profile, budget_usd_per_h=4, zone_usd_per_gb=1.0, **given)
    assert (dear.best.num_workers, dear.zone_bytes) == (3, 0)
    with pytest.raises(PlanError, match="budget_usd_per_h: is too small for this job"):
        plan(profile, budget_usd_per_h=0.5, zone_usd_per_gb=1.0, **given)


def test_nodes_in_two_zones_are_bought_with_the_data_between_them() -> None:
    profile = job(num_sections=4, batch_size=64, micro_batch_size=1)
    given: dict[str, Any] = {"pool": {"@a": 4, "@b": 4}, "num_gpus_per_node": 2, "usd_per_gpu_hour": {"": 1.0}}
    for objective in ("usd_per_example", "examples_per_s"):
        found = plan(profile, objective=objective, budget_usd_per_h=7, zone_usd_per_gb=1.0, **given)
        assert found.zone_bytes == 0
        assert found.best.num_workers <= 4
    cheap = plan(profile, budget_usd_per_h=7, zone_usd_per_gb=1e-6, zone_gbit_per_s=10, **given)
    assert len(cheap.best.pool.zones) == 2
    assert 0 < cheap.zone_usd_per_h < 1
