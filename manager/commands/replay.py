"""``morph replay``: the cost and the duration of a job on spot VMs, under several policies."""

from __future__ import annotations

import importlib.util
import json
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.errors import places
from morph.cli.reading.options import JsonOption, PngOption, SettingsOption
from morph.cli.reading.progress import COMPILED_ONCE, doing_if_long, progress
from morph.contract import ranges
from morph.contract.errors import ConfigError, TraceError
from morph.contract.files import check_output, write_output
from morph.contract.vm_names import MAX_DEVICES
from morph.words import counted
from morph.yaml_files import load_cluster, load_yaml, read_settings
from simulator.commands.plan_options import memory_bytes_of, profile_to_plan
from simulator.commands.settings import ReplaySettings, with_settings
from simulator.commands.trace_options import MOST_VMS, LikeOption, ModelOption, VmsOption, model_of, read_traces

if TYPE_CHECKING:
    from morph.contract.trace import Trace

_MOST_SEEDS, _MOST_PROCESSES, _MOST_USD = 10_000, 256, ranges.USD_PER_HOUR.high
Cases = tuple[tuple[str, int, "Trace"], ...]


class AimName(StrEnum):
    """The objectives of a policy: examples per second, or per dollar."""

    EXAMPLES = "examples"
    DOLLARS = "dollars"


@with_settings(ReplaySettings)
def replay_command(  # noqa: C901 (checks of options, one after the other)
    profile: Annotated[
        Path,
        typer.Argument(
            help="Profile that `morph calibrate` wrote. For a job on one VM: a YAML file with its durations.",
            metavar="PROFILE",
            show_default=False,
        ),
    ],
    traces: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="Trace of VMs, in any format of `morph trace`. Repeatable."),
    ] = None,
    vms: VmsOption = None,
    hours: Annotated[float, typer.Option("--hours", min=0.1, max=10_000, help="Length of a drawn trace.")] = 24.0,
    like: LikeOption = None,
    model: ModelOption = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=_MOST_SEEDS, help="Number of traces to draw.")] = 5,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**31, help="Seed of the first drawn trace.")] = 0,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="Cluster file (YAML): policy, VMs, prices and limits.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy", help="Policies to compare: names with commas, or all. The default leaves out variants of Morph."
        ),
    ] = "compared",
    objective: Annotated[
        AimName | None,
        typer.Option(
            "--objective",
            metavar="NAME",
            help="Advise by examples or dollars. Default: dollars, if all prices are known.",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", help="End: 100000 (steps), 48h, 2d, a date or 300usd. Default: the trace's end."),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", min=0, max=_MOST_USD, help="Dollars per hour of a spot VM. Default: the trace's."),
    ] = None,
    on_demand_price: Annotated[
        float | None,
        typer.Option("--on-demand-price", min=0, max=_MOST_USD, help="Dollars per hour of the same VM on demand."),
    ] = None,
    gpus_per_vm: Annotated[
        int, typer.Option("--gpus-per-vm", min=1, max=MAX_DEVICES, help="GPUs of each VM. One worker drives each GPU.")
    ] = 1,
    node_types: Annotated[
        str | None,
        typer.Option(
            "--node-types",
            help="GPU types of a trace's instance types. For example p3.2xlarge=v100,g4dn.xlarge=t4.",
        ),
    ] = None,
    memory_gib: Annotated[float | None, typer.Option("--memory-gib", help="Memory of one GPU in GiB.")] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, max=_MOST_PROCESSES, help="Number of processes to simulate in.")
    ] = 1,
    as_json: JsonOption = False,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write a row for each policy and trace.")] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", help="Write the rows of --csv as Parquet.")] = None,
    png: PngOption = None,
    settings: SettingsOption = None,
) -> None:
    """Simulate a job on spot VMs under several policies: compare cost and progress.

    \b
    Example:
      morph replay profile.json --vms 24 --hours 48 --until 20000 --price 0.9
      morph replay profile.json --trace trace.csv --png replay.png
      morph replay profile.json --like p3.csv --set zones=3 --seeds 20 --jobs 4
    """
    from manager.run.controller_config import most_of_types
    from manager.simulation.replay import Replay, advice, frame_of, policies_of, types_of
    from manager.simulation.spot.job import Durations, OneVmJob, SpotJob, job_from_profile, with_redundant_costs
    from manager.simulation.spot.run_end import SpotPrices, Until, most_vms
    from morph.contract.cluster import ClusterConfig
    from simulator import PlanRequest

    check_output(csv, parquet, png, read=[profile, *(traces or ()), like, model, cluster])
    if parquet is not None and importlib.util.find_spec("pyarrow") is None:
        allowed = "pip install -e '.[parquet]' in the clone of Morph, or --csv"
        raise ConfigError("needs pyarrow", field="--parquet", value=str(parquet), allowed=allowed)
    names = policies_of(policy)
    bound = None if until is None else Until.parse(until, datetime.now().astimezone())
    numbers = load_yaml(profile, OneVmJob) if profile.suffix in (".yaml", ".yml") else None
    measured = profile_to_plan(profile) if numbers is None else None
    chosen = read_settings([text for text in settings or () if not _is_of_cluster(text)], ReplaySettings)
    of_cluster = [text for text in settings or () if _is_of_cluster(text)]
    wanted = read_settings(of_cluster, ClusterConfig) if cluster is None else load_cluster(cluster, of_cluster)
    decides, limits = wanted.policy, wanted.vms.limits
    price = wanted.vms.usd_per_h if price is None else price
    on_demand_price = wanted.vms.on_demand_usd_per_h if on_demand_price is None else on_demand_price
    most_wanted = None if cluster is None else most_vms(wanted.vms, price, str(cluster), gpus_per_vm)
    memory_bytes = wanted.vms.memory_bytes if memory_gib is None else memory_bytes_of(memory_gib)
    if bound is None and limits.budget_usd is not None:
        bound = Until(kind="usd", amount=limits.budget_usd)
    if traces and (vms is not None or like is not None or model is not None):
        raise ConfigError("cannot be combined with --vms, --like or --model", field="--trace")
    if traces:
        cases = _recorded(traces)
    else:
        if vms is None and like is None and model is None:
            vms = most_wanted
        drawn = model_of(vms, like, model, chosen)
        drawn_seeds = range(seed, seed + seeds)
        cases = tuple((f"drawn {number}", number, drawn.draw(number, hours * 3600)) for number in drawn_seeds)
        for _, number, trace in cases:
            if not trace.events:
                message = f"no VM comes in the {hours:g} h of a drawn trace"
                raise TraceError(message, field="--seed", value=number, allowed="more --hours, or VMs from the start")
    if most_wanted is not None:
        cases = tuple((name, number, trace.at_most(most_wanted)) for name, number, trace in cases)
    priced = price is not None or all(trace.prices for _, _, trace in cases)
    priced &= "on-demand" not in names or bool(on_demand_price)
    allowed = "with --price, and --on-demand-price above 0 for on-demand"
    if objective is AimName.DOLLARS and not priced:
        raise ConfigError("needs prices", field="--objective", value=objective.value, allowed=allowed)
    if bound is not None and bound.kind == "usd" and not priced:
        raise ConfigError("needs prices", field="--until", value=until or f"{bound.amount:g}usd", allowed=allowed)
    if numbers is not None and gpus_per_vm > 1:
        raise ConfigError("a job on one VM has one worker", field="--gpus-per-vm", value=gpus_per_vm, allowed="1")
    job: SpotJob | OneVmJob
    if measured is None:
        assert numbers is not None
        job = numbers
    else:
        most = gpus_per_vm * max(trace.max_nodes for _, _, trace in cases)
        if most > MOST_VMS:
            allowed = f"1 to {MOST_VMS} GPUs; for more VMs, vms.keep in a --cluster file limits their number"
            raise TraceError("has too many GPUs at once", field="--trace", value=most, allowed=allowed)
        types = types_of(node_types, gpus_per_vm, names) if node_types is not None else {}
        pool = most_of_types([trace for _, _, trace in cases], types, "--node-types") if types else None
        nodes = None if gpus_per_vm == 1 else gpus_per_vm
        request = PlanRequest(memory_bytes=memory_bytes, redundancy=decides.redundancy, num_gpus_per_node=nodes)
        of_cluster_file = memory_gib is None and memory_bytes is not None
        where = (str(cluster or profile), "vms.memory_bytes") if of_cluster_file else (str(profile), "--memory-gib")
        planning = doing_if_long(f"planning for 1 to {most} {'VMs' if nodes is None else 'GPUs'} ({COMPILED_ONCE})")
        with planning, places({"memory_bytes": where, "pool": (str(profile), "--node-types")}):
            job = job_from_profile(
                measured,
                most if pool is None else pool,
                request,
                node_types=types,
                durations=Durations(setup_s=chosen.setup_s, restart_s=chosen.restart_s),
                policy=decides,
            )
            job = with_redundant_costs(job, measured, most) if pool is None else job
    longest = hours if not traces else min(trace.duration_s for _, _, trace in cases) / 3600
    if bound is not None and bound.kind == "hours" and bound.amount > longest:
        raise ConfigError("is after a trace's end", field="--until", value=until, allowed=f"at most {longest:.4g}h")
    replay = Replay(
        job=job,
        policies=names,
        traces=cases,
        until=bound or Until(kind="hours", amount=longest),
        prices=SpotPrices(spot_usd_per_h=price, on_demand_usd_per_h=on_demand_price),
    )
    what = f"simulating {counted(len(names), 'policy', 'policies')} on {counted(len(cases), 'trace')}"
    with progress(remaining=True) as show_progress:
        show_progress(what, 0.0)
        outcomes = replay.run(jobs, partial(show_progress, what))
    if as_json:
        print(json.dumps(json.loads(frame_of(outcomes).to_json(orient="records"))))
    else:
        from manager.commands.replay_shown import show

        show(job.name, outcomes)
        print(advice(outcomes, None if objective is None else objective.value))
    if csv is not None:
        write_output(csv, frame_of(outcomes).to_csv(index=False, lineterminator="\n"))
    if parquet is not None:
        write_output(parquet, frame_of(outcomes).to_parquet(index=False))
    if png is not None:
        from manager.commands.replay_shown import draw

        draw(job.name, outcomes, png)


def _is_of_cluster(setting: str) -> bool:
    return "." in setting.partition("=")[0]


def _recorded(files: list[Path]) -> Cases:
    """Read the traces; each begins at its first event."""
    cases = tuple((path.stem, 0, read_traces([path])) for path in files)
    for path, (_, _, trace) in zip(files, cases, strict=True):
        if not trace.duration_s:
            raise TraceError(
                "ends with its first events, so there is nothing to play",
                source=str(path),
                field="event",
                allowed="later events, or a last line such as 86400,end for the second at which the recording ended",
            )
    return cases
