"""Reports to the user on each stored version: whether it is whole, and its size, age and kind."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import fsspec
from pydantic import Field

from morph.checkpoint.manifest import MANIFEST, files_in, read_manifest, version_url
from morph.checkpoint.newest import check_files
from morph.checkpoint.storage import reading
from morph.checkpoint.versions import SET_ASIDE, StoredVersion, stored_versions
from morph.contract.base import Value
from morph.contract.checkpoint import Manifest, SaveKind
from morph.contract.errors import CheckpointDamaged


class State(StrEnum):
    """The state of a stored version.

    INCOMPLETE: it has no manifest, because it is being written, or its writing was interrupted. DAMAGED: it differs
    from its manifest, or was set aside because it differed.
    """

    WHOLE = "whole"
    DAMAGED = "damaged"
    INCOMPLETE = "incomplete"


class VersionStatus(Value):
    """The report on one version."""

    version: int
    state: State
    kept: bool = Field(description="whether a user keeps it, so that it is never deleted as an old one")
    best: bool = Field(default=False, description="whether it is the best evaluated version")
    kind: SaveKind | None = None
    shape: str = ""
    size_bytes: int = Field(description="size of all files in its folder")
    saved_s: float | None = Field(default=None, description="wall-clock seconds (epoch); None: not known")
    where: str
    problem: str = Field(default="", description="a sentence that names the file, if it is damaged")


def inspect_versions(url: str, versions: tuple[int, ...] = (), *, every_byte: bool) -> Iterator[VersionStatus]:
    """Yield a report on each stored version, ascending.

    ``versions``: the only versions to inspect; empty: all. ``every_byte``: whether to read all of each version, file by
    file; otherwise only file sizes are checked.
    """
    for stored in stored_versions(url):
        if versions and stored.version not in versions:
            continue
        look = inspect_version(url, stored, every_byte=every_byte)
        if look is not None:
            yield look


def inspect_version(url: str, stored: StoredVersion, *, every_byte: bool) -> VersionStatus | None:
    """Return a report on one version; None if it was deleted meanwhile."""
    where = version_url(url, stored.version)
    seen = VersionStatus(
        version=stored.version,
        state=State.INCOMPLETE,
        kept=stored.kept,
        best=stored.best,
        size_bytes=stored.size_bytes,
        where=where,
    )
    if not stored.complete and not stored.set_aside:
        return seen
    name = MANIFEST if stored.complete else SET_ASIDE
    manifest, problem = _held_against(url, stored.version, name, every_byte=every_byte)
    if problem and not _is_there(where, name):
        return None
    if stored.set_aside:
        problem = problem or f"{where}: it was set aside as damaged"
    known: dict[str, object] = {"state": State.DAMAGED if problem else State.WHOLE, "problem": problem}
    if manifest is not None:
        saved_s = manifest.saved_s if manifest.saved_s is not None else _written_s(f"{where}/{name}")
        known |= {"kind": manifest.kind, "shape": manifest.shape, "saved_s": saved_s}
    return seen.model_copy(update=known)


def _held_against(url: str, version: int, name: str, *, every_byte: bool) -> tuple[Manifest | None, str]:
    manifest = None
    try:
        manifest = read_manifest(url, version, name)
        check_files(url, manifest, every_byte=every_byte)
    except CheckpointDamaged as error:
        return manifest, str(error)
    return manifest, ""


def _is_there(where: str, name: str) -> bool:
    with reading(where):
        filesystem, folder = fsspec.core.url_to_fs(where)
        return name in files_in(filesystem, folder)


def _written_s(where: str) -> float | None:
    """Return when a file was written, in epoch seconds, according to storage; None if storage does not report it."""
    filesystem, path = fsspec.core.url_to_fs(where)
    try:
        return float(filesystem.modified(path).timestamp())
    except Exception:  # not every kind of storage has this time
        return None
