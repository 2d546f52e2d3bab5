"""How far plans are from the best that there is: every other choice tried, on small random jobs.

    python benchmarks/plan_search.py [--cases N]

Three questions, each with a seed for every case: windows of any size for given stages; every depth, number of
replicas, micro-batch size, cut, slope and schedule, with recompute and without; and latencies from none to eight
forwards, against GPipe, 1F1B and windows of any slope on the same stages. Prints how much slower the planner's choice
is than the best.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import combinations, product

import numpy as np

from morph.contract.profile import Profile
from simulator import plan, simulate, synthetic_profile
from simulator.answers.answer import deal
from simulator.answers.costs import SectionCosts, stage_costs
from simulator.answers.finish import finish
from simulator.playing.engine import run_pipeline

SCHEDULES = ("varuna", "gpipe", "1f1b")
LATENCIES = (0, 1, 2, 4, 8)


def random_profile(rng: np.random.Generator, num_sections: int, batch_size: int, sizes: tuple[int, ...]) -> Profile:
    forward_s = [float(value) for value in rng.uniform(0.002, 0.01, num_sections)]
    return synthetic_profile(
        num_sections=num_sections,
        forward_s=forward_s,
        batch_size=batch_size,
        micro_batch_sizes=sizes,
        overhead_s=float(rng.choice([0.0, 0.002])),
        latency_s=float(rng.choice([0.0, 0.5, 1, 2, 4])) * 0.006,
        bandwidth_bytes_per_s=float(rng.choice([1e7, 3e7, 1e9])),
        parameter_bytes=int(rng.choice([10_000, 1_000_000])),
        tied=bool(rng.integers(2)),
    )


def any_windows(seed: int) -> float:
    """The simulator's windows over the best windows of any size: mini-batches on links of one's own."""
    rng = np.random.default_rng(seed)
    depth, count = int(rng.integers(2, 5)), int(rng.integers(3, 7))
    profile = random_profile(rng, depth, count, (1,))
    given = {"boundaries": range(depth), "micro_batch_size": 1, "share_links": False}
    found = simulate(profile, **given).costs  # type: ignore[arg-type]
    sections = SectionCosts(profile, 1)

    def time_ns(windows: tuple[int, ...]) -> int:
        costs = stage_costs(sections, range(depth), windows, "varuna")
        last_backward_ns = run_pipeline(costs.times, (count,)).last_backward_ns
        return finish(costs, last_backward_ns, costs.to_come_ns[:, None]).mini_batch_ns

    best = min(time_ns(windows) for windows in product(*[range(1, count + 1)] * (depth - 1), [1]))
    return time_ns(tuple(found.times.window.tolist())) / best


def slopes(schedule: str, count: int) -> Iterator[int | None]:
    yield from range(1, max(2, count)) if schedule == "varuna" else (None,)


def everything(seed: int) -> float:
    """The plan over the best of all shapes, sizes, cuts, schedules and slopes."""
    rng = np.random.default_rng(seed)
    num_sections, gpus = int(rng.integers(2, 5)), int(rng.integers(2, 6))
    profile = random_profile(rng, num_sections, int(rng.choice([4, 8, 12])), (1, 2, 4))
    times = []
    for depth, m, recompute in product(range(1, min(gpus, num_sections) + 1), profile.micro_batch_sizes, (True, False)):
        total = profile.job.batch_size // m
        for replicas in range(1, min(gpus // depth, total) + 1):
            for cuts, schedule in product(combinations(range(1, num_sections), depth - 1), SCHEDULES):
                for slope in slopes(schedule, deal(total, replicas)[0] if depth > 1 else 1):
                    other = simulate(
                        profile,
                        boundaries=(0, *cuts),
                        num_replicas=replicas,
                        micro_batch_size=m,
                        schedule=schedule,  # type: ignore[arg-type]
                        window_slope=slope,
                        recompute=recompute,
                    )
                    times.append(other.expected.mini_batch_s)
    return plan(profile, num_gpus=gpus, num_runners_up=0).best.expected.mini_batch_s / min(times)


def latency(seed: int, forwards: float, *, gpipe_alone: bool = False) -> float:
    """A plan for 8 GPUs over the best of the other schedules and slopes on its stages, 64 micro-batches."""
    rng = np.random.default_rng(seed)
    profile = synthetic_profile(
        num_sections=8,
        forward_s=[float(value) for value in rng.uniform(0.008, 0.012, 8)],
        overhead_s=0.0,
        batch_size=64,
        micro_batch_size=1,
        latency_s=forwards * 0.01,
        bandwidth_bytes_per_s=float(rng.choice([1e7, 1e9])),
        parameter_bytes=10_000,
    )
    best = plan(profile, num_gpus=8, pipeline_depth=8, num_runners_up=0).best
    times = []
    for schedule in ("gpipe",) if gpipe_alone else SCHEDULES:
        for slope in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63) if schedule == "varuna" else (None,):
            other = simulate(
                profile,
                boundaries=[stage.first_section for stage in best.stages],
                schedule=schedule,  # type: ignore[arg-type]
                window_slope=slope,
                recompute=best.stages[0].recompute,
            )
            times.append(other.expected.mini_batch_s)
    return best.expected.mini_batch_s / min(times)


def tell(name: str, ratios: list[float]) -> None:
    best, near = (sum(ratio <= limit for ratio in ratios) / len(ratios) for limit in (1 + 1e-9, 1.01))
    print(
        f"  {name}: {best:.0%} of {len(ratios)} optimal, {near:.0%} within 1 %, "
        f"median {np.median(ratios) - 1:+.1%}, worst {max(ratios) - 1:+.1%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="How far plans are from the best that there is.")
    parser.add_argument("--cases", type=int, default=60, help="random jobs of each kind")
    cases = parser.parse_args().cases
    print("How much slower than the best of what was tried:")
    tell("windows of any size", [any_windows(seed) for seed in range(5 * cases)])
    tell("everything, on at most 5 GPUs and 4 sections", [everything(seed) for seed in range(max(1, cases // 2))])
    for forwards in LATENCIES:
        tell(f"latency of {forwards} forwards", [latency(seed, forwards) for seed in range(max(1, cases // 3))])
        ratios = [latency(seed, forwards, gpipe_alone=True) for seed in range(max(1, cases // 3))]
        print(f"    slower than GPipe on the same stages: {sum(ratio > 1.0001 for ratio in ratios)} of {len(ratios)}")


if __name__ == "__main__":
    main()
