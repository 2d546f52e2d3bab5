"""Links that hold messages back, and stages that sleep in place of computing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from benchmarks.emulated_links.cases import SMALL, Case
from morph.contract.messages import DEFAULT_LIMIT_S
from morph.runtime.groups.channels import Channel, Pending
from morph.runtime.groups.interrupt import Interrupt


class Wire:
    """Holds messages back in a thread of its own: in order, each by the latency and an extra of its own."""

    def __init__(self, case: Case, stage: int, direction: int) -> None:
        self._latency_s, self._jitter_s = case.latency_s, case.jitter_s
        self._random = np.random.default_rng([case.seed, stage, direction])
        self._due_s = 0.0
        self._waiting: queue.SimpleQueue[tuple[float, Callable[[], None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._deliver, daemon=True).start()

    def put(self, deliver: Callable[[], None]) -> None:
        extra_s = self._random.exponential(self._jitter_s) if self._jitter_s else 0.0
        self._due_s = max(self._due_s, time.perf_counter() + self._latency_s + extra_s)
        self._waiting.put((self._due_s, deliver))

    def close(self) -> None:
        self._waiting.put(None)

    def _deliver(self) -> None:
        while (entry := self._waiting.get()) is not None:
            due_s, deliver = entry
            time.sleep(max(0.0, due_s - time.perf_counter()))
            deliver()


class HeldBack:
    """A transfer that begins when its wire lets it; as ``Pending``."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self.begun: Pending | None = None

    @property
    def done(self) -> bool:
        return self.begun is not None and self.begun.done

    @property
    def done_at_s(self) -> float:
        return self.begun.done_at_s if self.begun else 0.0

    def wait(self, what: str, timeout_s: float | None = None) -> float:
        return self._interrupt.wait_for(lambda: self.done, what, timeout_s)


class SlowChannel:
    """The sending end of a channel behind a wire."""

    def __init__(self, channel: Channel, wire: Wire, interrupt: Interrupt) -> None:
        self._channel, self._wire, self._interrupt = channel, wire, interrupt

    def transfer(self, tensor: Tensor) -> HeldBack:
        held = HeldBack(self._interrupt)

        def begin() -> None:
            held.begun = self._channel.transfer(tensor)
            self._interrupt.notify()  # it may be done already

        self._wire.put(begin)
        return held


class SleepingStage:
    """As ``morph.runtime.step.stage.Stage``, but it sleeps."""

    def __init__(self, case: Case, last: bool) -> None:
        self._unit_s = case.unit_s
        self._output = torch.ones(SMALL if last else (case.message_bytes // 4,))
        self._gradient = torch.ones(case.message_bytes // 4)
        self.num_stored = self.num_live = 0

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:  # noqa: ARG002
        time.sleep(self._unit_s)
        return (self._output,)

    def recompute(self, micro_batch: int) -> None:  # noqa: ARG002
        time.sleep(self._unit_s)

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None], add: object) -> tuple[Tensor]:  # noqa: ARG002
        time.sleep(2 * self._unit_s)
        return (self._gradient,)


class NoSums:
    """As ``morph.runtime.step.sums.StepSums``, but nothing is summed."""

    def of(self, micro_batch: int) -> None:
        """Where gradients of a micro-batch go."""

    def add_loss(self, micro_batch: int, outputs: Sequence[Tensor], metric_names: Sequence[str]) -> None:
        """Take the last stage's outputs."""

    def count(self, micro_batch: int) -> None:
        """Take note of a backward."""


class _Sleep(torch.autograd.Function):
    """Sleeps in both directions; returns tensors of the size that travels."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, like: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s, ctx.shape = backward_s, value.shape
        time.sleep(forward_s)
        return like.clone()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor, None, None, None]:
        time.sleep(ctx.backward_s)
        return torch.ones(ctx.shape), None, None, None


class SleepingModule(nn.Module):
    """A stage for torch's pipeline; a recompute belongs to its backward, as with ``torch.utils.checkpoint``."""

    def __init__(self, case: Case, last: bool, recompute: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._times_s = (case.unit_s, (3 if recompute else 2) * case.unit_s)
        self._like = torch.ones(1, *(SMALL if last else (case.message_bytes // 4,)))

    def forward(self, value: Tensor) -> Tensor:
        given = value + self.weight if value.shape[-1] == 1 else value
        found: Tensor = _Sleep.apply(given, self._like, *self._times_s)  # type: ignore[no-untyped-call]
        return found


class SlowStage(PipelineStage):
    """A stage of torch's pipeline whose sends go behind wires, and never make the schedule wait."""

    def __init__(self, module: nn.Module, stage: int, num_stages: int) -> None:
        super().__init__(module, stage, num_stages, torch.device("cpu"))
        self.wires: dict[bool, Wire] = {}
        self._sent: queue.SimpleQueue[tuple[Tensor, Any]] = queue.SimpleQueue()

    def get_fwd_send_ops(self, fwd_chunk_index: int) -> list[dist.P2POp]:
        """What the schedule is to send: nothing, where a wire has taken it."""
        return self._taken(super().get_fwd_send_ops(fwd_chunk_index), downstream=True)

    def get_bwd_send_ops(self, bwd_chunk_index: int) -> list[dist.P2POp]:
        """See ``get_fwd_send_ops``."""
        return self._taken(super().get_bwd_send_ops(bwd_chunk_index), downstream=False)

    def _taken(self, sends: list[dist.P2POp], *, downstream: bool) -> list[dist.P2POp]:
        wire = self.wires.get(downstream)
        if wire is None:
            return sends
        for send in sends:
            copy = send.tensor.detach().clone()
            wire.put(lambda copy=copy, send=send: self._begin(copy, send))  # type: ignore[misc]
        return []

    def _begin(self, copy: Tensor, send: dist.P2POp) -> None:
        self._sent.put((copy, dist.isend(copy, group=send.group, group_dst=send.group_peer)))

    def drain(self, count: int) -> None:
        """Wait until so many messages have left."""
        for _ in range(count):
            self._sent.get(timeout=DEFAULT_LIMIT_S)[1].wait()
