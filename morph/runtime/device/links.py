"""Links between neighbours: ``send`` tensors, and ``receive`` them; a stage's boundary has a queue at each end.

``HostLink`` is for tensors in host memory, ``StagedLink`` for those of a device, whose copies to and from pinned memory
run while it computes; mailboxes (``mailboxes.py``) are read from device to device. An abort of the generation's
``Interrupt`` ends every wait. A ``Receiver`` keeps receives posted ahead of need, so that transfers overlap compute; a
``Sender`` hands tensors over and releases them once they have left.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from morph.runtime.device.devices import Event
from morph.runtime.device.staging import Staging, staging_of
from morph.runtime.groups.channels import Carrier, Transfer
from morph.runtime.groups.interrupt import Interrupt

NUM_POSTED = 2

Interval = tuple[float, float]
"""Start and end of one micro-batch's transfer, on the clock of ``time.perf_counter``."""


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
        """Start sending tensors of the link's device, copied unless ``lent``; host tensors ``beside`` them go too."""

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
    detached = [tensor.detach() for tensor in tensors]
    return [tensor.contiguous() if lent else tensor.clone(memory_format=torch.contiguous_format) for tensor in detached]


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
    """Copies of device tensors to the host, and a transfer after each, in this order; those ``beside`` go first.

    ``joined``: flat bytes, some of which may be on the host, are sent as one tensor.
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


def _interval(start_s: float, transfer: Transfer) -> Interval:
    return start_s, transfer.done_at_s or start_s  # a message without tensors has no end


class Sender:
    """Sends the tensors of one boundary to the neighbouring stage; ``history``: an interval for each that has left.

    ``peak``: the most micro-batches that were handed over and had not left. ``lacking``: default specs of tensors that
    may be absent; each message says which are present. ``device``: of these tensors; None: the host.
    """

    def __init__(self, link: Link, lacking: Sequence[TensorSpec] = (), device: torch.device | None = None) -> None:
        self._link = link
        self._lacking, self._device = tuple(lacking), device
        self._pending: deque[tuple[float, Transfer]] = deque()
        self.peak = 0
        self.history: list[Interval] = []

    def send(self, tensors: Sequence[Tensor | None], lacking: Sequence[TensorSpec] = ()) -> None:
        """Start sending one micro-batch's tensors, with zeros for absent ones; returns at once."""
        like = tuple(lacking) or self._lacking
        while self._pending and self._pending[0][1].done:
            self._let_go()
        beside = _are_there(tensors) if self._lacking else ()
        filled = [
            torch.zeros(like[place].shape, dtype=like[place].dtype, device=self._device) if tensor is None else tensor
            for place, tensor in enumerate(tensors)
        ]
        # not lent: a result may be a view of memory that is written again
        self._pending.append((time.perf_counter(), self._link.send(filled, beside=beside)))
        self.peak = max(self.peak, len(self._pending))

    def flush(self) -> None:
        """Block until everything has left. Raises as ``Interrupt.wait_for``."""
        while self._pending:
            self._pending[0][1].wait("activations or gradients to leave")
            self._let_go()

    def _let_go(self) -> None:
        self.history.append(_interval(*self._pending.popleft()))


class Receiver:
    """Receives the tensors of one boundary, ``count`` micro-batches in order; ``history``: an interval for each taken.

    ``peak``: the most that had arrived and were not taken. ``may_lack``: messages say which tensors are present.
    ``specs_of``: specs of a message's tensors, by its place, if they differ in shape from ``specs``.
    """

    def __init__(
        self,
        link: Link,
        specs: Sequence[TensorSpec],
        count: int,
        *,
        may_lack: bool = False,
        specs_of: Callable[[int], Sequence[TensorSpec]] | None = None,
    ) -> None:
        self._link = link
        self._specs = tuple(specs)
        self._specs_of = specs_of or (lambda _: self._specs)
        self._count = count
        self._may_lack = may_lack and bool(specs)
        self._to_post = count
        self._posted: deque[tuple[float, Arrival, tuple[Tensor, ...]]] = deque()
        self._taken = 0
        self.peak = 0
        self.history: list[Interval] = []
        self._post()

    def arrived(self) -> int:
        """The number of micro-batches that have arrived so far, including those already taken."""
        untaken = 0
        for _, arrival, _ in self._posted:
            if not arrival.done:
                break
            untaken += 1
        self.peak = max(self.peak, untaken)
        return self._taken + untaken

    def take(self) -> tuple[Tensor, ...]:
        """Return the next micro-batch's tensors; it must have arrived."""
        return self._take()[0]

    def take_there(self) -> tuple[Tensor | None, ...]:
        """Return the next micro-batch's tensors, with None for absent ones."""
        tensors, beside = self._take()
        there = beside[0].tolist() if beside else [True] * len(tensors)
        return tuple(tensor if is_there else None for tensor, is_there in zip(tensors, there, strict=True))

    def _take(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        posted_s, arrival, beside = self._posted.popleft()
        self._taken += 1
        tensors = arrival.take()
        self.history.append(_interval(posted_s, arrival))
        self._post()
        return tensors, beside

    def _post(self) -> None:
        while self._to_post and len(self._posted) < NUM_POSTED:
            beside = _are_there(self._specs) if self._may_lack else ()
            specs = self._specs_of(self._count - self._to_post)
            self._posted.append((time.perf_counter(), self._link.receive(specs, beside=beside), beside))
            self._to_post -= 1


def _are_there(tensors: Sequence[object | None]) -> tuple[Tensor]:
    """Return the flags that are sent with tensors that may be absent."""
    return (torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8),)
