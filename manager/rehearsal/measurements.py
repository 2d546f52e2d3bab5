"""Measures the times of a rehearsal's mini-batches, and how busy the rehearsal and other work kept the cores."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil

from manager.controller.state.events import WorkerAnswered
from manager.engine.loop.driver import Observed
from manager.rehearsal.planning import Planned
from manager.rehearsal.spec import WARM_UP_STEPS
from morph.contract.messages import Prepared
from morph.contract.plan import Plan, StagePlan
from morph.contract.pool import Pool

_PARTS = ("forward", "recompute", "backward", "reduce", "wait")


Work = tuple[tuple[StagePlan, ...], tuple[int, ...]]
LATE_SHARE_AT_MOST = 0.01


def _work_of(plan: Plan) -> Work:
    """Return the part of a plan that determines its workers' tasks, without expectations."""
    return plan.stages, plan.micro_batches_per_replica


@dataclass
class Measured:
    """An observer of the driver that records steps.

    ``decided_s[t]`` is the time when step t was decided, by generation ``generations[t]`` of workers, which run
    ``plans[generation]``. ``prepared[t]`` has (time, stage, answer) of its workers. ``only``: the plan whose steps
    count; None: steps of every plan count.
    """

    decided_s: list[float] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    plans: dict[int, Plan] = field(default_factory=dict)
    prepared: dict[int, list[tuple[float, int, Prepared]]] = field(default_factory=dict)
    only: Plan | None = None

    def __call__(self, observed: Observed) -> None:
        state, event = observed.decision.state, observed.event
        if isinstance(event, WorkerAnswered) and isinstance(event.answer, Prepared):
            stages = {slot.worker: slot.stage for slot in state.slots}
            entry = (observed.time_s, stages[event.worker], event.answer)
            self.prepared.setdefault(event.answer.step, []).append(entry)
        if state.reshape is not None:
            self.plans[state.reshape.generation] = state.reshape.plan
        while len(self.decided_s) < state.version:
            answers = self.prepared[len(self.decided_s)]
            self.generations.append(max(answer.generation for _, _, answer in answers))
            self.decided_s.append(observed.time_s)

    def by_plan(self) -> list[Measured]:
        """Return these measurements for each plan with a counted step, in the order of the plans' first steps."""
        ran = {self._work(step): self.plans[self.generations[step]] for step in self.counted_steps}
        return [replace(self, only=plan) for plan in ran.values()]

    def _work(self, step: int) -> Work:
        return _work_of(self.plans[self.generations[step]])

    @property
    def mini_batches_s(self) -> tuple[float, ...]:
        """The times, from decision to decision, of the steps that count."""
        return tuple(self.decided_s[step] - self.decided_s[step - 1] for step in self.counted_steps)

    @property
    def counted_steps(self) -> list[int]:
        """The steps that count: all but the first of each generation."""
        pairs = enumerate(itertools.pairwise(self.generations), WARM_UP_STEPS)
        steps = [step for step, (before, generation) in pairs if before == generation]
        return [step for step in steps if self.only is None or self._work(step) == _work_of(self.only)]

    def _answers(self, step: int) -> list[tuple[float, int, Prepared]]:
        """Return the answers with which a step was decided, without those of earlier attempts."""
        return [entry for entry in self.prepared[step] if entry[2].generation == self.generations[step]]

    def commit_s(self, optimizer_s: Mapping[int, float]) -> float:
        """The median over steps of the manager's round trip: from a decision to the start of the next step.

        ``optimizer_s``: the time of the optimizer step in each first stage of a pipeline; it comes before the start.
        """
        turns = []
        for step in self.counted_steps:
            begun = [
                time_s - answer.times.step_s - optimizer_s[stage]
                for time_s, stage, answer in self._answers(step)
                if stage in optimizer_s
            ]
            turns.append(max(begun) - self.decided_s[step - 1])
        return max(0.0, statistics.median(turns))

    @property
    def late_s(self) -> float:
        """The median delay of a step by the busy host, up to the answer of its last worker."""
        late_s = []
        for step in self.counted_steps:
            answers = [(time_s, answer.times.late_s) for time_s, _, answer in self._answers(step)]
            late_s.append(max(time_s for time_s, _ in answers) - max(time_s - late_s for time_s, late_s in answers))
        return statistics.median(late_s)

    def parts_s(self) -> dict[str, float]:
        """Return seconds per worker and step by kind of work, averaged over workers and the steps that count."""
        answers = [answer for step in self.counted_steps for _, _, answer in self._answers(step)]
        return {part: statistics.mean(getattr(answer.times, f"{part}_s") for answer in answers) for part in _PARTS}


@dataclass(frozen=True)
class _Counters:
    """The busy seconds of all cores since the machine started, and those of this process and its descendants."""

    busy_s: float
    total_s: float
    own_s: float


class Load:
    """An observer of the driver that reads the machine's counters when ``first`` and when ``last`` are decided.

    ``busy_share``: that of all cores, with any work; ``others_share``: that of work other than the rehearsal.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._before: _Counters | None = None
        self.busy_share = 0.0
        self.others_share = 0.0

    def __call__(self, observed: Observed) -> None:
        version = observed.decision.state.version
        if version == self._first and self._before is None:
            self._before = _read()
        elif version == self._last and self._before is not None and self.busy_share == 0.0:
            before, after = self._before, _read()
            total_s = max(1e-9, after.total_s - before.total_s)
            self.busy_share = (after.busy_s - before.busy_s) / total_s
            self.others_share = max(0.0, self.busy_share - (after.own_s - before.own_s) / total_s)


def _read() -> _Counters:
    times = psutil.cpu_times()
    total_s = float(sum(times[:8]))  # guest time is part of user time
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    me = psutil.Process()
    own_s = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            own_s += used.user + used.system
    return _Counters(total_s - idle_s, total_s, own_s)


@dataclass(frozen=True)
class Rehearsed:
    """The result of rehearsing one plan. Times are as measured, stretched by ``planned.scales.time``.

    ``planned`` has this plan's simulation. ``mini_batches_s``: every counted step. ``commit_s``: the real manager's
    measured round trip; it replaces the profile's in ``expected_s``. ``parts_s``: seconds per worker and step by kind
    of work. ``late_s``: the median delay of a step by the busy host. ``busy_share``: that of this machine's cores
    during the counted steps; ``others_share``: that taken by work other than the rehearsal.
    """

    planned: Planned
    mini_batches_s: tuple[float, ...]
    commit_s: float
    parts_s: dict[str, float]
    late_s: float
    busy_share: float
    others_share: float

    @property
    def measured_s(self) -> float:
        """The median mini-batch time; with jitter the mean, as in the simulator's result."""
        average = statistics.median if self.planned.spec.jitter_seed is None else statistics.mean
        return average(self.mini_batches_s)

    @property
    def expected_s(self) -> float:
        """The simulated mini-batch time; with jitter the mean over the same draws that were run."""
        simulation = self.planned.simulation
        expected_s = simulation.expected.mini_batch_s
        if simulation.jitter is not None:
            expected_s = statistics.mean(simulation.jitter.draws_s[WARM_UP_STEPS:])
        return expected_s + self.commit_s - self.planned.profile.commit.median_s

    @property
    def host_too_busy(self) -> bool:
        """Whether this machine's cores were so busy that they limited the measured times."""
        return self.late_s > LATE_SHARE_AT_MOST * self.measured_s

    @property
    def error(self) -> float:
        """The simulator's error as a share of the measured time; above 0: it expects more."""
        return self.expected_s / self.measured_s - 1


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal with changes of VMs.

    ``plans``: one for each plan with a counted step, which is a step that followed another with the same workers.
    ``changes``: (version, shape, pool) of every generation of workers that trained. ``lost``: types of the lost
    workers, in order; "" if all are of one type. ``num_left``: events of the trace that the run's end left unplayed.
    """

    plans: tuple[Rehearsed, ...]
    changes: tuple[tuple[int, str, Pool], ...]
    lost: tuple[str, ...]
    num_left: int
