"""The clock of an emulated device: it sleeps until deadlines, so that delays of a busy host do not add up."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from morph.contract.emulation import Duration

# Durations of a step's tasks and messages: medians, or draws from the profile's quantiles.
#
# The uniform numbers depend on (seed, step, kind, section, micro-batch), exactly as in the simulator, where a draw
# counts as a step. So a rehearsal and a simulation with the same seed have the same jitter.


Seconds = npt.NDArray[np.float64]
KINDS = ("forward", "recompute", "backward", "activation", "gradient")
NEVER_S = float("-inf")


class JitterDraw:
    """The times of one step. ``seed``: seed of the draws; None: medians. ``num_micro_batches``: N over all replicas."""

    def __init__(self, seed: int | None, step: int, num_sections: int, num_micro_batches: int) -> None:
        self._seed = seed
        self._step = step
        self._shape = (num_sections, num_micro_batches)

    def times_s(self, kind: str, sections: Mapping[int, Duration], micro_batches: Sequence[int]) -> Seconds:
        """Return the time of these sections together for each micro-batch (by global number)."""
        total: Seconds = self.section_times_s(kind, sections, micro_batches).sum(axis=0)
        return total

    def section_times_s(self, kind: str, sections: Mapping[int, Duration], micro_batches: Sequence[int]) -> Seconds:
        """Return the time of each section and micro-batch: float64[sections, micro-batches]."""
        times_s = np.empty((len(sections), len(micro_batches)))
        varied = {section: duration for section, duration in sections.items() if duration.quantiles_s}
        if self._seed is None:
            varied = {}
        for row, duration in zip(times_s, sections.values(), strict=True):
            row[:] = duration.median_s
        if varied:
            assert self._seed is not None
            random = np.random.default_rng([self._seed, self._step, KINDS.index(kind)])
            numbers = random.random(self._shape)
            for row, (section, duration) in zip(times_s, sections.items(), strict=True):
                if section in varied:
                    at = np.linspace(0.0, 1.0, len(duration.quantiles_s))
                    row[:] = np.interp(numbers[section, list(micro_batches)], at, duration.quantiles_s)
        return times_s


class DeviceClock:
    """The clock of one device, in seconds of ``time.perf_counter``, which all processes of a machine share.

    A task begins when the previous one has ended, or its input has arrived. If the worker is late by up to
    ``forgiven_s`` (because its host was busy), the task still ends as if it had begun in time.
    """

    def __init__(
        self,
        forgiven_s: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._forgiven_s = forgiven_s
        self._now = now
        self._sleep = sleep
        self._arrival_s = self._undelayed_arrival_s = NEVER_S
        self.slowness = 1.0
        """Factor of all times on this device."""
        self.free_s = NEVER_S
        """End of the last task by this clock; the real end may be a little later."""
        self.took_s = 0.0
        """Duration of the last task by this clock, however late the worker started it."""
        self.late_s = 0.0
        """The delay of the last task, since ``rest``, by busy hosts: this one and those that sent to it."""

    def now(self) -> float:
        """The present time."""
        return self._now()

    def arrived(self, at_s: float, late_s: float = 0.0) -> None:
        """Record the arrival of an input, which busy hosts delayed: a task that waited for it begins at that moment."""
        self._arrival_s = max(self._arrival_s, at_s)
        self._undelayed_arrival_s = max(self._undelayed_arrival_s, at_s - late_s)

    def rest(self) -> None:
        """Mark the device as idle: the next task begins when the worker starts it."""
        self._arrival_s = self._undelayed_arrival_s = self.free_s = NEVER_S
        self.late_s = 0.0

    def begin(self) -> float:
        """Return the moment from which a task that the worker begins now occupies the device."""
        now_s = self._now()
        could_s = max(self.free_s, self._arrival_s)
        begun_s = could_s if now_s - could_s <= self._forgiven_s else now_s
        undelayed_s = max(self.free_s - self.late_s, self._undelayed_arrival_s)
        self.late_s = begun_s - undelayed_s if undelayed_s > NEVER_S else 0.0
        return begun_s

    def end(self, begun_s: float, duration_s: float) -> None:
        """Block until a task that began at ``begun_s`` has taken its duration times ``slowness``."""
        self.took_s = duration_s * self.slowness
        end_s = begun_s + self.took_s
        self.wait_until(end_s)
        self.free_s = end_s

    def wait_until(self, moment_s: float) -> None:
        """Block until a moment."""
        while (left_s := moment_s - self._now()) > 0:
            self._sleep(left_s)


class Alarm:
    """One thread for any number of moments; it ends with the process."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        threading.Thread(target=self._run, name="morph-alarm", daemon=True).start()

    def at(self, moment_s: float, call: Callable[[], None]) -> None:
        """Call a function at a moment of ``time.perf_counter``, from the alarm's thread; returns at once."""
        with self._condition:
            heapq.heappush(self._heap, (moment_s, next(self._numbers), call))
            if self._heap[0][2] is call:
                self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._heap or self._heap[0][0] > time.perf_counter():
                    self._condition.wait(self._heap[0][0] - time.perf_counter() if self._heap else None)
                call = heapq.heappop(self._heap)[2]
            call()
