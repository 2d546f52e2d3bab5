"""Simulations of a plan's orders equal the reference engine in every event, by its rules and by the executor's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from morph.contract.plan import Schedule
from morph.runtime.step.schedule_cursor import Progress, ScheduleCursor
from simulator.engine import reference
from simulator.engine.execution import ShapeTimes, execute_orders, lane_times
from simulator.engine.pipeline import StageTimes, run_pipeline
from simulator.engine.schedules import fixed_order, stage_windows
from tests.seeds import each_seed
from tests.simulator.test_engine import assert_alike

SCHEDULES: list[Schedule] = ["varuna", "varuna", "varuna", "gpipe", "1f1b"]


def random_stages(rng: np.random.Generator, num_stages: int, schedule: Schedule, most: int) -> StageTimes:
    top = int(rng.choice([3, 10, 1000]))  # small numbers bring many simultaneous events
    forward = rng.integers(1, top + 1, num_stages)
    wires = [rng.integers(0, int(rng.choice([1, top, 3 * top])) + 1, num_stages) for _ in range(2)]
    again = np.full(num_stages, rng.random() < 0.8)
    again[-1] = again[-1] and schedule == "gpipe"
    return StageTimes(
        forward_ns=forward,
        recompute_ns=forward.copy(),
        backward_ns=rng.integers(1, 2 * top + 1, num_stages),
        activation_ns=wires[0] + rng.integers(0, top + 1, num_stages),
        gradient_ns=wires[1] + rng.integers(0, top + 1, num_stages),
        window=np.array(stage_windows(schedule, num_stages, most, int(rng.choice([1, 2, 4])))),
        recompute=again,
        activation_wire_ns=wires[0],
        gradient_wire_ns=wires[1],
    )


def jittered(values: np.ndarray, rng: np.random.Generator, most: int, least: int) -> np.ndarray:
    """Return one time for each micro-batch."""
    extra = rng.exponential(0.7 * max(1.0, float(values.mean())), (*values.shape[:2], most))
    return np.maximum(least, values + np.rint(extra * rng.integers(0, 2, extra.shape))).astype(np.int64)


def random_lanes(
    rng: np.random.Generator, times: StageTimes, counts: Sequence[int], *, drawn: bool = True
) -> ShapeTimes:
    lanes = lane_times(times, len(counts))
    nodes = rng.integers(0, int(rng.integers(1, 7)), lanes.node.shape) if rng.random() < 0.7 else lanes.node
    lanes = replace(lanes, node=nodes, share_links=bool(rng.random() < 0.7))
    if rng.random() < 0.5:
        slow = rng.choice([1, 1, 2], lanes.node.shape)[:, :, None]
        lanes = replace(lanes, forward_ns=lanes.forward_ns * slow, backward_ns=lanes.backward_ns * slow)
    if drawn and rng.random() < 0.5:
        most = max(counts)
        lanes = replace(
            lanes,
            forward_ns=jittered(lanes.forward_ns, rng, most, 1),
            recompute_ns=jittered(lanes.recompute_ns, rng, most, 1),
            backward_ns=jittered(lanes.backward_ns, rng, most, 1),
            activation_ns=jittered(lanes.activation_ns, rng, most, 0),
            gradient_ns=jittered(lanes.gradient_ns, rng, most, 0),
        )
    return lanes


def orders_of(times: StageTimes, counts: Sequence[int], schedule: Schedule) -> list[tuple[str, ...]]:
    return [run_pipeline(times, (count,), schedule=schedule, keep_orders=True).orders[0] for count in counts]


def executors_rules(
    orders: Sequence[Sequence[str]], times: StageTimes, schedule: Schedule
) -> Callable[[int, int], reference.Decide]:
    """Return the executor's rules for the reference engine, in place of its own."""

    def make(stage: int, replica: int) -> reference.Decide:
        window = int(times.window[stage])
        cursor = ScheduleCursor(orders[replica][stage], window, opportunistic=schedule == "varuna")

        def decide(worker: reference.StageWorker) -> str:
            cursor.progress = Progress(*worker.done.values())
            gradients = worker.done["F"] if worker.is_last else worker.gradients
            return cursor.next_task(worker.activations, gradients) or reference.WAIT

        return decide

    return make


@pytest.mark.slow
@each_seed(100, in_long=400)
def test_tasks_start_as_in_the_reference_engine_under_either_rules(seed: int) -> None:
    rng = np.random.default_rng(seed)
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    counts = tuple(int(count) for count in rng.integers(1, 10, int(rng.integers(1, 4))))
    times = random_stages(rng, int(rng.integers(1, 6)), schedule, max(counts))
    lanes, orders = random_lanes(rng, times, counts), orders_of(times, counts, schedule)
    slots = int(rng.integers(1, 5)) if rng.random() < 0.3 else None
    given: dict[str, Any] = {"strict": schedule != "varuna", "compute_slots": slots}
    played = execute_orders(lanes, orders, times.window, **given, keep_times=True)
    assert_alike(played, reference.execute_orders(lanes, orders, times.window, **given))
    decide = executors_rules(orders, times, schedule)
    assert_alike(played, reference.execute_orders(lanes, orders, times.window, **given, decide=decide))


@each_seed(50, in_long=200)
def test_an_order_on_its_own_devices_and_links_ends_as_planned(seed: int) -> None:
    rng = np.random.default_rng(5000 + seed)
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    counts = (int(rng.integers(1, 30)),)
    times = random_stages(rng, int(rng.integers(1, 9)), schedule, max(counts))
    planned = run_pipeline(times, counts, schedule=schedule, keep_orders=True)
    followed = execute_orders(
        lane_times(times, 1), planned.orders, times.window, strict=schedule != "varuna", keep_times=True
    )
    assert followed.orders == planned.orders
    # The rules delay a recompute until the gradient's arrival is known; the execution of an order need not.
    assert (followed.last_backward_ns <= planned.last_backward_ns).all()
    in_time = times.recompute_ns[:-1] <= times.backward_ns[1:] + times.gradient_ns[:-1]
    if schedule != "varuna" or (in_time | ~times.recompute[:-1]).all():
        assert followed.last_backward_ns.tolist() == planned.last_backward_ns.tolist()


@each_seed(75, in_long=300)
def test_skipping_periods_under_fixed_orders_changes_no_end(seed: int) -> None:
    rng = np.random.default_rng(9000 + seed)
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    most = int(rng.choice([20, 60, 200]))
    counts = tuple(int(count) for count in rng.integers(most // 2, most, int(rng.integers(1, 4))))
    times = random_stages(rng, int(rng.integers(1, 7)), schedule, max(counts))
    lanes, orders = random_lanes(rng, times, counts, drawn=False), orders_of(times, counts, schedule)
    slots = int(rng.integers(1, 5)) if rng.random() < 0.3 else None
    skipped = execute_orders(lanes, orders, times.window, strict=schedule != "varuna", compute_slots=slots)
    played = execute_orders(
        lanes, orders, times.window, strict=schedule != "varuna", compute_slots=slots, keep_times=True
    )
    assert skipped.last_backward_ns.tolist() == played.last_backward_ns.tolist()


def two_senders(share: bool, nodes: list[list[int]]) -> ShapeTimes:
    """Return two replicas of two stages; an activation takes 100 ns on the wire and 10 ns behind it."""
    lanes = lane_times(
        StageTimes(
            forward_ns=np.array([10, 10]),
            recompute_ns=np.array([10, 10]),
            backward_ns=np.array([10, 10]),
            activation_ns=np.array([110, 0]),
            gradient_ns=np.array([0, 0]),
            window=np.array([1, 1]),
            recompute=np.array([False, False]),
            activation_wire_ns=np.array([100, 0]),
            gradient_wire_ns=np.array([0, 0]),
        ),
        2,
    )
    return replace(lanes, node=np.array(nodes), share_links=share)


def second_stage_starts(lanes: ShapeTimes) -> list[int]:
    played = execute_orders(lanes, [("FB", "FB")] * 2, [1, 1], keep_times=True)
    return [int(played.start_ns[replica][1][0]) for replica in range(2)]


def test_two_messages_that_leave_one_node_at_once_take_twice_the_wire_time() -> None:
    assert second_stage_starts(two_senders(True, [[0, 0], [1, 2]])) == [220, 220]


def test_two_messages_that_enter_one_node_at_once_take_twice_the_wire_time() -> None:
    assert second_stage_starts(two_senders(True, [[0, 1], [2, 2]])) == [220, 220]


def test_messages_that_share_no_link_are_not_delayed() -> None:
    assert second_stage_starts(two_senders(True, [[0, 1], [2, 3]])) == [120, 120]
    assert second_stage_starts(two_senders(True, [[0, 0], [0, 0]])) == [120, 120]
    assert second_stage_starts(two_senders(False, [[0, 0], [1, 2]])) == [120, 120]


def test_a_message_that_comes_later_shares_only_what_is_left() -> None:
    lanes = two_senders(True, [[0, 0], [1, 2]])
    later = replace(lanes, forward_ns=np.array([[[10], [60]], [[10], [10]]]))
    # alone from 10 to 60, shared from 60 to 160, then the second one alone for its last 50
    assert second_stage_starts(later) == [170, 220]


def test_gradients_share_the_link_with_activations() -> None:
    times = StageTimes(
        forward_ns=np.array([10, 10, 10]),
        recompute_ns=np.array([10, 10, 10]),
        backward_ns=np.array([10, 10, 10]),
        activation_ns=np.array([100, 100, 0]),
        gradient_ns=np.array([100, 100, 0]),
        window=np.array([5, 3, 1]),
        recompute=np.zeros(3, np.bool_),
        activation_wire_ns=np.array([100, 100, 0]),
        gradient_wire_ns=np.array([100, 100, 0]),
    )
    lanes = lane_times(times, 1)
    orders = orders_of(times, (6,), "varuna")
    alone, shared = (execute_orders(replace(lanes, share_links=share), orders, times.window) for share in (False, True))
    assert shared.makespan_ns > alone.makespan_ns


def test_a_late_gradient_lets_a_forward_go_first_and_the_order_is_left() -> None:
    times = StageTimes(
        forward_ns=np.array([10, 10]),
        recompute_ns=np.array([10, 10]),
        backward_ns=np.array([10, 10]),
        activation_ns=np.array([0, 0]),
        gradient_ns=np.array([0, 0]),
        window=np.array([2, 1]),
        recompute=np.array([True, False]),
    )
    orders = [("FRBFRB", "FBFB")]
    lanes = lane_times(times, 1)
    late = replace(lanes, gradient_ns=np.array([[[100, 0]], [[0, 0]]]))
    # stage 0 runs its second forward while it waits for the first gradient
    assert execute_orders(late, orders, times.window, keep_times=True).orders[0][0] == "FFRBRB"
    assert execute_orders(late, orders, times.window, strict=True, keep_times=True).orders[0][0] == "FRBFRB"


def test_gpipe_orders_that_wait_for_each_other_are_refused() -> None:
    from morph.contract.errors import PlanError

    times = random_stages(np.random.default_rng(0), 2, "gpipe", 2)
    assert fixed_order("gpipe", 0, 2, 2, True) == "FFRBRB"
    lanes = replace(lane_times(times, 1), recompute=np.array([False, False]))
    for either in (execute_orders, reference.execute_orders):
        with pytest.raises(PlanError, match="wait for each other"):
            either(lanes, [("FBFB", "FFBB")], [2, 2], strict=True)
