from __future__ import annotations

import math

import numpy as np
import pytest

from morph.contract.errors import PlanError
from morph.contract.profile import Profile
from simulator import plan, plan_frame, plan_table, simulate, synthetic_profile
from simulator.objectives import MostProgress, Revocations, Shape, poisson, usd_per_h_of


def _profile(**changes: object) -> Profile:
    settings: dict[str, object] = {"batch_size": 48, "micro_batch_size": 2, "parameter_bytes": 8_000_000}
    return synthetic_profile(**(settings | changes))  # type: ignore[arg-type]


def _every_shape(num_gpus: int) -> list[Shape]:
    return [(depth, d) for depth in range(1, min(8, num_gpus) + 1) for d in range(1, num_gpus // depth + 1)]


@pytest.mark.parametrize("num_gpus", [3, 7])
def test_the_cheapest_plan_is_the_cheapest_of_all_shapes(num_gpus: int) -> None:
    choice = plan(_profile(), num_gpus=num_gpus, objective="usd_per_example", usd_per_gpu_hour=1.8)
    costs = {
        (depth, d): depth
        * d
        * 1.8
        / 3600
        / simulate(_profile(), num_stages=depth, num_replicas=d).expected.examples_per_s
        for depth, d in _every_shape(num_gpus)
    }
    assert choice.values[0] == pytest.approx(min(costs.values()))
    assert (choice.best.pipeline_depth, choice.best.num_replicas) == min(costs, key=lambda shape: costs[shape])
    assert list(choice.values) == sorted(choice.values)


def test_whole_nodes_are_paid_for_at_the_price_of_their_size() -> None:
    assert usd_per_h_of({1: 1.0, 4: 0.5}, {1: 3, 4: 2}) == pytest.approx(3 * 1.0 + 2 * 4 * 0.5)
    assert usd_per_h_of(2.0, {1: 3, 4: 2}) == pytest.approx(22.0)
    with pytest.raises(PlanError, match="nodes of 1, 4 GPUs"):
        usd_per_h_of({1: 1.0}, {1: 3, 4: 2})
    cheap = {1: 10.0, 4: 0.1}
    choice = plan(
        _profile(),
        num_gpus_per_node=(1, 1, 4, 4),
        objective="usd_per_example",
        usd_per_gpu_hour=cheap,
        num_runners_up=0,
    )
    assert {choice.best.node_sizes[node] for row in choice.best.placement for node in row} == {4}


def test_poisson_chances_add_up() -> None:
    assert poisson(0.0) == [1.0]
    chances = poisson(2.5)
    assert sum(chances) == pytest.approx(1)
    assert chances[3] == pytest.approx(math.exp(-2.5) * 2.5**3 / 6)


def test_expected_progress_is_what_a_run_with_random_revocations_makes() -> None:
    """Draws revocations one by one instead of using the formula: pauses, half mini-batches, spares, replacements."""
    given = Revocations(per_hour=20.0, pause_s=4.0, replacement_s=60.0)
    num_nodes, used, mini_batch_s, batch = 8, 6, 2.0, 60
    fallback = {missing: 30.0 * (8 - missing) / 6 for missing in range(9)}
    objective = MostProgress(batch, given, num_nodes, lambda _: used, lambda missing: fallback[min(missing, 8)])
    rng, rate_per_s = np.random.default_rng(3), num_nodes * given.per_hour / 3600
    clock = examples = 0.0
    back: list[float] = []
    end_s = 300_000.0
    while clock < end_s:
        wait = float(rng.exponential(1 / rate_per_s))
        until = clock + wait
        while clock < until:  # train at the rate of those that are there until the next return or revocation
            back = [instant for instant in back if instant > clock]
            step_end = min([until, *back])
            rate = batch / mini_batch_s if len(back) <= num_nodes - used else min(30.0, fallback[min(len(back), 8)])
            examples += (step_end - clock) * rate
            clock = step_end
        spare = len(back) < num_nodes - used
        if rng.random() < used / num_nodes:  # a used node: pause, half a mini-batch, and again when it is replaced
            lost_s = given.pause_s * (1 if spare else 2) + mini_batch_s / 2
            clock += lost_s
            back = [instant + lost_s for instant in back]
        back.append(clock + given.replacement_s)
    assert objective.value((6, 1), mini_batch_s) == pytest.approx(examples / clock, rel=0.03)


def test_revocations_make_shapes_with_spares_and_short_mini_batches_worth_it() -> None:
    quiet = plan(_profile(), num_gpus=8, objective="progress", revocations_per_hour=0.0)
    assert quiet.best.shape == plan(_profile(), num_gpus=8).best.shape
    assert quiet.values[0] == pytest.approx(quiet.best.expected.examples_per_s)
    busy = plan(
        _profile(), num_gpus=8, objective="progress", revocations_per_hour=30.0, pause_s=20.0, replacement_s=30.0
    )
    assert busy.values[0] < 0.9 * quiet.values[0]
    assert busy.best.num_workers < quiet.best.num_workers
    assert busy.num_idle > 0


def test_the_frame_of_a_choice_holds_best_and_runners_up() -> None:
    choice = plan(_profile(), num_gpus=6, objective="usd_per_example", usd_per_gpu_hour=1.0)
    frame = choice.frame
    assert frame["examples_per_s"].tolist() == [p.expected.examples_per_s for p in (choice.best, *choice.runners_up)]
    assert frame["usd_per_example"].tolist() == list(choice.values)
    assert (frame["num_workers"] + frame["num_idle"] == 6).all()


def test_the_frame_of_a_range_is_the_table_of_plans() -> None:
    plans = plan_table(_profile(), 7, min_gpus=3)
    frame = plan_frame(_profile(), 7, min_gpus=3, usd_per_gpu_hour=2.0)
    assert frame["num_gpus"].tolist() == list(plans) == [3, 4, 5, 6, 7]
    assert frame["pipeline_depth"].tolist() == [best.pipeline_depth for best in plans.values()]
    assert frame["usd_per_h"].tolist() == [2.0 * gpus for gpus in plans]
    assert plan_frame(_profile(), 2, memory_bytes=1000).empty


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"objective": "fame"}, "objective"),
        ({"objective": "usd_per_example"}, "usd_per_gpu_hour"),
        ({"objective": "progress"}, "revocations_per_hour"),
        ({"objective": "progress", "revocations_per_hour": -1.0}, "revocations_per_hour"),
        ({"objective": "progress", "revocations_per_hour": 1.0, "pause_s": float("nan")}, "pause_s"),
        ({"objective": "usd_per_example", "usd_per_gpu_hour": -1.0}, "usd_per_gpu_hour"),
    ],
)
def test_figures_that_an_objective_needs_are_asked_for(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(_profile(), num_gpus=4, **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field
