"""``morph history``: show how long the VMs of all runs lived."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.options import JsonOption
from morph.contract.errors import ConfigError
from morph.words import counted

if TYPE_CHECKING:
    from manager.history.estimate import KindSeen

COLUMNS = (
    *("provider", "size", "region", "zone", "VMs", "VM-hours", "lost", "expected per VM-hour", "mean life"),
    *("noticed", "lead", "in bulk", "allocation", "preparation", "$/h"),
)


def history_command(
    provider: Annotated[str | None, typer.Option(help="Only VMs of this provider: azure, static, local.")] = None,
    size: Annotated[str | None, typer.Option(help="Only VMs of this size.")] = None,
    region: Annotated[str | None, typer.Option(help="Only VMs in this region.")] = None,
    zone: Annotated[str | None, typer.Option(help="Only VMs in this zone.")] = None,
    as_json: JsonOption = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Forget these VMs; needs at least one of the above.")
    ] = False,
) -> None:
    """Show how VMs fared in all of your runs: how long they lived, and which losses to expect in the next run.

    \b
    Example:
      morph history --provider azure
      morph history --json | jq '.[].estimate.expected.per_vm_h'
      morph history --forget --provider local
    """
    from manager.history.database import forget_lives, history_path, kept_lives
    from manager.history.estimate import INTERVAL, kinds

    requested = {"provider": provider, "size": size, "region": region, "zone": zone}
    kind = {name: value for name, value in requested.items() if value is not None}
    path = history_path()
    if forget:
        if not kind:
            raise ConfigError(
                "needs an option that selects the VMs to forget",
                field="--forget",
                allowed=f"with --provider, --size, --region or --zone; to forget everything, remove {path}",
            )
        print(f"{counted(forget_lives(path, kind), 'VM is', 'VMs are')} forgotten")
        return
    lives = kept_lives(path, {})
    selected = [kind_seen for kind_seen in kinds(lives) if kind.items() <= kind_seen.facts.model_dump().items()]
    if as_json:
        print(json.dumps([kind_seen.model_dump(mode="json") for kind_seen in selected], indent=2))
    elif not selected:
        print("no run has recorded such a VM" if lives else f"no run has recorded its VMs yet ({path})")
    else:
        from morph.tables import table, wide_console

        wide_console(200).print(table(f"VMs of all runs ({path})", COLUMNS, map(_cells, selected), left=4, light=True))
        print(
            "expected: losses that the next run assumes, starting from those of published traces; in brackets: "
            f"the rate lies there with a probability of {INTERVAL:.0%}"
        )


def _cells(kind_seen: KindSeen) -> list[str]:
    seen, estimate = kind_seen.seen, kind_seen.estimate
    return [
        *(kind_seen.facts.model_dump().values()),
        str(seen.num_vms),
        f"{seen.hours:.3g}",
        str(seen.num_lost),
        f"{estimate.expected.per_vm_h:.2g} [{estimate.low_per_vm_h:.2g}, {estimate.high_per_vm_h:.2g}]",
        _or_nothing(kind_seen.mean_lifetime_h, "{:.3g} h"),
        f"{seen.num_noticed / seen.num_lost:.0%}" if seen.num_lost else "-",
        _or_nothing(kind_seen.lead_s, "{:.3g} s"),
        f"{seen.num_bulk / seen.num_lost:.0%}" if seen.num_lost else "-",
        _or_nothing(kind_seen.allocation_s, "{:.3g} s"),
        _or_nothing(kind_seen.preparation_s, "{:.3g} s"),
        _or_nothing(kind_seen.usd_per_h, "{:.3g}"),
    ]


def _or_nothing(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
