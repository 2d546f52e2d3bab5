"""Emulated links: when messages arrive, and that they are not visible before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from morph.runtime.emulation.clock import Alarm, DeviceClock
from morph.runtime.emulation.links import IncomingLink, IncomingState, OutgoingLink
from morph.runtime.emulation.message import Head, border, due_s, read_head, stamp, write_head
from morph.runtime.groups.interrupt import Interrupt
from tests.emulation.fakes import FakeChannel, FakeTime


class FakeAlarm(Alarm):
    def __init__(self) -> None:
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def at(self, moment_s: float, call: Callable[[], None]) -> None:
        self.calls.append((moment_s, call))


def message() -> torch.Tensor:
    return torch.zeros(border(64).shape, dtype=torch.float64)


def test_a_message_arrives_after_its_task_by_the_links_time() -> None:
    time, channel = FakeTime(), FakeChannel()
    clock = DeviceClock(0.02, time.now, time.sleep)
    link = OutgoingLink(channel, clock, iter([0.5, 0.25]), wire_s=0.0)
    clock.end(clock.begin(), 1.0)
    time.now_s += 0.004  # the executor takes a moment to come to it
    link.transfer(message())
    clock.end(clock.begin(), 1.0)
    link.transfer(message())
    assert [due_s(tensor) for tensor in channel.tensors] == pytest.approx([101.5, 102.25])


def test_messages_keep_their_order_whatever_the_jitter() -> None:
    time, channel = FakeTime(), FakeChannel()
    clock = DeviceClock(0.02, time.now, time.sleep)
    clock.end(clock.begin(), 1.0)
    link = OutgoingLink(channel, clock, iter([3.0, 0.1]), wire_s=0.0)
    link.transfer(message())
    link.transfer(message())
    assert [due_s(tensor) for tensor in channel.tensors] == pytest.approx([104.0, 104.0])


def test_messages_follow_each_other_on_the_wire_and_their_latencies_overlap() -> None:
    time, channel = FakeTime(), FakeChannel()
    clock = DeviceClock(0.02, time.now, time.sleep)
    clock.end(clock.begin(), 1.0)
    link = OutgoingLink(channel, clock, iter([1.5, 1.5, 1.5]), wire_s=0.5)
    for _ in range(3):
        link.transfer(message())
    assert [due_s(tensor) for tensor in channel.tensors] == pytest.approx([102.5, 103.0, 103.5])


def test_a_message_is_not_there_before_it_really_is() -> None:
    time, channel, alarm = FakeTime(), FakeChannel(), FakeAlarm()
    clock = DeviceClock(0.02, time.now, time.sleep)
    tensor = message()
    transfer = IncomingLink(channel, clock, alarm, Interrupt(1)).transfer(tensor)
    stamp(tensor, 99.0)
    assert not transfer.done
    channel.transfers[0].done, channel.transfers[0].done_at_s = True, 99.9
    assert transfer.done
    assert transfer.done_at_s == pytest.approx(99.9)
    assert alarm.calls == []


def test_an_early_message_is_held_back_until_it_is_due() -> None:
    time, channel, alarm = FakeTime(), FakeChannel(), FakeAlarm()
    clock = DeviceClock(0.02, time.now, time.sleep)
    tensor = message()
    transfer = IncomingLink(channel, clock, alarm, Interrupt(1)).transfer(tensor)
    stamp(tensor, 101.0, late_s=0.5)
    channel.transfers[0].done, channel.transfers[0].done_at_s = True, 100.0
    assert not transfer.done
    assert not transfer.done
    assert [moment_s for moment_s, _ in alarm.calls] == [101.0]
    time.now_s = 101.0001
    assert transfer.done
    assert transfer.done_at_s == pytest.approx(101.0)
    assert clock.begin() == pytest.approx(101.0)
    assert clock.late_s == pytest.approx(0.5)


def test_a_units_state_travels_by_its_unscaled_bytes() -> None:
    time, channel, alarm = FakeTime(), FakeChannel(), FakeAlarm()
    link = IncomingState(channel, DeviceClock(0.02, time.now, time.sleep), alarm, Interrupt(1), seconds_per_byte=0.01)
    size = link.transfer(torch.zeros(1, dtype=torch.int64))
    state = link.transfer(torch.zeros(200, dtype=torch.uint8))
    for transfer in channel.transfers:
        transfer.done = True
    assert size.done
    assert not state.done
    assert [moment_s for moment_s, _ in alarm.calls] == [102.0]
    time.now_s = 102.0
    assert state.done


def test_waiting_for_a_message_ends_when_it_is_due() -> None:
    channel, interrupt = FakeChannel(), Interrupt(1)
    clock = DeviceClock(0.02)
    tensor = message()
    transfer = IncomingLink(channel, clock, Alarm(), interrupt).transfer(tensor)
    due = clock.now() + 0.02
    stamp(tensor, due)
    channel.transfers[0].done = True
    transfer.wait("a message", timeout_s=20.0)
    assert clock.now() >= due


def test_a_head_tells_a_message_that_went_astray() -> None:
    tensor = message()
    write_head(tensor, Head(step=3, micro_batch=7, value=0.625))
    assert read_head(tensor, 3, 7) == 0.625
    with pytest.raises(AssertionError, match="step 3, micro-batch 7 came for 3, 8"):
        read_head(tensor, 3, 8)


def test_a_message_holds_its_head_however_small_it_is_scaled() -> None:
    assert border(0).shape == (5,)
    assert border(1_000_000).num_bytes == 1_000_000
