"""How fast the simulator answers, beside the same rules on heapq-based SimPy in the same run.

    python benchmarks/simulator_speed.py

Prints milliseconds of CPU time, the best of several runs, after one run that compiles or loads the loops.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from morph.contract.profile import Profile
from simulator import plan, plan_table, synthetic_profile
from simulator.costs import SectionCosts, stage_costs
from simulator.engine import StageTimes, run_pipeline
from simulator.orders import stage_windows
from simulator.partition import partition_table
from simulator.simpy_model import play_with_simpy

DEPTH, REPLICAS, MICRO_BATCHES = 36, 3, 683


def best_ms(action: Callable[[], object], repeats: int = 10) -> float:
    action()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        action()
        times.append(time.process_time() - begin)
    return min(times) * 1e3


def profile(uneven: bool) -> Profile:
    spread = np.random.default_rng(0).uniform(0.8, 1.2, 72)
    forward_s = [0.01 * float(factor) for factor in spread] if uneven else 0.01
    return synthetic_profile(num_sections=72, batch_size=8192, micro_batch_size=4, forward_s=forward_s)


def stage_times(measured: Profile, slope: int) -> StageTimes:
    sections = SectionCosts(measured, 4)
    boundaries = partition_table(sections, "varuna", num_micro_batches=MICRO_BATCHES, slope=slope).boundaries(DEPTH)
    windows = stage_windows("varuna", DEPTH, MICRO_BATCHES, slope)
    return stage_costs(sections, boundaries, windows, "varuna").times


def main() -> None:
    tasks = MICRO_BATCHES * (3 * DEPTH - 1)
    print(f"One configuration: P={DEPTH}, D={REPLICAS}, {MICRO_BATCHES} micro-batches per replica ({tasks} tasks each;")
    print("equal replicas are played once)")
    for uneven in (False, True):
        for slope in (1, 2, 4):
            times = stage_times(profile(uneven), slope)
            counts = (MICRO_BATCHES,) * REPLICAS
            skipping = best_ms(lambda times=times, counts=counts: run_pipeline(times, counts))
            plain = best_ms(lambda times=times, counts=counts: run_pipeline(times, counts, skip_periods=False))
            print(
                f"  {'uneven' if uneven else 'equal '} stages, slope {slope}: {skipping:6.2f} ms; "
                f"without skipping periods {plain:6.2f} ms ({tasks / plain / 1e3:.0f} million tasks/s)"
            )
    times = stage_times(profile(False), 1)
    reference = best_ms(lambda: play_with_simpy(times, (MICRO_BATCHES,)), repeats=1)
    print(f"  SimPy model, equal stages, slope 1: {reference:.0f} ms ({tasks / reference / 1e3:.2f} million tasks/s)")
    print("Sweep over every P: 128 GPUs, batch 8192, 72 cut-points, m = 4")
    for uneven in (False, True):
        measured = profile(uneven)
        alone = best_ms(lambda measured=measured: plan(measured, num_gpus=128, num_runners_up=0), 5)
        ranked = best_ms(lambda measured=measured: plan(measured, num_gpus=128), 5)
        table = best_ms(lambda measured=measured: plan_table(measured, 128), 3)
        print(f"  {'uneven' if uneven else 'equal '} sections: best {alone:.1f} ms; with runners-up {ranked:.1f} ms;")
        print(f"    table of the best plan for each of 1 to 128 GPUs {table:.0f} ms")


if __name__ == "__main__":
    main()
