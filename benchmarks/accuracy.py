"""How well the simulator knows the executor: shapes rehearsed by emulated workers and simulated (as Varuna's Table 7).

    python benchmarks/accuracy.py
    python benchmarks/accuracy.py --only "6x2" --steps 3

Every shape runs the real manager, executor, messages and reductions with as many worker processes as it has workers;
only computing is replaced by sleeping for the profile's time, and links hold messages back (docs/rehearsal.md). Times
are stretched so that this machine's cores carry the workers' own CPU time; the factor stands in the table. The measured
time is the median over the mini-batches; the simulated one is of the same plan, with one value of this machine, the
manager's round trip between two steps (commit), which is measured in the same run and printed. With jitter both are
means over the same draws. Before each shape the command waits, up to ``--patience``, until the cores are idle. A shape
during which other work kept them busy all the same is rehearsed again, as often as ``--retries`` allows; every try is
printed, and the one with the least of other work counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from manager.rehearsal import RehearsalSpec, plan_rehearsal, rehearse, run_facts
from manager.run_dir import RunDir
from morph.contract.profile import LinkProfile, Profile, SendTime, Timing
from simulator import synthetic_profile

NUM_SECTIONS = 24
FORWARD_S = 0.00125
"""Of one sample in one section: 5 ms for a micro-batch of 4, and 10 ms backwards."""

MICRO_BATCH_SIZE = 4
NUM_MICRO_BATCHES = 48
TARGET_MEAN, TARGET_WORST = 0.015, 0.03
NUM_QUANTILES = 21
IDLE_PERCENT = 15.0


@dataclass(frozen=True)
class Case:
    """One shape; ``links`` and ``tasks`` name the profile's."""

    shape: str
    note: str = ""
    links: str = "fast"
    jittery_tasks: bool = False
    uneven: bool = False
    tied: bool = False
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
    return profile


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


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    label: str
    workers: int
    stretched: float
    measured_s: float
    lowest_s: float
    highest_s: float
    simulated_s: float
    commit_s: float
    busy: float
    others: float
    late_s: float
    disturbed: bool

    @property
    def error(self) -> float:
        return self.simulated_s / self.measured_s - 1


def run_case(case: Case, options: argparse.Namespace) -> Row:
    """Rehearse and simulate one shape."""
    depth, replicas = map(int, case.shape.split("x"))
    jittery = case.links == "jittery" or case.jittery_tasks
    given: dict[str, Any] = {
        "profile": profile_of(case),
        "num_replicas": replicas,
        "num_hosts": depth * replicas,
        "steps": options.steps,
        "jitter_seed": options.seed if jittery else None,
        "forgiven_s": options.forgive_ms / 1e3 if options.forgive_ms is not None else None,
        **({} if "boundaries" in case.options else {"num_stages": depth}),
        **case.options,
    }
    planned = plan_rehearsal(RehearsalSpec(**given))
    with (
        tempfile.TemporaryDirectory(prefix="morph-accuracy-") as directory,
        RunDir(Path(directory) / "run", run_facts(planned)) as run_dir,
    ):
        rehearsed = rehearse(planned, run_dir, temporary=True)
    return Row(
        label=case.label,
        workers=depth * replicas,
        stretched=planned.scales.time,
        measured_s=rehearsed.measured_s,
        lowest_s=min(rehearsed.mini_batches_s),
        highest_s=max(rehearsed.mini_batches_s),
        simulated_s=rehearsed.expected_s,
        commit_s=rehearsed.commit_s,
        busy=rehearsed.busy_share,
        others=rehearsed.others_share,
        late_s=rehearsed.late_s,
        disturbed=rehearsed.host_too_busy,
    )


def best_try(case: Case, options: argparse.Namespace) -> Row:
    """Rehearse a shape until other work leaves it alone, or as often as the options allow."""
    tries: list[Row] = []
    while len(tries) <= options.retries:
        wait_until_idle(options.patience)
        tries.append(run_case(case, options))
        if not tries[-1].disturbed:
            break
        print(f"disturbed: {line(tries[-1])}", flush=True)
    return min(tries, key=lambda row: row.others)


def wait_until_idle(patience_s: float) -> None:
    """Block until the cores are idle, or until ``patience_s`` is over."""
    until_s = time.monotonic() + patience_s
    while psutil.cpu_percent(interval=2.0) > IDLE_PERCENT and time.monotonic() < until_s:
        pass


def line(row: Row) -> str:
    """One line of the table."""
    return (
        f"| {row.label} | {row.workers} | {row.stretched:g} | {row.measured_s:.3f} "
        f"({row.lowest_s:.3f}-{row.highest_s:.3f}) | {row.simulated_s:.3f} | {row.error:+.2%} | "
        f"{row.commit_s * 1e3:.0f} | {row.busy:.0%} ({row.others:.0%}) | {row.late_s * 1e3:.0f} |"
    )


def _is_meant(case: Case, text: str) -> bool:
    labels = {other.label for other in CASES}
    return case.label == text if text in labels else case.label.startswith(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="mini-batches that count")
    parser.add_argument("--seed", type=int, default=1, help="of the jitter")
    parser.add_argument(
        "--only", action="append", default=None, help="the case of this label, else those that begin so; repeatable"
    )
    parser.add_argument("--forgive-ms", type=float, default=None, help="host delay that a task makes up for")
    parser.add_argument("--retries", type=int, default=2, help="of a shape while the cores are busy with other work")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for idle cores, at most")
    parser.add_argument("--out", type=Path, default=None, help="also write the rows as JSON")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or any(_is_meant(case, text) for text in options.only)]
    print(f"{os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}; {options.steps} mini-batches a shape")
    heads = "shape|workers|times x|measured s (range)|simulated s|error|commit ms|cores busy (others)|late ms"
    print(f"| {heads.replace('|', ' | ')} |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for case in cases:
        rows.append(best_try(case, options))
        print(line(rows[-1]), flush=True)
    errors = [abs(row.error) for row in rows]
    print(
        f"{len(rows)} shapes: mean error {statistics.mean(errors):.2%} (target {TARGET_MEAN:.1%}), "
        f"worst {max(errors):.2%} (target {TARGET_WORST:.1%})"
    )
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
