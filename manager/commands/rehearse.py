"""``morph rehearse``: run a shape or a trace with emulated workers here, and compare the times with simulated ones."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.errors import places
from morph.cli.reading.options import (
    JitterOption,
    MicroBatchOption,
    PlainOption,
    PlanFileOption,
    ProfileArgument,
    ReplicasOption,
    ScheduleName,
    ScheduleOption,
    SettingsOption,
    SlowOption,
    StagesOption,
)
from morph.cli.reading.progress import doing
from morph.contract.errors import PlanError
from morph.words import counted, time_text
from morph.yaml_files import SET, read_settings
from simulator.commands.plan_options import in_plan_file, memory_bytes_of, profile_to_plan, slow_of
from simulator.commands.settings import RehearseSettings, with_settings

if TYPE_CHECKING:
    from rich.table import Table

    from manager.rehearsal import Planned, Rehearsal, Rehearsed


@with_settings(RehearseSettings)
def rehearse_command(
    profile: ProfileArgument,
    pipeline_depth: StagesOption = None,
    num_replicas: ReplicasOption = 1,
    plan: PlanFileOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="Trace of VMs that come and are lost, in place of a shape: the manager chooses the shapes."
        ),
    ] = None,
    hosts: Annotated[
        int | None, typer.Option("--hosts", help="Hosts to emulate. Default: as many as the workers need.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Mini-batches to measure, after one to warm up.")] = 5,
    m: MicroBatchOption = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", help="Samples of a mini-batch, a multiple of m. Default: the job's."),
    ] = None,
    schedule: ScheduleOption = ScheduleName.VARUNA,
    jitter_seed: JitterOption = None,
    slow: SlowOption = None,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", help="Memory of one device in GiB. Default: no limit.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Keep journal, checkpoint and logs in this folder. Default: they are deleted."),
    ] = None,
    plain: PlainOption = False,
    settings: SettingsOption = None,
) -> None:
    """Run a shape on emulated devices: processes, messages and manager are real, compute lasts as in the profile.

    \b
    Example:
      morph rehearse profile.json -P 9 -D 4 --hosts 36
      morph rehearse configs/profiles/gpt2-8.3b.json -P 9 -D 4 --hosts 36 \\
          --batch-size 256
      morph rehearse profile.json -P 4 -D 2 --slow 2:1.3 --jitter-seed 1
      morph rehearse profile.json --plan plan.json
      morph rehearse profile.json --trace trace.csv --steps 50
    """
    if (pipeline_depth is not None) + (plan is not None) + (trace is not None) != 1:
        raise PlanError("give one of -P (with -D), --plan and --trace", field="-P", value=pipeline_depth)
    doing(f"planning {pipeline_depth} x {num_replicas}" if pipeline_depth else f"reading {plan or trace}")
    from manager.commands.run_view import run_view
    from manager.rehearsal import (
        RehearsalSpec,
        Rehearsed,
        digest_of,
        plan_rehearsal,
        rehearse,
        rehearse_changes,
        run_facts,
    )
    from manager.report.live import LiveRun
    from manager.run_dir import RunDir
    from morph.contract.plan import load_plan
    from simulator.commands.trace_options import read_traces

    measured, chosen = profile_to_plan(profile), read_settings(settings or (), RehearseSettings)
    planned_before = None if plan is None else load_plan(plan)
    recorded = None if trace is None else read_traces([trace])
    num_workers = max(1, (pipeline_depth or 1) * num_replicas) if planned_before is None else planned_before.num_workers
    num_workers = num_workers if recorded is None else recorded.max_nodes
    options = {
        "num_hosts": "--hosts",
        "steps": "--steps",
        "num_workers": "-P times -D",
        "pipeline_depth": "-P",
        "num_replicas": "-D",
        "micro_batch_size": "job.micro_batch_size" if m is None else "--m",
        "batch_size": "job.batch_size" if batch_size is None else "--batch-size",
        **{name: f"{SET} {name}" for name in RehearseSettings.model_fields},
        "slow": "--slow",
        "jitter_seed": "--jitter-seed",
        "memory_bytes": "--memory-gib",
    }
    places_of = {field: (str(profile), name) for field, name in options.items()}
    of_files = {"pool": (str(trace), "VMs by instance_type")}
    if plan is not None:
        of_files |= in_plan_file(plan)
    with places(places_of | of_files):
        planned = plan_rehearsal(
            RehearsalSpec(
                profile=measured,
                num_stages=pipeline_depth,
                num_replicas=num_replicas,
                plan=planned_before,
                trace=recorded,
                num_hosts=-(-num_workers // chosen.workers_per_host) if hosts is None else hosts,
                steps=steps,
                schedule=schedule.value,
                micro_batch_size=m,
                batch_size=batch_size,
                **chosen.model_dump(),
                jitter_seed=jitter_seed,
                slow=slow_of(slow or ()),
                memory_bytes=memory_bytes_of(memory_gib),
            )
        )
    print(_headline(planned), flush=True)
    doing(f"starting {counted(planned.spec.num_workers, 'worker')}")
    with _directory(run_dir) as directory, RunDir(directory, run_facts(planned)) as opened:
        job = planned.profile.job
        with run_view(LiveRun(job.name, steps + 1, job.batch_size), plain=plain) as observer:
            run = rehearse if recorded is None else rehearse_changes
            result: Rehearsed | Rehearsal = run(planned, opened, observer, temporary=run_dir is None)
        digest = digest_of(opened)
    if isinstance(result, Rehearsed):
        _tell(result)
    else:
        _tell_changes(result)
    print(f"sha256 of the final weights, after {counted(steps + 1, 'step')}: {digest[:16]}")


@contextmanager
def _directory(run_dir: Path | None) -> Iterator[Path]:
    if run_dir is not None:
        yield run_dir
        return
    with tempfile.TemporaryDirectory(prefix="morph-rehearsal-") as directory:
        yield Path(directory) / "run"


def _headline(planned: Planned) -> str:
    spec, scales, plan, size = planned.spec, planned.scales, planned.plan, planned.plan.micro_batch_size
    shape = plan.shape if spec.trace is None else f"{counted(len(planned.plans), 'plan')}, {plan.shape} first"
    most, workers = "" if spec.trace is None else "at most ", counted(spec.num_workers, "emulated worker")
    return (
        f"{planned.profile.job.name}: {shape}, {plan.schedule} schedule, "
        f"{counted(plan.num_micro_batches, 'micro-batch', 'micro-batches')} of {counted(size, 'sample')}; "
        f"{most}{workers} on {counted(-(-spec.num_workers // spec.workers_per_host), 'host')} ({spec.network})\n"
        f"times x {scales.time:g}, messages x {scales.message:.3g}, parameters x {scales.state:.3g}"
    )


def _tell(rehearsed: Rehearsed) -> None:
    from morph.tables import wide_console

    console, scale = wide_console(), rehearsed.planned.scales.time
    measured_s, expected_s = rehearsed.measured_s, rehearsed.expected_s
    average = "median" if rehearsed.planned.spec.jitter_seed is None else "mean"
    low_s, high_s = min(rehearsed.mini_batches_s), max(rehearsed.mini_batches_s)
    console.print(
        f"mini-batch, {average} of {len(rehearsed.mini_batches_s)}: measured {time_text(measured_s)} "
        f"({time_text(low_s)} to {time_text(high_s)}), simulated {time_text(expected_s)}, "
        f"error {rehearsed.error:+.1%}",
        soft_wrap=True,
    )
    if scale != 1:
        rest_s = measured_s - rehearsed.commit_s
        console.print(
            f"without the stretching by {scale:g}, and with the profile's commit: "
            f"{time_text(rest_s / scale + rehearsed.planned.spec.profile.commit.median_s)}",
            soft_wrap=True,
        )
    console.print(_parts_table(rehearsed))
    console.print(
        f"commit: {time_text(rehearsed.commit_s)}, the real manager's round trip as measured here; cores "
        f"{rehearsed.busy_share:.0%} busy, {rehearsed.others_share:.0%} with other work; they "
        f"delayed a step by {time_text(rehearsed.late_s)}",
        soft_wrap=True,
    )
    _warn_if_busy(rehearsed)


def _warn_if_busy(rehearsed: Rehearsed) -> None:
    if rehearsed.host_too_busy:
        print(
            "the cores here were too busy for the measured time to mean much: take a larger --set time_scale, "
            "or a quiet machine",
            file=sys.stderr,
        )


def _tell_changes(rehearsal: Rehearsal) -> None:
    from morph.tables import table, wide_console

    console = wide_console()
    rows = [
        (
            plan.planned.plan.shape,
            str(plan.planned.plan.pool),
            len(plan.mini_batches_s),
            time_text(plan.measured_s),
            time_text(plan.expected_s),
            f"{plan.error:+.1%}",
        )
        for plan in rehearsal.plans
    ]
    names = ("shape", "GPUs", "steps", "measured", "simulated", "error")
    if rows:
        console.print(table("Mini-batches of each shape, medians", names, rows, left=2))
    for version, shape, pool in rehearsal.changes:
        console.print(f"from step {version}: {shape} on {pool}", soft_wrap=True, highlight=False)
    lost = ", ".join(f"{rehearsal.lost.count(name)} {name}".strip() for name in sorted(set(rehearsal.lost)))
    console.print(f"workers lost: {lost or 0}", highlight=False)
    if rehearsal.num_left:
        left = counted(rehearsal.num_left, "event")
        print(f"the run ended before {left} of the trace: take more --steps to play them", file=sys.stderr)
    if rehearsal.plans:
        _warn_if_busy(rehearsal.plans[0])


def _parts_table(rehearsed: Rehearsed) -> Table:
    from morph.tables import table

    expected, measured = rehearsed.planned.simulation.expected.parts_s, rehearsed.parts_s
    parts = ("forward", "recompute", "backward")
    rest_s = rehearsed.measured_s - sum(measured[part] for part in parts)
    others_s = rehearsed.expected_s - sum(expected[part] for part in parts)
    rows = [(part, time_text(measured[part]), time_text(expected[part])) for part in parts]
    rows.append(("waiting, all-reduce, optimizer, commit", time_text(rest_s), time_text(others_s)))
    title = "Where a worker's mini-batch goes, on average"
    return table(title, ("part", "measured", "simulated"), rows, left=1)
