"""Runs one step's micro-batches through a stage, then reduces the gradients (Varuna 3.2, 5, 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from morph.contract.timeline import Peaks, SpanKind, StepTimeline
from morph.runtime.device.links import Interval, Receiver, Sender
from morph.runtime.device.task_clock import TaskClock, clock_of, core_clock, linger
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.step.generation import Borders, Generation, StageWork
from morph.runtime.step.schedule_cursor import ScheduleCursor, Task
from morph.runtime.step.stage import StageTasks
from morph.runtime.step.stopwatch import Stopwatch
from morph.runtime.step.sums import StepSums

ResultT = TypeVar("ResultT")


class Executor:
    """One stage's run of one step; ``slowness``: how many times as long each task takes, for tests."""

    def __init__(
        self,
        stage: StageTasks,
        work: StageWork,
        interrupt: Interrupt,
        faults: FaultPlan,
        device: torch.device,
        *,
        clock: TaskClock | None = None,
        slowness: float = 1.0,
    ) -> None:
        self._stage = stage
        self._work = work
        self._interrupt = interrupt
        self._faults = faults
        self._device = device
        self._clock, self._slowness = clock or clock_of(device), slowness
        self._cursor = ScheduleCursor(work.order, work.window, opportunistic=work.opportunistic)
        activations_in, gradients_out, activations_out, gradients_in = work.links
        count, lack = len(work.micro_batches), work.gradients_may_lack
        self._activations_in = self._gradients_in = None
        if activations_in:
            self._activations_in = Receiver(
                activations_in, work.inputs, count, specs_of=lambda place: work.inputs_of(work.micro_batches[place])
            )
        if gradients_in:
            self._gradients_in = Receiver(
                gradients_in,
                _with_gradients(work.outputs),
                count,
                may_lack=lack,
                specs_of=lambda place: _with_gradients(work.outputs_of(work.micro_batches[place])),
            )
        self._activations_out = Sender(activations_out) if activations_out else None
        lacking = _with_gradients(work.inputs) if lack else ()
        self._gradients_out = Sender(gradients_out, lacking, device) if gradients_out else None
        self._loss_scale = 1.0
        self.stopwatch = Stopwatch(self._clock, recording=work.record_timeline)
        self._peak_in_flight = self._peak_live = 0

    def run(self, sums: StepSums, loss_scale: float = 1.0) -> None:
        """Run every task; gradients and losses go to the sums. Raises as ``Interrupt.wait_for``."""
        self._loss_scale = loss_scale
        with core_clock() as core_times:
            while not self._cursor.finished:
                self._interrupt.check()
                task = self._cursor.next_task(self._activations(), self._gradients())
                if task is None:
                    self._wait()
                    continue
                start, begun = self.stopwatch.mark(), core_times()
                micro_batch = self._run_task(task, sums)
                self._cursor.done(task)
                spent = core_times().since(begun) if self._device.type == "cpu" else None
                self.stopwatch.task_given(task, micro_batch, start, spent)
                self._count_stored()

    def reduce(self, sums: StepSums) -> None:
        """Wait until every unit is reduced over its ring; most were while this worker computed. Raises as ``run``."""
        start = self.stopwatch.mark()
        sums.finish_reduction()
        self.stopwatch.stood("reduce", start)

    def finish(self) -> None:
        """Block until all messages have left; called after the reductions, which need not wait for them."""
        for sender in (self._activations_out, self._gradients_out):
            if sender is not None:
                sender.flush()
        self.stopwatch.settle(self._interrupt)
        self._record_transfers()

    @property
    def peaks(self) -> Peaks:
        """Return the largest numbers of micro-batches held at once so far."""
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

    def timeline(self, current: Generation, step: int) -> StepTimeline:
        """Return the recorded timeline of this step."""
        assert current.slot is not None
        return StepTimeline(
            worker=current.slot.worker,
            stage=current.slot.stage,
            replica=current.slot.replica,
            shape=current.plan.shape,
            schedule=current.plan.schedule,
            window=self._work.window,
            step=step,
            start_ns=self.stopwatch.start_ns,
            peaks=self.peaks,
            spans=tuple(self.stopwatch.spans),
        )

    def _count_stored(self) -> None:
        live = self._stage.num_live
        self._peak_live = max(self._peak_live, live)
        self._peak_in_flight = max(self._peak_in_flight, self._stage.num_stored + live)

    def _wait(self) -> None:
        start = self.stopwatch.mark()
        self._interrupt.wait_for(
            lambda: self._cursor.next_task(self._activations(), self._gradients()) is not None,
            "the neighbouring stages' activations or gradients",
        )
        self.stopwatch.stood("wait", start)

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
        return self._cursor.progress.forwards if self._gradients_in is None else self._gradients_in.arrived()

    def _run_task(self, task: Task, sums: StepSums) -> int:
        """Run the next task of this kind; returns the number of its micro-batch."""
        progress = self._cursor.progress
        if task is Task.FORWARD:
            micro_batch = self._work.micro_batches[progress.forwards]
            self._faults.reach("forward")
            self._forward(micro_batch, sums)
        elif task is Task.RECOMPUTE:
            micro_batch = self._work.micro_batches[progress.recomputes]
            self._timed(lambda: self._stage.recompute(micro_batch))
        else:
            micro_batch = self._work.micro_batches[progress.backwards]
            self._faults.reach("backward")
            self._backward(micro_batch, sums)
        return micro_batch

    def _timed(self, task: Callable[[], ResultT]) -> ResultT:
        """Run a task of the stage, and linger after it on a slow device."""
        if self._slowness == 1.0:
            return task()
        start = self._clock.mark()
        result = task()
        linger(self._clock, start, self._slowness)
        return result

    def _forward(self, micro_batch: int, sums: StepSums) -> None:
        inputs = self._activations_in.take() if self._activations_in else ()
        outputs = self._timed(lambda: self._stage.forward(micro_batch, inputs))
        if self._activations_out:
            self._activations_out.send(outputs)
        else:
            sums.add_loss(micro_batch, outputs, self._work.metric_names, self._work.share_of(micro_batch))

    def _backward(self, micro_batch: int, sums: StepSums) -> None:
        gradients: tuple[Tensor | None, ...]
        if self._gradients_in is None:
            scale = self._loss_scale * self._work.factor_of(micro_batch)
            seed = torch.full((), scale, device=self._device, dtype=self._work.outputs[0].dtype)
            gradients = (seed, *(None for _ in self._work.metric_names))
        else:
            arrived = iter(self._gradients_in.take_there())
            gradients = tuple(next(arrived) if spec.requires_grad else None for spec in self._work.outputs)
        input_gradients = self._timed(lambda: self._stage.backward(micro_batch, gradients, sums.of(micro_batch)))
        sums.count(micro_batch)
        if self._gradients_out:
            pairs = zip(input_gradients, self._work.inputs, strict=True)
            there = [gradient for gradient, spec in pairs if spec.requires_grad]
            like = _with_gradients(self._work.inputs_of(micro_batch)) if self._work.gradients_may_lack else ()
            self._gradients_out.send(there, like)


def _with_gradients(specs: Borders) -> Borders:
    return tuple(spec for spec in specs if spec.requires_grad)
