"""Soak: a real job through the first hours of a spot trace, in a fraction of the time; nothing may leak or be lost.

    python -m benchmarks soak TRACE.csv --hours 8 --minutes 48
    python -m benchmarks soak TRACE.csv --hours 2 --minutes 4 --machines processes

A share of the trace's nodes is played by local VMs: those of a moment's removal are kept all or none (seeded), so that
times, and what is revoked together, stay. When the trace is over, weights and optimizer state are compared bit for
bit with those of an undisturbed run of as many steps on one worker. Prints how memory, file handles and threads of
the manager, of the workers that lived long and of the host processes went, and draws it. Exit code 1: bits differ.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.harness import TINY_JOB, Seed, head, machine, option, row
from benchmarks.runs import Subject, play, specify, subject_of_job
from benchmarks.soak.sampling import MIB, Process, Sample, Sampler, draw, trend
from benchmarks.soak.thinning import describe, first_hours, thinned
from manager.report.summary import summarise
from manager.report.values import RunReport
from morph.checkpoint.manifest import read_manifest
from morph.contract.cluster import LocalVms, Policy
from morph.contract.trace import Trace, load_trace
from simulator import plan_table, synthetic_profile

QUANTITIES: dict[str, Callable[[Sample], float]] = {
    "RSS MiB": lambda sample: sample.rss_mib,
    "handles": lambda sample: float(sample.num_handles),
    "threads": lambda sample: float(sample.num_threads),
}


def differing_units(subject: Subject, report: RunReport, directory: Path) -> list[str]:
    """Units whose final bits are not those of an undisturbed run on one worker."""
    command = [sys.executable, "-m", "morph.runtime.process.single", subject.job_path, "--steps", str(report.version)]
    command += ["--sections", str(subject.num_sections), "--micro-batch", str(subject.m)]
    subprocess.run([*command, "--checkpoints", str(directory / "alone")], check=True, stdout=subprocess.DEVNULL)
    alone = read_manifest(str(directory / "alone"), report.version)
    ours = read_manifest(str(directory / "run" / "checkpoints"), report.version)
    digests = [{entry.unit: entry.sha256 for entry in manifest.units} for manifest in (ours, alone)]
    return [name for name in sorted(subject.units) if digests[0].get(name) != digests[1].get(name)]


def show_trends(processes: list[Process], min_lived_s: float, warm_up_s: float) -> None:
    """One line per process that lived long: first quarter -> last quarter, and the slope per hour."""
    long_lived = [process for process in processes if process.lived_s >= min_lived_s]
    print(f"\nprocesses that lived {min_lived_s / 60:.0f} minutes or more, without their first {warm_up_s:.0f} s:")
    head("process | minutes | " + " | ".join(QUANTITIES))
    for process in sorted(long_lived, key=lambda entry: (entry.role, -entry.lived_s)):
        found = [trend(process.after(warm_up_s), of) for of in QUANTITIES.values()]
        cells = (f"{one.first:.0f} -> {one.last:.0f} ({one.per_hour:+.1f}/h)" for one in found)
        row(f"{process.role} {process.name}", f"{process.lived_s / 60:.1f}", *cells)


def main(
    trace: Annotated[Path, typer.Argument(help="CSV, as `morph run --trace` takes it")],
    job: Annotated[str, option("path/to/file.py:name")] = TINY_JOB,
    hours: Annotated[float, option("of the trace")] = 8.0,
    minutes: Annotated[float, option("in which they are played")] = 48.0,
    vms: Annotated[int, option("most local VMs at once")] = 6,
    seed: Seed = 1,
    machines: Literal["ray", "processes"] = "ray",
    checkpoint_every: Annotated[int, option("steps")] = 50,
    heartbeat_timeout_s: Annotated[float, option("other programs share the cores")] = 20.0,
    sample_s: float = 10.0,
    out: Annotated[Path | None, option("keep journal, checkpoints, samples and picture here")] = None,
) -> None:
    whole = first_hours(load_trace(trace), hours)
    short = thinned(whole, vms, seed).scaled(minutes * 60 / (hours * 3600))
    print(f"trace: {describe(whole)}\nplayed in {minutes:g} minutes: {describe(short)}", flush=True)
    directory = out or Path(tempfile.mkdtemp(prefix="morph-soak-"))
    directory.mkdir(parents=True, exist_ok=True)
    policy = Policy(checkpoint_every_steps=checkpoint_every, heartbeat_timeout_s=heartbeat_timeout_s)
    try:
        ok = soak(subject_of_job(job), short, policy, machines, sample_s, directory)
    finally:
        if out is None:
            shutil.rmtree(directory, ignore_errors=True)
    sys.exit(0 if ok else 1)


def soak(
    subject: Subject,
    trace: Trace,
    policy: Policy,
    machines: Literal["ray", "processes"],
    sample_s: float,
    directory: Path,
) -> bool:
    """Play, compare, print and draw; whether every bit is the same."""
    m, told, start_s = subject.m, machine(), time.time()
    profile = synthetic_profile(
        num_sections=subject.num_sections, batch_size=subject.batch_size, micro_batch_sizes=(m,), micro_batch_size=m
    )
    spec = specify(
        subject,
        plan_table(profile, trace.max_nodes),
        policy,
        trace,
        config={"job": subject.job_path},
        cluster={"vms": LocalVms(launcher=machines)},
        stop_with_trace=True,
    )
    try:
        with Sampler(sample_s) as sampler:
            finish, report = play(subject, spec, directory / "run", sampler)
    finally:  # what was measured is worth keeping whatever became of the run
        samples = [asdict(process) for process in sampler.processes.values()]
        (directory / "samples.json").write_text(json.dumps({"notes": sampler.notes, "processes": samples}))
    wall_s = time.time() - start_s
    journal_mib = sum(file.stat().st_size for file in (directory / "run").glob("journal.sqlite*")) / MIB
    different = differing_units(subject, report, directory)
    pauses = [morph.pause_ms for morph in report.morphs if morph.pause_ms is not None and not morph.planned]
    print(summarise(report.model_copy(update={"morphs": ()})))
    print(
        f"{finish.outcome}; {wall_s / 60:.1f} minutes, {told} before, {machines}, niceness {os.nice(0)}; "
        f"{len(report.shapes)} generations, {sum(not morph.planned for morph in report.morphs)} forced morphs"
        + (f", pause median {statistics.median(pauses):.0f} ms, worst {max(pauses):.0f} ms" if pauses else "")
    )
    print(f"journal: {journal_mib:.1f} MiB, {journal_mib * 1024 / max(1, report.version):.1f} KiB a step")
    show_trends(list(sampler.processes.values()), min(600.0, wall_s / 2), min(60.0, wall_s / 8))
    same = f"of {len(subject.units)} units bit-identical after {report.version} steps"
    print(f"\n{'NO ' if different else 'yes'} weights and optimizer state {same}")
    if different:
        print(f"    units that differ: {', '.join(different)}")
    draw(sampler, directory / "soak.png", f"{subject.job_path}: a spot trace")
    return not different
