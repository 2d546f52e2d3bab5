"""How far plans are from optimal: all alternatives are tried on small random jobs.

    python -m benchmarks plan_search --cases 60
    python -m benchmarks plan_search --groups

Three questions, each with a seed for every case: windows of any size for given stages; every depth, number of
replicas, micro-batch size, cut, slope and schedule, with recompute and without; and latencies from none to eight
forwards, against GPipe, 1F1B and windows of any slope on the same stages. Prints how much slower the planner's choice
is than the best.

With ``--groups`` instead what it gains that stages may run their sections again in groups: the least memory in which a
pipeline of each depth fits, and examples per second within tight limits, of GPT-2 2.5B on V100s.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import PROFILES, head, option, row
from morph.contract.plan import Schedule
from morph.contract.profile import Profile, load_profile
from simulator import PlanRequest, plan, simulate, synthetic_profile
from simulator.costs.answer import deal
from simulator.costs.finish import finish
from simulator.costs.outcome import ShapeOutcome
from simulator.costs.stage_costs import SectionCosts, stage_costs
from simulator.engine.pipeline import run_pipeline
from simulator.search.setting import Setting
from simulator.search.sweep import Sweep

GPT2 = PROFILES / "gpt2-2.5b.json"
GIB = 2**30
SCHEDULES: tuple[Schedule, ...] = ("varuna", "gpipe", "1f1b")
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
    """Return the time with the simulator's windows over that with the best windows; each stage has its own links."""
    rng = np.random.default_rng(seed)
    depth, count = int(rng.integers(2, 5)), int(rng.integers(3, 7))
    profile = random_profile(rng, depth, count, (1,))
    given: dict[str, Any] = {"boundaries": range(depth), "micro_batch_size": 1, "share_links": False}
    found = simulate(profile, **given).costs
    sections = SectionCosts(profile, 1)

    def time_ns(windows: tuple[int, ...]) -> int:
        costs = stage_costs(sections, range(depth), windows, "varuna")
        last_backward_ns = run_pipeline(costs.times, (count,)).last_backward_ns
        return finish(costs, last_backward_ns, costs.to_come_ns[:, None]).mini_batch_ns

    best = min(time_ns(windows) for windows in product(*[range(1, count + 1)] * (depth - 1), [1]))
    return time_ns(tuple(found.times.window.tolist())) / best


def slopes(schedule: str, count: int) -> Iterator[int | None]:
    yield from range(1, max(2, count)) if schedule != "gpipe" else (None,)


def everything(seed: int) -> float:
    """Return the plan's time over the best of all shapes, sizes, cuts, schedules and slopes."""
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
                        schedule=schedule,
                        window_slope=slope,
                        recompute=recompute,
                    )
                    times.append(other.expected.mini_batch_s)
    return plan(profile, num_gpus=gpus, num_runners_up=0).best.expected.mini_batch_s / min(times)


def latency(seed: int, forwards: float, *, gpipe_alone: bool = False) -> float:
    """Return a plan's time (8 GPUs, 64 micro-batches) over the best of other schedules and slopes on its stages."""
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
    for schedule in SCHEDULES[1:2] if gpipe_alone else SCHEDULES:
        for slope in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63) if schedule != "gpipe" else (None,):
            other = simulate(
                profile,
                boundaries=[stage.first_section for stage in best.stages],
                schedule=schedule,
                window_slope=slope,
                recompute=best.stages[0].recompute,
            )
            times.append(other.expected.mini_batch_s)
    return best.expected.mini_batch_s / min(times)


def tell(name: str, ratios: list[float], slower: str = "") -> None:
    best, near = (sum(ratio <= limit for ratio in ratios) / len(ratios) for limit in (1 + 1e-9, 1.01))
    cells = (f"{best:.0%}", f"{near:.0%}", f"{np.median(ratios) - 1:+.1%}", f"{max(ratios) - 1:+.1%}")
    row(name, len(ratios), *cells, slower)


def least_gib(changes: bool) -> None:
    """Print by depth the least memory of a device, with whole stages and in groups; two replicas, m = 4."""
    profile, rules = load_profile(GPT2), PlanRequest(changes=changes).memory_rules
    settings = [Setting(profile, 4, True, SCHEDULES, 2**50, rules, grouped=grouped) for grouped in (False, True)]
    head("P | GiB with whole stages | in groups | ")
    for depth in (1, 2, 3, 4, 6, 9, 12, 18, 27):
        whole, grouped = (setting.least_bytes(depth, setting.num_micro_batches // 2) / GIB for setting in settings)
        row(depth, f"{whole:.2f}", f"{grouped:.2f}", f"{grouped / whole - 1:+.0%}")


def _text(one: ShapeOutcome, batch_size: int) -> str:
    (depth, replicas), m = one.shape, one.costs.sections.micro_batch_size
    return f"{batch_size / (one.mini_batch_ns / 1e9):6.2f} examples/s at {depth} x {replicas}, m = {m}"


def rates(num_gpus: int, changes: bool) -> None:
    """Print the best plans within memory limits, with whole stages only and with groups."""
    profile = load_profile(GPT2)
    head("GiB | whole stages | with groups | gain")
    for gib in (4, 5, 6, 7, 8, 10, 12, 16, 24, 32):
        request = PlanRequest(memory_bytes=gib * GIB, changes=changes)
        sweep, texts, times_s = Sweep(profile, request, request.conditions(None)), [], []
        for each in (sweep.without_groups(), sweep):
            best = each.fastest(num_gpus, each.depths(num_gpus), 1)
            times_s += [one.mini_batch_ns / 1e9 for one in best]
            texts += [_text(one, profile.job.batch_size) for one in best] or ["does not fit"]
        row(gib, *texts, f"{times_s[0] / times_s[1] - 1:+.1%}" if len(times_s) == 2 else "")


def groups() -> None:
    for changes in (True, False):
        name = "that may change its shape" if changes else "of one shape"
        print(f"GPT-2 2.5B on V100s, a run {name}: the least memory of a device")
        least_gib(changes)
        print(f"GPT-2 2.5B on 36 GPUs, a run {name}: the best plan within a limit")
        rates(36, changes)


def main(
    cases: Annotated[int, option("random jobs of each kind")] = 60,
    grouped: Annotated[bool, typer.Option("--groups", help="what groups of sections gain, instead")] = False,
) -> None:
    if grouped:
        groups()
        return
    head("slower than the best of what was tried | jobs | optimal | within 1 % | median | worst | slower than GPipe")
    tell("windows of any size", [any_windows(seed) for seed in range(5 * cases)])
    tell("everything, on at most 5 GPUs and 4 sections", [everything(seed) for seed in range(max(1, cases // 2))])
    for forwards in LATENCIES:
        seeds = range(max(1, cases // 3))
        slower = sum(latency(seed, forwards, gpipe_alone=True) > 1.0001 for seed in seeds)
        tell(f"latency of {forwards} forwards", [latency(seed, forwards) for seed in seeds], f"{slower}")
