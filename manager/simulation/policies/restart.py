"""Restarts from the newest checkpoint whenever VMs are lost, as job morphing by restart does (Varuna, section 4.5).

This is also Bamboo's first strawman (section 3). It saves after a fixed number of steps, or, as in the thesis on
Spotify (equation 4.5), every sqrt(2 stall (MTTP + R)), where the mean time between losses is that of the whole cluster,
because each loss sends the job back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from manager.accounting.account import TimeUse
from manager.simulation.policies.membership import Books, end_of, intervals, nothing_paid
from manager.simulation.spot.job import SpotJob
from manager.simulation.spot.run_end import PolicyOutcome, SpotPrices, Until
from morph.contract.plan import Plan
from morph.contract.trace import Trace
from morph.contract.waits import cheapest_interval_s


@dataclass
class _RestartingJob:
    """A job that trains, saves and restarts; times in seconds, durations from the job."""

    job: SpotJob
    books: Books
    every_steps: int | None
    most: float
    step: int = 0
    saved: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    """the versions that became durable, with their times"""
    since_s: float = 0.0
    plan: Plan | None = None
    members: tuple[str, ...] = ()
    begun_s: float = 0.0
    """the time of the running step so far"""
    ready_s: float = 0.0
    """the end of the running restart"""
    spent: list[tuple[int, int, float, int]] = field(default_factory=list)
    """steps that may not be durable yet: the first of several, their number, the time of each, and the number of VMs"""
    only_heeds: bool = False
    """whether every loss has a notice with time to save, so that no other saves are made"""
    must_save: bool = False
    """whether a VM will be taken, and there is time to save before that"""
    lost_steps: int = 0
    num_fatal: int = 0
    num_restarts: int = 0

    @property
    def done(self) -> bool:
        """Whether all requested steps are done."""
        return self.step >= self.most

    def is_told_in_time(self, leads: Sequence[float | None]) -> bool:
        """Return whether every notice leaves time to finish and save a step; ``leads``: all losses' lead times."""
        if self.plan is None or not leads:
            return False
        needs_s = self.plan.expected.mini_batch_s + self.job.durations.order_s + self._stall_s() + self._durable_s()
        return all(lead_s is not None and lead_s >= needs_s for lead_s in leads)

    def heed(self, lead_s: float) -> None:
        """Handle a notice: save after the running step, if the save is durable before the loss (the thesis, 4.2)."""
        if self.plan is None or self.every_steps is not None or self.books.now_s < self.ready_s:
            return
        left_s = self.plan.expected.mini_batch_s + self.job.durations.order_s - self.begun_s
        self.must_save |= left_s + self._stall_s() + self._durable_s() <= lead_s

    def restart(self, *, from_memory: bool) -> None:
        """Start again with the ready VMs from the newest checkpoint; ``from_memory``: from one that is made now."""
        books, times = self.books, self.job.durations
        now_s = books.now_s
        if from_memory:
            now_s += self._durable_s()
            self.saved = [*self.saved[-2:], (now_s, self.step)]
        else:
            newest = max(step for since_s, step in self.saved if since_s <= now_s)
            self.lost_steps += self.step - newest
            self.num_fatal += self.step > newest
            for step, num, step_s, members in self.spent:
                books.undo(max(0, min(num, step + num - newest)) * step_s, members)
            self.step, self.saved = newest, [(0.0, newest)]
            self.spent.clear()
        books.undo(self.begun_s, len(self.members))
        self.must_save = False
        self.begun_s, self.plan = 0.0, self.job.best_plan(len(books.ready))
        self.members = tuple(books.ready)[: self.plan.num_workers] if self.plan is not None else ()
        self.num_restarts += 1
        load_s = self._bytes_of_one() / times.storage_bytes_per_s if self.step else 0.0
        self.ready_s = now_s + times.restart_s + load_s
        self.since_s = self.ready_s

    def train(self, until_s: float) -> None:
        """Train until this time with this membership."""
        books, plan = self.books, self.plan
        if plan is None:
            return books.spend(until_s, TimeUse.WAITING, 0)
        members = plan.num_workers
        books.spend(min(self.ready_s, until_s), TimeUse.MORPH, members)
        step_s = plan.expected.mini_batch_s + self.job.durations.order_s
        while not self.done and books.now_s + step_s - self.begun_s <= until_s:
            num = self._steps_until_save(step_s, until_s)
            books.spend(books.now_s + num * step_s - self.begun_s, TimeUse.COMPUTE, members)
            self.spent.append((self.step, num, step_s, members))
            self.step, self.begun_s = self.step + num, 0.0
            if self._is_due():
                self._save(until_s)
        if not self.done:
            self.begun_s += max(0.0, until_s - books.now_s)
            books.spend(until_s, TimeUse.COMPUTE, members)
        return None

    def _steps_until_save(self, step_s: float, until_s: float) -> int:
        """Return the number of steps, at least one, until a save is due, time is over or the job is done."""
        books = self.books
        most = int((until_s - books.now_s + self.begun_s) / step_s + 1e-9)
        if self.must_save:
            return 1
        if self.only_heeds:
            return max(1, int(min(most, self.most - self.step)))
        if self.every_steps is not None:
            due = self.every_steps - (self.step - self.saved[-1][1])
        else:
            due = math.ceil((self.since_s + self._every_s() - books.now_s + self.begun_s) / step_s - 1e-9)
        durable = math.ceil((self.saved[-1][0] - books.now_s + self.begun_s) / step_s - 1e-9)
        return max(1, int(min(most, max(due, durable), self.most - self.step)))

    def _is_due(self) -> bool:
        on_its_way = self.saved[-1][0] > self.books.now_s + 1e-6
        if on_its_way or self.done:
            return False
        if self.must_save or self.only_heeds:
            return self.must_save
        if self.every_steps is not None:
            return self.step - self.saved[-1][1] >= self.every_steps
        return self.books.now_s - self.since_s >= self._every_s() - 1e-6

    def _every_s(self) -> float:
        """Return the interval between saves that costs least given the losses so far, at least the time of one save."""
        num, now_s = self.books.num_losses, self.since_s
        mttp_s = now_s / num if num and now_s else max(3600.0, now_s)
        restart_s = self.job.durations.restart_s + self.job.durations.setup_s
        return max(cheapest_interval_s(self._stall_s(), mttp_s, restart_s), self._durable_s())

    def _save(self, until_s: float) -> None:
        assert self.plan is not None
        books, stall_s = self.books, self._stall_s()
        books.spend(min(until_s, books.now_s + stall_s), TimeUse.CHECKPOINT, self.plan.num_workers)
        newest = max(step for since_s, step in self.saved if since_s <= books.now_s)
        self.saved = [*self.saved[-2:], (books.now_s + self._durable_s(), self.step)]
        self.spent = [entry for entry in self.spent if entry[0] + entry[1] > newest]
        self.since_s, self.must_save = books.now_s, False

    def _stall_s(self) -> float:
        return self.job.durations.save_stall_s(self._bytes_of_one())

    def _durable_s(self) -> float:
        times = self.job.durations
        return times.save_upload_s(self._bytes_of_one()) + times.manifest_s

    def _bytes_of_one(self) -> float:
        return self.job.state_bytes / max(1, self.plan.num_workers if self.plan else 1)


def play_restart(
    job: SpotJob,
    trace: Trace,
    *,
    until: Until,
    seed: int = 0,
    prices: SpotPrices | None = None,
    name: str = "",
    every_steps: int | None = None,
    adaptive: bool = False,
) -> PolicyOutcome:
    """Play a job that restarts and saves every ``every_steps`` steps; None: at the interval of least cost.

    ``adaptive``: no other saves if every notice leaves time to save (the thesis on Spotify, 4.2).
    """
    most = math.inf if until.num_steps is None else until.num_steps
    books = Books(job, nothing_paid(trace, prices))
    run = _RestartingJob(job, books, every_steps, most)
    leads = [event.notice_s for event in trace.events if event.event == "remove"]
    for change, until_s in intervals(trace, job.durations.setup_s, end_of(until, trace), prices, job.gpus_per_vm):
        books.spend(change.time_s, TimeUse.WAITING, 0)
        books.take(change)
        better = job.best_plan(len(books.ready))
        if not set(change.lost).isdisjoint(run.members):
            run.restart(from_memory=False)
        elif better is not None and _gain(run.plan, better) >= job.policy.min_join_gain:
            run.restart(from_memory=run.step > 0 and run.ready_s <= change.time_s)
        for lead_s in (lead_s for vm, lead_s in change.noticed if vm in run.members):
            run.heed(lead_s)
        books.note(run.plan)
        run.only_heeds = adaptive and run.is_told_in_time(leads)
        run.train(until_s)
        if run.done or books.is_spent(until):
            break
    policy = "adaptive" if adaptive else "restart" if every_steps is None else f"restart-{every_steps}"
    return books.outcome(
        policy,
        name,
        seed,
        run.step,
        lost_steps=run.lost_steps,
        num_fatal=run.num_fatal,
        num_changes=run.num_restarts,
        finished=run.done,
    )


def _gain(plan: Plan | None, better: Plan) -> float:
    return math.inf if plan is None else better.expected.examples_per_s / plan.expected.examples_per_s - 1
