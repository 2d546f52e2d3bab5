"""The memory of a job's stages: the planner's estimates, and measurements of workers on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from calibrate.computing import compute as computing
from calibrate.computing.peak import LiveBytes
from calibrate.computing.subject import Subject, load_subject
from calibrate.links.network import NetworkMeasurement
from calibrate.timing.environment import describe_environment
from calibrate.writing.assemble import MeasuredLinks, assemble_profile
from calibrate.writing.measure import one_thread
from calibrate.writing.storage import StorageSpeeds
from morph.contract.plan import Plan
from morph.contract.profile import Profile
from morph.cutting import CutModel
from morph.jobs.files import imported_once
from morph.runtime.state.reduction import Reduction
from simulator import Simulation, simulate, simulate_plan, synthetic_profile
from simulator.costs.stage_costs import SectionCosts
from simulator.inputs.request import MemoryRules
from tests.crew import Crew
from tests.members import ThreadMember
from tests.system.harness import TinyJob

NUM_STEPS = 3
"""After the first step the optimizer's state exists, and after the second the scales fit."""
WITHOUT_COPIES = MemoryRules(keeps_sums=False, copies_sums=False, saves=False, changes=False)
"""In these steps no checkpoint is written, no sums are sent, and no step is given up."""


class TrackedMember(ThreadMember):
    """A worker whose tensors are counted in bytes, including those of its reductions, which run in another thread."""

    here = threading.local()

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.live = LiveBytes()

    def carry_out(self, method: str, *arguments: object) -> Any:
        """Carry out an order in this thread, and count its tensors."""
        self.here.live = self.live
        with nullcontext() if method == "setup" else self.live:
            return super().carry_out(method, *arguments)


class TrackedCrew(Crew):
    """Workers that run a job on a CPU; each member's ``live`` counts the bytes of its tensors."""

    def __init__(self, subject: Subject, model: CutModel, names: Sequence[str], directory: Path) -> None:
        units = {unit.id: unit.sections for unit in model.units}
        job = TinyJob(model.fingerprint, 0, units, len(model.sections), model.micro_batch_size)
        super().__init__(job, names, TrackedMember)
        with imported_once(subject.job_path):  # so that all but the first read the cached cut
            self.set_up(subject.job_path, model.fingerprint, directory)
        reading = threading.Lock()
        for member in self.members.values():
            self._take_turns(member.worker, reading)

    def _take_turns(self, worker: Any, reading: threading.Lock) -> None:
        """Let only one worker at a time read data: all share the process's generators."""
        loader = worker._workload._loader
        load = loader.load

        def alone(*arguments: Any) -> Any:
            with reading:
                return load(*arguments)

        loader.load = alone

    def ask(self, workers: Iterable[str], method: str, order: object) -> list[Any]:
        """Send orders, and count tensors of reductions as those of their workers."""
        put, run = Reduction.put, Reduction._run

        def counted_put(reduction: Reduction, *arguments: Any) -> None:
            reduction.live = TrackedMember.here.live  # type: ignore[attr-defined]
            put(reduction, *arguments)

        def counted_run(reduction: Reduction) -> None:
            with reduction.live:  # type: ignore[attr-defined]
                run(reduction)

        with mock.patch.object(Reduction, "put", counted_put), mock.patch.object(Reduction, "_run", counted_run):
            return super().ask(workers, method, order)

    def form_shape(self, plan: Plan) -> dict[int, int]:
        """Form this shape on the first workers.

        Return, by stage, the most bytes that one of its workers had meanwhile.
        """
        order = self.order(plan, list(self.members)[: plan.num_workers])
        self._forget_peaks()
        self.form(order.model_copy(update={"keep_sums": True}))
        return {stage: bytes_there for stage, (bytes_there, _) in self._most({}).items()}

    def train_steps(self, num_steps: int) -> dict[int, tuple[int, int]]:
        """Run steps; return, by stage, the maximum of one of its workers in the last step.

        The maximum is given as bytes, and the number of micro-batches in flight there, which the plan's window limits.
        """
        for _ in range(num_steps):
            self._forget_peaks()
            self.prepare(record_timeline=True)
            self.decide()
        timelines = {answer.worker: answer.timeline for answer in self.answers}
        return self._most({name: found.peaks.in_flight for name, found in timelines.items() if found is not None})

    def _forget_peaks(self) -> None:
        for member in self.members.values():
            member.live.peak = member.live.now

    def _most(self, in_flight: dict[str, int]) -> dict[int, tuple[int, int]]:
        """Return, by stage, the most bytes of a worker, and its number of micro-batches in flight."""
        found: dict[int, tuple[int, int]] = {}
        for slot in self.slots:
            there = self.members[slot.worker].live.peak, in_flight.get(slot.worker, 0)
            found[slot.stage] = max(found.get(slot.stage, there), there)
        return found


@dataclass(frozen=True)
class Measured:
    """For each stage, the estimated bytes, and the maximum over its workers.

    ``estimates`` assume the plan's windows, ``reached`` the micro-batches that were in flight: whether a window is ever
    full depends on the speed of neighbours.
    """

    shape: str
    recompute: bool
    estimates: tuple[int, ...]
    peaks: tuple[int, ...]
    reached: tuple[int, ...] = ()
    moments: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeasuredJob:
    """A job that is calibrated except for its links."""

    subject: Subject
    model: CutModel
    profile: Profile

    def plan(self, depth: int, replicas: int, *, recompute: bool, live_sections: int | None = None) -> Simulation:
        """Return a shape's plan with its windows; with ``live_sections`` all stages run sections again in groups."""
        found = simulate(self.profile, num_stages=depth, num_replicas=replicas, recompute=recompute)
        if live_sections is None:
            return found
        update = {"recompute": True, "live_sections": live_sections}
        stages = tuple(stage.model_copy(update=update) for stage in found.plan.stages)
        return simulate_plan(self.profile, found.plan.model_copy(update={"stages": stages}))

    def steps(
        self, depth: int, replicas: int, *, recompute: bool, directory: Path, live_sections: int | None = None
    ) -> Measured:
        simulation = self.plan(depth, replicas, recompute=recompute, live_sections=live_sections)
        crew = self._crew(depth * replicas, directory)
        crew.form_shape(simulation.plan)
        taken = crew.train_steps(NUM_STEPS)
        peaks, in_flight = zip(*(taken[stage] for stage in range(depth)), strict=True)
        costs = simulation.costs
        memory = self._memory(WITHOUT_COPIES, single=replicas == 1, recompute=recompute)
        window = np.array(in_flight, np.int64)
        assert (window <= costs.times.window).all(), "more micro-batches were in flight than the plan allows"
        reached = memory.device_bytes(*costs.spans, window, costs.times.recompute, costs.live)
        moments = memory.moments(*costs.spans, window, costs.times.recompute, costs.live)
        totals = {moment: sum(np.broadcast_arrays(*parts.values())) for moment, parts in moments.items()}
        found = memory.device_bytes(*costs.spans, costs.times.window, costs.times.recompute, costs.live)
        return Measured(
            f"{depth}x{replicas}",
            recompute,
            tuple(found.tolist()),
            peaks,
            tuple(reached.tolist()),
            tuple(max(totals, key=lambda moment: totals[moment][stage]) for stage in range(depth)),
        )

    def change(self, before: str, after: str, directory: Path) -> Measured:
        """Run steps in one shape, then form another; return the maximum of each new stage's workers meanwhile."""
        (first, second) = (tuple(map(int, shape.split("x"))) for shape in (before, after))
        crew = self._crew(max(first[0] * first[1], second[0] * second[1]), directory)
        crew.form_shape(self.plan(*first, recompute=True).plan)
        crew.train_steps(NUM_STEPS)
        simulation = self.plan(*second, recompute=True)
        peaks = crew.form_shape(simulation.plan)
        rules = MemoryRules(keeps_sums=True, copies_sums=False, saves=False)
        spans = [self.plan(*shape, recompute=True).costs.spans for shape in (first, second)]
        singles = [shape[1] == 1 for shape in (first, second)]
        bounds = [
            self._memory(rules, single=single, recompute=True).tables[2][span]
            for single, span in zip(singles, spans, strict=True)
        ]
        largest = max(int(bound.max()) for bound in bounds)  # a worker may come from the largest earlier stage
        return Measured(
            f"{before} to {after}",
            True,
            tuple(largest for _ in range(second[0])),
            tuple(peaks[stage] for stage in range(second[0])),
        )

    def _memory(self, rules: MemoryRules, *, single: bool, recompute: bool):  # type: ignore[no-untyped-def]
        (m,) = self.profile.micro_batch_sizes
        return SectionCosts(self.profile, m, recompute=recompute, rules=rules).memory(single=single)

    def _crew(self, num_workers: int, directory: Path) -> TrackedCrew:
        return TrackedCrew(self.subject, self.model, [f"w{number}" for number in range(num_workers)], directory)


def measured_job(job_path: str) -> MeasuredJob:
    """Calibrate compute and memory of a job; links are invented, because no times are needed."""
    with one_thread():
        subject = load_subject(job_path, torch.device("cpu"))
        size = subject.job.micro_batch_size
        assert size is not None
        compute = computing.measure_compute(
            subject, (size,), None, stop_early=False, num_samples=5, progress=lambda _what, _share: None
        )
    made_up = synthetic_profile()
    links = NetworkMeasurement(made_up.inter_node, made_up.all_reduce, made_up.commit)
    environment = describe_environment(subject.device)
    profile = assemble_profile(subject.job, environment, compute, MeasuredLinks(links), StorageSpeeds(1e9, None, 1e9))
    return MeasuredJob(subject, compute.model, profile)
