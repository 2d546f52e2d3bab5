"""``morph checkpoints``: list, verify, keep, remove, clean and copy stored checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from morph.cli.reading.options import JsonOption, StoredArgument
from morph.words import counted

if TYPE_CHECKING:
    from rich.table import Table

    from morph.checkpoint.inspection import VersionStatus
    from morph.contract.checkpoint import Manifest

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
EXIT_DAMAGED = 1
WIDTH = 120
checkpoints_app = typer.Typer(
    help="List, verify, keep, remove, copy and clean up.\n\n\b\nExample:\n  morph checkpoints ls runs/tiny",
    no_args_is_help=True,
    rich_markup_mode=None,
)
VersionArgument = Annotated[int, typer.Argument(metavar="VERSION", min=0, help="Steps applied.", show_default=False)]
VersionsArgument = Annotated[
    list[int], typer.Argument(metavar="VERSION...", min=0, help="Versions (steps applied).", show_default=False)
]


def checkpoint_table(url: str, inspect_versions: Sequence[VersionStatus], now_s: float) -> Table:
    """Return one row for each version, the newest last; ages are as of ``now_s`` (epoch)."""
    from morph.tables import table

    columns = ("where", "state", "version", "kind", "shape", "MiB", "age")
    rows = [
        (
            look.where.rsplit("/", 1)[-1],
            ", ".join([look.state, *(["kept"] if look.kept else []), *(["best"] if look.best else [])]),
            look.version,
            look.kind or "-",
            look.shape or "-",
            f"{look.size_bytes / 2**20:.1f}",
            age_text(look.saved_s, now_s),
        )
        for look in inspect_versions
    ]
    return table(f"checkpoints in {url}", columns, rows, left=2)


def age_text(saved_s: float | None, now_s: float) -> str:
    """Return an age in its largest unit; never below zero, even if the clock was set back."""
    if saved_s is None:
        return "unknown"
    age_s = max(0.0, now_s - saved_s)
    length_s, name = next((unit for unit in _UNITS if age_s >= unit[0]), _UNITS[-1])
    return f"{age_s / length_s:.{1 if length_s > 1 else 0}f} {name}"


@checkpoints_app.command("ls")
def ls_command(source: StoredArgument, as_json: JsonOption = False) -> None:
    """List what is stored: version (steps applied), kind, shape, size, age, and whether it is kept or damaged.

    Only the sizes of files are checked; `morph checkpoints verify` reads every byte.

    \b
    Example:
      morph checkpoints ls runs/tiny
      morph checkpoints ls az://container/run --json | jq .[-1].version
    """
    import json
    import time

    from manager.run.checkpoint_location import no_checkpoint, stored_at
    from morph.checkpoint.inspection import inspect_versions
    from morph.tables import wide_console

    stored = stored_at(source)
    checkpoints = tuple(inspect_versions(stored.url, every_byte=False))
    if as_json:
        print(json.dumps([look.model_dump(mode="json") for look in checkpoints], indent=2))
        return
    if not checkpoints:
        raise no_checkpoint(stored)
    wide_console(WIDTH).print(checkpoint_table(stored.url, checkpoints, time.time()))


@checkpoints_app.command("verify")
def verify_command(
    source: StoredArgument,
    version: Annotated[int | None, typer.Option(min=0, help="Verify only this version.", show_default=False)] = None,
) -> None:
    """Read every byte of each checkpoint, and say which are intact. Nothing is changed. Exit status 1: one is damaged.

    \b
    Example:
      morph checkpoints verify runs/tiny
      morph checkpoints verify az://container/run --version 40
    """
    from manager.run.checkpoint_location import stored_at, unknown_version
    from morph.checkpoint.inspection import State, inspect_versions
    from morph.checkpoint.versions import stored_versions

    stored = stored_at(source)
    known = tuple(entry.version for entry in stored_versions(stored.url))
    if not known or version not in (None, *known):
        raise unknown_version(stored, "--version", version or 0, known)
    states = []
    for look in inspect_versions(stored.url, () if version is None else (version,), every_byte=True):
        states.append(look.state)
        print(_told(look), flush=True)
    if State.DAMAGED in states:
        raise typer.Exit(EXIT_DAMAGED)


@checkpoints_app.command("keep")
def keep_command(
    source: StoredArgument,
    version: VersionArgument,
    undo: Annotated[bool, typer.Option("--undo", help="No longer keep it: let it be deleted in its turn.")] = False,
) -> None:
    """Keep a checkpoint: it is not deleted when newer ones are written, whatever the policy.

    \b
    Example:
      morph checkpoints keep runs/tiny 40
      morph checkpoints keep runs/tiny 40 --undo
    """
    from manager.run.checkpoint_location import stored_at, unknown_version
    from morph.checkpoint.retention import keep, let_go
    from morph.checkpoint.versions import stored_versions

    stored = stored_at(source)
    known = {entry.version for entry in stored_versions(stored.url) if entry.complete or (undo and entry.kept)}
    if version not in known:
        raise unknown_version(stored, "VERSION", version, tuple(sorted(known)))
    if undo:
        let_go(stored.url, version)
        print(f"version {version} is no longer kept: it is deleted once newer ones replace it")
    else:
        keep(stored.url, version)
        print(f"version {version} is kept until `morph checkpoints keep --undo` or `rm --force`")


@checkpoints_app.command("rm")
def rm_command(
    source: StoredArgument,
    versions: VersionsArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Also remove the newest intact one, newer ones and kept ones.")
    ] = False,
) -> None:
    """Remove checkpoints, even while their run is active.

    The newest intact checkpoint and newer ones, which the run may be reading or writing, are removed only with --force,
    and not while the run is active. The manifest goes first, so that an incomplete checkpoint is never mistaken for a
    complete one.

    \b
    Example:
      morph checkpoints rm runs/tiny 20 40
    """
    from manager.run.checkpoint_location import stored_at, unknown_version
    from manager.run_dir import holder_of
    from morph.checkpoint.inspection import inspect_versions
    from morph.checkpoint.retention import refusal
    from morph.checkpoint.storage import writing
    from morph.checkpoint.versions import delete_version
    from morph.contract.errors import InputError

    stored = stored_at(source)
    checkpoints = tuple(inspect_versions(stored.url, every_byte=False))
    known = tuple(look.version for look in checkpoints)
    missing = next((version for version in versions if version not in known), None)
    if missing is not None:
        raise unknown_version(stored, "VERSION", missing, known)
    holder = None if stored.run_dir is None else holder_of(stored.run_dir)
    for version in dict.fromkeys(versions):
        problem = refusal(checkpoints, version, force=force, holder=holder)
        if problem is not None:
            raise InputError(problem[0], source=stored.url, field="VERSION", value=version, allowed=problem[1])
    for version in dict.fromkeys(versions):
        with writing(stored.url):
            gone = delete_version(stored.url, version, even_kept=force)
        outcome = "is removed" if gone else "stays: it is marked to be kept (--force removes it)"
        print(f"version {version} {outcome}", flush=True)


@checkpoints_app.command("gc")
def gc_command(source: StoredArgument) -> None:
    """Remove files that killed saves left half-written, even while the run is active. No checkpoint loses a byte.

    A save removes them from its own folder. This command removes them from all complete checkpoints and from incomplete
    ones before the newest.

    \b
    Example:
      morph checkpoints gc runs/tiny
    """
    from manager.run.checkpoint_location import no_checkpoint, stored_at
    from morph.checkpoint.manifest import remove_half_written
    from morph.checkpoint.storage import writing
    from morph.checkpoint.versions import stored_versions

    stored = stored_at(source)
    versions = stored_versions(stored.url)
    if not versions and stored.run_dir is None:
        raise no_checkpoint(stored)
    newest = max((entry.version for entry in versions if entry.complete), default=-1)
    with writing(stored.url):
        old = [entry.version for entry in versions if entry.version <= newest]
        sizes = [size_bytes for version in old for size_bytes in remove_half_written(stored.url, version)]
    print(f"removed {counted(len(sizes), 'half-written file')} of killed saves, {counted(sum(sizes), 'byte')}")


@checkpoints_app.command("copy")
def copy_command(
    source: StoredArgument,
    target: Annotated[
        str, typer.Argument(metavar="DEST_URL", help="fsspec URL or folder to copy to.", show_default=False)
    ],
    version: Annotated[
        int | None,
        typer.Option(min=0, help="Version (steps applied); default: the newest intact one.", show_default=False),
    ] = None,
) -> None:
    """Copy a checkpoint to other storage, every byte checked; the copy is a checkpoint like any other.

    \b
    Example:
      morph checkpoints copy runs/tiny az://container/tiny
    """
    from manager.run.checkpoint_location import stored_at, target_url, unknown_version, with_newest
    from morph.checkpoint.manifest import complete_versions, read_manifest
    from morph.checkpoint.transfer import copy_version

    stored, url = stored_at(source), target_url(target)

    def copied(manifest: Manifest) -> bool:
        return copy_version(stored.url, manifest, url)

    if version is None:
        manifest, is_new = with_newest(stored, copied)
    else:
        known = complete_versions(stored.url)
        if version not in known:
            raise unknown_version(stored, "--version", version, known)
        manifest = read_manifest(stored.url, version)
        is_new = copied(manifest)
    if is_new:
        print(f"copied version {manifest.version}, {manifest.size_bytes / 2**20:.1f} MiB, to {url}")
    else:
        print(f"version {manifest.version} is in {url} already")


def _told(look: VersionStatus) -> str:
    """Return one line of ``verify``."""
    from morph.checkpoint.inspection import State

    kept = ", kept" if look.kept else ""
    size = f"{look.size_bytes / 2**20:.1f} MiB{kept}"
    match look.state:
        case State.WHOLE:
            return f"version {look.version}: whole, every byte read ({size})"
        case State.DAMAGED:
            return f"version {look.version}: damaged: {look.problem} ({size})"
        case State.INCOMPLETE:
            return f"version {look.version}: incomplete: it has no manifest, and is no checkpoint ({size})"
