"""Lists the folder of each version, and deletes a version so that half of it is never a checkpoint.

Besides its files and its manifest, a version may have markers, which need no change of the manifest: a file ``kept``,
which a user puts there, and a file ``best``, with the metric by which the version is the best.
``manifest.damaged.json`` is the manifest of a version that was skipped as damaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import fsspec

from morph.checkpoint.manifest import (
    MANIFEST,
    files_in,
    is_half_written,
    version_folders,
    version_url,
    write_atomically,
)
from morph.checkpoint.storage import read_whole, reading
from morph.contract.errors import CheckpointDamaged

SET_ASIDE = "manifest.damaged.json"
"""The name of the manifest of a skipped version: the version is then not a checkpoint, but loses no byte."""
KEPT = "kept"
BEST = "best"
RECOVERY = "run/recovery.json"
"""A file below the checkpoint URL, with which the run can resume elsewhere."""


@dataclass(frozen=True)
class StoredVersion:
    """One stored version. ``files``: the size of each file in its folder in bytes, by name."""

    version: int
    files: Mapping[str, int]

    @property
    def complete(self) -> bool:
        """Whether it is a checkpoint, judging only by its manifest."""
        return MANIFEST in self.files

    @property
    def set_aside(self) -> bool:
        """Whether it was skipped as damaged, and has not been written again since then."""
        return SET_ASIDE in self.files and not self.complete

    @property
    def kept(self) -> bool:
        """Whether a user keeps it."""
        return KEPT in self.files

    @property
    def best(self) -> bool:
        """Whether it was the best evaluated version when it was marked."""
        return BEST in self.files and self.complete

    @property
    def size_bytes(self) -> int:
        """The size of all its files in bytes, without those that killed saves left half-written."""
        return sum(size_bytes for name, size_bytes in self.files.items() if not is_half_written(name))


def stored_versions(url: str) -> tuple[StoredVersion, ...]:
    """Return every version of which any file is stored, complete or not, ascending."""
    with reading(url):
        filesystem, path = fsspec.core.url_to_fs(url)
        folders = version_folders(filesystem, path)
        return tuple(StoredVersion(version, files_in(filesystem, folder)) for version, folder in folders.items())


def delete_version(url: str, version: int, *, even_kept: bool = False) -> bool:
    """Delete a version: first it stops being a checkpoint, then its files are deleted. Return whether it is gone.

    A version that a user begins to keep meanwhile is left as it was, unless ``even_kept``.
    """
    where = version_url(url, version)
    filesystem, folder = fsspec.core.url_to_fs(where)
    filesystem.invalidate_cache()
    manifest, marker = f"{folder}/{MANIFEST}", f"{folder}/{KEPT}"
    data, is_there = None, filesystem.exists(manifest)
    if is_there:
        with contextlib.suppress(CheckpointDamaged):
            data = read_whole(filesystem, manifest)
        filesystem.rm_file(manifest)
    filesystem.invalidate_cache()
    if filesystem.exists(marker):
        if not even_kept:
            if data is not None:
                write_atomically(f"{where}/{MANIFEST}", data)
            return False
        filesystem.rm_file(marker)  # after a crash below, the remaining files are not kept
    with contextlib.suppress(FileNotFoundError):  # an object store has no empty folders
        filesystem.rm(folder, recursive=True)
    return True
