"""Options of ``morph trace`` and ``morph replay`` that choose a trace or a model of traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.errors import places
from morph.contract.errors import ConfigError, TraceError
from morph.yaml_files import SET
from simulator.commands.settings import DrawnTrace

if TYPE_CHECKING:
    from morph.contract.trace import Trace
    from simulator import TraceModel

MOST_VMS = 2000
VmsOption = Annotated[int | None, typer.Option("--vms", min=1, max=MOST_VMS, help="Draw traces of so many spot VMs.")]
LikeOption = Annotated[Path | None, typer.Option("--like", help="Draw from a model fitted to this recorded trace.")]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Draw from this model. `morph trace generate --save-model` writes one.")
]


def read_traces(
    paths: Sequence[Path], zone: str | None = None, instance_type: str | None = None, seed: int = 0
) -> Trace:
    """Read traces of any format as one cluster, which begins at its first event.

    TraceError if a file cannot be read; the error names file and line.
    """
    from morph.contract.trace import UNKNOWN
    from simulator.traces.importers import ZoneAndType, import_trace, merged, name_of

    place = ZoneAndType(zone or UNKNOWN, instance_type or UNKNOWN)
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise TraceError("is given twice", source=str(twice), allowed="each trace once")
    names = [name_of(path) for path in paths]
    names = [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names, 1)]
    traces = [import_trace(path, place, seed) for path in paths]
    return merged(list(zip(names, traces, strict=True))).from_first_event()


def model_of(vms: int | None, like: Path | None, model: Path | None, drawn: DrawnTrace) -> TraceModel:
    """Return the model to draw from.

    ConfigError if not exactly one of ``vms``, ``like`` and ``model`` is given, or a setting needs another one.
    TraceError if the trace cannot be read.
    """
    from simulator import spot_model
    from simulator.traces.fitting import fit
    from simulator.traces.model import load_model

    sources = {"--vms": vms, "--like": like, "--model": model}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        problem = "cannot be combined" if given else "is missing"
        raise ConfigError(problem, field=" and ".join(given) or "--vms", allowed=f"one of {', '.join(sources)}")
    zones, own = drawn.zones, sorted(drawn.model_fields_set & {"losses_per_vm_h", "bulk_share", "replacement_s"})
    if own and vms is None:
        problem = f"cannot be combined with {given[0]}"
        raise ConfigError(problem, field=f"{SET} {own[0]}", value=getattr(drawn, own[0]), allowed="with --vms")
    if vms is not None:
        if zones is not None and zones > vms:
            raise ConfigError("is more than there are VMs", field=f"{SET} zones", value=zones, allowed=f"1 to {vms}")
        chosen = spot_model(
            vms,
            losses_per_vm_h=drawn.losses_per_vm_h,
            bulk_share=drawn.bulk_share,
            replacement_s=drawn.replacement_s,
            num_zones=zones or min(2, vms),
        )
    else:
        with places({"trace": (str(like), "--like")}):
            chosen = fit(read_traces([like])) if like is not None else load_model(model)  # type: ignore[arg-type]
        chosen = chosen if zones is None else chosen.with_zones(zones)
    return chosen if drawn.notice is None else chosen.model_copy(update=_notice(str(drawn.notice)))


def _notice(text: str) -> dict[str, float]:
    lead, _, share = text.partition(":")
    try:
        notice = {"notice_s": float(lead), "noticed": float(share or 1)}
    except ValueError:
        notice = {"notice_s": -1.0, "noticed": -1.0}
    if not (0 < notice["notice_s"] <= 1e6 and 0 <= notice["noticed"] <= 1):
        allowed = "seconds, more than 0, and a share from 0 to 1: 120 or 30:0.8"
        raise ConfigError("is not a notice", field=f"{SET} notice", value=text, allowed=allowed)
    return notice
