"""Redundant forwards and backwards equal the reference engine in every event; without them nothing changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.engine import reference
from simulator.engine.execution import ShapeTimes, execute_orders, lane_times
from simulator.engine.pipeline import Played, StageTimes
from tests.seeds import each_seed
from tests.simulator.test_engine import assert_alike
from tests.simulator.test_following import SCHEDULES, orders_of, random_lanes, random_stages


def with_redundant_tasks(lanes: ShapeTimes, rng: np.random.Generator, *, backwards: bool) -> ShapeTimes:
    """Let each worker run the next stage's tasks, or other tasks of the same order."""

    def of_next(values: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.roll(values, -1, axis=0) * int(rng.choice([1, 1, 3]))
        return found

    return replace(
        lanes,
        redundant_forward_ns=of_next(lanes.forward_ns),
        redundant_backward_ns=of_next(lanes.backward_ns) if backwards else None,
    )


@pytest.mark.slow
@each_seed(75, in_long=400)
def test_every_task_and_every_redundant_one_is_when_the_reference_engine_has_it(seed: int) -> None:
    rng = np.random.default_rng(20_000 + seed)
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    counts = tuple(int(count) for count in rng.integers(1, 10, int(rng.integers(1, 4))))
    times = random_stages(rng, int(rng.integers(2, 6)), schedule, max(counts))
    lanes = with_redundant_tasks(random_lanes(rng, times, counts), rng, backwards=seed % 3 > 0)
    orders = orders_of(times, counts, schedule)
    strict = schedule != "varuna"
    played = execute_orders(lanes, orders, times.window, strict=strict, keep_times=True)
    assert_alike(played, reference.execute_orders(lanes, orders, times.window, strict=strict))
    quick = execute_orders(lanes, orders, times.window, strict=strict)
    assert quick.last_backward_ns.tolist() == played.last_backward_ns.tolist()
    assert quick.redone_ns.tolist() == played.redone_ns.tolist()


def two_stages(window: int = 1) -> StageTimes:
    return StageTimes(
        forward_ns=np.array([10, 30]),
        recompute_ns=np.array([10, 30]),
        backward_ns=np.array([20, 60]),
        activation_ns=np.array([0, 0]),
        gradient_ns=np.array([0, 0]),
        window=np.array([window, 1]),
        recompute=np.array([False, False]),
    )


@each_seed(60, in_long=400)
def test_alike_pipelines_of_other_lengths_end_as_each_does_alone(seed: int) -> None:
    rng = np.random.default_rng(30_000 + seed)
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    num_alike, num_together, most = int(rng.integers(2, 5)), int(rng.integers(1, 3)), int(rng.choice([3, 10, 60]))
    times = random_stages(rng, int(rng.integers(2, 6)), schedule, most)
    one = random_lanes(rng, times, (most,) * num_together, drawn=False)
    if seed % 4 == 3:
        one = with_redundant_tasks(one, rng, backwards=seed % 8 == 7)
    alike = one.of_replicas(list(range(num_together)) * num_alike)
    company_of = np.arange(num_alike * num_together) // num_together
    alike = replace(alike, node=alike.node + company_of * (1 + int(one.node.max())))
    counts = rng.integers(max(1, most - 3), most + 1, num_alike * num_together).tolist()
    orders, strict = orders_of(times, counts, schedule), schedule != "varuna"
    for keep_times in (False, True):
        played = execute_orders(alike, orders, times.window, strict=strict, keep_times=keep_times)
        for first in range(0, len(counts), num_together):
            own = slice(first, first + num_together)
            alone = execute_orders(one, orders[own], times.window, strict=strict, keep_times=keep_times)
            redone = None if played.redone_ns is None else played.redone_ns[:, own]
            assert_alike(
                Played(
                    played.last_backward_ns[:, own],
                    played.orders[own],
                    played.start_ns[own],
                    redone,
                    played.redundant_ns[own],
                ),
                alone,
            )


def test_a_forward_costs_only_what_exceeds_the_wait() -> None:
    times = two_stages()
    lanes = lane_times(times, 1)
    orders = orders_of(times, (4,), "varuna")
    plain = execute_orders(lanes, orders, times.window)
    fits = replace(lanes, redundant_forward_ns=np.array([[[90]], [[10]]]))
    # stage 0 waits for 90 ns behind each forward, stage 1 for 30 ns behind each backward
    assert execute_orders(fits, orders, times.window).last_backward_ns.tolist() == plain.last_backward_ns.tolist()
    beyond = replace(lanes, redundant_forward_ns=np.array([[[200]], [[10]]]))
    late = execute_orders(beyond, orders, times.window, keep_times=True)
    # the forward of k waits for the redundant one of k - 2: 20 ns are left of the first, 110 of the second
    assert late.start_ns[0][0][::2].tolist() == [0, 120, 240 + 20, 380 + 110]
    assert late.redundant_ns[0][0][0, :2].tolist() == [[10, 260], [270, 490]]


def test_a_redundant_backward_waits_for_the_gradient_that_its_stage_was_given() -> None:
    times = two_stages()
    lanes = replace(
        lane_times(times, 1),
        redundant_forward_ns=np.array([[[30]], [[10]]]),
        redundant_backward_ns=np.array([[[60]], [[20]]]),
    )
    played = execute_orders(lanes, orders_of(times, (1,), "varuna"), times.window, keep_times=True)
    first, last = played.redundant_ns[0]
    assert first.tolist() == [[[10, 40]], [[40, 100]]]  # of stage 1, in parallel
    assert last.tolist() == [[[100, 110]], [[110, 130]]]  # of stage 0, behind stage 1's own tasks
