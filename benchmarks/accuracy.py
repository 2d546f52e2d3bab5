"""How well the simulator knows the executor: shapes rehearsed by emulated workers and simulated (as Varuna's Table 7).

    python -m benchmarks accuracy
    python -m benchmarks accuracy --only "6x2" --steps 3

Every shape runs the real manager, executor, messages and reductions with as many worker processes as it has workers;
only computing is replaced by sleeping for the profile's time, and links hold messages back (docs/guides/rehearsal.md).
Times are stretched so that this machine's cores carry the workers' own CPU time; the table has the factor. The measured
time is the median over the mini-batches; the simulated one is of the same plan, with one value of this machine, the
manager's round trip between two steps (commit), which is measured in the same run and printed. With jitter both are
means over the same draws. Before each shape the command waits, up to ``--patience``, until the cores are idle. A shape
during which other work kept them busy all the same is rehearsed again, as often as ``--retries`` allows; every try is
printed, and the one with the least of other work counts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil

from benchmarks.harness import head, machine, option, row
from manager.rehearsal import Planned, RehearsalSpec, Rehearsed, plan_rehearsal, rehearse, run_facts
from manager.run_dir import RunDir
from morph.contract.profile import LinkProfile, Profile, SendTime, Timing
from simulator import plan, synthetic_profile
from simulator.inputs.synthetic import with_type

NUM_SECTIONS = 24
FORWARD_S = 0.00125
"""Of one sample in one section: 5 ms for a micro-batch of 4, and 10 ms backwards."""

MICRO_BATCH_SIZE = 4
NUM_MICRO_BATCHES = 48
TARGET_MEAN, TARGET_WORST = 0.015, 0.03
OWN, SLOW = "synthetic", "slow"
"""Types of node: what a synthetic profile calls its own, and one that is added."""

NUM_QUANTILES = 21
IDLE_PERCENT = 15.0


@dataclass(frozen=True)
class Case:
    """One shape; ``links`` and ``tasks`` name the profile's.

    ``pool``: instead, the plan for these GPUs, in unequal pipelines: of one type, or of two, of which the slow one
    takes twice as long for a task.
    """

    shape: str
    note: str = ""
    links: str = "fast"
    jittery_tasks: bool = False
    uneven: bool = False
    tied: bool = False
    pool: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.shape} {self.note}".strip()


LINKS = {"fast": (0.0005, 1.25e9), "slow": (0.012, 1.25e8), "jittery": (0.004, 6e8)}
"""Latency (s) and bandwidth (bytes/s). A message has 1 MB; stage times are 20 ms and more."""

CASES = (
    Case("1x1", options={"time_scale": 0.25}),
    Case("2x1", options={"time_scale": 0.5}),
    Case("4x1"),
    Case("8x1"),
    Case("12x1"),
    Case("1x4", "data parallel"),
    Case("2x2", "tied", tied=True, options={"time_scale": 0.5}),
    Case("4x3"),
    Case("6x2", "tied", tied=True),
    Case("9x4"),
    Case("12x3"),
    Case("6x6"),
    Case("3x1", "unbalanced", options={"boundaries": (0, 5, 16), "time_scale": 0.5}),
    Case("5x2", "uneven sections", uneven=True),
    Case("8x3", "unbalanced", uneven=True, options={"boundaries": (0, 2, 6, 9, 12, 15, 18, 20)}),
    Case("4x1", "slow links", links="slow"),
    Case("6x2", "slow links", links="slow"),
    Case("12x2", "slow links, slope 4", links="slow", options={"window_slope": 4}),
    Case("8x1", "slow links, slope 1", links="slow", options={"window_slope": 1}),
    Case("4x2", "jittery links", links="jittery"),
    Case("8x1", "jittery links, slope 2", links="jittery", options={"window_slope": 2}),
    Case("12x1", "jittery links", links="jittery"),
    Case("6x1", "jittery tasks", jittery_tasks=True),
    Case("4x2", "gpipe", options={"schedule": "gpipe"}),
    Case("6x1", "1f1b, slow links", links="slow", options={"schedule": "1f1b"}),
    Case("4x1", "stage 2 slow by 1.3", options={"slow": {2: 1.3}}),
    Case("6x2", "one worker slow by 1.4", options={"slow": {(3, 1): 1.4}}),
    Case("pool", "of 5", pool={OWN: 5}),
    Case("pool", "of 7", pool={OWN: 7}),
    Case("pool", "of 11, uneven sections", uneven=True, pool={OWN: 11}),
    Case("pool", "of 13, slow links", links="slow", pool={OWN: 13}),
    Case("pool", "of 3 fast and 3 slow", pool={OWN: 3, SLOW: 3}),
    Case("pool", "of 4 fast and 5 slow", pool={OWN: 4, SLOW: 5}),
    Case("pool", "of 6 fast and 2 slow, tied", tied=True, pool={OWN: 6, SLOW: 2}),
    Case("pool", "of 5 fast and 7 slow, uneven sections", uneven=True, pool={OWN: 5, SLOW: 7}),
    Case("pool", "of 4 fast and 4 slow, slow links", links="slow", pool={OWN: 4, SLOW: 4}),
    Case("pool", "of 8 fast and 8 slow", pool={OWN: 8, SLOW: 8}),
)


def profile_of(case: Case) -> Profile:
    """The case's profile, unstretched."""
    forward = [FORWARD_S * (1 + 0.5 * ((7 * index) % 5) / 4) for index in range(NUM_SECTIONS)]
    forward[0], forward[-1] = 2 * FORWARD_S, 3 * FORWARD_S
    latency_s, bandwidth = LINKS[case.links]
    profile = synthetic_profile(
        num_sections=NUM_SECTIONS,
        forward_s=forward if case.uneven else FORWARD_S,
        overhead_s=0.0,
        batch_size=MICRO_BATCH_SIZE * NUM_MICRO_BATCHES,
        micro_batch_sizes=(MICRO_BATCH_SIZE,),
        latency_s=latency_s,
        bandwidth_bytes_per_s=bandwidth,
        boundary_bytes_per_sample=250_000,
        tied=case.tied,
    )
    if case.links == "jittery":
        link = _jittery_link(profile.inter_node)
        profile = profile.model_copy(update={"inter_node": link})
    if case.jittery_tasks:
        sections = tuple(
            section.model_copy(
                update={
                    "forward": {m: _spread(timing, 0.2) for m, timing in section.forward.items()},
                    "backward": {m: _spread(timing, 0.2) for m, timing in section.backward.items()},
                }
            )
            for section in profile.sections
        )
        profile = profile.model_copy(update={"sections": sections})
    return with_type(profile, SLOW, 2.0) if SLOW in case.pool else profile


def _jittery_link(link: LinkProfile) -> LinkProfile:
    def of(times: tuple[SendTime, ...]) -> tuple[SendTime, ...]:
        return tuple(entry.model_copy(update={"time": _spread(entry.time, 1.0)}) for entry in times)

    return LinkProfile(activation=of(link.activation), gradient=of(link.gradient))


def _spread(timing: Timing, relative: float) -> Timing:
    """A one-sided spread with a long tail: quantiles of median * (1 + relative * a half-normal-like extra)."""
    places = [index / (NUM_QUANTILES - 1) for index in range(NUM_QUANTILES)]
    factors = [1 + relative * (2.5 * place**3 - 2.5 * 0.5**3) for place in places]
    return Timing(
        median_s=timing.median_s,
        mad_s=timing.median_s * relative * 0.25,
        num_samples=timing.num_samples,
        quantiles_s=tuple(timing.median_s * factor for factor in factors),
    )


def run_case(case: Case, steps: int, seed: int, forgive_ms: float | None) -> tuple[Planned, Rehearsed]:
    """Rehearse and simulate one shape, or what is planned for a pool."""
    if case.pool:
        found = plan(profile_of(case), pool=case.pool, unequal=True, micro_batch_size=MICRO_BATCH_SIZE).best
        return rehearsed(case, {"plan": found, "num_hosts": found.num_workers}, steps, seed, forgive_ms)
    depth, replicas = map(int, case.shape.split("x"))
    shape = {} if "boundaries" in case.options else {"num_stages": depth}
    given = {"num_replicas": replicas, "num_hosts": depth * replicas, **shape}
    return rehearsed(case, given, steps, seed, forgive_ms)


def rehearsed(
    case: Case, shape: dict[str, Any], steps: int, seed: int, forgive_ms: float | None
) -> tuple[Planned, Rehearsed]:
    """Rehearse and simulate one shape that is given by fields of a ``RehearsalSpec``."""
    jittery = case.links == "jittery" or case.jittery_tasks
    given: dict[str, Any] = {
        "profile": profile_of(case),
        "steps": steps,
        "jitter_seed": seed if jittery else None,
        "forgiven_s": forgive_ms / 1e3 if forgive_ms is not None else None,
        **shape,
        **case.options,
    }
    planned = plan_rehearsal(RehearsalSpec(**given))
    with (
        tempfile.TemporaryDirectory(prefix="morph-accuracy-") as directory,
        RunDir(Path(directory) / "run", run_facts(planned)) as run_dir,
    ):
        return planned, rehearse(planned, run_dir, temporary=True)


def wait_until_idle(patience_s: float) -> None:
    """Block until the cores are idle, or until ``patience_s`` is over."""
    until_s = time.monotonic() + patience_s
    while psutil.cpu_percent(interval=2.0) > IDLE_PERCENT and time.monotonic() < until_s:
        pass


def error_of(found: Rehearsed) -> float:
    return found.expected_s / found.measured_s - 1


def cells(case: Case, planned: Planned, found: Rehearsed) -> tuple[str, ...]:
    """One line of the table."""
    return (
        f"{planned.plan.shape} {case.note}".strip(),
        f"{planned.plan.num_workers}",
        f"{planned.scales.time:g}",
        f"{found.measured_s:.3f} ({min(found.mini_batches_s):.3f}-{max(found.mini_batches_s):.3f})",
        f"{found.expected_s:.3f}",
        f"{error_of(found):+.2%}",
        f"{found.commit_s * 1e3:.0f}",
        f"{found.busy_share:.0%} ({found.others_share:.0%})",
        f"{found.late_s * 1e3:.0f}",
    )


def _is_meant(case: Case, text: str) -> bool:
    labels = {other.label for other in CASES}
    return case.label == text if text in labels else case.label.startswith(text)


def main(
    steps: Annotated[int, option("mini-batches that count")] = 5,
    seed: Annotated[int, option("of the jitter")] = 1,
    only: Annotated[list[str] | None, option("the case of this label, else those that begin so; repeatable")] = None,
    forgive_ms: Annotated[float | None, option("host delay that a task makes up for")] = None,
    retries: Annotated[int, option("of a shape while the cores are busy with other work")] = 2,
    patience: Annotated[float, option("seconds to wait for idle cores, at most")] = 60.0,
) -> None:
    cases = [case for case in CASES if not only or any(_is_meant(case, text) for text in only)]
    print(f"{machine()}; {steps} mini-batches a shape")
    times = "measured s (range) | simulated s | error | commit ms"
    head(f"shape | workers | times x | {times} | cores busy (others) | late ms")
    errors = []
    for case in cases:
        tries: list[tuple[Planned, Rehearsed]] = []
        while len(tries) <= retries:
            wait_until_idle(patience)
            tries.append(run_case(case, steps, seed, forgive_ms))
            if not tries[-1][1].host_too_busy:
                break
            row("disturbed: " + cells(case, *tries[-1])[0], *cells(case, *tries[-1])[1:])
        planned, found = min(tries, key=lambda one: one[1].others_share)
        row(*cells(case, planned, found))
        errors.append(abs(error_of(found)))
    print(
        f"{len(errors)} shapes: mean error {statistics.mean(errors):.2%} (target {TARGET_MEAN:.1%}), "
        f"worst {max(errors):.2%} (target {TARGET_WORST:.1%})"
    )
