"""An emulated stage: time, memory and numbers of its tasks, on a clock that the test moves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from morph.runtime.emulation.clock import DeviceClock
from morph.runtime.emulation.memory import DeviceMemory
from morph.runtime.emulation.message import Head, border, read_head, write_head
from morph.runtime.emulation.stage import EmulatedStage, SectionUnits, TaskTimes
from tests.emulation.fakes import FakeTime

MICRO_BATCHES = (4, 5)
STEP = 3


def message() -> Tensor:
    return torch.zeros(border(0).shape, dtype=torch.float64)


def section(index: int, weights: float = 0.01) -> SectionUnits:
    return SectionUnits(index, weights, {f"s{index}": torch.tensor([1.0, -2.0])})


def backward_s(num_sections: int) -> NDArray[np.float64]:
    """Of each section and micro-batch: a second for each section but the first, 3 and 4 in all."""
    rest_s = np.array([3.0, 4.0]) - (num_sections - 1)
    return np.array([rest_s, *([[1.0, 1.0]] * (num_sections - 1))])


def stage_of(
    sections: range,
    num_sections: int,
    time: FakeTime,
    *,
    recompute: bool = True,
    memory: DeviceMemory | None = None,
    weights: float = 0.01,
    slowness: float = 1.0,
) -> EmulatedStage:
    clock = DeviceClock(0.0, time.now, time.sleep)
    clock.slowness = slowness
    return EmulatedStage(
        [section(index, weights) for index in sections],
        TaskTimes(np.array([1.0, 2.0]), np.array([1.5, 2.5]), backward_s(len(sections))),
        MICRO_BATCHES,
        recompute=recompute,
        clock=clock,
        memory=memory or DeviceMemory(None, 0, 0, 0, 0),
        key=(7, STEP),
        message=None if sections.stop == num_sections else message(),
        gradient=message() if sections.start else None,
    )


class Sums:
    def __init__(self) -> None:
        self.by_name: dict[str, list[list[float]]] = {}
        self.through: list[int] = []

    def add(self, section: int, name: str, gradient: Tensor) -> None:
        self.by_name.setdefault(name, []).append(gradient.tolist())

    def done(self, section: int) -> None:
        self.through.append(section)


def train(
    cuts: list[int], num_sections: int, weights: float = 0.01
) -> tuple[list[float], dict[str, list[list[float]]]]:
    """Losses and gradients of two micro-batches through stages that begin at ``cuts``."""
    bounds = [*cuts, num_sections]
    ranges = [range(first, end) for first, end in itertools.pairwise(bounds)]
    stages = [stage_of(part, num_sections, FakeTime(), weights=weights) for part in ranges]
    losses, sums = [], Sums()
    for micro_batch in MICRO_BATCHES:
        values: tuple[Tensor, ...] = ()
        for stage in stages:
            values = tuple(value.clone() for value in stage.forward(micro_batch, values))
        losses.append(float(values[0]))
        gradients: tuple[Tensor | None, ...] = (torch.ones(()),)
        for stage in reversed(stages):
            stage.recompute(micro_batch)
            gradients = tuple(
                gradient if gradient is None else gradient.clone()
                for gradient in stage.backward(micro_batch, gradients, sums)
            )
    return losses, sums.by_name


def test_each_task_takes_its_micro_batchs_time() -> None:
    time = FakeTime()
    stage = stage_of(range(2), 2, time)
    took = []
    for micro_batch in MICRO_BATCHES:
        for task in (
            lambda micro_batch=micro_batch: stage.forward(micro_batch, ()),
            lambda micro_batch=micro_batch: stage.recompute(micro_batch),
            lambda micro_batch=micro_batch: stage.backward(micro_batch, (torch.ones(()),), Sums()),
        ):
            before_s = time.now_s
            task()
            took.append(time.now_s - before_s)
    assert took == pytest.approx([1.0, 1.5, 3.0, 2.0, 2.5, 4.0])


def test_a_backward_goes_through_its_sections_one_after_the_other() -> None:
    time = FakeTime()
    stage = stage_of(range(3), 3, time, slowness=2.0)
    for micro_batch in MICRO_BATCHES:
        stage.forward(micro_batch, ())
        stage.recompute(micro_batch)
        begun_s = time.now_s
        stage.backward(micro_batch, (torch.ones(()),), Sums())
    assert stage.ends_s == pytest.approx({2: begun_s + 2.0, 1: begun_s + 4.0, 0: begun_s + 8.0})
    assert time.now_s == pytest.approx(begun_s + 8.0)


@pytest.mark.parametrize("cuts", [[0, 1], [0, 2], [0, 1, 2]])
def test_losses_and_gradients_do_not_depend_on_the_stages(cuts: list[int]) -> None:
    assert train(cuts, 3) == train([0], 3)


def test_losses_and_gradients_depend_on_the_weights() -> None:
    losses, gradients = train([0], 2)
    other_losses, other_gradients = train([0], 2, weights=0.02)
    assert losses != other_losses
    assert gradients != other_gradients


def test_losses_and_gradients_depend_on_the_micro_batch() -> None:
    losses, gradients = train([0], 2)
    assert losses[0] != losses[1]
    assert all(first != second for first, second in gradients.values())


def test_a_message_carries_step_and_micro_batch_and_one_for_another_is_refused() -> None:
    stage = stage_of(range(1), 2, FakeTime())
    (sent,) = stage.forward(5, ())
    assert 0 <= read_head(sent, STEP, 5) < 1
    behind = stage_of(range(1, 2), 2, FakeTime())
    wrong = message()
    write_head(wrong, Head(STEP, 4, 0.5))
    with pytest.raises(AssertionError, match="micro-batch 4 came for 3, 5"):
        behind.forward(5, (wrong,))


def test_stored_and_live_micro_batches_are_counted() -> None:
    stage = stage_of(range(2), 2, FakeTime())
    stage.forward(4, ())
    stage.forward(5, ())
    assert (stage.num_stored, stage.num_live) == (2, 0)
    stage.recompute(4)
    assert (stage.num_stored, stage.num_live) == (1, 1)
    stage.backward(4, (torch.ones(()),), Sums())
    assert (stage.num_stored, stage.num_live) == (1, 0)


def test_more_than_the_device_holds_is_out_of_memory() -> None:
    memory = DeviceMemory(150, held_bytes=100, input_bytes=10, activation_bytes=20, extra_bytes=5)
    stage = stage_of(range(2), 2, FakeTime(), memory=memory)
    stage.forward(4, ())
    assert memory.peak_bytes == 135
    stage.forward(5, ())
    assert memory.peak_bytes == 145
    small = DeviceMemory(140, held_bytes=100, input_bytes=10, activation_bytes=20, extra_bytes=5)
    full = stage_of(range(2), 2, FakeTime(), memory=small)
    full.forward(4, ())
    with pytest.raises(torch.OutOfMemoryError, match=r"145 bytes are needed .* 2 stored inputs"):
        full.forward(5, ())


def test_without_recompute_activations_of_all_in_flight_are_held() -> None:
    memory = DeviceMemory(None, held_bytes=100, input_bytes=10, activation_bytes=20, extra_bytes=0)
    stage = stage_of(range(2), 2, FakeTime(), recompute=False, memory=memory)
    stage.forward(4, ())
    stage.forward(5, ())
    assert memory.peak_bytes == 160


def test_a_state_that_does_not_fit_is_out_of_memory_at_once() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="100 of state"):
        DeviceMemory(99, held_bytes=100, input_bytes=0, activation_bytes=0, extra_bytes=0)
