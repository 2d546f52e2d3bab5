"""The planner's objectives compared by the work that a simulated job completes: a day on spot VMs with each.

    python -m benchmarks objectives TRACE.csv ... --drawn 4

For every number of VMs each objective chooses a shape, and the controller of real runs plays these shapes on the same
traces. *fastest*: most examples per second, as in runs. *progress*: ``morph plan --objective progress``, given the
trace's own rate of losses, number of VMs lost at once and replacement time. *next hour*: progress with the VMs that are
expected in the next hour given the present ones, for which liveput (Parcae, NSDI 2024) plans; a Markov chain of losses
and replacements takes the place of a forecast. *half*: the fastest shape with half of the VMs, to show the cost of a
wrong choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.harness import PROFILES, head, row
from manager.simulation.policies.bounds import play_ideal
from manager.simulation.policies.morph import play_morph
from manager.simulation.spot.job import SpotJob, job_from_profile
from manager.simulation.spot.run_end import Until
from morph.contract.plan import Plan, by_pool
from morph.contract.profile import Profile, load_profile
from morph.contract.trace import Trace, load_trace
from simulator import plan, spot_model
from simulator.search.objectives import MostProgress, Revocations
from simulator.traces.statistics import ALL, statistics_of

HOUR_S = 3600.0
DRAWN_VMS, DRAWN_HOURS = 32, 12
PAUSE_S = 1.0
Choose = Callable[[int], Plan]


@dataclass(frozen=True)
class NextHour(Revocations):
    """The mean distribution of living VMs over the next hour, given the present number."""

    now: int = 0

    def living(self, num_nodes: int) -> np.ndarray:
        """Return the probabilities that 0, 1, ..., ``num_nodes`` live: a Markov chain that begins at ``now``."""
        numbers = np.arange(num_nodes + 1)
        lost_per_s = numbers * self.per_hour / HOUR_S / self.together
        come_per_s = (num_nodes - numbers) / self.replacement_s
        step_s = 0.2 / max(float((lost_per_s + come_per_s).max()), 1e-6)
        chances, total = (numbers == self.now).astype(float), np.zeros(num_nodes + 1)
        num_steps = int(np.ceil(HOUR_S / step_s))
        target = np.maximum(numbers - self.together, 0)
        for _ in range(num_steps):
            total += chances
            down, up = chances * lost_per_s * step_s, chances * come_per_s * step_s
            chances = chances - down - up
            np.add.at(chances, target, down)
            chances[1:] += up[:-1]
        found: np.ndarray = total / num_steps
        return found


def tables(profile: Profile, trace: Trace, job: SpotJob) -> Iterator[tuple[str, SpotJob]]:
    """Yield the job with the shapes of each objective for every number of VMs up to the trace's maximum."""
    seen = statistics_of(trace)
    all_zones = seen[ALL] if ALL in seen else next(iter(seen.values()))
    revocations = Revocations(
        per_hour=all_zones.losses_per_vm_h,
        pause_s=PAUSE_S,
        replacement_s=all_zones.replacement_s or 120.0,
        together=max(1, round(all_zones.num_lost / max(1, sum(all_zones.sizes.values())))),
    )
    most = trace.max_nodes
    any_plan = next(iter(job.plans.values()))
    found = plan(
        profile,
        num_gpus=most,
        num_runners_up=10_000,
        micro_batch_size=any_plan.micro_batch_size,
        objective="progress",
        revocations_per_hour=revocations.per_hour,
    )
    shapes = {(one.plan.pipeline_depth, one.plan.num_replicas): one.plan for one in found.simulations}
    shapes |= {(one.pipeline_depth, one.num_replicas): one for one in job.plans.values()}
    fewest = min(deep * wide for deep, wide in shapes)

    def fastest(count: int) -> Plan:
        fitting = [one for one in shapes.values() if one.num_workers <= count]
        return max(fitting, key=lambda one: (one.expected.examples_per_s, -one.num_workers))

    def by(given: Revocations, num_nodes: int, count: int) -> Plan:
        def rate(missing: int) -> float:
            left = num_nodes - missing
            return fastest(left).expected.examples_per_s if left >= fewest else 0.0

        objective = MostProgress(job.batch_size, given, num_nodes, lambda shape: shape[0] * shape[1], rate)
        fitting = [shape for shape in shapes if shape[0] * shape[1] <= count]
        return shapes[min(fitting, key=lambda shape: objective.cost(shape, shapes[shape].expected.mini_batch_s))]

    chosen: dict[str, Choose] = {
        "fastest": fastest,
        "progress": lambda count: by(revocations, count, count),
        "next hour": lambda count: by(
            NextHour(**{**vars(revocations), "now": count}) if revocations.per_hour else revocations, most, count
        ),
        "half": lambda count: fastest(max(fewest, count // 2)),
    }
    for name, choose in chosen.items():
        yield name, job.model_copy(update={"plans": {count: choose(count) for count in range(fewest, most + 1)}})


def cases(paths: list[Path], num_drawn: int) -> Iterator[tuple[str, Trace]]:
    """Yield recorded traces, and drawn ones with few and many losses."""
    for path in paths:
        yield path.stem, load_trace(path)
    for per_vm_h in (0.1, 0.6, 2.0):
        for seed in range(num_drawn):
            model = spot_model(DRAWN_VMS, losses_per_vm_h=per_vm_h, replacement_s=600)
            yield f"drawn, {per_vm_h:g} an hour, {seed}", model.draw(seed, DRAWN_HOURS * HOUR_S)


def main(
    traces: Annotated[list[Path] | None, typer.Argument()] = None,
    profile: Path = PROFILES / "gpt2-2.5b.json",
    drawn: int = 2,
) -> None:
    loaded = load_profile(profile)
    jobs: dict[int, SpotJob] = {}
    head("trace | fastest | progress | next hour | half of the VMs (and how many of the shapes differ)")
    for name, trace in cases(traces or [], drawn):
        until = Until(kind="hours", amount=trace.duration_s / HOUR_S)
        job = jobs.setdefault(trace.max_nodes, job_from_profile(loaded, trace.max_nodes))
        bound = play_ideal(job, trace, until=until).steps
        cells, plans = [], {}
        for objective, other in tables(loaded, trace, job):
            plans[objective] = dict(by_pool(other.plans))
            steps = play_morph(other, trace, until=until, seed=0).steps
            differ = sum(one.shape != plans["fastest"][count].shape for count, one in plans[objective].items())
            cells.append(f"{steps / bound:.1%} ({differ} of {len(other.plans)})")
        row(name, *cells)
