"""Soak: a real job through the first hours of a spot trace, in a fraction of the time; nothing may leak or be lost.

    python benchmarks/soak TRACE.csv --hours 8 --minutes 48
    python benchmarks/soak TRACE.csv --hours 2 --minutes 4 --machines processes

A share of the trace's nodes is played by local VMs: those of a moment's removal are kept all or none (seeded), so that
times, and what is revoked together, stay. When the trace is over, weights and optimizer state are compared bit for
bit with those of an undisturbed run of as many steps on one worker. Prints how memory, file handles and threads of
the manager, of the workers that lived long and of the host processes went, and draws it. Exit code 1: bits differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from drawing import draw
from sampling import MIB, Process, Sample, Sampler, trend
from thinning import describe, first_hours, thinned

from manager.controller.state.config import ControllerConfig
from manager.engine.run.session import RunSpec, run_session
from manager.report.reading import read_report
from manager.report.summary import summarise
from manager.report.values import RunReport
from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.manifest import read_manifest
from morph.contract.cluster import ClusterConfig, LocalVms, Policy
from morph.contract.trace import Trace, load_trace
from morph.cutting import cut, export_job
from morph.jobs.job import load_job
from simulator import plan_table, synthetic_profile

MANY_STEPS = 10**7
QUANTITIES = {
    "RSS MiB": lambda sample: sample.rss_mib,
    "handles": lambda sample: float(sample.num_handles),
    "threads": lambda sample: float(sample.num_threads),
}


def make_run(options: argparse.Namespace, trace: Trace) -> tuple[RunSpec, RunFacts]:
    """The job on the trace's VMs, with plans for every number of them."""
    job = load_job(options.job)
    m = job.micro_batch_size or 1
    model = cut(export_job(job), num_sections=job.num_sections, micro_batch_size=m)
    sections = len(model.sections)
    profile = synthetic_profile(
        num_sections=sections, batch_size=job.batch_size, micro_batch_sizes=(m,), micro_batch_size=m
    )
    plans = plan_table(profile, trace.max_nodes)
    policy = Policy(checkpoint_every_steps=options.checkpoint_every, heartbeat_timeout_s=options.heartbeat_timeout_s)
    config = ControllerConfig(
        job=job.name,
        fingerprint=model.fingerprint,
        plans={count: plan.model_copy(update={"fingerprint": model.fingerprint}) for count, plan in plans.items()},
        units={unit.id: unit.sections for unit in model.units},
        unit_bytes={unit.id: 1 for unit in model.units},
        num_steps=MANY_STEPS,
        policy=policy,
        expected_nodes=sum(event.event == "add" and event.time_s == 0 for event in trace.events) or 1,
    )
    path, _, name = options.job.partition(":")
    facts = RunFacts(
        job=options.job,
        fingerprint=model.fingerprint,
        micro_batch_size=m,
        batch_size=job.batch_size,
        num_sections=sections,
    )
    spec = RunSpec(
        job_path=f"{Path(path).resolve()}:{name}",
        config=config,
        cluster=ClusterConfig(vms=LocalVms(launcher=options.machines), policy=policy),
        trace=trace,
        num_sections=sections,
        micro_batch_size=m,
        stop_with_trace=True,
    )
    return spec, facts


def differing_units(facts: RunFacts, spec: RunSpec, report: RunReport, directory: Path) -> tuple[list[str], int]:
    """Units whose final bits are not those of an undisturbed run on one worker, and how many units there are."""
    command = [sys.executable, "-m", "morph.runtime.process.single", facts.job, "--steps", str(report.version)]
    command += ["--sections", str(facts.num_sections), "--micro-batch", str(facts.micro_batch_size)]
    subprocess.run([*command, "--checkpoints", str(directory / "alone")], check=True, stdout=subprocess.DEVNULL)
    alone = read_manifest(str(directory / "alone"), report.version)
    ours = read_manifest(str(directory / "run" / "checkpoints"), report.version)
    digests = [{entry.unit: entry.sha256 for entry in manifest.units} for manifest in (ours, alone)]
    names = sorted(spec.config.units)
    return [name for name in names if digests[0].get(name) != digests[1].get(name)], len(names)


def show_trends(processes: list[Process], min_lived_s: float, warm_up_s: float) -> None:
    """One line per process that lived long: first quarter -> last quarter, and the slope per hour."""
    long_lived = [process for process in processes if process.lived_s >= min_lived_s]
    print(f"\nprocesses that lived {min_lived_s / 60:.0f} minutes or more, without their first {warm_up_s:.0f} s:")
    print(f"  {'process':34} {'minutes':>8}" + "".join(f" {name:>26}" for name in QUANTITIES))
    for process in sorted(long_lived, key=lambda entry: (entry.role, -entry.lived_s)):
        samples = process.after(warm_up_s)
        cells = [_trend_cell(samples, of) for of in QUANTITIES.values()]
        label = f"{process.role} {process.name}"
        print(f"  {label:34.34} {process.lived_s / 60:8.1f}" + "".join(f" {cell:>26}" for cell in cells))


def _trend_cell(samples: list[Sample], of: object) -> str:
    found = trend(samples, of)  # type: ignore[arg-type]
    return f"{found.first:.0f} -> {found.last:.0f} ({found.per_hour:+.1f}/h)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="CSV, as `morph run --trace` takes it")
    parser.add_argument("--job", default="configs/jobs/tiny_gpt.py:job", help="path/to/file.py:name")
    parser.add_argument("--hours", type=float, default=8.0, help="of the trace")
    parser.add_argument("--minutes", type=float, default=48.0, help="in which they are played")
    parser.add_argument("--vms", type=int, default=6, help="most local VMs at once")
    parser.add_argument("--seed", type=int, default=1, help="which nodes of the trace are kept")
    parser.add_argument("--machines", choices=["ray", "processes"], default="ray")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps")
    parser.add_argument("--heartbeat-timeout-s", type=float, default=20.0, help="other programs share the cores")
    parser.add_argument("--sample-s", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=None, help="keep journal, checkpoints, samples and picture here")
    options = parser.parse_args()
    whole = first_hours(load_trace(options.trace), options.hours)
    trace = thinned(whole, options.vms, options.seed).scaled(options.minutes * 60 / (options.hours * 3600))
    print(f"trace: {describe(whole)}\nplayed in {options.minutes:g} minutes: {describe(trace)}", flush=True)
    directory = options.out or Path(tempfile.mkdtemp(prefix="morph-soak-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        ok = soak(options, trace, directory)
    finally:
        if options.out is None:
            shutil.rmtree(directory, ignore_errors=True)
    sys.exit(0 if ok else 1)


def soak(options: argparse.Namespace, trace: Trace, directory: Path) -> bool:
    """Play, compare, print and draw; whether every bit is the same."""
    spec, facts = make_run(options, trace)
    load, start_s = os.getloadavg()[0], time.time()
    try:
        with Sampler(options.sample_s) as sampler, RunDir(directory / "run", facts) as run_dir:
            finish = run_session(spec, run_dir, sampler)
    finally:  # what was measured is worth keeping whatever became of the run
        samples = [asdict(process) for process in sampler.processes.values()]
        (directory / "samples.json").write_text(json.dumps({"notes": sampler.notes, "processes": samples}))
    wall_s = time.time() - start_s
    journal_mib = sum(file.stat().st_size for file in (directory / "run").glob("journal.sqlite*")) / MIB
    report = read_report(directory / "run")
    different, num_units = differing_units(facts, spec, report, directory)
    pauses = [morph.pause_ms for morph in report.morphs if morph.pause_ms is not None and not morph.planned]
    print(summarise(report.model_copy(update={"morphs": ()})))
    print(
        f"{finish.outcome}; {wall_s / 60:.1f} minutes, {os.cpu_count()} cores, load before {load:.1f}, "
        f"{options.machines}, niceness {os.nice(0)}; {len(report.shapes)} generations, "
        f"{sum(not morph.planned for morph in report.morphs)} forced morphs"
        + (f", pause median {statistics.median(pauses):.0f} ms, worst {max(pauses):.0f} ms" if pauses else "")
    )
    print(f"journal: {journal_mib:.1f} MiB, {journal_mib * 1024 / max(1, report.version):.1f} KiB a step")
    show_trends(list(sampler.processes.values()), min(600.0, wall_s / 2), min(60.0, wall_s / 8))
    verdict = "NO " if different else "yes"
    print(f"\n{verdict} weights and optimizer state of {num_units} units bit-identical after {report.version} steps")
    if different:
        print(f"    units that differ: {', '.join(different)}")
    draw(sampler, directory / "soak.png", f"{facts.job}: {options.hours:g} hours of a spot trace")
    if options.out is not None:
        print(f"picture: {directory / 'soak.png'}")
    return not different


if __name__ == "__main__":
    main()
