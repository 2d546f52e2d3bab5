"""Seconds by kind of work in one step, on the device's clock; on request a timeline. ``Pace`` spans steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from morph.contract.timeline import ComputeTimes, MicroBatchTimes, Span, SpanKind
from morph.runtime.device.task_clock import CoreTimes, Mark, TaskClock
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.step.schedule_cursor import Task

MOST_KEPT = 16
"""The number of micro-batches that are kept until a heartbeat takes them; older ones are dropped."""
DIGITS = 7
Standing = Literal["wait", "reduce"]
"""The reasons for which the device is idle."""
_SPAN_KINDS: dict[Task | Standing, SpanKind] = {
    "wait": "wait",
    "reduce": "reduce",
    Task.FORWARD: "forward",
    Task.RECOMPUTE: "recompute",
    Task.BACKWARD: "backward",
}


@dataclass(frozen=True)
class _Done:
    """A task or wait of the device between two marks that it may not have reached yet."""

    what: Task | Standing
    micro_batch: int | None
    start: Mark
    end: Mark
    device_took_s: float | None = None
    cores: CoreTimes | None = None


class Stopwatch:
    """The stopwatch of one step: tasks and waits are counted once the device has reached their end."""

    def __init__(self, clock: TaskClock, *, recording: bool = False) -> None:
        self._clock = clock
        self._recording = recording
        self.start_ns = time.time_ns()
        """The wall clock at the start."""
        self.start_s = time.perf_counter()
        self._zero = clock.mark()
        self._open: deque[_Done] = deque()
        self._measured: list[tuple[SpanKind, int | None, float, float]] = []
        self.spent_s: dict[str, float] = dict.fromkeys(("F", "R", "B", "reduce", "wait"), 0.0)
        self.spans: list[Span] = []
        self.finished: Callable[[float, float, float, CoreTimes | None], None] | None = None
        """Called after a micro-batch's backward with the seconds of its (forward, recompute, backward).

        The last argument is how forward and backward spent the thread's time; None for another device.
        """
        self.in_groups = False
        """Whether backwards include further recomputes; ``finished`` gets times without these."""
        self.late_s = 0.0
        """For an emulated device: the seconds by which busy hosts delayed the end of its step."""
        self.device_took_s: Callable[[], float] | None = None
        """For an emulated device: duration of the last task by its own clock, which a busy host does not affect."""
        self._begun: dict[int | None, tuple[float, float, CoreTimes | None]] = {}

    def mark(self) -> Mark:
        """Mark the moment at which the device has done all work so far; returns at once."""
        return self._clock.mark()

    def task_given(self, task: Task, micro_batch: int, start: Mark, cores: CoreTimes | None = None) -> None:
        """Record a task of the device since ``start``, with the thread's times if the device is a processor."""
        took_s = None if self.device_took_s is None else self.device_took_s()
        self._note(_Done(task, micro_batch, start, self.mark(), took_s, cores))

    def stood(self, what: Standing, start: Mark) -> None:
        """Record a wait of the host since ``start``; the time in which the device was idle counts."""
        self._note(_Done(what, None, start, self.mark()))

    def settle(self, interrupt: Interrupt) -> None:
        """Count everything, once the device has done its work. Raises as ``Interrupt.wait_for``."""
        end = self._clock.mark()
        if not self._clock.is_over(end):
            interrupt.call(lambda: self._clock.wait(end), "the device to finish its work")
        self._count()
        # now the waits are over on both clocks
        after_s = max(0.0, time.perf_counter() - self.start_s - self._clock.seconds(self._zero, end))
        for kind, micro_batch, start_s, end_s in self._measured:
            self._keep(kind, micro_batch, start_s + after_s, end_s + after_s)
        self._measured.clear()

    def record(self, kind: SpanKind, micro_batch: int | None, start_s: float, end_s: float) -> None:
        """Keep a span of the host's clock (``time.perf_counter``) for the timeline, if one is requested."""
        self._keep(kind, micro_batch, start_s - self.start_s, end_s - self.start_s)

    def times(self) -> ComputeTimes:
        """Return the step's times as reported to the manager."""
        return ComputeTimes(
            forward_s=self.spent_s["F"],
            recompute_s=self.spent_s["R"],
            backward_s=self.spent_s["B"],
            reduce_s=self.spent_s["reduce"],
            wait_s=self.spent_s["wait"],
            step_s=time.perf_counter() - self.start_s,
            late_s=self.late_s,
        )

    def _note(self, done: _Done) -> None:
        self._open.append(done)
        self._count()

    def _count(self) -> None:
        while self._open and self._clock.is_over(self._open[0].end):
            done = self._open.popleft()
            took_s = self._clock.seconds(done.start, done.end)
            if self._recording:
                kind, start_s = _SPAN_KINDS[done.what], self._clock.seconds(self._zero, done.start)
                self._measured.append((kind, done.micro_batch, start_s, start_s + took_s))
            if isinstance(done.what, Task):
                self.spent_s[done.what.value] += took_s
                self._spend(done.what, done, took_s)
            else:
                self.spent_s[done.what] += took_s

    def _spend(self, task: Task, done: _Done, took_s: float) -> None:
        cores = done.cores
        if done.device_took_s is not None:
            took_s, cores = done.device_took_s, None
        if task is Task.FORWARD:
            self._begun[done.micro_batch] = (took_s, 0.0, cores)
        elif task is Task.RECOMPUTE:
            forward_s, _, before = self._begun[done.micro_batch]
            self._begun[done.micro_batch] = (forward_s, took_s, cores if self.in_groups else before)
        else:
            forward_s, recompute_s, before = self._begun.pop(done.micro_batch)
            if self.in_groups:
                took_s = max(0.0, took_s - max(0.0, forward_s - recompute_s))
            if self.finished is not None:
                both = None if before is None or cores is None else before.plus(cores)
                self.finished(forward_s, recompute_s, took_s, both)

    def _keep(self, kind: SpanKind, micro_batch: int | None, start_s: float, end_s: float) -> None:
        if self._recording:
            self.spans.append(Span(kind=kind, micro_batch=micro_batch, start_s=start_s, end_s=end_s))


class _Note(NamedTuple):
    generation: int
    forward_s: float
    recompute_s: float
    backward_s: float
    cores: CoreTimes | None


class Pace:
    """Times of the newest micro-batches. One thread records and one collects; neither waits for the other."""

    def __init__(self) -> None:
        self._notes: deque[_Note] = deque(maxlen=MOST_KEPT)

    def note(
        self,
        generation: int,
        forward_s: float,
        recompute_s: float,
        backward_s: float,
        cores: CoreTimes | None = None,
    ) -> None:
        """Record the times (seconds) of a finished micro-batch; this takes about a microsecond."""
        self._notes.append(_Note(generation, forward_s, recompute_s, backward_s, cores))

    def collect(self) -> MicroBatchTimes | None:
        """Return the times since the last call, of the newest generation; None: there are none."""
        notes: list[_Note] = []
        while self._notes:
            notes.append(self._notes.popleft())
        if not notes:
            return None
        generation = notes[-1].generation
        notes = [entry for entry in notes if entry.generation == generation]
        cores = [entry.cores for entry in notes if entry.cores is not None]
        return MicroBatchTimes(
            generation=generation,
            forward_s=tuple(round(entry.forward_s, DIGITS) for entry in notes),
            recompute_s=tuple(round(entry.recompute_s, DIGITS) for entry in notes),
            backward_s=tuple(round(entry.backward_s, DIGITS) for entry in notes),
            processor_s=tuple(round(each.processor_s, DIGITS) for each in cores),
            queued_s=tuple(round(each.queued_s, DIGITS) for each in cores if each.queued_s is not None),
        )
