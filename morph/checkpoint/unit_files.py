"""One unit's state as a safetensors file, checked byte for byte on load. Nothing is unpickled."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import safetensors.torch
from torch import Tensor

from morph.checkpoint.manifest import read_file, version_url, write_atomically
from morph.contract.checkpoint import Manifest
from morph.contract.errors import CheckpointDamaged
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
        CheckpointDamaged: when the file is missing or differs from the manifest.
        CheckpointError: when it is unreadable.
    """
    entry = next((entry for entry in manifest.units if entry.unit == unit), None)
    if entry is None:
        raise CheckpointDamaged(f"{version_url(url, manifest.version)}: the manifest lacks unit {unit}")
    return from_payload(read_file(url, manifest.version, entry))
