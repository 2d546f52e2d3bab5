"""Finds the newest whole checkpoint: damaged ones are skipped, set aside and reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar

import fsspec

from morph.checkpoint.manifest import (
    MANIFEST,
    complete_versions,
    files_in,
    read_file,
    read_manifest,
    version_url,
    write_atomically,
)
from morph.checkpoint.storage import bounded, read_whole, reading
from morph.checkpoint.versions import SET_ASIDE
from morph.contract.checkpoint import Manifest
from morph.contract.errors import CheckpointDamaged, CheckpointError

T = TypeVar("T")
LimitOf = Callable[[int], float]


def newest_whole(
    url: str, *, every_byte: bool = False, limit_s: LimitOf | None = None, at_most: int | None = None
) -> tuple[Manifest | None, tuple[str, ...]]:
    """Return the newest whole checkpoint (None if there is no checkpoint), and a sentence for each damaged one.

    Damaged ones are set aside once an older one is found whole: otherwise they would count as newer ones when the
    oldest are deleted. If no checkpoint is whole, nothing is changed.

    Without ``every_byte`` it is enough that every file exists with its size; the worker that loads it finds other
    damage. ``limit_s`` returns the time limit in seconds for reading a file of this many bytes (0: a listing); None: no
    limit. Versions newer than ``at_most`` are ignored.

    Raises CheckpointDamaged if all checkpoints are damaged. CheckpointError means that the result is unknown: storage
    does not answer, or a damaged one cannot be set aside.
    """
    manifest, damaged = find_whole(url, every_byte=every_byte, limit_s=limit_s, at_most=at_most)
    for version in damaged:
        _within_limit(url, limit_s, partial(_set_aside, url, version))
    return manifest, told_of(manifest, damaged)


def find_whole(
    url: str, *, every_byte: bool = False, limit_s: LimitOf | None = None, at_most: int | None = None
) -> tuple[Manifest | None, Mapping[int, CheckpointDamaged]]:
    """Return the newest whole checkpoint as ``newest_whole`` does, and the error of each newer checkpoint by version.

    Nothing is changed.
    """
    damaged: dict[int, CheckpointDamaged] = {}
    for version in reversed(_within_limit(url, limit_s, partial(complete_versions, url))):
        if at_most is not None and version > at_most:
            continue
        try:
            manifest = _within_limit(url, limit_s, partial(read_manifest, url, version))
            check_files(url, manifest, every_byte=every_byte, limit_s=limit_s)
        except CheckpointDamaged as error:
            damaged[version] = error
            continue
        return manifest, damaged
    if damaged:
        newest = next(iter(damaged.values()))
        raise CheckpointDamaged(f"{newest}; no other checkpoint there is whole") from newest
    return None, {}


def told_of(manifest: Manifest | None, damaged: Mapping[int, CheckpointDamaged]) -> tuple[str, ...]:
    """Return a sentence for each damaged checkpoint: that it is skipped, and which version is used instead."""
    whole = None if manifest is None else manifest.version
    return tuple(
        f"{error}; version {passed} is skipped, and version {whole} is the newest whole version"
        for passed, error in damaged.items()
    )


def check_files(url: str, manifest: Manifest, *, every_byte: bool, limit_s: LimitOf | None = None) -> None:
    """Check that every file of a version exists with its size; with ``every_byte`` also its content.

    Reads one file after the other, each within its ``limit_s``. Raises CheckpointDamaged if a file is missing or
    damaged; the message names it.
    """
    where = version_url(url, manifest.version)
    sizes = _within_limit(where, limit_s, lambda: files_in(*fsspec.core.url_to_fs(where)))
    for unit in manifest.units:
        size_bytes = sizes.get(unit.file)
        if size_bytes is None:
            raise CheckpointDamaged(f"{where}/{unit.file}: the file is missing")
        if size_bytes != unit.size_bytes:
            raise CheckpointDamaged(f"{where}/{unit.file}: {size_bytes} bytes, but {unit.size_bytes} by its manifest")
    if every_byte:
        for unit in manifest.units:
            _within_limit(where, limit_s, partial(read_file, url, manifest.version, unit, sha256=True), unit.size_bytes)


def _within_limit(where: str, limit_s: LimitOf | None, call: Callable[[], T], num_bytes: int = 0) -> T:
    """Return the result of ``call``; raise a CheckpointError also if storage does not answer within the limit."""
    with reading(where):
        return call() if limit_s is None else bounded(call, limit_s(num_bytes), "storage")


def _set_aside(url: str, version: int) -> None:
    where = version_url(url, version)
    try:
        filesystem, path = fsspec.core.url_to_fs(f"{where}/{MANIFEST}")
        data = b""
        with suppress(CheckpointDamaged):  # the version has no manifest file, so there is nothing to keep
            data = read_whole(filesystem, path)
        write_atomically(f"{where}/{SET_ASIDE}", data)
        filesystem.rm_file(path)
    except FileNotFoundError:  # the version was deleted meanwhile
        return
    except Exception as error:  # each kind of storage has errors of its own
        raise CheckpointError(f"{where}: it is damaged and cannot be set aside: {error}") from error
