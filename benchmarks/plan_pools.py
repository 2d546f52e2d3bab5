"""What unequal pipelines and mixed pools train, and how long plans for them take to find.

    python -m benchmarks plan_pools
    python -m benchmarks plan_pools --times

GPT-2 2.5B by its published profile for V100s. A T4 is taken to need 1.92 times as long for everything (125 and 65
TFLOPS with tensor cores, as NVIDIA states them), with as much memory and the same links; a third type 3 times as long.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

import typer

from benchmarks.harness import PROFILES, head, row
from morph.contract.profile import Profile, load_profile
from simulator import PlanChoice, plan
from simulator.inputs.synthetic import with_type

V100, T4 = 125.0, 65.0
NUMBERS = (13, 19, 23, 26, 27, 29, 31, 37, 100)
POOLS = ({"v100": 12, "t4": 12}, {"v100": 10, "t4": 15}, {"v100": 50, "t4": 50}, {"v100": 400, "t4": 300, "old": 300})


def timed(profile: Profile, pool: Mapping[str, int] | int, *, unequal: bool) -> tuple[PlanChoice, float]:
    """The answer, and processor seconds of the second time that it is asked for."""
    given = {"num_gpus": pool} if isinstance(pool, int) else {"pool": pool}
    for _ in range(2):
        begin_s = time.process_time()
        found = plan(profile, num_runners_up=0, unequal=unequal, **given)
        needed_s = time.process_time() - begin_s
    return found, needed_s


def main(
    times: Annotated[bool, typer.Option("--times", help="Also say how long each search takes.")] = False,
) -> None:
    """Print both tables."""
    profile = with_type(load_profile(PROFILES / "gpt2-2.5b.json"), "t4", V100 / T4)
    profile = with_type(profile, "old", 3.0)
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
        alone, _ = timed(profile, {"v100": pool["v100"]}, unequal=True)
        rate, of_v100s = (each.best.expected.examples_per_s for each in (found, alone))
        text = ", ".join(f"{number} {name}" for name, number in pool.items())
        searched = (f"{found_s:.2f} s",) if times else ()
        row(text, found.best.shape, f"{rate:.4g}", f"{rate / of_v100s - 1:.0%}", *searched)


if __name__ == "__main__":
    typer.run(main)
