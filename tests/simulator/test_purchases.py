"""Which nodes of several GPUs are bought: for fewest dollars per example, or within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest

from morph.contract.errors import PlanError
from morph.contract.plan import Plan
from morph.contract.profile import Profile
from simulator import PlanRequest, plan, synthetic_profile
from simulator.inputs.synthetic import with_type
from simulator.search.planner import PlanChoice
from simulator.search.purchases import maximal_within
from tests.seeds import each_seed
from tests.simulator.test_unequal import random_pool, with_inner_links

Bought = dict[str, tuple[int, ...]]


def subsets(nodes: Mapping[str, tuple[int, ...]]) -> Iterator[Bought]:
    """Return every part of these nodes, by type; parts with equal nodes only once."""
    ways = []
    for sizes in nodes.values():
        counts = Counter(sizes)
        numbers = product(*(range(number + 1) for number in counts.values()))
        ways.append([tuple(s for s, k in zip(counts, each, strict=True) for _ in range(k)) for each in numbers])
    for each in product(*ways):
        if any(each):
            yield {name: sizes for name, sizes in zip(nodes, each, strict=True) if sizes}


def ask(profile: Profile, nodes: Bought, **given: Any) -> PlanChoice:
    request = PlanRequest(unequal=True, **given)
    if list(nodes) == [""]:
        return plan(profile, request, num_gpus_per_node=nodes[""], num_runners_up=0)
    pool = {name: sum(sizes) for name, sizes in nodes.items()}
    return plan(profile, request, num_gpus_per_node=nodes, pool=pool, num_runners_up=0)


def usd_of(nodes: Mapping[str, tuple[int, ...]], price: Mapping[Any, float]) -> float:
    return sum(size * price.get(name, price.get(size, 0.0)) for name, sizes in nodes.items() for size in sizes)


def nodes_in_use(found: Plan) -> Bought:
    """Return the sizes of the nodes that a plan uses, by type."""
    used: dict[str, dict[int, int]] = {}
    for replica, row in enumerate(found.placement):
        for node, stage in zip(row, found.stages_of(replica), strict=True):
            used.setdefault(found.stages[stage].node_type, {})[node] = found.node_sizes[node]
    return {name: tuple(sizes.values()) for name, sizes in used.items()}


def random_offer(rng: np.random.Generator) -> tuple[Profile, dict[str, tuple[int, ...]], dict[Any, float]]:
    """Draw a job, a few nodes of one to three GPUs of one or two types, and prices by type or by size."""
    profile, counts = random_pool(rng)
    profile, nodes = with_inner_links(rng, profile), {}
    for name in counts:
        sizes = [int(rng.integers(1, 4)) for _ in range(int(rng.integers(1, 4)))]
        nodes[name] = tuple(sizes)
    if rng.integers(2) and len(nodes) > 1:
        return profile, nodes, {name: float(rng.uniform(0.1, 1.0)) for name in nodes}
    return profile, nodes, {size: float(rng.uniform(0.5, 1.0)) for size in (1, 2, 3)}


@pytest.mark.slow
@each_seed(4, in_long=100)
def test_no_nodes_that_can_be_bought_are_cheaper_or_within_a_budget_faster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile, nodes, price = random_offer(rng)
    every = []
    for part in subsets(nodes):
        try:
            found = ask(profile, part)
        except PlanError:
            continue
        every.append((usd_of(part, price), found.best.expected.mini_batch_s))
    if not every:
        with pytest.raises(PlanError):
            ask(profile, nodes, usd_per_gpu_hour=price, objective="usd_per_example")
        return
    budget = float(rng.choice([usd for usd, _ in every]))
    batch_size = profile.job.batch_size
    cheap = ask(profile, nodes, usd_per_gpu_hour=price, objective="usd_per_example")
    within = ask(profile, nodes, usd_per_gpu_hour=price, budget_usd_per_h=budget)
    both = ask(profile, nodes, usd_per_gpu_hour=price, objective="usd_per_example", budget_usd_per_h=budget)
    for found in (cheap, within, both):
        assert found.usd_per_h == pytest.approx(usd_of(nodes_in_use(found.best), price)), "whole nodes are paid"
    assert within.usd_per_h is not None
    assert both.usd_per_h is not None
    assert max(within.usd_per_h, both.usd_per_h) <= budget * 1.0001
    assert cheap.values[0] <= min(usd * time_s for usd, time_s in every) / 3600 / batch_size * 1.001
    paid = [(usd, time_s) for usd, time_s in every if usd <= budget * (1 + 1e-9)]
    assert within.best.expected.mini_batch_s <= min(time_s for _, time_s in paid) * 1.001
    assert both.values[0] <= min(usd * time_s for usd, time_s in paid) / 3600 / batch_size * 1.001


def _mixed() -> Profile:
    profile = synthetic_profile(num_sections=6, batch_size=48, micro_batch_size=1, latency_s=0.002)
    return with_type(with_inner_links(np.random.default_rng(0), profile), "t4", 2.0)


def test_a_small_node_is_bought_where_a_large_one_would_be_half_idle() -> None:
    profile = synthetic_profile(num_sections=1, batch_size=8, micro_batch_size=4)
    choice = plan(
        profile, num_gpus_per_node=(4, 4, 1), objective="usd_per_example", usd_per_gpu_hour=1.0, num_runners_up=0
    )
    assert (nodes_in_use(choice.best), choice.usd_per_h, choice.num_gpus) == ({"": (1,)}, 1.0, 9)


def test_runners_up_follow_by_price_and_differ_in_shape() -> None:
    choice = plan(
        _mixed(), num_gpus_per_node=(4, 2, 1), objective="usd_per_example", usd_per_gpu_hour={1: 1.0, 2: 0.9, 4: 0.8}
    )
    assert len(choice.simulations) == len({each.plan.shape for each in choice.simulations}) == 6
    assert list(choice.values) == sorted(choice.values)


def test_nodes_of_each_type_have_their_own_size_and_price() -> None:
    sizes, price = {"": 4, "t4": 1}, {"": 1.0, "t4": 0.2}
    request = PlanRequest(unequal=True, num_gpus_per_node=sizes)
    whole = plan(_mixed(), request, pool={"": 8, "t4": 3}, num_runners_up=0)
    assert whole.best.node_sizes == (4, 4, 1, 1, 1)
    assert whole.usd_per_h is None
    within = plan(
        _mixed(), request, pool={"": 8, "t4": 3}, num_runners_up=0, usd_per_gpu_hour=price, budget_usd_per_h=4.7
    )
    assert within.usd_per_h == pytest.approx(4.6)
    assert within.best.node_sizes == (4, 1, 1, 1)
    assert (within.num_gpus, within.num_idle) == (11, 11 - within.best.num_workers)


def test_a_budget_that_pays_for_too_few_nodes_is_refused_with_nodes_that_would_do() -> None:
    needed = plan(_mixed(), num_gpus=1).best.expected.peak_memory_bytes
    given: dict[str, Any] = {
        "memory_bytes": needed * 2 // 5,
        "usd_per_gpu_hour": 0.5,
        "num_gpus_per_node": (4, 4, 1, 1),
    }
    with pytest.raises(
        PlanError, match=r"is too small for this job .got 0.9.; allowed: .* for 1 node of 4 GPUs"
    ) as error:
        plan(_mixed(), budget_usd_per_h=0.9, **given)
    enough = float(str(error.value).split("allowed: ")[1].split(" ")[0])
    assert plan(_mixed(), budget_usd_per_h=enough, **given).usd_per_h == enough


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_gpus_per_node": {"": 4}}, "num_gpus_per_node: .*allowed: one number for all types, or numbers for , t4"),
        ({"num_gpus_per_node": {"": 4, "t4": 1, "a100": 8}}, "num_gpus_per_node"),
        ({"num_gpus_per_node": {"": (4, 2), "t4": 1}}, r"that do not add up to the pool.*allowed: nodes of 8 GPUs"),
        ({"num_gpus_per_node": {"": 4, "t4": 0}}, "num_gpus_per_node"),
        ({"num_gpus_per_node": 4, "usd_per_gpu_hour": {"t4": 1.0}, "budget_usd_per_h": 4.0}, "usd_per_gpu_hour"),
        ({"num_gpus_per_node": 4, "usd_per_gpu_hour": {4: 1.0}, "budget_usd_per_h": 4.0}, "for nodes of 3, 4 GPUs"),
    ],
)
def test_nodes_of_a_pool_that_nothing_can_answer_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(_mixed(), pool={"": 8, "t4": 3}, unequal=True, **given)


def test_sizes_by_type_need_a_pool() -> None:
    with pytest.raises(PlanError, match="numbers by type need a pool"):
        plan(_mixed(), num_gpus=4, num_gpus_per_node={"t4": 4})


def test_many_nodes_are_compared_without_planning_all_choices() -> None:
    request = PlanRequest(objective="usd_per_example", usd_per_gpu_hour={1: 1.0, 2: 0.8, 4: 0.7}, micro_batch_size=1)
    nodes = (4,) * 2 + (2,) * 3 + (1,) * 5
    choice = plan(_mixed(), request, num_gpus_per_node=nodes, num_runners_up=0)
    for part in ((4,), (4, 4), (4, 2), (2,), (2, 2), (1,), (1, 1)):
        assert choice.values[0] <= plan(_mixed(), request, num_gpus_per_node=part, num_runners_up=0).values[0] * 1.001


@each_seed(50)
def test_maximal_choices_are_those_to_which_the_budget_cannot_add_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    numbers, usd, most = rng.integers(1, 6, 3).tolist(), rng.uniform(0.1, 1.0, 3), float(rng.uniform(0.2, 6.0))
    paid = [
        each for each in product(*(range(number + 1) for number in numbers)) if any(each) and np.dot(each, usd) <= most
    ]
    wanted = [
        each
        for each in paid
        if all(n == k or np.dot(each, usd) + p > most for n, k, p in zip(each, numbers, usd, strict=True))
    ]
    assert list(map(tuple, maximal_within(numbers, usd.tolist(), most).tolist())) == wanted


def test_no_choice_is_missed_among_many_kinds_of_which_few_are_paid() -> None:
    found = maximal_within([16] * 6, [1.0] * 6, 3.0)
    assert len(found) == 56, "the ways to share 3 GPUs among 6 kinds"
    assert (found.sum(axis=1) == 3).all()


def test_a_requested_shape_is_bought_among_many_nodes_that_are_too_few_for_it() -> None:
    given = PlanRequest(pipeline_depth=8, num_replicas=4, objective="usd_per_example", usd_per_gpu_hour=0.5)
    nodes = [4] * 16 + [1] * 64
    choice = plan(synthetic_profile(num_sections=32, batch_size=256), given, num_gpus_per_node=nodes)
    assert (choice.best.shape, choice.usd_per_h) == ("8x4", 16.0)
