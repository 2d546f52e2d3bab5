"""What is compared: links, mini-batches, contenders, and what the simulator's engine expects of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from morph.contract.plan import Schedule
from simulator.engine.mini_batch import StageTimes, run_pipeline
from simulator.engine.schedules import fixed_order, recomputes, stage_windows

SMALL = (1,)
"""Shape of what the last stage returns."""


@dataclass(frozen=True)
class Link:
    """Latency and mean of the exponential extra of every link, in units of x."""

    name: str
    latency: float
    jitter: float = 0.0


LINKS = (
    Link("normal", 0.5),
    Link("1.5x slower", 0.75),
    Link("2x slower", 1.0),
    Link("normal, jittery", 0.5, 0.5),
    Link("2x slower, jittery", 1.0, 1.0),
)


@dataclass(frozen=True)
class Case:
    """One mini-batch; times in seconds."""

    num_stages: int
    num_micro_batches: int
    message_bytes: int
    unit_s: float
    latency_s: float = 0.0
    jitter_s: float = 0.0
    seed: int = 0

    @property
    def ideal_s(self) -> float:
        return self.num_micro_batches * 4 * self.unit_s


@dataclass(frozen=True)
class Way:
    """One contender."""

    name: str
    schedule: Schedule
    slope: int = 1
    torchs: bool = False

    def again(self, num_stages: int) -> tuple[bool, ...]:
        """Which stages recompute."""
        return recomputes(self.schedule, num_stages)

    def windows(self, case: Case) -> tuple[int, ...]:
        return stage_windows(self.schedule, case.num_stages, case.num_micro_batches, self.slope)


WAYS = (
    *(Way(f"Morph varuna, slope {slope}", "varuna", slope) for slope in (1, 2, 4)),
    Way("Morph gpipe", "gpipe"),
    Way("Morph 1f1b", "1f1b"),
    Way("torch ScheduleGPipe", "gpipe", torchs=True),
    Way("torch Schedule1F1B", "1f1b", torchs=True),
)


def engine_times(way: Way, case: Case, base_s: float) -> StageTimes:
    """The same task times; ``base_s`` is a message's own time."""
    unit = np.full(case.num_stages, round(case.unit_s * 1e9), np.int64)
    link = np.full(case.num_stages, round((case.latency_s + case.jitter_s + base_s) * 1e9), np.int64)
    windows, again = np.array(way.windows(case), np.int64), np.array(way.again(case.num_stages))
    return StageTimes(unit, unit, 2 * unit, link, link, windows, again)


def expected_s(way: Way, case: Case, base_s: float) -> float:
    times = engine_times(way, case, base_s)
    return run_pipeline(times, (case.num_micro_batches,), schedule=way.schedule).makespan_ns / 1e9


def order_of(way: Way, case: Case, stage: int) -> str:
    """What a plan would hold for this link."""
    if way.schedule == "varuna":
        times = engine_times(way, case, 0.0)
        return run_pipeline(times, (case.num_micro_batches,), keep_orders=True).orders[0][stage]
    again = way.again(case.num_stages)[stage]
    return fixed_order(way.schedule, stage, case.num_stages, case.num_micro_batches, again)
