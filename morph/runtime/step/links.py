"""Transfers boundary tensors between two neighbouring stages, asynchronously and in micro-batch order.

A ``Receiver`` keeps receives posted ahead of need, so that transfers overlap compute; a ``Sender`` hands tensors over
and releases them once they have left. The plan's windows bound how far senders can run ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from morph.cutting.sections.section import BoundaryTensor
from morph.runtime.device.links import Arrival, Link
from morph.runtime.groups.channels import Transfer

NUM_POSTED = 2

Interval = tuple[float, float]
"""Start and end of one micro-batch's transfer, on the clock of ``time.perf_counter``."""


def _interval(start_s: float, transfer: Transfer) -> Interval:
    return start_s, transfer.done_at_s or start_s  # a message without tensors has no end


class Sender:
    """Sends the tensors of one boundary to the neighbouring stage.

    ``peak`` is the largest number of micro-batches that were handed over and had not left; ``history`` has one interval
    for each that had left at the last ``send`` or ``flush``. ``lacking``: default specs of tensors that may be absent;
    each message says which of them are present. Empty: no tensor may be absent. ``device``: the device of these
    tensors; None: the host.
    """

    def __init__(self, link: Link, lacking: Sequence[BoundaryTensor] = (), device: torch.device | None = None) -> None:
        self._link = link
        self._lacking, self._device = tuple(lacking), device
        self._pending: deque[tuple[float, Transfer]] = deque()
        self.peak = 0
        self.history: list[Interval] = []

    def send(self, tensors: Sequence[Tensor | None], lacking: Sequence[BoundaryTensor] = ()) -> None:
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
    """Receives the tensors of one boundary, ``count`` micro-batches in order.

    ``peak`` is the largest number of micro-batches that had arrived and were not taken; ``history`` has one interval,
    from posting to arrival, for each micro-batch that was taken. ``may_lack``: messages say which of their tensors are
    present. ``specs_of``: specs of a message's tensors, by its place, if they differ in shape from ``specs``.
    """

    def __init__(
        self,
        link: Link,
        specs: Sequence[BoundaryTensor],
        count: int,
        *,
        may_lack: bool = False,
        specs_of: Callable[[int], Sequence[BoundaryTensor]] | None = None,
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
