"""One unit's state as a safetensors file, checked byte for byte on load. Nothing is unpickled."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import fsspec
import safetensors.torch
from torch import Tensor

from morph.checkpoint.manifest import version_url, write_atomically
from morph.checkpoint.storage import reading
from morph.contract.checkpoint import Manifest
from morph.contract.errors import CheckpointError
from morph.contract.messages import UnitWritten


def to_payload(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialise named tensors; equal tensors give equal bytes."""
    return safetensors.torch.save(dict(sorted(tensors.items())))


def from_payload(payload: bytes) -> dict[str, Tensor]:
    """The inverse of ``to_payload``."""
    return safetensors.torch.load(payload)


def write_unit(url: str, version: int, unit: str, worker: str, tensors: Mapping[str, Tensor]) -> UnitWritten:
    """Write one unit of a checkpoint; blocks until the storage has it."""
    payload = to_payload(tensors)
    digest = hashlib.sha256(payload).hexdigest()
    # named by content: a late writer of a history that was set back cannot replace what a manifest names
    file = f"{unit.replace('+', '_')}-{digest[:16]}.safetensors"
    write_atomically(f"{version_url(url, version)}/{file}", payload)
    return UnitWritten(worker=worker, version=version, unit=unit, file=file, size_bytes=len(payload), sha256=digest)


def read_unit(url: str, manifest: Manifest, unit: str) -> dict[str, Tensor]:
    """Read one unit of a checkpoint.

    Raises:
        CheckpointError: when the file is missing, unreadable or differs from the manifest.
    """
    entry = next((entry for entry in manifest.units if entry.unit == unit), None)
    if entry is None:
        raise CheckpointError(f"{version_url(url, manifest.version)}: the manifest lacks unit {unit}")
    where = f"{version_url(url, manifest.version)}/{entry.file}"
    try:
        with reading(where):
            filesystem, path = fsspec.core.url_to_fs(where)
            payload = filesystem.cat_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{where}: the file is missing") from error
    if len(payload) != entry.size_bytes or hashlib.sha256(payload).hexdigest() != entry.sha256:
        raise CheckpointError(f"{where}: the file differs from its manifest (size or sha256)")
    return from_payload(payload)
