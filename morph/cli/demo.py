"""``morph demo``: the main job on real input, on VMs of this machine that come and go, checked bit for bit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from manager.report.values import RunReport
    from morph.contract.checkpoint import Manifest
    from morph.contract.cluster import ClusterConfig
    from morph.contract.plan import Plan
    from morph.contract.profile import Profile
    from morph.contract.trace import Trace

MANY_STEPS = 100_000
MIN_SHAPES = 4
SEED, SECONDS = 269, 30.0
"""A trace with revocations of two and of three VMs at once, in which the group shrinks and grows again.

Its clock stands while a VM boots, so the run takes about twice as long.
"""


def demo_command(
    out: Annotated[Path, typer.Option(help="Everything is written here; an earlier demo's files are replaced.")] = Path(
        "out/demo"
    ),
    job: Annotated[str, typer.Option(help="path/to/file.py:name")] = "configs/jobs/gpt2_stdlib.py:job",
    cluster: Annotated[Path, typer.Option(help="Cluster file (YAML).")] = Path("configs/clusters/demo.yaml"),
    seed: Annotated[int, typer.Option(help="Of the spot trace.")] = SEED,
    seconds: Annotated[
        float, typer.Option(min=10, help="Length of the trace; its clock stands while a VM boots.")
    ] = SECONDS,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines even in a terminal.")] = False,
) -> None:
    """Calibrate, plan, run through a spot trace with real kills, and compare with an uninterrupted run.

    \b
    Example:
      morph demo
      morph demo --seed 386 --out out/another
    """
    from calibrate import calibrate
    from manager.preparation import device_memory_bytes
    from morph.cli.cluster_file import load_cluster
    from morph.cli.demo_tables import (
        print_expectations,
        print_morphs,
        print_plans,
        print_shapes,
        shared_expectations,
        with_expectations,
    )
    from morph.cli.managed_run import managed_run
    from morph.cli.run_picture import draw_run
    from morph.contract.cluster import LocalVms
    from morph.contract.errors import ConfigError
    from morph.contract.trace import write_trace
    from simulator import generate_trace

    known_cluster = _ending_at_once(load_cluster(cluster))
    vms = known_cluster.vms
    if not isinstance(vms, LocalVms):
        raise ConfigError(
            "is not of this machine", source=str(cluster), field="vms.kind", value=vms.kind, allowed="local"
        )
    memory_bytes = device_memory_bytes(vms)
    _clear(out)
    started_s = time.monotonic()

    print(f"[1/5] calibrate {job}", flush=True)
    profile = calibrate(job)
    (out / "profile.json").write_text(profile.model_dump_json(indent=2), encoding="utf-8")
    took_s = time.monotonic() - started_s
    print(f"      {profile.num_sections} sections measured in {took_s:.0f} s -> {out / 'profile.json'}")

    print("[2/5] plan", flush=True)
    trace = generate_trace(
        seed,
        duration_s=seconds,
        initial=vms.num_vms,
        min_nodes=2,
        max_nodes=vms.num_vms,
        mean_revocation_s=8.0,
        bulk_share=0.5,
        replacement_s=6.0,
    )
    write_trace(trace, out / "trace.csv")
    print_plans(profile, trace.max_nodes, memory_bytes)

    print(f"[3/5] run on {vms.num_vms} VMs through {_describe(trace)}", flush=True)
    finish, report = managed_run(
        job,
        profile,
        known_cluster,
        trace,
        steps=MANY_STEPS,
        run_dir=out / "run",
        plain=plain,
        stop_with_trace=True,
    )
    if finish.outcome == "failed":
        raise typer.Exit(1)

    print(f"[4/5] the same {report.version} steps on one worker, uninterrupted", flush=True)
    plan = next(iter(_plans(profile, trace, memory_bytes).values()))
    reference = _reference(job, profile, plan, report.version, out / "reference")

    print("[5/5] results")
    print_shapes(report)
    print_morphs(report)
    num_cores = os.cpu_count() or 1
    shared = shared_expectations(report, profile, memory_bytes, num_cores)
    print_expectations(report, shared, num_cores)
    draw_run(with_expectations(report, shared), out / "run" / "run.png", f"expected on {num_cores} shared cores")
    ok = _judge(report, out, reference, promised=(seed, seconds) == (SEED, SECONDS))
    print(f"picture: {out / 'run' / 'run.png'}   journal: {out / 'run' / 'journal.sqlite'}")
    print(f"whole demo: {time.monotonic() - started_s:.0f} s")
    raise typer.Exit(0 if ok else 1)


def _ending_at_once(cluster: ClusterConfig) -> ClusterConfig:
    """The same cluster, which ends with a demo that is killed: nobody goes on with one."""
    return cluster.model_copy(update={"policy": cluster.policy.model_copy(update={"takeover_patience_s": 0.0})})


def _plans(profile: Profile, trace: Trace, memory_bytes: int) -> dict[int, Plan]:
    from simulator import plan_table

    return plan_table(profile, trace.max_nodes, memory_bytes=memory_bytes)


def _clear(out: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    import shutil

    from morph.contract.errors import RunDirError

    known = {"profile.json", "trace.csv", "run", "reference"}
    try:
        out.mkdir(parents=True, exist_ok=True)
        strangers = sorted(entry.name for entry in out.iterdir() if entry.name not in known)
        if strangers:
            raise RunDirError(f"holds files that no demo made ({strangers[0]})", source=str(out))
        for name in ("run", "reference"):
            shutil.rmtree(out / name, ignore_errors=True)
    except OSError as error:
        raise RunDirError(f"cannot be used: {error.strerror}", source=str(out)) from error


def _describe(trace: Trace) -> str:
    by_time: dict[float, int] = {}
    for event in trace.events:
        if event.event == "remove":
            by_time[event.time_s] = by_time.get(event.time_s, 0) + 1
    kills, together = sum(by_time.values()), max(by_time.values(), default=0)
    return f"a spot trace of {trace.duration_s:.0f} s: {kills} VMs killed without warning, up to {together} at once"


def _reference(job: str, profile: Profile, plan: Plan, steps: int, directory: Path) -> Manifest:
    """Run the same steps in one process; a bar or plain lines tell how far it is."""
    import json
    import subprocess
    import sys

    from morph.checkpoint.manifest import read_manifest
    from morph.contract.errors import TrainingStopped

    command = [sys.executable, "-m", "morph.runtime.single", job, "--steps", str(steps)]
    command += ["--sections", str(profile.num_sections), "--micro-batch", str(plan.micro_batch_size)]
    command += ["--checkpoints", str(directory)]
    told_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                entry = json.loads(line)
                if time.monotonic() - told_s > 5 or entry["step"] + 1 == steps:
                    told_s = time.monotonic()
                    print(f"      step {entry['step'] + 1}/{steps}  loss {entry['loss']:.4f}", flush=True)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise TrainingStopped(f"the uninterrupted run ended with code {process.returncode}")
    return read_manifest(str(directory), steps)


def _judge(report: RunReport, out: Path, reference: Manifest, *, promised: bool) -> bool:
    """Print the verdict; True when everything held. Only the demo's own trace is ``promised`` so many shapes."""
    from morph.checkpoint.manifest import read_manifest

    managed = read_manifest(str(out / "run" / "checkpoints"), report.version)
    ours = {entry.unit: entry.sha256 for entry in managed.units}
    theirs = {entry.unit: entry.sha256 for entry in reference.units}
    different = sorted(unit for unit in ours.keys() | theirs.keys() if ours.get(unit) != theirs.get(unit))
    losses = report.losses
    first, last = losses[min(losses)], losses[max(losses)]
    shapes = [span.shape for span in report.shapes if span.num_steps]
    depths, replicas = {shape.split("x")[0] for shape in shapes}, {shape.split("x")[1] for shape in shapes}
    checks = {
        f"weights and optimizer state bit-identical to the uninterrupted run ({len(ours)} units)": not different,
        f"loss fell from {first:.3f} to {last:.3f}": last < first - 1.0,
        f"{len(set(shapes))} different shapes, P and D both changed": len(set(shapes)) >= MIN_SHAPES
        and len(depths) > 1
        and len(replicas) > 1,
    }
    for sentence, held in checks.items():
        print(f"  {'yes' if held else 'NO '}  {sentence}")
    if different:
        print(f"  units that differ: {', '.join(different)}")
    return all(list(checks.values())[: None if promised else 2])
