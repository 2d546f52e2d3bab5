"""Cost of simulating a spot cluster with the real controller: for a day, and for each change with many nodes.

    python -m benchmarks spot_speed --seeds 5

A day of GPT-2 2.5B on up to 48 VMs, drawn at the rate at which VMs were lost on AWS p3 (0.61 an hour each), and changes
of membership one after the other on 48 to 1,000 VMs. Processor time. ``--parts``: the share of each large part, with
everything that it calls, as Python's profiler sees it, which makes all of it slower.
"""

from __future__ import annotations

import cProfile
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Annotated

from benchmarks.controller_scale import make_config
from benchmarks.harness import PROFILES, cpu_s, head, option, row
from manager.simulation.policies.morph import play_morph
from manager.simulation.spot.cluster import SpotCluster
from manager.simulation.spot.job import SpotJob, job_from_profile
from manager.simulation.spot.run_end import Until
from morph.contract.plan import Plan, by_pool
from morph.contract.profile import load_profile
from simulator import spot_model

PER_VM_H = 0.61
CHANGES = 20
BETWEEN_S = 150.0
STEP_S = 20.0
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "the controller": (("controller/decide.py", "decide"),),
    "of it, orders that form shapes": (("shape/forming.py", "_order"),),
    "of those, places and sources": (("shape", "place"), ("shape", "choose_sources")),
    "of those, followers": (("controller", "redundancy_of"),),
    "of those, what is spared": (("controller", "choose_salvage"),),
    "of it, ends of steps": (("controller", "decide_step"),),
    "simulated sums of steps that are given up": (("spot/vms.py", "abort"),),
    "the ledger": (("spot/cluster.py", "_book"),),
}
"""The parts that ``--parts`` reports: functions, each with a part of its file's name."""


def measured(work: Callable[[], object], parts: bool) -> float:
    """Return the processor time of some work; print the shares of its parts."""
    if not parts:
        return cpu_s(work)
    profile, begin_s = cProfile.Profile(), time.perf_counter()
    took_s = cpu_s(lambda: profile.runcall(work))
    whole_s = time.perf_counter() - begin_s
    head("part | share of the profiled time")
    for name, functions in PARTS.items():
        spent_s = sum(
            entry.totaltime
            for entry in profile.getstats()
            for piece, function in functions
            if isinstance(entry.code, CodeType) and entry.code.co_name == function and piece in entry.code.co_filename
        )
        row(name, f"{spent_s / whole_s:.0%}")
    return took_s


def day(job: SpotJob, num_vms: int, seed: int) -> tuple[float, int, int]:
    """Return the processor time of 24 h, the changes of membership in them, and the steps."""
    trace = spot_model(num_vms, losses_per_vm_h=PER_VM_H, replacement_s=600).draw(seed, 86_400)
    outcomes = []
    took_s = cpu_s(lambda: outcomes.append(play_morph(job, trace, until=Until(kind="hours", amount=24), seed=seed)))
    return took_s, len({event.time_s for event in trace.events}), outcomes[0].steps


def ready_cluster(num_vms: int) -> SpotCluster:
    """Return a cluster of so many training VMs."""
    config = make_config(num_vms)

    def slower(plan: Plan) -> Plan:
        step_s = STEP_S * num_vms / plan.num_workers
        expected = plan.expected.model_copy(update={"mini_batch_s": step_s, "examples_per_s": 1 / step_s})
        return plan.model_copy(update={"expected": expected})

    job = SpotJob(
        name="many",
        batch_size=1,
        plans={pool: slower(plan) for pool, plan in by_pool(config.plans)},
        units=config.units,
        unit_bytes=config.unit_bytes,
    )
    cluster = SpotCluster(job, num_steps=10**9, num_expected=num_vms)
    for _ in range(num_vms):
        cluster.vm_came()
    cluster.play(600)
    return cluster


def change(cluster: SpotCluster) -> None:
    """Take VMs away, and let others come."""
    draw = random.Random(0)
    for _ in range(CHANGES):
        cluster.vm_taken(draw.choice(sorted(cluster.workers.alive)))
        cluster.play(cluster.now_s + BETWEEN_S)
        cluster.vm_came()
        cluster.play(cluster.now_s + BETWEEN_S)


def main(seeds: int = 5, parts: Annotated[bool, option("say what the largest parts take")] = False) -> None:
    job = job_from_profile(load_profile(PROFILES / "gpt2-2.5b.json"), 48)
    days: list[tuple[float, int, int]] = []
    measured(lambda: days.extend(day(job, 48, seed) for seed in range(seeds)), parts)
    day_s = [each[0] for each in days]
    print(
        f"24 h of 48 VMs: {statistics.median(day_s):.2f} s ({min(day_s):.2f} to {max(day_s):.2f}), "
        f"{statistics.median(each[1] for each in days):.0f} moments with a change, "
        f"{statistics.median(each[2] for each in days):.0f} steps",
        flush=True,
    )
    for num_vms in (48, 200, 1000):
        cluster = ready_cluster(num_vms)
        before = cluster.num_decisions
        took_s = measured(partial(change, cluster), parts) / (2 * CHANGES)
        decisions = (cluster.num_decisions - before) / (2 * CHANGES)
        print(f"{num_vms} VMs: {took_s * 1e3:.1f} ms for each change, {decisions:.1f} decisions", flush=True)
