"""Boundary tensors between two neighbouring stages: asynchronous, in micro-batch order.

A ``Receiver`` keeps receives posted ahead of need, so that transfers overlap compute; a ``Sender``
hands tensors over and lets go of them once they have left. How far senders can run ahead is bounded
by the plan's windows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from morph.cutting.sections.section import BoundaryTensor
from morph.runtime.groups.channels import Carrier, Transfer

POSTED_AHEAD = 2

Interval = tuple[float, float]
"""Start and end of one micro-batch's transfer, on the clock of ``time.perf_counter``."""


def _interval(start_s: float, transfers: Sequence[Transfer]) -> Interval:
    return start_s, max((transfer.done_at_s for transfer in transfers), default=start_s)


class Sender:
    """Sends the tensors of one boundary to the neighbouring stage.

    ``peak`` is the most micro-batches that were handed over and had not left; ``history`` has one interval for
    each that has left, seen by the last ``send`` or ``flush``.
    """

    def __init__(self, channel: Carrier) -> None:
        self._channel = channel
        self._pending: deque[tuple[float, tuple[Transfer, ...]]] = deque()
        self.peak = 0
        self.history: list[Interval] = []

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Start sending one micro-batch's tensors; returns at once."""
        while self._pending and all(transfer.done for transfer in self._pending[0][1]):
            self._let_go()
        start_s = time.perf_counter()
        # a copy of its own: a result may be a view of something that is written again
        copies = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]
        self._pending.append((start_s, tuple(self._channel.transfer(copy) for copy in copies)))
        self.peak = max(self.peak, len(self._pending))

    def flush(self) -> None:
        """Block until everything has left. Raises as ``Interrupt.wait_for``."""
        while self._pending:
            for transfer in self._pending[0][1]:
                transfer.wait("activations or gradients to leave")
            self._let_go()

    def _let_go(self) -> None:
        self.history.append(_interval(*self._pending.popleft()))


class Receiver:
    """Receives the tensors of one boundary, ``count`` micro-batches in order.

    ``peak`` is the most micro-batches that had arrived and were not taken; ``history`` has one interval, from
    posting to arrival, for each that was taken.
    """

    def __init__(self, channel: Carrier, specs: Sequence[BoundaryTensor], count: int, device: torch.device) -> None:
        self._channel = channel
        self._specs = tuple(specs)
        self._device = device
        self._to_post = count
        self._posted: deque[tuple[float, tuple[Tensor, ...], tuple[Transfer, ...]]] = deque()
        self._taken = 0
        self.peak = 0
        self.history: list[Interval] = []
        self._post()

    def arrived(self) -> int:
        """How many micro-batches have arrived so far, those already taken included."""
        untaken = 0
        for _, _, pending in self._posted:
            if not all(transfer.done for transfer in pending):
                break
            untaken += 1
        self.peak = max(self.peak, untaken)
        return self._taken + untaken

    def take(self) -> tuple[Tensor, ...]:
        """The next micro-batch's tensors; it must have arrived."""
        posted_s, tensors, pending = self._posted.popleft()
        assert all(transfer.done for transfer in pending)
        self._taken += 1
        self.history.append(_interval(posted_s, pending))
        self._post()
        return tuple(tensor.to(self._device) for tensor in tensors)

    def _post(self) -> None:
        while self._to_post and len(self._posted) < POSTED_AHEAD:
            tensors = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in self._specs)
            start_s = time.perf_counter()
            self._posted.append((start_s, tensors, tuple(self._channel.transfer(tensor) for tensor in tensors)))
            self._to_post -= 1
