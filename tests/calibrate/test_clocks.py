from __future__ import annotations

import time

import pytest
import torch

from calibrate.computing.sections import measure_benches
from calibrate.timing.clocks import CpuClock, clock_of, devices_of
from calibrate.timing.samples import Sampling
from morph.contract.errors import JobError


def test_processor_time_does_not_count_what_others_do_with_the_core() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, CpuClock)
    start = clock.mark()
    time.sleep(0.05)  # what another process does with the core looks the same to this clock
    assert clock.between_s(start, clock.mark()) < 0.04


def test_a_device_that_is_not_there_is_refused() -> None:
    assert devices_of("cpu") == (torch.device("cpu"),)
    with pytest.raises(JobError, match=r"device: this machine has no such device \(got 'tpu'\); allowed: cpu"):
        devices_of("tpu")


class LateClock:
    """As on a device that works behind the host's back: a mark has a time only once the device got there."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.queued: list[list[float]] = []

    def settle(self) -> None:
        for mark in self.queued:
            mark.append(self.now_s)
            self.now_s += 1.5
        self.queued.clear()

    def mark(self) -> list[float]:
        mark: list[float] = []
        self.queued.append(mark)
        return mark

    def between_s(self, start: list[float], end: list[float]) -> float:
        return end[0] - start[0]  # fails on a mark that was not waited for


class Task:
    """In place of a bench; ``order`` says what was run."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.section = type("Section", (), {"signature": name, "finish": None})
        self.device = torch.device("cpu")
        self._name, self._order = name, order

    def forward(self, sample: int) -> tuple[str, torch.Tensor]:
        self._order.append(f"F{self._name}{sample}")
        return self._name, torch.zeros(10, dtype=torch.uint8)

    def backward(self, run: tuple[str, torch.Tensor]) -> None:
        assert run[0] == self._name
        self._order.append(f"B{self._name}")

    def both(self) -> None:
        self.backward(self.forward(0))

    def given_bytes(self) -> int:
        return 7


@pytest.mark.slow
def test_times_are_read_only_after_the_device_is_done_and_kinds_take_turns() -> None:
    order: list[str] = []
    tasks = [Task("a", order), Task("b", order)]
    found = measure_benches(tasks, 2, LateClock(), Sampling(budget_s=0.0, most=5))  # type: ignore[arg-type]
    assert found.keys() == {"a", "b"}
    for measured in found.values():
        assert measured.forward.median_s == measured.backward.median_s == 1.5
        assert measured.forward.num_samples == 5
        assert (measured.input_bytes_per_sample, measured.activation_bytes_per_sample) == (4, 5)
    assert order[-8:] == ["Fa3", "Ba", "Fb3", "Bb", "Fa4", "Ba", "Fb4", "Bb"]
