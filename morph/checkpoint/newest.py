"""The newest checkpoint that is whole: one that is damaged is passed over, kept aside and told of."""

from __future__ import annotations

import fsspec

from morph.checkpoint.manifest import (
    MANIFEST,
    complete_versions,
    read_file,
    read_manifest,
    version_url,
    write_atomically,
)
from morph.checkpoint.storage import reading
from morph.checkpoint.stored import SET_ASIDE
from morph.contract.checkpoint import Manifest
from morph.contract.errors import CheckpointDamaged, CheckpointError


def newest_whole(url: str, *, every_byte: bool = False) -> tuple[Manifest | None, tuple[str, ...]]:
    """Return the newest whole checkpoint, None where there is none at all; and a sentence for each that is damaged.

    Those are set aside, once an older one is found whole: else they would be taken for newer ones when the oldest are
    deleted. With none that is whole nothing is changed.

    Args:
        url: Where the run's checkpoints are.
        every_byte: Read all of each; else that every file is there with its size is enough, and a worker that loads one
            finds the rest.

    Raises:
        CheckpointDamaged: there are checkpoints, and all of them are damaged.
        CheckpointError: storage does not answer, or what is damaged cannot be set aside. Nothing is known then.
    """
    damaged: dict[int, CheckpointDamaged] = {}
    for version in reversed(complete_versions(url)):
        try:
            manifest = read_manifest(url, version)
            _check_files(url, manifest, every_byte)
        except CheckpointDamaged as error:
            damaged[version] = error
            continue
        for passed in damaged:
            _set_aside(url, passed)
        return manifest, tuple(
            f"{error}; version {passed} is passed over, and version {version} is the newest that is whole"
            for passed, error in damaged.items()
        )
    if damaged:
        newest = next(iter(damaged.values()))
        raise CheckpointDamaged(f"{newest}; no other checkpoint there is whole") from newest
    return None, ()


def _check_files(url: str, manifest: Manifest, every_byte: bool) -> None:
    where = version_url(url, manifest.version)
    with reading(where):
        filesystem, path = fsspec.core.url_to_fs(where)
        sizes = {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in filesystem.ls(path, detail=True)}
    for unit in manifest.units:
        size_bytes = sizes.get(unit.file)
        if size_bytes is None:
            raise CheckpointDamaged(f"{where}/{unit.file}: the file is missing")
        if size_bytes != unit.size_bytes:
            raise CheckpointDamaged(f"{where}/{unit.file}: it has {size_bytes} bytes, its manifest {unit.size_bytes}")
    if every_byte:
        for unit in manifest.units:
            read_file(url, manifest.version, unit)


def _set_aside(url: str, version: int) -> None:
    where = version_url(url, version)
    try:
        filesystem, path = fsspec.core.url_to_fs(f"{where}/{MANIFEST}")
        write_atomically(f"{where}/{SET_ASIDE}", filesystem.cat_file(path))
        filesystem.rm_file(path)
    except Exception as error:  # each kind of storage has errors of its own
        raise CheckpointError(f"{where}: it is damaged and cannot be set aside: {error}") from error
