"""Whether redundant computation (Bamboo) beats followers and salvage anywhere: a search over jobs and spot clusters.

    python -m benchmarks redundant_search --points 400 --seconds 200 --seed 0

Points are drawn at random, the second half next to the best one found: VMs, losses, how many at once, replacement,
what a step takes, micro-batches, state, network, memory, recompute. Each plays ``morph`` (redundancy ``auto``, and
``salvage``, which follows always, where that is not far ahead; the better one counts) and the better of ``bamboo``
(eager forwards) and ``bamboo-lflb`` (everything once a VM is lost) on the same drawn traces, by samples trained.
Overheads and pauses are simulated for the shape in question. Redundant computation is given more than the paper grants:
memory, and pipelines set up as fast as state can move. ``--extreme`` draws more losses than recorded traces have (0.1
to 0.6 a VM and hour), networks below 10 Gb/s, and micro-batches that take a stage longer than 3 s (published: 0.1 to
0.4).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np

from benchmarks.harness import Seed, head, option, row
from manager.simulation.policies.morph import play_morph
from manager.simulation.replay import play_of
from manager.simulation.spot.job import Durations, SpotJob, job_from_profile, with_redundant_costs
from manager.simulation.spot.run_end import Until
from morph.contract.errors import PlanError
from simulator import PlanRequest, spot_model, synthetic_profile

SECTIONS, LONGEST_SLOT_S = 48, 3.0
BYTES_OF_STATE, SHARES = 6, 4
"""Over those of the parameters: moments, sums and mean gradients too; of two units' shares on their way."""
SEEDS = 2
ALWAYS, CLOSE = "morph-salvage", 0.97
CHOICES: dict[str, tuple[float, ...]] = {
    "vms": (4, 8, 16, 32, 48),
    "losses_per_vm_h": (0.02, 0.1, 0.2, 0.5),
    "bulk_share": (0.0, 0.3, 0.7),
    "replacement_s": (10.0, 60.0, 300.0, 1800.0),
    "step_s": (1.0, 10.0, 60.0, 300.0, 1000.0),
    "micro_batches": (64.0, 256.0, 1024.0, 4096.0),
    "state_gb": (0.1, 1.0, 10.0, 100.0),
    "link_gb_per_s": (1.25, 3.0, 12.5),
    "memory_stages": (2.0, 4.0, 100.0),
    "recompute": (0.0, 1.0),
}
EXTREME = {"losses_per_vm_h": (0.1, 0.5, 2.0, 10.0), "link_gb_per_s": (0.1, 0.3, 1.25)}


@dataclass(frozen=True)
class Point:
    """One job on one kind of cluster.

    ``step_s``: on all VMs, of the compute alone; ``memory_stages``: of how many stages a device holds the state, where
    each VM has one.
    """

    vms: float
    losses_per_vm_h: float
    bulk_share: float
    replacement_s: float
    step_s: float
    micro_batches: float
    state_gb: float
    link_gb_per_s: float
    memory_stages: float
    recompute: float

    def job(self) -> SpotJob:
        """Plans for every number of VMs.

        Raises:
            PlanError: no plan fits.
        """
        num, batch = int(self.vms), int(self.micro_batches)
        parameter_bytes = int(self.state_gb * 1e9 / 3 / SECTIONS)
        profile = synthetic_profile(
            num_sections=SECTIONS,
            forward_s=self.step_s * num / (4 if self.recompute else 3) / SECTIONS / batch,
            overhead_s=0.0,
            batch_size=batch,
            micro_batch_size=1,
            bandwidth_bytes_per_s=self.link_gb_per_s * 1e9,
            parameter_bytes=parameter_bytes,
        )
        environment = profile.environment.model_copy(update={"host_memory_bytes": 2**40})
        profile = profile.model_copy(update={"host_copy_bytes_per_s": 12e9, "environment": environment})
        sections_held = self.memory_stages * SECTIONS / num
        request = PlanRequest(
            memory_bytes=int((BYTES_OF_STATE * sections_held + SHARES) * parameter_bytes) + 2**28,
            redundancy="off",
            changes=False,
            recompute=bool(self.recompute),
        )
        times = Durations(link_bytes_per_s=self.link_gb_per_s * 1e9)
        return with_redundant_costs(job_from_profile(profile, num, request, durations=times), profile, num)

    def hours(self, step_s: float) -> float:
        """Long enough for 40 losses and 200 steps, as far as two days or 20,000 steps go."""
        enough = max(40 / self.losses_per_vm_h / self.vms, 200 * step_s / 3600)
        return min(48.0, 20_000 * step_s / 3600, enough)


@dataclass(frozen=True)
class Found:
    """Samples of redundant computation over Morph's, all and in the worst seed; ``of_ideal``: Morph's of the bound."""

    point: Point
    shape: str
    ratio: float
    least: float
    mode: str
    overhead: float
    of_ideal: float


def judge(point: Point, longest_slot_s: float) -> Found | None:
    """Play it; None where nothing fits, micro-batches take longer, or one stage is best, which has no neighbour."""
    try:
        job = point.job()
    except PlanError:
        return None
    plan = job.best_plan(int(point.vms))
    if plan is None or plan.pipeline_depth == 1:
        return None
    if plan.expected.mini_batch_s / max(plan.micro_batches_per_replica) > longest_slot_s:
        return None
    hours = point.hours(plan.expected.mini_batch_s)
    model = spot_model(
        int(point.vms),
        losses_per_vm_h=point.losses_per_vm_h,
        bulk_share=point.bulk_share,
        replacement_s=point.replacement_s,
    )

    def trained(policy: str) -> list[float]:
        """Steps by seed."""
        always = partial(play_morph, redundancy="salvage")
        play = always if policy == ALWAYS else play_of(policy)
        until, traces = Until(kind="hours", amount=hours), [model.draw(seed, hours * 3600) for seed in range(SEEDS)]
        played = (play(job, trace, until=until, seed=seed, prices=None, name="") for seed, trace in enumerate(traces))
        return [max(one.steps, 0.5) for one in played]

    mode, redundant = max(
        ((policy, trained(policy)) for policy in ("bamboo", "bamboo-lflb")), key=lambda one: sum(one[1])
    )
    morph = trained("morph")
    if sum(redundant) > CLOSE * sum(morph):
        morph = max(morph, trained(ALWAYS), key=sum)
    return Found(
        point,
        plan.shape,
        sum(redundant) / sum(morph),
        min(mine / other for mine, other in zip(redundant, morph, strict=True)),
        mode,
        job.redundant["eflb"].overhead,
        sum(morph) / sum(trained("ideal")),
    )


def main(
    points: int = 400,
    seconds: Annotated[float, option("of CPU time, at most")] = 200.0,
    seed: Seed = 0,
    extreme: Annotated[bool, option("more losses and slower networks than recorded")] = False,
) -> None:
    choices = CHOICES | (EXTREME if extreme else {})
    rng, begin = np.random.default_rng(seed), time.process_time()
    seen: dict[Point, Found] = {}
    tried, longest_slot_s = 0, float("inf") if extreme else LONGEST_SLOT_S

    def spent() -> float:
        return max(tried / points, (time.process_time() - begin) / seconds)

    while spent() < 1:
        drawn = Point(**{name: float(rng.choice(values)) for name, values in choices.items()})
        if seen and spent() > 0.5:  # next to the best one
            best = max(seen.values(), key=lambda found: found.ratio).point
            name = str(rng.choice(list(choices)))
            drawn = dataclasses.replace(best, **{name: getattr(drawn, name)})
        tried += 1
        if drawn not in seen and (found := judge(drawn, longest_slot_s)) is not None:
            seen[drawn] = found
    ranked = sorted(seen.values(), key=lambda found: -found.ratio)
    outcome = "samples over Morph's | worst seed | policy | shape"
    head(f"{outcome} | {' | '.join(choices)} | eager forwards add | Morph's share of the ideal")
    for found in ranked[:12]:
        where = (f"{value:g}" for value in dataclasses.astuple(found.point))
        shares = (f"{found.overhead:.1%}", f"{found.of_ideal:.1%}")
        row(f"{found.ratio:.3f}", f"{found.least:.3f}", found.mode, found.shape, *where, *shares)
    ratios = [found.ratio for found in ranked]
    better, even = (sum(ratio >= least for ratio in ratios) for least in (1.02, 1.0))
    print(f"{len(ranked)} of {tried} points can be played; {time.process_time() - begin:.0f} s of CPU time")
    print(f"ratio: median {statistics.median(ratios):.3f}, best {ratios[0]:.3f}; {better} at 1.02, {even} at 1 or more")
