"""Copies a checkpoint to other storage: every byte is checked on the way, and the manifest is written last."""

from __future__ import annotations

import fsspec

from morph.checkpoint.frozen_weights import frozen_url
from morph.checkpoint.manifest import (
    complete_versions,
    read_file,
    read_manifest,
    version_url,
    write_atomically,
    write_manifest,
)
from morph.checkpoint.newest import check_files
from morph.checkpoint.storage import read_whole, reading, writing
from morph.checkpoint.versions import RECOVERY, delete_version
from morph.contract.checkpoint import Manifest
from morph.contract.errors import CheckpointDamaged, InputError


def copy_version(url: str, manifest: Manifest, target_url: str) -> bool:
    """Copy a version, file by file, and the recovery file of its run; return False if the version is already there.

    An interrupted copy is not a checkpoint; calling this again restarts it. Raises InputError if the target has other
    checkpoints, with which these must not be mixed. Raises CheckpointDamaged if a file differs from its manifest.
    """
    for version in complete_versions(target_url):
        there = read_manifest(target_url, version)
        if there.fingerprint != manifest.fingerprint or (version == manifest.version and there.units != manifest.units):
            raise InputError(
                f"holds another checkpoint of version {version}"
                if there.fingerprint == manifest.fingerprint
                else "holds checkpoints of another model",
                source=target_url,
                allowed="a place that is empty, or holds checkpoints of the same run",
            )
        if version == manifest.version and _is_whole(target_url, there):
            return False
    where = version_url(target_url, manifest.version)
    for unit in manifest.units:
        try:
            data = read_file(url, manifest.version, unit, sha256=True)
        except CheckpointDamaged:
            if manifest.version not in complete_versions(target_url):
                with writing(where):
                    delete_version(target_url, manifest.version)  # an incomplete copy is of no use
            raise
        with writing(f"{where}/{unit.file}"):
            write_atomically(f"{where}/{unit.file}", data)
    _copy_recovery(url, target_url)
    frozen = frozen_url(url)
    if 0 in complete_versions(frozen):
        copy_version(frozen, read_manifest(frozen, 0), frozen_url(target_url))
    with writing(where):
        write_manifest(target_url, manifest)
    return True


def _copy_recovery(url: str, target_url: str) -> None:
    """Copy the recovery file beside a run's checkpoints, so that the run can resume from the copy alone."""
    source, target = (f"{place.rstrip('/')}/{RECOVERY}" for place in (url, target_url))
    try:
        with reading(source):
            filesystem, path = fsspec.core.url_to_fs(source)
            data = read_whole(filesystem, path)
    except FileNotFoundError:
        return
    with writing(target):
        write_atomically(target, data)


def _is_whole(url: str, manifest: Manifest) -> bool:
    try:
        check_files(url, manifest, every_byte=False)
    except CheckpointDamaged:
        return False
    return True
