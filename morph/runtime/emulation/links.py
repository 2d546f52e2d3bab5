"""Emulated links over real channels: a message has arrived when both link and channel have delivered it.

The sender stamps the message with its due time and sends it at once, so emulated and real transfer times overlap. Both
ends must be on one machine, for a common clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from morph.runtime.emulation.clock import NEVER_S, Alarm, DeviceClock
from morph.runtime.emulation.message import due_s, late_s, stamp
from morph.runtime.groups.channels import Carrier, Transfer
from morph.runtime.groups.interrupt import Interrupt


class OutgoingLink:
    """The sending end of a link; ``times_s``: of each message on an idle link, ``wire_s``: the part on the wire."""

    def __init__(self, channel: Carrier, clock: DeviceClock, times_s: Iterator[float], wire_s: float) -> None:
        self._channel = channel
        self._clock = clock
        self._times_s = times_s
        self._wire_s = wire_s
        self._wire_free_s = NEVER_S
        self._due_s = NEVER_S

    def transfer(self, tensor: Tensor) -> Transfer:
        """Start sending the result of the device's last task."""
        self._wire_free_s = max(self._wire_free_s, self._clock.free_s) + self._wire_s
        latency_s = max(0.0, next(self._times_s) - self._wire_s)
        self._due_s = max(self._due_s, self._wire_free_s + latency_s)
        stamp(tensor, self._due_s, self._clock.late_s)
        return self._channel.transfer(tensor)


class IncomingLink:
    """The receiving end of a link."""

    def __init__(self, channel: Carrier, clock: DeviceClock, alarm: Alarm, interrupt: Interrupt) -> None:
        self._channel = channel
        self._clock = clock
        self._alarm = alarm
        self._interrupt = interrupt

    def transfer(self, tensor: Tensor) -> Transfer:
        """Start receiving; the transfer is done when the message has really arrived and is due."""
        real = self._channel.transfer(tensor)

        def arrived(at_s: float) -> None:
            self._clock.arrived(at_s, late_s(tensor))

        return HeldBack(real, lambda: due_s(tensor), self._clock, self._alarm, self._interrupt, arrived)


class IncomingState:
    """The receiving end of a unit's state, which takes the time of its unscaled bytes, one unit after the other.

    ``alarm``: wakes waiting threads; ``seconds_per_byte``: of each byte that is really received.
    """

    def __init__(
        self, channel: Carrier, clock: DeviceClock, alarm: Alarm, interrupt: Interrupt, seconds_per_byte: float
    ) -> None:
        self._channel = channel
        self._clock = clock
        self._alarm = alarm
        self._interrupt = interrupt
        self._seconds_per_byte = seconds_per_byte
        self._free_s = NEVER_S

    def transfer(self, tensor: Tensor) -> Transfer:
        """Start receiving; concurrent requests are served one after the other."""
        real = self._channel.transfer(tensor)
        if tensor.dtype != torch.uint8:
            return real
        due = self._free_s = max(self._free_s, self._clock.now()) + tensor.numel() * self._seconds_per_byte
        return HeldBack(real, lambda: due, self._clock, self._alarm, self._interrupt)


class HeldBack:
    """A transfer that is done when it has really arrived and is due; then ``arrived`` is called, once."""

    def __init__(
        self,
        real: Transfer,
        find_due_s: Callable[[], float],
        clock: DeviceClock,
        alarm: Alarm,
        interrupt: Interrupt,
        arrived: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._real = real
        self._find_due_s = find_due_s
        self._clock = clock
        self._alarm = alarm
        self._interrupt = interrupt
        self._arrived = arrived
        self._due_s: float | None = None
        self._done = False

    @property
    def done(self) -> bool:
        """Return whether the transfer is done. Only the training thread calls this; a change of the answer wakes it."""
        if self._done or not self._real.done:
            return self._done
        if self._due_s is None:
            self._due_s = self._find_due_s()
            if self._due_s > self._clock.now():
                self._alarm.at(self._due_s, self._interrupt.notify)
        if self._due_s <= self._clock.now():
            self._done = True
            self._arrived(self._due_s)
        return self._done

    @property
    def done_at_s(self) -> float:
        """The time of arrival: the later of the real and the due time."""
        return max(self._real.done_at_s, self._due_s or NEVER_S)

    def wait(self, what: str, timeout_s: float | None = None) -> float:
        return self._interrupt.wait_for(lambda: self.done, what, timeout_s)
