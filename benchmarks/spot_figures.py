"""Two figures of papers, reproduced by simulation: Varuna's figure 8 and Bamboo's figure 3.

    python -m benchmarks spot_figures varuna --png docs/images/varuna-figure-8.png
    python -m benchmarks spot_figures bamboo --png docs/images/bamboo-figure-3.png

*varuna*: GPT-2 2.5B on single-GPU spot VMs for 60 hours, morphed by Morph's own controller. The paper's trace is not
published; the one drawn here has its shape: between 28 and 140 VMs, as throughput of 50 to 250 examples/s at 1.77 a GPU
says, that come and go by the hour and go in bulk.

*bamboo*: GPT-2 2.5B on 64 spot VMs lost at the rate of AWS p3, where every loss restarts the job from a checkpoint,
compared with redundant computation and Morph on the same VMs: how their time was spent, hour by hour. The paper
measures 23 % training for restarts and 84 % for Bamboo. It does not give the duration of a restart: 60 s are fast, and
the benchmark also finds the duration that gives 23 %.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.harness import PROFILES, head, row
from manager.accounting.account import TimeUse
from manager.simulation.policies.morph import play_morph
from manager.simulation.replay import play_of
from manager.simulation.spot.job import Durations, SpotJob, job_from_profile
from manager.simulation.spot.run_end import PolicyOutcome, Until
from morph.contract.errors import ConfigError
from morph.contract.profile import load_profile
from morph.contract.trace import Trace, TraceEvent
from morph.pictures import picture, plain_axes
from simulator import spot_model

PROFILE = PROFILES / "gpt2-2.5b.json"
HOUR_S = 3600.0
FEWEST, MOST, HOURS, EVERY_S = 28, 140, 60, 300.0
P3_PER_VM_H, BAMBOO_VMS, BAMBOO_HOURS = 0.61, 64, 24
PUBLISHED_TRAINING = 0.23
STATES = {
    "training": ((TimeUse.COMPUTE, TimeUse.BUBBLE), "#1d6fa5"),
    TimeUse.LOST.words: ((TimeUse.LOST,), "#ef8354"),
    "restarts and changes of shape": ((TimeUse.MORPH, TimeUse.CHECKPOINT), "#c1443c"),
    "waiting and spare": ((TimeUse.WAITING, TimeUse.WARMING, TimeUse.SPARE), "#d0d0d0"),
}


def wandering_trace(seed: int = 8) -> Trace:
    """Draw the number of spare VMs of a cloud: a mean-reverting walk with sudden falls."""
    draw, alive, events = random.Random(seed), list[str](), list[TraceEvent]()
    level = wanted = 90.0
    for step in range(int(HOURS * HOUR_S / EVERY_S)):
        if draw.random() < EVERY_S / (5 * HOUR_S):  # every five hours the market changes
            level = draw.uniform(FEWEST, MOST)
        wanted += 0.04 * (level - wanted) + draw.gauss(0, 1.5)
        if draw.random() < EVERY_S / (3 * HOUR_S):
            wanted *= draw.uniform(0.6, 0.95)
        count = round(min(MOST, max(FEWEST, wanted)))
        swapped = len(alive) and draw.random() < 0.2  # one goes and another comes
        gone = max(0, len(alive) - count) + (1 if swapped else 0)
        for _ in range(gone):
            node = alive.pop(draw.randrange(len(alive)))
            events.append(TraceEvent(time_s=step * EVERY_S, event="remove", node_id=node))
        while len(alive) < count:
            alive.append(f"v{len(events)}")
            events.append(TraceEvent(time_s=step * EVERY_S, event="add", node_id=alive[-1]))
    return Trace(events=tuple(events), end_s=HOURS * HOUR_S)


def draw_varuna(outcome: PolicyOutcome, job: SpotJob, png: Path) -> None:
    """Draw examples per second, and per GPU in use, for shapes that lasted; pauses are too short to be visible."""
    workers = {plan.shape: plan.num_workers for plan in job.plans.values()}
    formed = [moment for moment in outcome.moments if moment.shape]
    with picture(png, ConfigError, (12.0, 6.0), nrows=2, sharex=True, height_ratios=[2, 1]) as (_, (above, below)):
        hours = [moment.time_s / HOUR_S for moment in formed]
        above.step(hours, [moment.examples_per_s for moment in formed], where="post", color="#1d6fa5", linewidth=1.1)
        ends = [*(moment.time_s for moment in formed[1:]), outcome.hours * HOUR_S]
        lasted: list[tuple[float, float, str, float]] = []
        for moment, end_s in zip(formed, ends, strict=True):
            if lasted and lasted[-1][2] == moment.shape:
                lasted[-1] = (lasted[-1][0], end_s, moment.shape, moment.examples_per_s)
            else:
                lasted.append((moment.time_s, end_s, moment.shape, moment.examples_per_s))
        told_h = -10.0
        for begin_s, end_s, shape, speed in lasted:
            if end_s - begin_s >= 0.25 * HOUR_S and begin_s / HOUR_S - told_h >= 3.8:
                above.annotate(shape, (begin_s / HOUR_S, speed), (2, 5), textcoords="offset points", fontsize=7)
                told_h = begin_s / HOUR_S
        above.set(ylabel="examples/s", ylim=(0, None), xlim=(0, outcome.hours))
        above.set_title("GPT-2 2.5B for 60 hours on spot VMs, simulated (Varuna, figure 8)", loc="left", fontsize=12)
        below.step(
            hours,
            [moment.examples_per_s / workers[moment.shape] for moment in formed],
            where="post",
            color="#c1443c",
            linewidth=0.9,
        )
        below.set(ylabel="examples/s/GPU", xlabel="hours", ylim=(0, 2.2))
        for axes in (above, below):
            plain_axes(axes, grid="y")


def varuna(png: Path | None) -> None:
    """Simulate the 60 hours and print a summary."""
    job = job_from_profile(load_profile(PROFILE), MOST)
    outcome = play_morph(job, wandering_trace(), until=Until(kind="hours", amount=HOURS))
    workers = {plan.shape: plan.num_workers for plan in job.plans.values()}
    speeds = [moment.examples_per_s for moment in outcome.moments if moment.shape]
    each = [moment.examples_per_s / workers[moment.shape] for moment in outcome.moments if moment.shape]
    depths = sorted({int(moment.shape.split("x")[0]) for moment in outcome.moments if moment.shape})
    print(
        f"{HOURS} hours, {outcome.num_losses} VMs lost, {outcome.num_changes} changes of shape, pipelines of {depths} "
        f"stages; {min(speeds):.0f} to {max(speeds):.0f} examples/s, a factor of {max(speeds) / min(speeds):.1f} "
        f"(published: 50 to 250, 5); per GPU {min(each):.2f} to {max(each):.2f}, {1 - min(each) / max(each):.0%} apart "
        f"(published: 1.77, 15 %); {outcome.examples_per_s:.1f} examples/s on average"
    )
    if png is not None:
        draw_varuna(outcome, job, png)


def shares(outcome: PolicyOutcome) -> dict[str, float]:
    """Return the shares of the VMs' time."""
    return {name: sum(outcome.parts_s[part] for part in parts) / outcome.vm_s for name, (parts, _) in STATES.items()}


def bamboo(png: Path | None) -> None:
    """Simulate the policies, and find the duration of a restart that gives the paper's share of training."""
    trace = spot_model(BAMBOO_VMS, losses_per_vm_h=P3_PER_VM_H, replacement_s=600).draw(3, BAMBOO_HOURS * HOUR_S)
    job = job_from_profile(load_profile(PROFILE), BAMBOO_VMS)
    until = Until(kind="hours", amount=BAMBOO_HOURS)

    def restarting(restart_s: float) -> SpotJob:
        return job.model_copy(update={"durations": Durations(restart_s=restart_s)})

    def training(restart_s: float) -> float:
        played = play_of("restart")(restarting(restart_s), trace, until=until, seed=0, prices=None, name="")
        return shares(played)["training"]

    low_s, high_s = 1.0, 3600.0
    for _ in range(12):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if training(middle_s) > PUBLISHED_TRAINING else (low_s, middle_s)
    slow_s = round(high_s)
    runs = {
        f"restart ({slow_s} s)": partial(play_of("restart"), restarting(slow_s)),
        "restart (60 s)": partial(play_of("restart"), job),
        "redundant computation": partial(play_of("bamboo"), job),
        "morph": partial(play_of("morph"), job),
    }
    rows = {}
    head(f"policy | {' | '.join(STATES)} | examples/s")
    for name, play in runs.items():
        outcome = rows[name] = play(trace, until=until, seed=0, prices=None, name="")
        row(name, *(f"{share:.1%}" for share in shares(outcome).values()), f"{outcome.examples_per_s:.1f}")
    if png is None:
        return
    with picture(png, ConfigError, (11.0, 7.5), nrows=len(runs), sharex=True) as (_, panels):
        for axes, (name, play) in zip(panels, runs.items(), strict=True):
            ends_h = [hour + 0.5 for hour in range(BAMBOO_HOURS)]
            so_far = [
                play(trace, until=Until(kind="hours", amount=end_h + 0.5), seed=0, prices=None, name="")
                for end_h in ends_h
            ]
            before = dict.fromkeys(TimeUse, 0.0)
            for end_h, outcome in zip(ends_h, so_far, strict=True):
                spent = {part: outcome.parts_s[part] - before[part] for part in TimeUse}
                whole, left = sum(spent.values()), 0.0
                for state, (parts, color) in STATES.items():
                    share = max(0.0, sum(spent[part] for part in parts)) / whole
                    label = state if end_h == ends_h[0] and axes is panels[0] else None
                    axes.bar(end_h, share, 1.0, bottom=left, color=color, label=label)
                    left += share
                before = outcome.parts_s
            axes.set(ylim=(0, 1), xlim=(0, BAMBOO_HOURS), ylabel="share")
            axes.set_title(f"{name}: {shares(rows[name])['training']:.0%} training", loc="left", fontsize=10)
            plain_axes(axes)
        panels[0].legend(ncols=len(STATES), loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
        panels[-1].set(xlabel="hours")


def main(figure: Literal["varuna", "bamboo"], png: Path | None = None) -> None:
    (varuna if figure == "varuna" else bamboo)(png)
