"""What simulating a spot cluster with the real controller costs: a day of it, and each change with many nodes.

A day of GPT-2 2.5B on up to 48 VMs, drawn at the rate at which VMs were lost on AWS p3 (0.61 an hour each), and changes
of membership one after the other on 48 to 1,000 VMs. Processor time. Run: python benchmarks/spot_speed.py [--seeds 5]
[--parts], which times the largest parts too: the controller's decisions, parts of them, and parts of the simulation.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import controller_scale

from manager.controller import answering
from manager.controller.shape import forming
from manager.simulation.policies.morph import play_morph
from manager.simulation.spot import cluster as spot_cluster
from manager.simulation.spot.cluster import SpotCluster
from manager.simulation.spot.job import SpotJob, job_from_profile
from manager.simulation.spot.until import Until
from manager.simulation.spot.vms import Workers
from morph.contract.plan import Plan
from morph.contract.profile import load_profile
from simulator import spot_model

PROFILE = Path(__file__).parent.parent / "configs/profiles/gpt2-2.5b.json"
PER_VM_H = 0.61
CHANGES = 20
BETWEEN_S = 150.0
STEP_S = 20.0

PARTS: dict[str, tuple[tuple[object, str], ...]] = {
    "the controller": ((spot_cluster, "decide"),),
    "of it, orders that form shapes": ((forming, "_order"),),
    "of those, places and sources": ((forming, "place"), (forming, "choose_sources")),
    "of those, followers": ((forming, "redundancy_of"),),
    "of those, what is spared": ((forming, "choose_salvage"),),
    "of it, ends of steps": ((answering, "decide_step"),),
    "simulated sums of steps that are given up": ((Workers, "abort"),),
    "the ledger": ((SpotCluster, "_book"),),
}
"""What ``--parts`` times, with everything that each of them calls."""
took_s: Counter[str] = Counter()


def time_parts() -> None:
    """From now on add up what the parts take."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = time.process_time()
            result = function(*args, **kwargs)
            took_s[name] += time.process_time() - start_s
            return result

        return call

    for name, functions in PARTS.items():
        for place, function in functions:
            setattr(place, function, timed(name, getattr(place, function)))


def print_parts(each_of: int) -> None:
    """Print what each part took, of so many changes, and begin anew."""
    for name in PARTS if took_s else ():
        print(f"    {took_s[name] * 1e3 / each_of:.2f} ms for each change: {name}")
    took_s.clear()


def day(job: SpotJob, num_vms: int, seed: int) -> tuple[float, int, int]:
    """Return the processor time of 24 h, the changes of membership in them, and the steps."""
    trace = spot_model(num_vms, losses_per_vm_h=PER_VM_H, replacement_s=600).draw(seed, 86_400)
    start_s = time.process_time()
    outcome = play_morph(job, trace, until=Until(kind="hours", amount=24), seed=seed)
    total_s = time.process_time() - start_s
    return total_s, len({event.time_s for event in trace.events}), outcome.steps


def change_s(num_vms: int) -> tuple[float, float]:
    """Return the processor time of one change of membership with so many VMs, and the decisions that it takes."""
    config = controller_scale.make_config(num_vms)

    def slower(plan: Plan) -> Plan:
        step_s = STEP_S * num_vms / plan.num_workers
        expected = plan.expected.model_copy(update={"mini_batch_s": step_s, "examples_per_s": 1 / step_s})
        return plan.model_copy(update={"expected": expected})

    job = SpotJob(
        name="many",
        batch_size=1,
        plans={count: slower(plan) for count, plan in config.plans.items()},
        units=config.units,
        unit_bytes=config.unit_bytes,
    )
    cluster = SpotCluster(job, num_steps=10**9, num_expected=num_vms)
    for _ in range(num_vms):
        cluster.vm_came()
    cluster.play(600)
    took_s.clear()
    draw = random.Random(0)
    start_s, before = time.process_time(), cluster.num_decisions
    for _ in range(CHANGES):
        cluster.vm_taken(draw.choice(sorted(cluster.workers.alive)))
        cluster.play(cluster.now_s + BETWEEN_S)
        cluster.vm_came()
        cluster.play(cluster.now_s + BETWEEN_S)
    changes = 2 * CHANGES
    return (time.process_time() - start_s) / changes, (cluster.num_decisions - before) / changes


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", action="store_true", help="say what the largest parts take")
    options = parser.parse_args()
    if options.parts:
        time_parts()
    job = job_from_profile(load_profile(PROFILE), 48)
    days = [day(job, 48, seed) for seed in range(options.seeds)]
    day_s = [each[0] for each in days]
    print(
        f"24 h of 48 VMs: {statistics.median(day_s):.2f} s ({min(day_s):.2f} to {max(day_s):.2f}), "
        f"{statistics.median(each[1] for each in days):.0f} moments with a change, "
        f"{statistics.median(each[2] for each in days):.0f} steps",
        flush=True,
    )
    print_parts(sum(each[1] for each in days))
    for num_vms in (48, 200, 1000):
        took, decisions = change_s(num_vms)
        print(f"{num_vms} VMs: {took * 1e3:.1f} ms for each change, {decisions:.1f} decisions", flush=True)
        print_parts(2 * CHANGES)


if __name__ == "__main__":
    main()
