"""Which trace, or which model of traces: options of ``morph trace`` and ``morph replay``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.contract.errors import ConfigError

if TYPE_CHECKING:
    from morph.contract.trace import Trace
    from simulator import TraceModel

MOST_VMS = 2000
LOSSES_PER_VM_H = 0.39
VmsOption = Annotated[int | None, typer.Option("--vms", min=1, max=MOST_VMS, help="Draw traces of so many spot VMs.")]
LossesOption = Annotated[
    float | None,
    typer.Option(
        "--losses-per-vm-h", min=0, max=100, help=f"How often one VM is taken, with --vms. Default: {LOSSES_PER_VM_H}."
    ),
]
BulkShareOption = Annotated[
    float | None,
    typer.Option("--bulk-share", min=0, max=1, help="Share of losses that take several, with --vms. Default: 0.5."),
]
ReplacementOption = Annotated[
    float | None,
    typer.Option(
        "--replacement-s", min=1, max=1e6, help="Mean seconds until a VM is replaced, with --vms. Default: 300."
    ),
]
ZonesOption = Annotated[
    int | None, typer.Option("--zones", min=1, max=100, help="Spread the drawn VMs over so many zones that are alike.")
]
NoticesOption = Annotated[
    str | None,
    typer.Option(
        "--notice", help="Seconds, and for which share of losses, of a drawn trace: 120 or 30:0.8.", metavar="S[:SHARE]"
    ),
]
LikeOption = Annotated[
    Path | None, typer.Option("--like", help="Draw from the model that is fitted to this recorded trace.")
]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Draw from this model (`morph trace generate --save-model`).")
]


def read_traces(
    paths: Sequence[Path], zone: str | None = None, instance_type: str | None = None, seed: int = 0
) -> Trace:
    """Read traces of any format as one cluster.

    Raises:
        TraceError: naming file and line.
    """
    from morph.contract.trace import UNKNOWN
    from simulator.traces.importing import Place, import_trace, merged, name_of

    place = Place(zone or UNKNOWN, instance_type or UNKNOWN)
    return merged([(name_of(path), import_trace(path, place, seed)) for path in paths])


def model_of(
    vms: int | None,
    like: Path | None,
    model: Path | None,
    losses_per_vm_h: float | None,
    bulk_share: float | None,
    replacement_s: float | None,
    zones: int | None,
    notices: str | None,
) -> TraceModel:
    """Return the model to draw from.

    Raises:
        ConfigError: none of ``vms``, ``like`` and ``model`` is given or several are, or what belongs to another one.
        TraceError: of the trace.
    """
    from simulator import spot_model
    from simulator.traces.fitting import fit
    from simulator.traces.model import load_model

    sources = {"--vms": vms, "--like": like, "--model": model}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        problem = "cannot be combined" if given else "is missing"
        raise ConfigError(problem, field=" and ".join(given) or "--vms", allowed=f"one of {', '.join(sources)}")
    own = {"--losses-per-vm-h": losses_per_vm_h, "--bulk-share": bulk_share, "--replacement-s": replacement_s}
    wrong = next((name for name, value in own.items() if value is not None and vms is None), None)
    if wrong is not None:
        raise ConfigError(f"cannot be combined with {given[0]}", field=wrong, value=own[wrong], allowed="with --vms")
    if vms is not None:
        if zones is not None and zones > vms:
            raise ConfigError("is more than there are VMs", field="--zones", value=zones, allowed=f"1 to {vms}")
        found = spot_model(
            vms,
            losses_per_vm_h=LOSSES_PER_VM_H if losses_per_vm_h is None else losses_per_vm_h,
            bulk_share=0.5 if bulk_share is None else bulk_share,
            replacement_s=replacement_s or 300.0,
            num_zones=zones or min(2, vms),
        )
    else:
        found = fit(read_traces([like])) if like is not None else load_model(model)  # type: ignore[arg-type]
        found = found if zones is None else found.with_zones(zones)
    return found if notices is None else found.model_copy(update=_notices(notices))


def _notices(text: str) -> dict[str, float]:
    lead, _, share = text.partition(":")
    try:
        told = {"notice_s": float(lead), "noticed": float(share or 1)}
    except ValueError:
        told = {"notice_s": -1.0, "noticed": -1.0}
    if not (0 < told["notice_s"] <= 1e6 and 0 <= told["noticed"] <= 1):
        allowed = "seconds, more than 0, and a share from 0 to 1: 120 or 30:0.8"
        raise ConfigError("is no notice", field="--notice", value=text, allowed=allowed)
    return told
