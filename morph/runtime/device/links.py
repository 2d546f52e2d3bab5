"""Links between neighbours: ``send`` tensors, and ``receive`` them.

Every worker has a link for each direction to each neighbour, and one contract test covers all implementations:
``HostLink`` for tensors in host memory, and ``StagedLink`` for tensors of a device, whose copies to and from pinned
memory run while the device computes. Both use a ``Carrier`` for host tensors. Mailboxes (``mailboxes.py``) are read
from device to device, and their carrier transports only numbers. An abort of the generation's ``Interrupt`` ends every
wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from morph.runtime.device.devices import Event
from morph.runtime.device.staging import Staging, staging_of
from morph.runtime.groups.channels import Carrier, Transfer
from morph.runtime.groups.interrupt import Interrupt


class TensorSpec(Protocol):
    """The shape and type of a tensor to be received."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's element type."""


class Arrival(Transfer, Protocol):
    """Tensors on their way to this worker."""

    def take(self) -> tuple[Tensor, ...]:
        """Return the tensors, once ``done``: the calling thread's stream may use them, and nothing else uses them."""


class Link(Protocol):
    """One direction between two workers: messages of one or more tensors, in order."""

    def send(self, tensors: Sequence[Tensor], *, lent: bool = False, beside: Sequence[Tensor] = ()) -> Transfer:
        """Start sending the tensors, which are on the link's device; returns at once.

        They are copied first unless ``lent``: then the caller leaves them unchanged until they have left. ``beside``:
        small tensors in host memory that are sent with them and do not change.
        """

    def receive(self, specs: Sequence[TensorSpec], *, beside: Sequence[Tensor] = ()) -> Arrival:
        """Start receiving one message; returns at once. ``beside``: memory for the host tensors of the message."""


class HostLink:
    """See ``Link``: for tensors in host memory, which are sent and received without copies."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def send(self, tensors: Sequence[Tensor], *, lent: bool = False, beside: Sequence[Tensor] = ()) -> Transfer:
        own = [tensor.detach() if lent else tensor.detach().to("cpu", copy=True) for tensor in tensors]
        return Several([self._carrier.transfer(tensor.contiguous()) for tensor in (*beside, *own)])

    def receive(self, specs: Sequence[TensorSpec], *, beside: Sequence[Tensor] = ()) -> Arrival:
        tensors = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in specs)
        return HostArrival(tensors, [self._carrier.transfer(tensor) for tensor in (*beside, *tensors)])


class Several:
    """Several transfers as one, which is over once all of them are over."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self.transfers = tuple(transfers)

    @property
    def done(self) -> bool:
        return all(transfer.done for transfer in self.transfers)

    @property
    def done_at_s(self) -> float:
        return max((transfer.done_at_s for transfer in self.transfers), default=0.0)

    def wait(self, what: str, timeout_s: float | None = None) -> float:
        """See ``Transfer.wait``: each within the bound."""
        return sum(transfer.wait(what, timeout_s) for transfer in self.transfers)


class HostArrival(Several):
    """See ``Arrival``."""

    def __init__(self, tensors: tuple[Tensor, ...], transfers: Sequence[Transfer]) -> None:
        super().__init__(transfers)
        self._tensors = tensors

    def take(self) -> tuple[Tensor, ...]:
        assert self.done
        return self._tensors


class StagedLink:
    """See ``Link``: for tensors on a device."""

    def __init__(self, carrier: Carrier, staging: Staging, interrupt: Interrupt) -> None:
        self._carrier, self._staging, self._interrupt = carrier, staging, interrupt

    def send(self, tensors: Sequence[Tensor], *, lent: bool = False, beside: Sequence[Tensor] = ()) -> Transfer:
        """See ``Link.send``. The copy is within the device, so that the next computation does not wait for the host."""
        own = own_of(tensors, lent=lent)
        return Leaving(own, self._staging, self._carrier.transfer, self._interrupt, beside)

    def receive(self, specs: Sequence[TensorSpec], *, beside: Sequence[Tensor] = ()) -> Arrival:
        hosts = [self._staging.device.pinned(spec.shape, spec.dtype) for spec in specs]
        return StagedArrival(hosts, [self._carrier.transfer(host) for host in (*beside, *hosts)], self._staging)


def own_of(tensors: Sequence[Tensor], *, lent: bool) -> list[Tensor]:
    """Return contiguous tensors on the same device that will not change: copies, unless they are ``lent``."""
    found = [tensor.detach() for tensor in tensors]
    return [tensor.contiguous() if lent else tensor.clone(memory_format=torch.contiguous_format) for tensor in found]


class Begun:
    """See ``Transfer``: another thread begins the transfer, or fails it, when the device has reached it."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._begun: Several | None = None
        self._failure: Exception | None = None

    def begin(self, transfers: Sequence[Transfer]) -> None:
        """Set the transfers of which it consists."""
        self._begun = Several(transfers)
        self._interrupt.notify()

    def fail(self, error: Exception) -> None:
        """Set the error that ``done`` raises."""
        self._failure = error
        self._interrupt.notify()

    @property
    def done(self) -> bool:
        """See ``Transfer.done``. Raises the error of ``fail``."""
        if self._failure is not None:
            raise self._failure
        return self._begun is not None and self._begun.done

    @property
    def done_at_s(self) -> float:
        return 0.0 if self._begun is None else self._begun.done_at_s

    def wait(self, what: str, timeout_s: float | None = None) -> float:
        return self._interrupt.wait_for(lambda: self.done, what, timeout_s)


class Leaving(Begun):
    """Copies of device tensors to the host, and a transfer that begins after each copy, in this order.

    The host tensors ``beside`` them are sent first. ``joined``: flat bytes, some of which may be on the host, are sent
    as one tensor; nothing that a step waits for is queued after them.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        staging: Staging,
        carry: Callable[[Tensor], Transfer],
        interrupt: Interrupt,
        beside: Sequence[Tensor] = (),
        *,
        joined: bool = False,
    ) -> None:
        super().__init__(interrupt)
        self._carry, self._beside = carry, tuple(beside)
        (staging.joined_to_host if joined else staging.to_host)(tensors, self._start, self.fail)

    def _start(self, hosts: Sequence[Tensor]) -> None:
        if not self._interrupt.over:
            self.begin([self._carry(host) for host in (*self._beside, *hosts)])


class StagedArrival(Several):
    """See ``Arrival``. The copy to the device starts when ``done`` first finds the tensors on the host."""

    def __init__(self, hosts: Sequence[Tensor], transfers: Sequence[Transfer], staging: Staging) -> None:
        super().__init__(transfers)
        self._hosts: Sequence[Tensor] = hosts
        self._staging = staging
        self._copied: tuple[tuple[Tensor, ...], Event] | None = None

    @property
    def done(self) -> bool:
        """Return whether the copy to the device is enqueued. Only the training thread calls this."""
        if self._copied is None and super().done:
            self._copied = self._staging.to_device(self._hosts)
            self._hosts = ()
        return self._copied is not None

    def take(self) -> tuple[Tensor, ...]:
        assert self.done
        assert self._copied is not None
        self._staging.arrived(*self._copied)
        return self._copied[0]


def link_over(carrier: Carrier, device: torch.device, interrupt: Interrupt) -> Link:
    """Return a link for tensors of a device over a carrier of host tensors."""
    if device.type == "cpu":
        return HostLink(carrier)
    return StagedLink(carrier, staging_of(device), interrupt)
