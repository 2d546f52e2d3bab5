"""Throughput of unequal pipelines and mixed pools, and the time to find plans for them.

    python -m benchmarks plan_pools
    python -m benchmarks plan_pools --times

GPT-2 2.5B with its published profile for V100s. A T4 is assumed to need 1.92 times as long for everything (NVIDIA
states 125 and 65 TFLOPS with tensor cores), with as much memory and the same links; a third type needs 3 times as long.
Numbers of stages by type are those of a pipeline that is on two types, first stages first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby
from typing import Annotated

import typer

from benchmarks.harness import PROFILES, head, row
from morph.contract.errors import PlanError
from morph.contract.plan import Plan
from morph.contract.profile import Profile, load_profile
from simulator import PlanChoice, plan
from simulator.inputs.synthetic import with_type

V100, T4 = 125.0, 65.0
NUMBERS = (13, 19, 23, 26, 27, 29, 31, 37, 100)
SPARE = ({"v100": 3, "t4": 3}, {"v100": 2, "t4": 9}, {"v100": 13, "t4": 5}, {"v100": 27, "t4": 5})
"""GPUs that pipelines on one type each leave idle, or on which none fits."""
POOLS = (
    *SPARE,
    {"v100": 12, "t4": 12},
    {"v100": 10, "t4": 15},
    {"v100": 50, "t4": 50},
    {"v100": 400, "t4": 300, "old": 300},
)


def timed(profile: Profile, pool: Mapping[str, int] | int, *, unequal: bool) -> tuple[PlanChoice, float]:
    """Return the plan, and the processor seconds of its second computation."""
    given = {"num_gpus": pool} if isinstance(pool, int) else {"pool": pool}
    for _ in range(2):
        begin_s = time.process_time()
        found = plan(profile, num_runners_up=0, unequal=unequal, **given)
        needed_s = time.process_time() - begin_s
    return found, needed_s


def planned(plan: Plan) -> str:
    """Return the shape, with the types of each pipeline that is on two: ``8x1 + 10x1 (5 t4, 5 v100)``."""
    kinds = []
    replica = 0
    for kind in plan.pipeline_kinds:
        runs = groupby(plan.stages[stage].node_type for stage in plan.stages_of(replica))
        types = [f"{len(list(stages))} {name}" for name, stages in runs]
        kinds.append(f"{kind.num_stages}x{kind.num_replicas}" + (f" ({', '.join(types)})" if len(types) > 1 else ""))
        replica += kind.num_replicas
    return " + ".join(kinds)


def main(
    times: Annotated[bool, typer.Option("--times", help="Also say how long each search takes.")] = False,
) -> None:
    """Print both tables."""
    profile = load_profile(PROFILES / "gpt2-2.5b.json")
    memory_bytes = profile.environment.device_memory_bytes
    profile = with_type(with_type(profile, "t4", V100 / T4, memory_bytes), "old", 3.0, memory_bytes)
    more = " | search, equal | unequal" if times else ""
    head(f"V100s | equal | examples/s | unequal | examples/s | gain{more}")
    for number in NUMBERS:
        (equal, equal_s), (unequal, unequal_s) = (timed(profile, number, unequal=each) for each in (False, True))
        rates = [each.best.expected.examples_per_s for each in (equal, unequal)]
        took = (f"{equal_s:.2f} s", f"{unequal_s:.2f} s") if times else ()
        cells = [number, equal.best.shape, f"{rates[0]:.4g}", unequal.best.shape, f"{rates[1]:.4g}"]
        row(*cells, f"{rates[1] / rates[0] - 1:.1%}", *took)
    print()
    head(f"pool | plan | examples/s | over the V100s alone{' | search' if times else ''}")
    for pool in POOLS:
        found, found_s = timed(profile, pool, unequal=True)
        rate, more = found.best.expected.examples_per_s, "does not fit"
        with suppress(PlanError):
            alone, _ = timed(profile, {"v100": pool["v100"]}, unequal=True)
            more = f"{rate / alone.best.expected.examples_per_s - 1:.0%}"
        text = ", ".join(f"{number} {name}" for name, number in pool.items())
        searched = (f"{found_s:.2f} s",) if times else ()
        row(text, planned(found.best), f"{rate:.4g}", more, *searched)


if __name__ == "__main__":
    typer.run(main)
