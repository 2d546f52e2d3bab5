"""``morph trace``: describe, convert, generate and plot spot traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.errors import places
from morph.cli.reading.options import JsonOption, SettingsOption
from morph.contract.files import check_output, write_output
from morph.words import counted
from morph.yaml_files import read_settings
from simulator.commands.settings import DrawnTrace, with_settings
from simulator.commands.trace_options import LikeOption, ModelOption, VmsOption, model_of, read_traces

if TYPE_CHECKING:
    from morph.contract.trace import Trace

trace_app = typer.Typer(
    help="Describe, convert, generate and plot spot traces.\n\n\b\nExample:\n  morph trace stats trace.csv",
    no_args_is_help=True,
    rich_markup_mode=None,
)
FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE...", help="Files in any format that `morph trace convert` reads; several make one cluster."
    ),
]
OutOption = Annotated[Path, typer.Option("-o", "--output", help="The trace, as CSV.", show_default=False)]
ZoneOption = Annotated[str | None, typer.Option("--zone", help="Zone of VMs for which the file has none.")]
TypeOption = Annotated[str | None, typer.Option("--instance-type", help="Type of VMs for which the file has none.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the draw.")]
WindowOption = Annotated[
    float,
    typer.Option("--window-s", min=0.001, max=3600, help="VMs lost within so many seconds count as lost at once."),
]


@trace_app.command("stats")
def stats_command(traces: FilesArgument, window_s: WindowOption = 60.0, as_json: JsonOption = False) -> None:
    """Say how many VMs there are, how they are lost and come back, and what they cost.

    \b
    Example:
      morph trace stats trace.csv
      morph trace stats us-east-2b_v100_1.json us-west-2a_v100_1.json
    """
    from morph.tables import wide_console
    from simulator.render.trace import trace_table
    from simulator.traces.statistics import statistics_of

    statistics = statistics_of(read_traces(traces), window_s)
    if as_json:
        shown = {
            zone: {
                "hours": zone_statistics.hours,
                "mean_vms": zone_statistics.mean_vms,
                "peak_vms": zone_statistics.peak,
                "vms_lost": zone_statistics.num_lost,
                "losses_per_vm_h": zone_statistics.losses_per_vm_h,
                "bulk_share": zone_statistics.bulk_share,
                "lost_at_once": zone_statistics.sizes,
                "median_life_h": zone_statistics.median_life_h,
                "replacement_s": zone_statistics.replacement_s,
                "noticed": zone_statistics.num_noticed,
                "notice_s": zone_statistics.lead_s,
                "usd_per_h": zone_statistics.usd_per_h,
                "usd_per_h_range": zone_statistics.usd_range,
            }
            for zone, zone_statistics in statistics.items()
        }
        print(json.dumps(shown, indent=2))
        return
    wide_console(118).print(trace_table(", ".join(path.name for path in traces), statistics.values()))


@trace_app.command("convert")
def convert_command(
    traces: FilesArgument,
    output: OutOption,
    zone: ZoneOption = None,
    instance_type: TypeOption = None,
    from_h: Annotated[float, typer.Option("--from-h", min=0, help="Leave out events before this hour.")] = 0.0,
    hours: Annotated[
        float | None, typer.Option("--hours", min=0.001, help="Keep so many hours, leave out later events.")
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Write traces of other formats as one CSV that `morph replay`, `run`, `rehearse` and `inject` take.

    \b
    Formats, recognised by their contents:
      time_s,event,node_id...           Morph's own
      time_ms,add|remove,node           Bamboo, AWS
      YYYY-MM-DD, HH:MM:SS, VMs         Bamboo, GCP
      {"metadata": {"gap_seconds": 300}, "data": [VMs, ...]}, ZONE_TYPE.json     SkyPilot
    If a format gives only the number of VMs, the VMs that leave are drawn.

    \b
    Example:
      morph trace convert p3-trace.csv --instance-type p3.2xlarge -o p3.csv
      morph trace convert zone_v100_1.json --from-h 24 --hours 48 -o v100.csv
    """
    from morph.contract.trace import write_trace
    from simulator.traces.importers import part_of

    check_output(output, read=traces)
    trace = read_traces(traces, zone, instance_type, seed)
    if from_h or hours is not None:
        end_s = trace.duration_s if hours is None else (from_h + hours) * 3600
        if end_s > trace.duration_s:
            print(f"note: the traces end after {trace.duration_s / 3600:.4g} h", file=sys.stderr)
        with places({"trace": (", ".join(map(str, traces)), "--from-h")}):
            trace = part_of(trace, from_h * 3600, end_s)
    write_trace(trace, output)
    print(f"{_told(trace)}; written: {output}")


@trace_app.command("generate")
@with_settings(DrawnTrace)
def generate_command(
    output: OutOption,
    vms: VmsOption = None,
    hours: Annotated[float, typer.Option("--hours", min=0.01, max=100_000, help="Length of the trace.")] = 24.0,
    seed: SeedOption = 0,
    like: LikeOption = None,
    model: ModelOption = None,
    save_model: Annotated[
        Path | None, typer.Option("--save-model", help="Write the model to this JSON file, which can be edited.")
    ] = None,
    settings: SettingsOption = None,
) -> None:
    """Draw a trace: for a number of VMs (--vms), from a model fitted to a recorded trace (--like), or from a model.

    The same options give the identical trace. A model states for each zone the number of requested VMs, their losses by
    hour of the day and their number at once, the time to replace them, and their price.

    \b
    Example:
      morph trace generate --vms 24 --hours 48 --set zones=3 -o trace.csv
      morph trace generate --like p3.csv --seed 7 -o trace.csv --save-model m.json
      morph trace generate --model m.json --hours 100 -o trace.csv
    """
    from morph.contract.trace import write_trace

    check_output(output, save_model, read=[like, model])
    spot_model = model_of(vms, like, model, read_settings(settings or (), DrawnTrace))
    trace = spot_model.draw(seed, hours * 3600)
    write_trace(trace, output)
    print(f"{_told(trace)}; written: {output}")
    if save_model is not None:
        write_output(save_model, spot_model.model_dump_json(indent=2) + "\n")
        print(f"its model: {save_model}")


@trace_app.command("plot")
def plot_command(
    traces: FilesArgument,
    png: Annotated[Path, typer.Option("--png", help="The picture.", show_default=False)],
    fit: Annotated[bool, typer.Option("--fit", help="Also draw traces of a model fitted to the trace.")] = False,
    window_s: WindowOption = 60.0,
) -> None:
    """Draw VMs over time, how many are lost at once, lifetimes, and the times between losses.

    \b
    Example:
      morph trace plot p3.csv --fit --png p3.png
    """
    from simulator.render.trace import draw_trace
    from simulator.traces.fitting import fit as fitted

    check_output(png, read=traces)
    trace = read_traces(traces)
    name = traces[0].stem if len(traces) == 1 else f"{len(traces)} traces"
    with places({"trace": (", ".join(map(str, traces)), "--fit")}):
        model = fitted(trace, window_s=window_s) if fit else None
    draw_trace(trace, name, png, model)
    print(f"{_told(trace)}; drawn: {png}")


def _told(trace: Trace) -> str:
    lost = sum(event.event == "remove" for event in trace.events)
    return f"{trace.duration_s / 3600:.1f} hours, {counted(trace.max_nodes, 'VM')} at most, {lost} lost"
