"""Boundary tensors between two neighbouring stages: asynchronous, in micro-batch order.

A ``Receiver`` keeps receives posted ahead of need, so that transfers overlap compute; a ``Sender``
hands tensors over and lets go of them once they have left. How far senders can run ahead is bounded
by the plan's windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from morph.cutting.cut_model import BoundaryTensor
from morph.runtime.channels import Channel, Pending

POSTED_AHEAD = 2


class Sender:
    """Sends the tensors of one boundary to the neighbouring stage."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pending: deque[Pending] = deque()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Start sending one micro-batch's tensors; returns at once."""
        while self._pending and self._pending[0].done:
            self._pending.popleft()
        for tensor in tensors:
            # a copy of its own: a result may be a view of something that is written again
            self._pending.append(self._channel.transfer(tensor.detach().to("cpu", copy=True).contiguous()))

    def flush(self) -> None:
        """Block until everything has left. Raises as ``Interrupt.wait_for``."""
        while self._pending:
            self._pending.popleft().wait("activations or gradients to leave")


class Receiver:
    """Receives the tensors of one boundary, ``count`` micro-batches in order."""

    def __init__(self, channel: Channel, specs: Sequence[BoundaryTensor], count: int, device: torch.device) -> None:
        self._channel = channel
        self._specs = tuple(specs)
        self._device = device
        self._to_post = count
        self._posted: deque[tuple[tuple[Tensor, ...], tuple[Pending, ...]]] = deque()
        self._taken = 0
        self._post()

    def arrived(self) -> int:
        """How many micro-batches have arrived so far, those already taken included."""
        arrived = self._taken
        for _, pending in self._posted:
            if not all(transfer.done for transfer in pending):
                break
            arrived += 1
        return arrived

    def take(self) -> tuple[Tensor, ...]:
        """The next micro-batch's tensors; it must have arrived."""
        tensors, pending = self._posted.popleft()
        assert all(transfer.done for transfer in pending)
        self._taken += 1
        self._post()
        return tuple(tensor.to(self._device) for tensor in tensors)

    def _post(self) -> None:
        while self._to_post and len(self._posted) < POSTED_AHEAD:
            tensors = tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in self._specs)
            self._posted.append((tensors, tuple(self._channel.transfer(tensor) for tensor in tensors)))
            self._to_post -= 1
