"""Runs one step's micro-batches through a stage, then reduces the gradients (Varuna 3.2, 5, 6)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from morph.contract.messages import ComputeTimes, MicroBatchLoss
from morph.cutting.cut_model import BoundaryTensor
from morph.runtime.accumulators import Accumulator
from morph.runtime.channels import GROUP_TIMEOUT_S, Channel, Pending, Ring
from morph.runtime.faults import FaultPlan
from morph.runtime.interrupt import Interrupt
from morph.runtime.links import Receiver, Sender
from morph.runtime.order_follower import OrderFollower, Task
from morph.runtime.stage import Stage


@dataclass(frozen=True)
class Neighbours:
    """Channels to the stages before and behind; None at the pipeline's ends."""

    activations_in: Channel | None
    gradients_out: Channel | None
    activations_out: Channel | None
    gradients_in: Channel | None


@dataclass(frozen=True)
class StageWork:
    """What one stage has to do in one step."""

    micro_batches: Sequence[int]
    order: str
    window: int
    opportunistic: bool
    inputs: tuple[BoundaryTensor, ...]
    outputs: tuple[BoundaryTensor, ...]
    metric_names: tuple[str, ...] = ()


@dataclass
class Stopwatch:
    """Seconds by kind of work in one step."""

    start_s: float = field(default_factory=time.perf_counter)
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("F", "R", "B", "reduce", "wait"), 0.0))

    def times(self) -> ComputeTimes:
        """The step's times as reported to the manager."""
        return ComputeTimes(
            forward_s=self.spent_s["F"],
            recompute_s=self.spent_s["R"],
            backward_s=self.spent_s["B"],
            reduce_s=self.spent_s["reduce"],
            wait_s=self.spent_s["wait"],
            step_s=time.perf_counter() - self.start_s,
        )


class Executor:
    """One stage's run of one step."""

    def __init__(
        self,
        stage: Stage,
        work: StageWork,
        neighbours: Neighbours,
        interrupt: Interrupt,
        faults: FaultPlan,
        device: torch.device,
    ) -> None:
        self._stage = stage
        self._work = work
        self._interrupt = interrupt
        self._faults = faults
        self._device = device
        count = len(work.micro_batches)
        self._first, self._last = neighbours.activations_in is None, neighbours.activations_out is None
        self._follower = OrderFollower(work.order, work.window, opportunistic=work.opportunistic)
        self._activations_in = self._receiver(neighbours.activations_in, work.inputs, count)
        self._gradient_specs = tuple(spec for spec in work.outputs if spec.requires_grad)
        self._gradients_in = self._receiver(neighbours.gradients_in, self._gradient_specs, count)
        self._activations_out = Sender(neighbours.activations_out) if neighbours.activations_out else None
        self._gradients_out = Sender(neighbours.gradients_out) if neighbours.gradients_out else None
        self._loss_scale = 1.0
        self.losses: list[MicroBatchLoss] = []
        self.stopwatch = Stopwatch()

    def _receiver(self, channel: Channel | None, specs: Sequence[BoundaryTensor], count: int) -> Receiver | None:
        return Receiver(channel, specs, count, self._device) if channel else None

    def run(self, accumulators: Mapping[str, Accumulator], loss_scale: float = 1.0) -> None:
        """Run every task; gradients go to the accumulator of their parameter. Raises as ``Interrupt.wait_for``.

        ``loss_scale`` is what the loss is multiplied by before its backward.
        """
        self._loss_scale = loss_scale
        while not self._follower.finished:
            self._interrupt.check()
            task = self._follower.next_task(self._activations(), self._gradients())
            if task is None:
                self.stopwatch.spent_s["wait"] += self._interrupt.wait_for(
                    lambda: self._follower.next_task(self._activations(), self._gradients()) is not None,
                    "the neighbouring stages' activations or gradients",
                    GROUP_TIMEOUT_S,
                )
                continue
            start_s = time.perf_counter()
            self._run_task(task, accumulators)
            self._follower.done(task)
            self.stopwatch.spent_s[task.value] += time.perf_counter() - start_s
        for sender in (self._activations_out, self._gradients_out):
            if sender is not None:
                sender.flush()

    def _activations(self) -> int:
        return len(self._work.micro_batches) if self._activations_in is None else self._activations_in.arrived()

    def _gradients(self) -> int:
        return self._follower.progress.forwards if self._gradients_in is None else self._gradients_in.arrived()

    def _run_task(self, task: Task, accumulators: Mapping[str, Accumulator]) -> None:
        progress = self._follower.progress
        if task is Task.FORWARD:
            self._faults.reach("forward")
            self._forward(self._work.micro_batches[progress.forwards])
        elif task is Task.RECOMPUTE:
            self._stage.recompute(self._work.micro_batches[progress.recomputes])
        else:
            self._faults.reach("backward")
            self._backward(self._work.micro_batches[progress.backwards], accumulators)

    def _forward(self, micro_batch: int) -> None:
        inputs = self._activations_in.take() if self._activations_in else ()
        outputs = self._stage.forward(micro_batch, inputs)
        if self._activations_out:
            self._activations_out.send(outputs)
        else:
            self.losses.append(told_loss(micro_batch, outputs, self._work.metric_names))

    def _backward(self, micro_batch: int, accumulators: Mapping[str, Accumulator]) -> None:
        gradients: tuple[Tensor | None, ...]
        if self._gradients_in is None:
            seed = torch.full((), self._loss_scale, device=self._device, dtype=self._work.outputs[0].dtype)
            gradients = (seed, *(None for _ in self._work.metric_names))
        else:
            arrived = iter(self._gradients_in.take())
            gradients = tuple(next(arrived) if spec.requires_grad else None for spec in self._work.outputs)
        found = self._stage.backward(micro_batch, gradients, lambda name, grad: accumulators[name].add(name, grad))
        if self._gradients_out:
            self._gradients_out.send([gradient for gradient in found if gradient is not None])


def told_loss(micro_batch: int, outputs: Sequence[Tensor], metric_names: Sequence[str]) -> MicroBatchLoss:
    """What the last stage's outputs say of one micro-batch."""
    loss, *metrics = (float(output) for output in outputs)
    return MicroBatchLoss(micro_batch=micro_batch, loss=loss, metrics=dict(zip(metric_names, metrics, strict=True)))


def reduce_all(
    accumulators: Mapping[str, Accumulator], rings: Mapping[str, Ring | None], faults: FaultPlan, stopwatch: Stopwatch
) -> None:
    """Reduce every unit over its ring, all in flight at once; units in the same order on every worker."""
    start_s = time.perf_counter()
    pending: list[Pending] = []
    for unit in sorted(accumulators):
        pending += accumulators[unit].start_reduce(rings[unit])
        faults.reach("reduce")
    for reduction in pending:
        reduction.wait("the gradient all-reduce")
    stopwatch.spent_s["reduce"] += time.perf_counter() - start_s
