"""Accuracy of the simulator: shapes are rehearsed by emulated workers and simulated (as in Varuna's Table 7).

    python -m benchmarks accuracy
    python -m benchmarks accuracy --only "6x2" --steps 3

Every shape runs the real manager, executor, messages and reductions, with a process for each worker; only computing is
replaced by sleeping for the profile's time, and links delay messages (docs/guides/rehearsal.md). Times are stretched so
that this machine's cores can carry the workers' own CPU time; the table shows the factor. The measured time is the
median over the mini-batches; the simulated one is that of the same plan, with one value from this machine: the
manager's round trip between two steps (commit), which is measured in the same run and printed. With jitter, both are
means over the same draws.

*Processor* is the share of the cores' time that the rehearsal took, and in brackets that of other work. *Late* is by
how much busy cores delayed a mini-batch: workers carry it with their messages and reductions (the median over steps). A
row counts if *late* is at most 1 % of the mini-batch. Before each shape the command waits, up to ``--patience``, until
the cores are idle. A shape that does not count is rehearsed again, as often as ``--retries`` allows; every attempt is
printed. Beside other work, take ``--slower``.
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
from manager.rehearsal.device import FORGIVEN_S
from manager.run_dir import RunDir
from morph.contract.pool import Pool
from morph.contract.profile import LinkProfile, Profile, SendTime, Timing
from simulator import plan, synthetic_profile
from simulator.inputs.synthetic import with_type

NUM_SECTIONS = 24
FORWARD_S = 0.00125
"""Forward seconds of one sample in one section: 5 ms for a micro-batch of 4, and 10 ms for its backward."""

MICRO_BATCH_SIZE = 4
NUM_MICRO_BATCHES = 48
TARGET_MEAN, TARGET_WORST = 0.015, 0.03
OWN, SLOW = "synthetic", "slow"
"""Types of node: a synthetic profile's own, and one that is added."""

NUM_QUANTILES = 21
IDLE_PERCENT = 15.0


@dataclass(frozen=True)
class Case:
    """One shape; ``links`` and ``tasks`` name those of the profile.

    ``pool``: in place of a shape, the plan for these GPUs in unequal pipelines; GPUs are of one type, or of two, of
    which the slow one takes twice as long for a task. Between zones links are slow.
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
    Case("pool", "of 4 and 4 in two zones", pool={f"{OWN}@a": 4, f"{OWN}@b": 4}),
    Case("pool", "of 3 fast and 6 slow in two zones", pool={f"{OWN}@a": 3, f"{SLOW}@b": 6}),
)


def profile_of(case: Case) -> Profile:
    """Return the case's profile, with times not stretched."""
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
    if len(Pool.of(case.pool).zones) > 1:
        profile = profile.model_copy(update={"between_zones": LinkProfile.of(*LINKS["slow"])})
    return with_type(profile, SLOW, 2.0) if any(name.startswith(SLOW) for name in case.pool) else profile


def _jittery_link(link: LinkProfile) -> LinkProfile:
    def of(times: tuple[SendTime, ...]) -> tuple[SendTime, ...]:
        return tuple(entry.model_copy(update={"time": _spread(entry.time, 1.0)}) for entry in times)

    return LinkProfile(activation=of(link.activation), gradient=of(link.gradient))


def _spread(timing: Timing, relative: float) -> Timing:
    """Return a one-sided spread with a long tail: quantiles of median * (1 + relative * a half-normal-like extra)."""
    places = [index / (NUM_QUANTILES - 1) for index in range(NUM_QUANTILES)]
    factors = [1 + relative * (2.5 * place**3 - 2.5 * 0.5**3) for place in places]
    return Timing(
        median_s=timing.median_s,
        mad_s=timing.median_s * relative * 0.25,
        num_samples=timing.num_samples,
        quantiles_s=tuple(timing.median_s * factor for factor in factors),
    )


def run_case(case: Case, steps: int, seed: int, forgive_ms: float, slower: float) -> tuple[Planned, Rehearsed]:
    """Rehearse and simulate one shape, or the plan for a pool."""
    if case.pool:
        found = plan(profile_of(case), pool=case.pool, unequal=True, micro_batch_size=MICRO_BATCH_SIZE).best
        shape: dict[str, Any] = {"plan": found, "num_hosts": found.num_workers}
    else:
        depth, replicas = map(int, case.shape.split("x"))
        shape = {"num_replicas": replicas, "num_hosts": depth * replicas}
        shape |= {} if "boundaries" in case.options else {"num_stages": depth}
    jittery = case.links == "jittery" or case.jittery_tasks
    given: dict[str, Any] = {
        "profile": profile_of(case),
        "steps": steps,
        "jitter_seed": seed if jittery else None,
        "forgiven_s": forgive_ms / 1e3 * slower,
        **shape,
        **case.options,
    }
    planned = plan_rehearsal(RehearsalSpec(**given))
    if slower != 1:
        planned = plan_rehearsal(RehearsalSpec(**given | {"time_scale": planned.scales.time * slower}))
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
    """Return one line of the table."""
    return (
        f"{planned.plan.shape} {case.note}".strip(),
        f"{planned.plan.num_workers}",
        f"{planned.scales.time:g}",
        f"{found.measured_s:.3f} ({min(found.mini_batches_s):.3f}-{max(found.mini_batches_s):.3f})",
        f"{found.expected_s:.3f}",
        f"{error_of(found):+.2%}",
        f"{found.commit_s * 1e3:.0f}",
        f"{found.busy_share - found.others_share:.0%} ({found.others_share:.0%})",
        f"{found.late_s * 1e3:.0f}",
        "no" if found.host_too_busy else "yes",
    )


def _is_meant(case: Case, text: str) -> bool:
    labels = {other.label for other in CASES}
    return case.label == text if text in labels else case.label.startswith(text)


def main(
    steps: Annotated[int, option("mini-batches that count")] = 5,
    seed: Annotated[int, option("of the jitter")] = 1,
    only: Annotated[list[str] | None, option("the case of this label, else those that begin so; repeatable")] = None,
    forgive_ms: Annotated[float, option("host delay that a task makes up for")] = FORGIVEN_S * 1e3,
    slower: Annotated[float, option("factor for all times, and for what tasks make up for")] = 1.0,
    retries: Annotated[int, option("of a shape while the cores are busy with other work")] = 2,
    patience: Annotated[float, option("seconds to wait for idle cores, at most")] = 60.0,
) -> None:
    cases = [case for case in CASES if not only or any(_is_meant(case, text) for text in only)]
    print(f"{machine()}; {steps} mini-batches a shape")
    times = "measured s (range) | simulated s | error | commit ms"
    head(f"shape | workers | times x | {times} | processor (others) | late ms | counts")
    errors = []
    for case in cases:
        for _ in range(retries + 1):
            wait_until_idle(patience)
            planned, found = run_case(case, steps, seed, forgive_ms, slower)
            row(*cells(case, planned, found))
            if not found.host_too_busy:
                errors.append(abs(error_of(found)))
                break
    print(f"{len(errors)} of {len(cases)} shapes count")
    if errors:
        print(
            f"mean error {statistics.mean(errors):.2%} (target {TARGET_MEAN:.1%}), "
            f"worst {max(errors):.2%} (target {TARGET_WORST:.1%})"
        )
