"""``morph demo``: train a job on local VMs that come and go, and compare the weights bit for bit."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.progress import doing, progress

if TYPE_CHECKING:
    from manager.report.values import RunReport
    from morph.contract.checkpoint import Manifest
    from morph.contract.profile import Profile
    from morph.contract.trace import Trace

MANY_STEPS = 100_000
TOLD_EVERY_S = 5.0
MIN_SHAPES = 4
SEED, SECONDS = 221133, 22.0
"""Seed and length of a trace in which once two and once three VMs are revoked together, and new VMs come later.

Every shape lasts some seconds. The trace's clock pauses while a VM boots, so the run takes a little longer.
"""
STEP_S = 0.5
"""Seconds. If a step on one worker takes longer (on a slow or busy machine), the trace is stretched in proportion; even
so, a shape may end before its first step."""


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for all files; files of an earlier demo are replaced.")] = Path(
        "out/demo"
    ),
    job: Annotated[str, typer.Option(help="path/to/file.py:name")] = "configs/jobs/gpt2_stdlib.py:job",
    cluster: Annotated[Path, typer.Option(help="Cluster file (YAML).")] = Path("configs/clusters/demo.yaml"),
    seed: Annotated[int, typer.Option(help="Seed of the spot trace.")] = SEED,
    seconds: Annotated[
        float, typer.Option(min=10, help="Length of the trace; its clock pauses while a VM boots.")
    ] = SECONDS,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines even in a terminal.")] = False,
) -> None:
    """Try it all on this machine: calibrate, plan, run a spot trace with real kills, and compare with a quiet run.

    \b
    Example:
      morph demo
      morph demo --seed 386 --out out/another
    """
    doing("loading PyTorch and the simulator")
    from calibrate import calibrate
    from manager.commands.run_view import run_view
    from manager.report.picture import draw_run
    from manager.report.summary import summarise
    from manager.run.controller_config import memory_of
    from manager.run.prepared import Inputs, prepared
    from manager.run.request import RunRequest
    from manager.run.train import train
    from manager.run_dir import read_facts
    from morph.contract.cluster import LocalVms
    from morph.contract.errors import ConfigError
    from morph.contract.trace import write_trace
    from morph.jobs.snapshot import collect
    from morph.yaml_files import load_cluster
    from simulator import PlanRequest, plan, spot_model
    from simulator.render.curve import show_curve

    known_cluster = load_cluster(cluster)
    policy = known_cluster.policy.model_copy(update={"takeover_patience_s": 0.0})  # no demo is continued
    known_cluster = known_cluster.model_copy(update={"policy": policy})
    vms = known_cluster.vms
    if not isinstance(vms, LocalVms):
        raise ConfigError(
            "does not describe VMs of this machine",
            source=str(cluster),
            field="vms.kind",
            value=vms.kind,
            allowed="local",
        )
    memory = memory_of(vms)
    _clear(out)
    started_s = time.monotonic()

    print(f"[1/5] calibrate {job}", flush=True)
    with progress() as show_progress:
        profile = calibrate(job, progress=show_progress)
    (out / "profile.json").write_text(profile.model_dump_json(indent=2), encoding="utf-8")
    took_s = time.monotonic() - started_s
    print(f"      {profile.num_sections} sections measured in {took_s:.0f} s -> {out / 'profile.json'}")

    print("[2/5] plan", flush=True)
    model = spot_model(vms.num_vms, losses_per_vm_h=900.0 / vms.num_vms, replacement_s=6.0, num_zones=1, least=2)
    request = PlanRequest(memory_bytes=memory.device_bytes, host_memory_bytes=memory.host_bytes)
    step_s = plan(profile, request, num_gpus=1).best.expected.mini_batch_s
    stretch = max(1.0, step_s / STEP_S)
    trace = model.draw(seed, seconds).scaled(stretch)
    write_trace(trace, out / "trace.csv")
    show_curve(profile, range(1, trace.max_nodes + 1), request, csv=None, png=None, as_json=False)

    print(f"[3/5] run on {vms.num_vms} VMs through {_describe(trace)}", flush=True)
    asked = RunRequest(job=job, steps=MANY_STEPS)
    inputs = Inputs(asked, profile, known_cluster, out / "run", collect(job), trace=trace, stop_with_trace=True)
    with prepared(inputs) as run:
        finish, report = train(run, lambda live: run_view(live, plain=plain))
    if finish.outcome == "failed":
        raise typer.Exit(1)

    print(f"[4/5] the same {report.version} steps on one worker, uninterrupted", flush=True)
    reference = _reference(job, profile, read_facts(out / "run").micro_batch_size, report.version, out / "reference")

    print("[5/5] results")
    print(summarise(report.model_copy(update={"num_steps": report.version}), verbose=True))  # its trace ends the run
    draw_run(report, out / "run" / "run.png")
    ok = _judge(report, out, reference, promised=(seed, seconds, stretch) == (SEED, SECONDS, 1.0))
    print(f"picture: {out / 'run' / 'run.png'}   journal: {out / 'run' / 'journal.sqlite'}")
    print(f"whole demo: {time.monotonic() - started_s:.0f} s")
    raise typer.Exit(0 if ok else 1)


def _clear(out: Path) -> None:
    """Remove the files of an earlier demo, and nothing else."""
    import shutil

    from morph.contract.errors import RunDirError

    known = {"profile.json", "trace.csv", "run", "reference"}
    try:
        out.mkdir(parents=True, exist_ok=True)
        foreign = sorted(entry.name for entry in out.iterdir() if entry.name not in known)
        if foreign:
            raise RunDirError(f"holds files that are not from a demo ({foreign[0]})", source=str(out))
        for name in ("run", "reference"):
            shutil.rmtree(out / name, ignore_errors=True)
    except OSError as error:
        raise RunDirError(f"cannot be used: {error.strerror}", source=str(out)) from error


def _describe(trace: Trace) -> str:
    by_time = Counter(event.time_s for event in trace.events if event.event == "remove")
    kills, together = by_time.total(), max(by_time.values(), default=0)
    return f"a spot trace of {trace.duration_s:.0f} s: {kills} VMs killed without warning, up to {together} at once"


def _reference(job: str, profile: Profile, micro_batch_size: int, steps: int, directory: Path) -> Manifest:
    """Run the same steps in this process, and print the progress every ``TOLD_EVERY_S`` seconds."""
    from morph.runtime.process.single import run_single

    told_s = time.monotonic()

    def tell(step: int, loss: float) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > TOLD_EVERY_S or step + 1 == steps:
            told_s = time.monotonic()
            print(f"      {step + 1}/{steps} steps  loss {loss:.4f}", flush=True)

    return run_single(
        job,
        steps=steps,
        num_sections=profile.num_sections,
        micro_batch_size=micro_batch_size,
        checkpoint_url=str(directory),
        on_step=tell,
    )


def _judge(report: RunReport, out: Path, reference: Manifest, *, promised: bool) -> bool:
    """Print the verdict; return whether all checks passed. ``promised``: whether the trace must reach all shapes."""
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
        f"weights and optimizer state bit-identical to the uninterrupted run (in {len(ours)} files)": not different,
        f"loss fell from {first:.3f} to {last:.3f}": last < first - (1.0 if promised else 0.0),
        f"{len(set(shapes))} different shapes, P and D both changed": len(set(shapes)) >= MIN_SHAPES
        and len(depths) > 1
        and len(replicas) > 1,
    }
    for sentence, held in checks.items():
        print(f"  {'yes' if held else 'NO '}  {sentence}")
    if different:
        print(f"  files of the checkpoint that differ: {', '.join(different)}")
    return all(list(checks.values())[: None if promised else 2])
