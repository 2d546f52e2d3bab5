"""Computes an upper bound for all policies on a trace's VMs, and the result of on-demand VMs, which are never taken."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from manager.accounting.account import TimeUse
from manager.simulation.policies.membership import Books, end_of, intervals, nothing_paid, twice_slower
from manager.simulation.spot.job import SpotJob
from manager.simulation.spot.run_end import PolicyOutcome, SpotPrices, Until
from morph.contract.plan import Plan
from morph.contract.trace import Trace

_NEAR = 1e-12


class Fastest(NamedTuple):
    """Parallel pipelines of any depths, and the time of their common step."""

    step_s: float
    pipelines: tuple[int, ...]
    """depths, in ascending order"""
    num_workers: int

    @property
    def shape(self) -> str:
        """The shape, with a term in a plan's notation for each depth: 8x2+11x1."""
        return "+".join(f"{depth}x{number}" for depth, number in sorted(Counter(self.pipelines).items()))


class _Kind(NamedTuple):
    """Pipelines of one kind: the workers of one pipeline, and the seconds that it needs for each share."""

    workers: int
    shares: tuple[float, ...]
    times_s: tuple[float, ...]

    def share(self, time_s: float) -> float:
        """Return the micro-batches that a pipeline completes in this time; 0 if fewer than one."""
        place = bisect_left(self.times_s, time_s)
        if place == len(self.times_s):
            return self.shares[-1]
        before = (0.0, 0.0) if place == 0 else (self.times_s[place - 1], self.shares[place - 1])
        value = before[1] + (time_s - before[0]) / (self.times_s[place] - before[0]) * (self.shares[place] - before[1])
        return value if value >= 1 - _NEAR else 0.0


class Bound:
    """The fastest step of any number of workers, by a relaxation: no set of pipelines can be faster.

    The pipelines may differ in depth, and a share need not be a whole number of micro-batches. Each depth's time as a
    function of its share is derived from all known times (``SpotJob.pipelines`` and ``plans``), rounded down: linear
    between two shares, proportional below the smallest, and per micro-batch never growing with the share, because each
    share fills the pipeline once. So a policy that drops samples cannot exceed the bound either. If a job does not say
    which pipelines fit, a worker may compute two stages, as in Bamboo.
    """

    def __init__(self, job: SpotJob) -> None:
        plans = list(job.plans.values())
        self._whole = max(plan.num_micro_batches for plan in plans)
        known: dict[tuple[int, int], dict[float, float]] = {}
        for depth, share, time_s in (*_of_pipelines(job), *_of_plans(plans)):
            kinds = [((depth, depth), time_s)]
            if not job.pipelines:
                kinds.append(((math.ceil(depth / 2), depth), time_s * twice_slower(share, depth)))
            for kind, kind_s in kinds:
                times = known.setdefault(kind, {})
                times[share] = min(times.get(share, math.inf), kind_s)
        self._kinds = [_kind(workers, times, self._whole) for (workers, _), times in sorted(known.items())]
        self._found: dict[int, Fastest | None] = {}

    def fastest(self, num_workers: int) -> Fastest | None:
        """Return the fastest step on this many workers; None: no pipeline fits."""
        if num_workers not in self._found:
            self._found[num_workers] = self._search(num_workers)
        return self._found[num_workers]

    def _search(self, num_workers: int) -> Fastest | None:
        """Find in turn the pipelines that complete most in a time, and their time, until it is constant."""
        fitting = [kind for kind in self._kinds if kind.workers <= num_workers]
        if not fitting:
            return None
        time_s = min(kind.times_s[-1] for kind in fitting)
        while True:
            chosen = self._most(fitting, num_workers, time_s)
            needed_s = self._time_s(chosen, time_s)
            if needed_s >= time_s * (1 - _NEAR):
                depths = tuple(sorted(kind.workers for kind in chosen))
                return Fastest(time_s, depths, sum(depths))
            time_s = needed_s

    def _most(self, kinds: list[_Kind], num_workers: int, time_s: float) -> list[_Kind]:
        """Return the set of pipelines on this many workers that completes most micro-batches in this time."""
        sizes = np.array([kind.workers for kind in kinds])
        shares = np.array([kind.share(time_s) for kind in kinds])
        most, taken = np.zeros(num_workers + 1), np.full(num_workers + 1, -1)
        for number in range(1, num_workers + 1):
            most[number] = most[number - 1]
            num_fitting = int(np.searchsorted(sizes, number, "right"))
            if num_fitting:
                sums = most[number - sizes[:num_fitting]] + shares[:num_fitting]
                best = int(sums.argmax())
                if sums[best] > most[number] * (1 + _NEAR):
                    most[number], taken[number] = sums[best], best
        chosen: list[_Kind] = []
        left = num_workers
        while left > 0:
            if taken[left] >= 0:
                chosen.append(kinds[taken[left]])
                left -= chosen[-1].workers
            else:
                left -= 1
        return chosen

    def _time_s(self, chosen: list[_Kind], most_s: float) -> float:
        """Return the time at which these pipelines complete a mini-batch; ``most_s`` bounds it from above."""
        counted = Counter(chosen)
        low_s, high_s = 0.0, most_s
        while high_s - low_s > _NEAR * high_s:
            middle_s = (low_s + high_s) / 2
            if middle_s in (low_s, high_s):
                break
            done = sum(number * kind.share(middle_s) for kind, number in counted.items())
            low_s, high_s = (low_s, middle_s) if done >= self._whole else (middle_s, high_s)
        return high_s


def _of_pipelines(job: SpotJob) -> Iterator[tuple[int, float, float]]:
    for depth, times in job.pipelines.items():
        yield from ((depth, share, time_s) for share, time_s in times)


def _of_plans(plans: list[Plan]) -> Iterator[tuple[int, float, float]]:
    """Yield each kind's busiest and mean share with the same time; the mean counts for policies that drop samples."""
    for plan in plans:
        for kind in plan.pipeline_kinds:
            for counted in {sum(kind.micro_batches) / kind.num_replicas, float(kind.longest_share)}:
                yield kind.num_stages, counted, plan.expected.mini_batch_s


def _kind(workers: int, times: dict[float, float], whole: float) -> _Kind:
    """Return times that increase with the share, with times per micro-batch that do not increase."""
    shares = sorted(times.keys() | {whole})
    per_share, times_s = math.inf, []
    for share in shares:
        per_share = min(per_share, times.get(share, math.inf) / share)
        times_s.append(per_share * share)
    for place in range(len(times_s) - 2, -1, -1):
        times_s[place] = min(times_s[place], times_s[place + 1] * (1 - _NEAR))
    return _Kind(workers, tuple(map(float, shares)), tuple(times_s))


def play_ideal(
    job: SpotJob, trace: Trace, *, until: Until, seed: int = 0, prices: SpotPrices | None = None, name: str = ""
) -> PolicyOutcome:
    """Play the ideal: changes of shape take no time, newcomers are ready at once, nothing is lost, no VM is idle."""
    books, steps, num_changes, bound = Books(job, nothing_paid(trace, prices)), 0.0, 0, Bound(job)
    most = math.inf if until.num_steps is None else until.num_steps
    for change, until_s in intervals(trace, 0.0, end_of(until, trace), prices, job.gpus_per_vm):
        books.spend(change.time_s, TimeUse.WAITING, 0)
        books.take(change)
        best = bound.fastest(len(books.ready))
        num_changes += not books.moments or books.moments[-1].shape != ("" if best is None else best.shape)
        books.note_shape(*(("", 0.0) if best is None else (best.shape, job.batch_size / best.step_s)))
        if best is not None:
            end_s = min(until_s, change.time_s + (most - steps) * best.step_s)
            books.spend(end_s, TimeUse.COMPUTE, best.num_workers)
            steps += (end_s - change.time_s) / best.step_s
        else:
            books.spend(until_s, TimeUse.WAITING, 0)
        if steps >= most - 1e-9 or books.is_spent(until):
            break
    done = steps >= most - 1e-9
    return books.outcome("ideal", name, seed, math.floor(steps + 1e-9), num_changes=num_changes, finished=done)


def play_on_demand(
    job: SpotJob, trace: Trace, *, until: Until, seed: int = 0, prices: SpotPrices | None = None, name: str = ""
) -> PolicyOutcome:
    """Play as many on-demand VMs as the trace has VMs on average; these are never taken."""
    price = None if prices is None else prices.on_demand_usd_per_h
    books = Books(job, None if price is None else 0.0)
    mean_vms = play_ideal(job, trace, until=Until(kind="hours", amount=trace.duration_s / 3600)).vm_s / trace.duration_s
    plan = job.best_plan(max(job.fewest_workers, job.gpus_per_vm * round(mean_vms)))
    assert plan is not None, "some number of workers fits a plan"
    num_vms = -(-plan.num_workers // job.gpus_per_vm)
    step_s, books.num_vms = plan.expected.mini_batch_s, num_vms * job.gpus_per_vm
    books.ready = dict.fromkeys(map(str, range(books.num_vms)))
    books.usd_per_h = num_vms * (price or 0.0)
    books.note(plan)
    if until.num_steps is not None:
        end_s = until.num_steps * step_s
    elif until.kind == "usd":
        end_s = end_of(until, trace) if not price else until.amount / price / num_vms * 3600
    else:
        end_s = until.end_s or trace.duration_s
    books.spend(end_s, TimeUse.COMPUTE, plan.num_workers)
    finished = until.num_steps is not None
    return books.outcome("on-demand", name, seed, math.floor(end_s / step_s + 1e-9), finished=finished)
