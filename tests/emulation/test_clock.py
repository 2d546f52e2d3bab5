"""When an emulated device is busy, on a clock that the test moves."""

from __future__ import annotations

import pytest

from morph.runtime.emulation.clock import DeviceClock
from tests.emulation.fakes import FakeTime


def clock_of(time: FakeTime, forgiven_s: float = 0.02) -> DeviceClock:
    return DeviceClock(forgiven_s, time.now, time.sleep)


def test_a_task_blocks_for_its_time() -> None:
    time = FakeTime()
    clock = clock_of(time)
    clock.end(clock.begin(), 2.0)
    assert time.now_s == pytest.approx(102.0)
    assert clock.free_s == pytest.approx(102.0)


def test_oversleeping_does_not_add_up() -> None:
    time = FakeTime(oversleep_s=0.005)
    clock = clock_of(time)
    for _ in range(100):
        clock.end(clock.begin(), 0.1)
    assert time.now_s == pytest.approx(110.005)
    assert clock.late_s == pytest.approx(0.005)


def test_work_done_within_a_task_is_part_of_its_time() -> None:
    time = FakeTime()
    clock = clock_of(time)
    begun_s = clock.begin()
    time.now_s += 0.3
    clock.end(begun_s, 1.0)
    assert time.slept == pytest.approx([0.7])


def test_a_small_delay_of_the_host_is_forgiven_and_a_large_one_is_not() -> None:
    time = FakeTime()
    clock = clock_of(time, forgiven_s=0.02)
    clock.end(clock.begin(), 1.0)
    time.now_s += 0.015
    assert clock.begin() == pytest.approx(101.0)
    time.now_s += 0.010
    assert clock.begin() == pytest.approx(101.025)


def test_nothing_is_forgiven_where_nothing_is_to_be() -> None:
    time = FakeTime()
    clock = clock_of(time, forgiven_s=0.0)
    clock.end(clock.begin(), 1.0)
    time.now_s += 0.001
    assert clock.begin() == pytest.approx(101.001)


def test_a_task_that_waited_begins_when_its_input_arrived() -> None:
    time = FakeTime()
    clock = clock_of(time)
    clock.end(clock.begin(), 1.0)
    time.now_s = 105.003
    clock.arrived(105.0)
    assert clock.begin() == pytest.approx(105.0)


def test_an_earlier_arrival_does_not_move_a_task_before_the_end_of_the_one_in_front() -> None:
    time = FakeTime()
    clock = clock_of(time)
    clock.end(clock.begin(), 1.0)
    clock.arrived(100.7)
    time.now_s += 0.002
    assert clock.begin() == pytest.approx(101.0)


def test_after_a_rest_a_task_begins_when_the_worker_comes_to_it() -> None:
    time = FakeTime()
    clock = clock_of(time)
    clock.end(clock.begin(), 1.0)
    clock.rest()
    time.now_s += 0.002
    assert clock.begin() == pytest.approx(101.002)
    assert clock.late_s == 0.0


def test_a_slow_device_takes_longer_over_everything() -> None:
    time = FakeTime()
    clock = clock_of(time)
    clock.slowness = 1.5
    clock.end(clock.begin(), 2.0)
    assert clock.free_s == pytest.approx(103.0)
