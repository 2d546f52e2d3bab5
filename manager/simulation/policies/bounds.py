"""What no policy on these VMs can surpass, and VMs that are never taken, at their price."""

from __future__ import annotations

import math

from manager.accounting.account import Part
from manager.simulation.policies.membership import Books, end_of, intervals, nothing_paid
from manager.simulation.spot.job import SpotJob
from manager.simulation.spot.outcome import Outcome
from manager.simulation.spot.run_end import SpotPrices, Until
from morph.contract.trace import Trace


def play_ideal(
    job: SpotJob, trace: Trace, *, until: Until, seed: int = 0, prices: SpotPrices | None = None, name: str = ""
) -> Outcome:
    """Every change of shape is free and instant, newcomers are ready at once, and nothing is ever lost."""
    books, steps, num_changes = Books(job, nothing_paid(trace, prices)), 0.0, 0
    most = math.inf if until.num_steps is None else until.num_steps
    for change, until_s in intervals(trace, 0.0, end_of(until, trace), prices):
        books.spend(change.time_s, Part.WAITING, 0)
        books.take(change)
        plan = job.best_plan(len(books.ready))
        num_changes += not books.moments or books.moments[-1].shape != ("" if plan is None else plan.shape)
        books.note(plan)
        if plan is not None:
            step_s = plan.expected.mini_batch_s
            end_s = min(until_s, change.time_s + (most - steps) * step_s)
            books.spend(end_s, Part.COMPUTE, plan.num_workers)
            steps += (end_s - change.time_s) / step_s
        else:
            books.spend(until_s, Part.WAITING, 0)
        if steps >= most - 1e-9 or books.is_spent(until):
            break
    done = steps >= most - 1e-9
    return books.outcome("ideal", name, seed, math.floor(steps + 1e-9), num_changes=num_changes, finished=done)


def play_on_demand(
    job: SpotJob, trace: Trace, *, until: Until, seed: int = 0, prices: SpotPrices | None = None, name: str = ""
) -> Outcome:
    """As many VMs as the trace has on average, never taken, at the on-demand price."""
    price = None if prices is None else prices.on_demand_usd_per_h
    books = Books(job, None if price is None else 0.0)
    mean_vms = play_ideal(job, trace, until=Until(kind="hours", amount=trace.duration_s / 3600)).vm_s / trace.duration_s
    plan = job.best_plan(max(min(job.plans), round(mean_vms)))
    assert plan is not None, "some number of workers fits a plan"
    step_s, books.num_vms = plan.expected.mini_batch_s, plan.num_workers
    books.ready = dict.fromkeys(map(str, range(plan.num_workers)))
    books.usd_per_h = plan.num_workers * (price or 0.0)
    books.note(plan)
    if until.num_steps is not None:
        end_s = until.num_steps * step_s
    elif until.kind == "usd":
        end_s = end_of(until, trace) if not price else until.amount / price / plan.num_workers * 3600
    else:
        end_s = until.end_s or trace.duration_s
    books.spend(end_s, Part.COMPUTE, plan.num_workers)
    finished = until.num_steps is not None
    return books.outcome("on-demand", name, seed, math.floor(end_s / step_s + 1e-9), finished=finished)
