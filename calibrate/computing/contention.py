"""Measures how much slower computing gets when several workers of a machine, which share caches, compute at once.

The heaviest kind of section is timed in this process, in turns alone and while 1, 2, ... helpers run the same, in
processor time: on a busy machine, wall time would include the share of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import psutil

from calibrate.computing.subject import Subject
from calibrate.helpers.crew import Crew
from calibrate.timing.bench import Bench
from calibrate.timing.clocks import clock_of
from morph.contract.profile import Contention

MIN_ROUNDS, MAX_ROUNDS = 3, 7
CLOSE = 0.01
"""Rounds end when the ratios of most of them are at least this close to their median."""
_WINDOW_S = 0.2
_MIN_RUNS = 3
_MAX_BUSY = 16
_START_TIMEOUT_S = 300.0
_BUSY_TIMEOUT_S = 120.0


def busy_counts(num_cores: int, most: int = _MAX_BUSY) -> tuple[int, ...]:
    """Return how many processes compute at once in each measurement: 2, 3, 4, then growing steps, up to all cores."""
    last = min(num_cores, most)
    counts = [count for count in (2, 3, 4, 6, 8, 12, 16) if count < last]
    return (*counts, last) if last >= 2 else ()


class Neighbours:
    """Helpers that load the job while this process prepares it, and compute on request.

    ``crew``: at least one fewer than ``num_cores``; with one core there is nothing to measure.
    """

    def __init__(self, crew: Crew, num_cores: int) -> None:
        self.crew = crew
        self.counts: tuple[int, ...] = ()
        self._num_cores = num_cores

    def load(self, subject: Subject) -> None:
        """Let as many helpers as fit into memory load the job, which this process has cut; returns at once."""
        if subject.device.type == "cpu":
            self.counts = busy_counts(self._num_cores, min(_MAX_BUSY, self.crew.size + 1, _processes_that_fit()))
        spec = {"job_path": subject.job_path, "num_sections": subject.num_sections, "device": "cpu"}
        for number in self._told:
            self.crew.send(number, spec)

    def wait(self) -> None:
        """Block until the helpers have loaded the job, and rest; errors as of ``Crew.gather``."""
        self.crew.gather(self._told, "the processes that measure contention", _START_TIMEOUT_S)

    @property
    def _told(self) -> range:
        return range(max(self.counts, default=1) - 1)


def measure_contention(
    subject: Subject, heaviest: str, micro_batch_size: int, neighbours: Neighbours
) -> tuple[Contention, ...]:
    """Let more and more resting helpers run the ``heaviest`` kind of section; return the factors."""
    if not neighbours.counts:
        return ()
    (bench,) = subject.benches(subject.cut(micro_batch_size), [heaviest])
    bench.both()
    crew, order = neighbours.crew, {"do": "busy", "micro_batch_size": micro_batch_size, "signature": heaviest}

    def together(count: int) -> float:
        others = range(count - 1)
        for number in others:
            crew.send(number, order)
        crew.gather(others, "the processes that measure contention to compute", _BUSY_TIMEOUT_S)
        taken_s = _task_s(bench)
        for number in others:
            crew.send(number, {"do": "rest"})
        crew.gather(others, "the processes that measure contention to rest", _BUSY_TIMEOUT_S)
        return taken_s

    return factors(neighbours.counts, lambda: _task_s(bench), together)


def factors(
    counts: Sequence[int], alone: Callable[[], float], together: Callable[[int], float]
) -> tuple[Contention, ...]:
    """Measure the median ratio of time together to time alone, in rounds, until it is known well enough.

    ``alone``, and ``together`` for that many of ``counts``, measure a task's time in any one unit.
    """
    ratios: dict[int, list[float]] = {count: [] for count in counts}
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and all(_is_close(measured) for measured in ratios.values()):
            break
        base = alone()
        for count in counts:
            ratios[count].append(together(count) / base)
    return tuple(Contention(num_busy=count, factor=round(max(1.0, median(ratios[count])), 4)) for count in counts)


def _is_close(measured: Sequence[float]) -> bool:
    centre = median(measured)
    return median(abs(ratio - centre) for ratio in measured) <= CLOSE * centre


def _task_s(bench: Bench) -> float:
    """Return the processor time of one forward and backward, the mean over a window of wall time."""
    clock = clock_of(bench.device)
    begun_s, spent_s, runs, start = time.perf_counter(), 0.0, 0, clock.mark()
    while runs < _MIN_RUNS or spent_s < _WINDOW_S:
        bench.both()
        runs += 1
        spent_s = time.perf_counter() - begun_s
    return clock.between_s(start, clock.mark()) / runs


def _processes_that_fit() -> int:
    """Return how many processes like this one, including it, fit into half of the free memory."""
    return 1 + int(psutil.virtual_memory().available / 2 // psutil.Process().memory_info().rss)
