"""Runs one step's micro-batches through a stage, then reduces the gradients (Varuna 3.2, 5, 6)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from morph.contract.messages import MicroBatchLoss
from morph.contract.timeline import ComputeTimes, Peaks, Span, SpanKind
from morph.cutting.sections.section import BoundaryTensor
from morph.runtime.groups.channels import GROUP_TIMEOUT_S, Carrier, Pending, Ring
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.accumulators import Accumulator
from morph.runtime.step.links import Interval, Receiver, Sender
from morph.runtime.step.schedule_follower import ScheduleFollower, Task
from morph.runtime.step.stage import StageTasks

_SPAN_KINDS: dict[Task, SpanKind] = {
    Task.FORWARD: "forward",
    Task.RECOMPUTE: "recompute",
    Task.BACKWARD: "backward",
}


@dataclass(frozen=True)
class Neighbours:
    """Channels to the stages before and behind; None at the pipeline's ends."""

    activations_in: Carrier | None
    gradients_out: Carrier | None
    activations_out: Carrier | None
    gradients_in: Carrier | None


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
    record_timeline: bool = False


@dataclass
class Stopwatch:
    """Seconds by kind of work in one step, and where asked for what was done when.

    ``start_ns`` is the wall clock at the start; everything else is on the clock of ``time.perf_counter``.
    """

    recording: bool = False
    start_ns: int = field(default_factory=time.time_ns)
    start_s: float = field(default_factory=time.perf_counter)
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("F", "R", "B", "reduce", "wait"), 0.0))
    spans: list[Span] = field(default_factory=list)
    finished: Callable[[float, float, float, float | None], None] | None = None
    """Told (forward, recompute, backward) in seconds of each micro-batch when its backward is done.

    Last, the processor time of forward and backward; None where the device is another.
    """
    late_s: float = 0.0
    """Of an emulated device: the most by which a task of the step ended late, because the host was busy."""

    device_took_s: Callable[[], float] | None = None
    """Of an emulated device: what the last task took by its own clock, which a busy host does not disturb."""
    begun: dict[int, tuple[float, float, float | None]] = field(default_factory=dict)
    """Seconds of forward, recompute and the forward's processor time of the micro-batches in flight."""

    def spend(self, task: Task, micro_batch: int, took_s: float, processor_s: float | None = None) -> None:
        """Count a task's time (seconds), and its processor time where that is the device's."""
        self.spent_s[task.value] += took_s
        if self.device_took_s is not None:
            took_s, processor_s = self.device_took_s(), None
        if task is Task.FORWARD:
            self.begun[micro_batch] = (took_s, 0.0, processor_s)
        elif task is Task.RECOMPUTE:
            forward_s, _, spent_s = self.begun[micro_batch]
            self.begun[micro_batch] = (forward_s, took_s, spent_s)
        else:
            forward_s, recompute_s, spent_s = self.begun.pop(micro_batch)
            if self.finished is not None:
                whole_s = None if spent_s is None or processor_s is None else spent_s + processor_s
                self.finished(forward_s, recompute_s, took_s, whole_s)

    def record(self, kind: SpanKind, micro_batch: int | None, start_s: float, end_s: float) -> None:
        """Keep a span of the timeline, if one is asked for."""
        if self.recording:
            start_s, end_s = start_s - self.start_s, end_s - self.start_s
            self.spans.append(Span(kind=kind, micro_batch=micro_batch, start_s=start_s, end_s=end_s))

    def times(self) -> ComputeTimes:
        """The step's times as reported to the manager."""
        return ComputeTimes(
            forward_s=self.spent_s["F"],
            recompute_s=self.spent_s["R"],
            backward_s=self.spent_s["B"],
            reduce_s=self.spent_s["reduce"],
            wait_s=self.spent_s["wait"],
            step_s=time.perf_counter() - self.start_s,
            late_s=self.late_s,
        )


class Executor:
    """One stage's run of one step."""

    def __init__(
        self,
        stage: StageTasks,
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
        self._follower = ScheduleFollower(work.order, work.window, opportunistic=work.opportunistic)
        self._activations_in = self._receiver(neighbours.activations_in, work.inputs, count)
        self._gradient_specs = tuple(spec for spec in work.outputs if spec.requires_grad)
        self._gradients_in = self._receiver(neighbours.gradients_in, self._gradient_specs, count)
        self._activations_out = Sender(neighbours.activations_out) if neighbours.activations_out else None
        self._gradients_out = Sender(neighbours.gradients_out) if neighbours.gradients_out else None
        self._loss_scale = 1.0
        self.losses: list[MicroBatchLoss] = []
        self.stopwatch = Stopwatch(recording=work.record_timeline)
        self._peak_in_flight = self._peak_live = 0

    def _receiver(self, channel: Carrier | None, specs: Sequence[BoundaryTensor], count: int) -> Receiver | None:
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
                self._wait()
                continue
            start_s, began_s = time.perf_counter(), time.thread_time()
            micro_batch = self._run_task(task, accumulators)
            self._follower.done(task)
            end_s, spent_s = time.perf_counter(), time.thread_time() - began_s
            processor_s = spent_s if self._device.type == "cpu" else None
            self.stopwatch.spend(task, micro_batch, end_s - start_s, processor_s)
            self.stopwatch.record(_SPAN_KINDS[task], micro_batch, start_s, end_s)
            self._count_stored()

    def finish(self) -> None:
        """Block until everything has left; to be called after the reductions, which need not wait for it."""
        for sender in (self._activations_out, self._gradients_out):
            if sender is not None:
                sender.flush()
        self._record_transfers()

    @property
    def peaks(self) -> Peaks:
        """The most that was held at once so far."""
        links = {
            "untaken_activations": self._activations_in,
            "untaken_gradients": self._gradients_in,
            "unsent_activations": self._activations_out,
            "unsent_gradients": self._gradients_out,
        }
        return Peaks(
            in_flight=self._peak_in_flight,
            live_graphs=self._peak_live,
            **{name: link.peak if link else 0 for name, link in links.items()},
        )

    def _count_stored(self) -> None:
        live = self._stage.num_live
        self._peak_live = max(self._peak_live, live)
        self._peak_in_flight = max(self._peak_in_flight, self._stage.num_stored + live)

    def _wait(self) -> None:
        start_s = time.perf_counter()
        self.stopwatch.spent_s["wait"] += self._interrupt.wait_for(
            lambda: self._follower.next_task(self._activations(), self._gradients()) is not None,
            "the neighbouring stages' activations or gradients",
            GROUP_TIMEOUT_S,
        )
        self.stopwatch.record("wait", None, start_s, time.perf_counter())

    def _record_transfers(self) -> None:
        histories: dict[SpanKind, list[Interval]] = {
            "receive_activation": self._activations_in.history if self._activations_in else [],
            "send_activation": self._activations_out.history if self._activations_out else [],
            "receive_gradient": self._gradients_in.history if self._gradients_in else [],
            "send_gradient": self._gradients_out.history if self._gradients_out else [],
        }
        for kind, history in histories.items():
            for micro_batch, interval in zip(self._work.micro_batches, history, strict=False):
                self.stopwatch.record(kind, micro_batch, *interval)

    def _activations(self) -> int:
        return len(self._work.micro_batches) if self._activations_in is None else self._activations_in.arrived()

    def _gradients(self) -> int:
        return self._follower.progress.forwards if self._gradients_in is None else self._gradients_in.arrived()

    def _run_task(self, task: Task, accumulators: Mapping[str, Accumulator]) -> int:
        """Run the next task of this kind; returns the number of its micro-batch."""
        progress = self._follower.progress
        if task is Task.FORWARD:
            micro_batch = self._work.micro_batches[progress.forwards]
            self._faults.reach("forward")
            self._forward(micro_batch)
        elif task is Task.RECOMPUTE:
            micro_batch = self._work.micro_batches[progress.recomputes]
            self._stage.recompute(micro_batch)
        else:
            micro_batch = self._work.micro_batches[progress.backwards]
            self._faults.reach("backward")
            self._backward(micro_batch, accumulators)
        return micro_batch

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
    end_s = time.perf_counter()
    stopwatch.spent_s["reduce"] += end_s - start_s
    stopwatch.record("reduce", None, start_s, end_s)
