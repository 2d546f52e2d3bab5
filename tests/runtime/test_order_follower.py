from __future__ import annotations

import random
from collections import deque
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from morph.contract.plan import Plan, Schedule
from morph.runtime.step.schedule_cursor import ScheduleCursor, Task
from simulator import plan, synthetic_profile
from simulator.engine.schedules import fixed_order

EVERYTHING = 10**6


@lru_cache(maxsize=256)
def shape(schedule: Schedule, depth: int, num_micro_batches: int, latency_s: float) -> Plan:
    profile = synthetic_profile(
        num_sections=depth, batch_size=num_micro_batches, micro_batch_sizes=(1,), latency_s=latency_s
    )
    return plan(
        profile,
        num_gpus=depth,
        pipeline_depth=depth,
        num_replicas=1,
        schedule=schedule,
        micro_batch_size=1,
        recompute=True,
    ).best


def followers(planned: Plan) -> list[ScheduleCursor]:
    opportunistic = planned.schedule == "varuna"
    orders = planned.orders[planned.num_micro_batches]
    return [
        ScheduleCursor(order, stage.window, opportunistic=opportunistic)
        for order, stage in zip(orders, planned.stages, strict=True)
    ]


class Pipeline:
    """Stages that run one task at a time, and messages, which arrive in order whenever the history says."""

    def __init__(self, planned: Plan) -> None:
        self.plan = planned
        self.stages = followers(planned)
        depth, count = planned.pipeline_depth, planned.num_micro_batches
        self.activations = [count] + [0] * (depth - 1)
        self.gradients = [0] * depth
        self.messages: dict[tuple[str, int], deque[int]] = {}
        self.ran: list[list[str]] = [[] for _ in range(depth)]

    def next_task(self, index: int) -> Task | None:
        last = index == self.plan.pipeline_depth - 1
        gradients = self.stages[index].progress.forwards if last else self.gradients[index]
        return self.stages[index].next_task(self.activations[index], gradients)

    def choices(self) -> list[tuple[str, int]]:
        tasks = [("task", index) for index in range(len(self.stages)) if self.next_task(index) is not None]
        return tasks + [key for key, waiting in self.messages.items() if waiting]

    def take(self, choice: tuple[str, int]) -> None:
        kind, index = choice
        if kind != "task":
            self.messages[choice].popleft()
            (self.activations if kind == "activation" else self.gradients)[index] += 1
            return
        task = self.next_task(index)
        assert task is not None
        stage = self.stages[index]
        micro_batch = {
            Task.FORWARD: stage.progress.forwards,
            Task.RECOMPUTE: stage.progress.recomputes,
            Task.BACKWARD: stage.progress.backwards,
        }[task]
        stage.done(task)
        self.ran[index].append(f"{task.value}{micro_batch}")
        if task is Task.FORWARD and index + 1 < len(self.stages):
            self.messages.setdefault(("activation", index + 1), deque()).append(micro_batch)
        if task is Task.BACKWARD and index:
            self.messages.setdefault(("gradient", index - 1), deque()).append(micro_batch)


SCHEDULES: list[Schedule] = ["varuna", "gpipe", "1f1b"]


@given(
    schedule=st.sampled_from(SCHEDULES),
    depth=st.integers(1, 6),
    num_micro_batches=st.integers(1, 9),
    latency_s=st.sampled_from([0.0001, 0.01]),
    seed=st.integers(0, 2**32),
    message_bias=st.sampled_from([0.02, 0.5, 0.98]),
)
def test_every_history_of_arrivals_finishes_and_runs_each_task_once(
    schedule: Schedule, depth: int, num_micro_batches: int, latency_s: float, seed: int, message_bias: float
) -> None:
    planned = shape(schedule, depth, num_micro_batches, latency_s)
    pipeline, chance = Pipeline(planned), random.Random(seed)
    while choices := pipeline.choices():
        messages = [choice for choice in choices if choice[0] != "task"]
        tasks = [choice for choice in choices if choice[0] == "task"]
        pick_message = messages and (not tasks or chance.random() < message_bias)
        pipeline.take(chance.choice(messages if pick_message else tasks))
        for stage, follower in zip(planned.stages, pipeline.stages, strict=True):
            if schedule == "varuna":
                assert follower.in_flight <= stage.window
    for index, (stage, follower) in enumerate(zip(planned.stages, pipeline.stages, strict=True)):
        kinds = "FRB" if stage.recompute else "FB"
        assert follower.finished, f"stage {index} stands still after {pipeline.ran[index]}"
        assert sorted(pipeline.ran[index]) == sorted(f"{kind}{n}" for kind in kinds for n in range(num_micro_batches))


def run_with_everything_there(follower: ScheduleCursor) -> str:
    ran = ""
    while (task := follower.next_task(EVERYTHING, follower.progress.forwards)) is not None:
        follower.done(task)
        ran += task.value
    return ran


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(
    stage=st.integers(0, 4), count=st.integers(1, 12), window=st.integers(1, 12) | st.none(), seed=st.integers(0, 2**32)
)
def test_a_fixed_schedule_is_kept_to_the_letter_whatever_arrives_when(
    schedule: Schedule, stage: int, count: int, window: int | None, seed: int
) -> None:
    order = fixed_order(schedule, stage, 5, count, stage < 4, window)
    follower, chance = ScheduleCursor(order, count, opportunistic=False), random.Random(seed)
    activations = gradients = 0
    ran = ""
    while not follower.finished:
        task = follower.next_task(activations, gradients)
        if task is not None:
            follower.done(task)
            ran += task.value
        else:
            may_come = ["activation"] * (activations < count) + ["gradient"] * (gradients < follower.progress.forwards)
            assert may_come, f"stands still after {ran}"
            if chance.choice(may_come) == "activation":
                activations += 1
            else:
                gradients += 1
    assert ran == order


def test_an_order_is_followed_when_every_input_comes_in_time() -> None:
    order = "FFRBFRBRB"
    follower = ScheduleCursor(order, 2, opportunistic=False)
    assert run_with_everything_there(follower) == order
    assert follower.finished
    assert follower.next_task(EVERYTHING, EVERYTHING) is None


def test_a_forward_fills_the_wait_for_a_gradient_but_only_within_the_window() -> None:
    follower = ScheduleCursor("FFBBFFBB", 3, opportunistic=True)
    for _ in range(3):  # two by the order, and one in place of the backward that is due
        assert follower.next_task(4, 0) is Task.FORWARD
        follower.done(Task.FORWARD)
    assert follower.in_flight == 3
    assert follower.next_task(4, 0) is None
    strict = ScheduleCursor("FFBBFFBB", 3, opportunistic=False)
    strict.done(Task.FORWARD)
    strict.done(Task.FORWARD)
    assert strict.next_task(4, 0) is None


def test_a_gradient_that_is_there_goes_before_the_forward_that_is_due() -> None:
    follower = ScheduleCursor("FFFRBRBRB", 3, opportunistic=True)
    follower.done(Task.FORWARD)
    assert follower.next_task(3, 1) is Task.RECOMPUTE
    assert ScheduleCursor("FFFBBB", 3, opportunistic=True).next_task(3, 0) is Task.FORWARD


def test_only_its_backward_may_follow_a_recompute() -> None:
    follower = ScheduleCursor("FFRBFRBRB", 3, opportunistic=True)
    for task in (Task.FORWARD, Task.FORWARD, Task.RECOMPUTE):
        follower.done(task)
    assert follower.in_flight < 3
    assert follower.next_task(3, 0) is None  # although a forward is possible and the window has room
    assert follower.next_task(3, 1) is Task.BACKWARD


def test_a_recompute_that_is_due_starts_before_its_gradient_has_come() -> None:
    follower = ScheduleCursor("FRB", 1, opportunistic=True)
    follower.done(Task.FORWARD)
    assert follower.next_task(1, 0) is Task.RECOMPUTE


def test_a_forward_precedes_an_early_recompute_while_the_window_has_room() -> None:
    follower = ScheduleCursor("FRBFRBFRB", 2, opportunistic=True)
    follower.done(Task.FORWARD)
    assert follower.next_task(3, 0) is Task.FORWARD
    follower.done(Task.FORWARD)
    assert follower.next_task(3, 0) is Task.RECOMPUTE  # no room for a third
    strict = ScheduleCursor("FRBFRBFRB", 2, opportunistic=False)
    strict.done(Task.FORWARD)
    assert strict.next_task(3, 0) is Task.RECOMPUTE


def test_the_order_continues_after_tasks_run_out_of_turn() -> None:
    follower = ScheduleCursor("FBFB", 2, opportunistic=True)
    ran = ""
    for gradients in (0, 0, 0, 1, 2):
        task = follower.next_task(2, gradients)
        if task is not None:
            follower.done(task)
            ran += task.value
    assert ran == "FFBB"
    assert follower.finished
