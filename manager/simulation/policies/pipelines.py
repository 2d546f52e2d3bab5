"""Pipelines of fixed depth that are not re-cut: a loss drops samples, or makes neighbours compute for the lost VM.

Both policies are from Bamboo (NSDI 2023). ``drop`` is its second strawman (section 3): a pipeline that lost a VM pauses
until newcomers complete it, and the others continue with fewer samples. ``bamboo`` is redundant computation (section
5): each VM computes forward for its successor too, so a lost VM's predecessor takes over its stage after a pause, and
runs both stages until the pipelines are set up again, at the end of a step (appendix A). The cost is simulated
(``SpotJob.redundant``), with forwards in every step as in the paper (``eflb``), or computing for a successor only once
it is lost (``lflb``). Losses that leave a stage of a pipeline without a holder end that pipeline, and the running step
starts again; if a stage has no holder in any pipeline, the job goes back to a checkpoint.

Depth and number of pipelines are upper bounds: those of the best plan for the most VMs of the trace. Progress is
counted in whole batches: fewer pipelines train fewer samples in the same time. Both get better conditions than in the
paper: no 1.5 times deeper pipelines, saves at the interval of least cost, and pipelines set up as fast as state can
move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from manager.accounting.account import TimeUse
from manager.simulation.policies.membership import Books, Change, end_of, intervals, nothing_paid, twice_slower
from manager.simulation.spot.job import RedundantCost, SpotJob
from manager.simulation.spot.run_end import PolicyOutcome, SpotPrices, Until
from morph.contract.plan import Plan
from morph.contract.trace import Trace
from morph.contract.waits import cheapest_interval_s

Pipeline = list[str | None]


@dataclass
class _PipelinedJob:
    """The progress of the job. ``done``: the trained samples, in whole batches."""

    job: SpotJob
    books: Books
    plan: Plan
    redundant: RedundantCost | None
    most: float
    pipelines: list[Pipeline] = field(default_factory=list)
    standby: list[str] = field(default_factory=list)
    done: float = 0.0
    ready_s: float = 0.0
    since_save_s: float = 0.0
    of_step: float = 0.0
    is_due: bool = False
    lost: float = 0.0
    num_fatal: int = 0
    num_changes: int = 0

    @property
    def depth(self) -> int:
        """The number of stages."""
        return len(self.plan.stages)

    @property
    def working(self) -> list[Pipeline]:
        """The pipelines that train."""
        return [pipeline for pipeline in self.pipelines if self._works(pipeline)]

    def _works(self, pipeline: Pipeline) -> bool:
        if self.redundant:  # a stage's predecessor computes for it, the last stage for the first
            if len(pipeline) - pipeline.count(None) < min(self.job.pipelines, default=1):
                return False  # a cut into so few stages does not fit in memory
            return all(vm is not None or pipeline[stage - 1] is not None for stage, vm in enumerate(pipeline))
        return None not in pipeline

    def take(self, change: Change) -> None:
        """Apply a change of VMs; set up pipelines again if that is due."""
        self.standby += change.ready
        lost = set(change.lost)
        before, hit = len(self.working), False
        self.standby = [vm for vm in self.standby if vm not in lost]
        for pipeline in self.pipelines:
            for stage, vm in enumerate(pipeline):
                if vm in lost:
                    pipeline[stage], hit = None, True
        held = all(any(pipeline[stage] is not None for pipeline in self.pipelines) for stage in range(self.depth))
        if before and not self.working and not (held or (self.redundant and self._held_by_neighbours())):
            self._go_back()
        elif self.redundant and len(self.working) < before:
            self._give_up_step(before)
        elif hit and self.redundant:
            self._pause(self.job.durations.noticed_s + self.redundant.pause * self.plan.expected.mini_batch_s)
        self.is_due = self._is_due(before)
        if self.is_due and (not self.redundant or len(self.working) < max(1, before)):
            self._set_up()  # else at the end of the step

    def _held_by_neighbours(self) -> bool:
        return all(
            any(pipeline[stage] is not None or pipeline[stage - 1] is not None for pipeline in self.pipelines)
            for stage in range(self.depth)
        )

    def _is_due(self, before: int) -> bool:
        """Return whether newcomers can complete all pipelines or one more, or too much is missing to continue."""
        holes = sum(vm is None for pipeline in self.pipelines for vm in pipeline)
        room = self.plan.num_replicas - len(self.pipelines)
        if not self.working:
            return len(self.standby) + sum(len(pipeline) for pipeline in self.pipelines) - holes >= self.depth
        if self.redundant and len(self.working) < before:
            return True
        if holes and self.redundant:  # a further loss next to a gap would end the pipeline
            most = max(sum(vm is None for vm in pipeline) for pipeline in self.pipelines)
            return len(self.standby) >= holes or most > 1
        fewest = min((sum(vm is None for vm in pipeline) for pipeline in self.pipelines if None in pipeline), default=0)
        return 0 < fewest <= len(self.standby) or (room > 0 and len(self.standby) >= self.depth)

    def _set_up(self) -> None:
        """Make as many whole pipelines as there are VMs for; the other VMs stand by."""
        there = [vm for pipeline in self.pipelines for vm in pipeline if vm is not None] + self.standby
        num = min(self.plan.num_replicas, len(there) // self.depth)
        whole = num * self.depth
        self.pipelines = [list(there[first : first + self.depth]) for first in range(0, whole, self.depth)]
        self.standby = there[whole:]
        self.num_changes += 1
        self.is_due, self.of_step = False, 0.0
        times, stages_held = self.job.durations, 2 if self.redundant else 1
        self._pause(times.groups_s + stages_held * self.job.state_bytes / self.depth / times.link_bytes_per_s)

    def _give_up_step(self, working: int) -> None:
        """Handle the loss of neighbours: all pipelines are set up again at once, and the running step starts again."""
        gained = min(self.done, self.of_step * working / self.plan.num_replicas)
        self.books.undo(gained * self.plan.num_replicas / working * self._step_s(), self.depth * working)
        self.done, self.lost, self.of_step = self.done - gained, self.lost + gained, 0.0

    def _go_back(self) -> None:
        lost_s = self.since_save_s + (self._every_s() if self.since_save_s < self._durable_s() else 0.0)
        members = max(1, self.depth * self.plan.num_replicas)
        lost_s = min(lost_s, self.books.parts_s[TimeUse.COMPUTE] / members, self.done * self._step_s())
        self.books.undo(lost_s, members)
        lost = min(self.done, lost_s / self._step_s())
        self.done, self.lost = self.done - lost, self.lost + lost
        self.num_fatal += 1
        self.since_save_s = self.of_step = 0.0
        times = self.job.durations
        self._pause(times.restart_s + self.job.state_bytes / members / times.storage_bytes_per_s)

    def _pause(self, seconds: float) -> None:
        self.ready_s = max(self.ready_s, self.books.now_s) + seconds

    def train(self, until_s: float) -> None:
        """Train until this time; pipelines are set up again at the end of a step if that is due."""
        while self.is_due and self.working:
            end_s = max(self.ready_s, self.books.now_s) + (1 - self.of_step) * self._slower() * self._step_s()
            if end_s >= until_s:
                break
            self._train(end_s)
            self._set_up()
        self._train(until_s)

    def _train(self, until_s: float) -> None:
        books, working = self.books, self.working
        if not working:
            return books.spend(until_s, TimeUse.WAITING, 0)
        members = sum(vm is not None for pipeline in working for vm in pipeline)
        books.spend(min(self.ready_s, until_s), TimeUse.MORPH, members)
        if books.now_s >= until_s:
            return None
        share = len(working) / self.plan.num_replicas
        slower, step_s = self._slower(), self._step_s()
        gained = min((until_s - books.now_s) / slower / step_s * share, self.most - self.done)
        compute_s = gained * step_s / share
        books.spend(books.now_s + compute_s * (slower - 1), TimeUse.CHECKPOINT, members)
        books.spend(books.now_s + compute_s, TimeUse.COMPUTE, members)
        self.done += gained
        self.since_save_s = math.fmod(self.since_save_s + compute_s, self._every_s())
        self.of_step = (self.of_step + compute_s / step_s) % 1.0
        return None

    def _slower(self) -> float:
        """Return the factor by which saves lengthen computing."""
        return 1 + self._stall_s() / self._every_s()

    def _step_s(self) -> float:
        step_s = self.plan.expected.mini_batch_s + self.job.durations.order_s
        if self.redundant:
            # the first stage's gradients come last: nothing hides their transfer to the holder of its copy
            gradient_bytes = self.job.state_bytes / self.job.state_copies / self.depth
            step_s = step_s * (1 + self.redundant.overhead) + gradient_bytes / self.job.durations.link_bytes_per_s
        if any(None in pipeline for pipeline in self.working):
            step_s *= twice_slower(max(self.plan.micro_batches_per_replica), self.depth)
        return step_s

    def _every_s(self) -> float:
        """Return the interval of least cost, for losses that no other pipeline heals; at first, one loss a day."""
        mttf_s = max(3600.0, self.books.now_s) / max(1, self.num_fatal) if self.num_fatal else 86_400.0
        return max(cheapest_interval_s(self._stall_s(), mttf_s), self._durable_s(), self._step_s())

    def _stall_s(self) -> float:
        return self.job.durations.save_stall_s(self._bytes_of_one())

    def _durable_s(self) -> float:
        times = self.job.durations
        return times.save_upload_s(self._bytes_of_one()) + times.manifest_s

    def _bytes_of_one(self) -> float:
        return self.job.state_bytes / (self.depth * self.plan.num_replicas)


def play_pipelines(
    job: SpotJob,
    trace: Trace,
    *,
    until: Until,
    seed: int = 0,
    prices: SpotPrices | None = None,
    name: str = "",
    redundant: str | None,
) -> PolicyOutcome:
    """Play pipelines that drop samples, or whose VMs compute for their successors: "eflb" or "lflb"."""
    most = math.inf if until.num_steps is None else float(until.num_steps)
    books = Books(job, nothing_paid(trace, prices))
    plan = job.best_plan(max(job.gpus_per_vm * trace.max_nodes, job.fewest_workers), equal=True)
    assert plan is not None, "some number of workers fits equal pipelines"
    run = _PipelinedJob(job, books, plan, None if redundant is None else job.redundant[redundant], most)
    for change, until_s in intervals(trace, job.durations.setup_s, end_of(until, trace), prices, job.gpus_per_vm):
        books.spend(change.time_s, TimeUse.WAITING, 0)
        books.take(change)
        run.take(change)
        books.note(plan if run.working else None)
        run.train(until_s)
        if run.done >= most - 1e-9 or books.is_spent(until):
            break
    return books.outcome(
        {None: "drop", "eflb": "bamboo"}.get(redundant, f"bamboo-{redundant}"),
        name,
        seed,
        math.floor(run.done + 1e-9),
        lost_steps=math.ceil(run.lost - 1e-9),
        num_fatal=run.num_fatal,
        num_changes=run.num_changes,
        finished=run.done >= most - 1e-9,
    )
