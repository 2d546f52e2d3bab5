"""Emulated links over real channels: a message has arrived when both link and channel have delivered it.

The sender stamps the message with its due time and sends it at once, so emulated and real transfer times overlap. Both
ends must be on one machine, for a common clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from morph.runtime.emulation.clock import NEVER_S, Alarm, DeviceClock
from morph.runtime.emulation.message import due_s, late_s, stamp
from morph.runtime.groups.channels import Carrier, Transfer
from morph.runtime.groups.interrupt import Interrupt


@dataclass(eq=False)
class OutgoingLink:
    """The sending end of a link; ``times_s``: of each message on an idle link, ``wire_s``: the part on the wire."""

    channel: Carrier
    clock: DeviceClock
    times_s: Iterator[float]
    wire_s: float
    _wire_free_s: float = NEVER_S
    _due_s: float = NEVER_S

    def transfer(self, tensor: Tensor) -> Transfer:
        """Start sending the result of the device's last task."""
        self._wire_free_s = max(self._wire_free_s, self.clock.free_s) + self.wire_s
        latency_s = max(0.0, next(self.times_s) - self.wire_s)
        self._due_s = max(self._due_s, self._wire_free_s + latency_s)
        stamp(tensor, self._due_s, self.clock.late_s)
        return self.channel.transfer(tensor)


@dataclass(eq=False)
class IncomingLink:
    """The receiving end of a link; ``alarm``: wakes waiting threads."""

    channel: Carrier
    clock: DeviceClock
    alarm: Alarm
    interrupt: Interrupt

    def transfer(self, tensor: Tensor) -> Transfer:
        """Start receiving; the transfer is done when the message has really arrived and is due."""
        real = self.channel.transfer(tensor)

        def arrived(at_s: float) -> None:
            self.clock.arrived(at_s, late_s(tensor))

        return HeldBack(real, lambda: due_s(tensor), self.clock, self.alarm, self.interrupt, arrived)


@dataclass(eq=False)
class IncomingState(IncomingLink):
    """The receiving end of a unit's state, which takes the time of its unscaled bytes, one unit after the other.

    ``seconds_per_byte``: of each byte that is really received.
    """

    seconds_per_byte: float
    _free_s: float = NEVER_S

    def transfer(self, tensor: Tensor) -> Transfer:
        """Start receiving; concurrent requests are served one after the other."""
        real = self.channel.transfer(tensor)
        if tensor.dtype != torch.uint8:
            return real
        due = self._free_s = max(self._free_s, self.clock.now()) + tensor.numel() * self.seconds_per_byte
        return HeldBack(real, lambda: due, self.clock, self.alarm, self.interrupt)


@dataclass(eq=False)
class HeldBack:
    """A transfer that is done when it has really arrived and is due; then ``arrived`` is called, once."""

    real: Transfer
    find_due_s: Callable[[], float]
    clock: DeviceClock
    alarm: Alarm
    interrupt: Interrupt
    arrived: Callable[[float], None] = lambda _: None
    _due_s: float | None = None
    _done: bool = False

    @property
    def done(self) -> bool:
        """Return whether the transfer is done. Only the training thread calls this; a change of the answer wakes it."""
        if self._done or not self.real.done:
            return self._done
        if self._due_s is None:
            self._due_s = self.find_due_s()
            if self._due_s > self.clock.now():
                self.alarm.at(self._due_s, self.interrupt.notify)
        if self._due_s <= self.clock.now():
            self._done = True
            self.arrived(self._due_s)
        return self._done

    @property
    def done_at_s(self) -> float:
        """The time of arrival: the later of the real and the due time."""
        return max(self.real.done_at_s, self._due_s or NEVER_S)

    def wait(self, what: str, timeout_s: float | None = None) -> float:
        return self.interrupt.wait_for(lambda: self.done, what, timeout_s)
