"""One unit's state as a safetensors file, checked byte for byte on load. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from morph.checkpoint.manifest import ALIGNMENT, read_file, version_url, write_atomically
from morph.contract.checkpoint import Manifest
from morph.contract.errors import CheckpointDamaged
from morph.contract.messages import UnitWritten

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the names that safetensors gives them."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def to_payload(tensors: Mapping[str, Tensor]) -> bytes:
    """Return host tensors as a safetensors file; equal tensors give equal bytes.

    In contrast to what the library writes, large tensors come first, so that each can be used where it lies once the
    file is in memory, and all are copied once.
    """
    header: dict[str, Any] = {}
    parts: list[memoryview] = []
    end = 0
    for name in sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT != 0, name)):
        tensor, begin, end = tensors[name], end, end + tensors[name].nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        parts.append(memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def from_payload(payload: bytes | memoryview) -> dict[str, Tensor]:
    """The inverse of ``to_payload``. Where the payload may be written to, the tensors are views of it.

    Raises:
        ValueError: it is no safetensors file.
    """
    data = memoryview(payload)
    if data.readonly:
        return safetensors.torch.load(bytes(data))
    begin = 8 + int.from_bytes(data[:8], "little")
    if begin > len(data):
        raise ValueError("a unit's state has no whole header")
    header = json.loads(bytes(data[8:begin]))
    body = torch.frombuffer(data, dtype=torch.uint8)[begin:]
    return {name: _view(body, name, entry) for name, entry in header.items() if name != "__metadata__"}


def _view(body: Tensor, name: str, entry: Mapping[str, Any]) -> Tensor:
    """One tensor as a view of the data after the header; a copy where it does not lie as its type wants."""
    dtype, (first, end) = DTYPES.get(entry["dtype"]), entry["data_offsets"]
    if dtype is None or not 0 <= first <= end <= len(body) or end - first != math.prod(entry["shape"]) * dtype.itemsize:
        raise ValueError(f"a unit's state is not as its header says: {name}")
    part = body[first:end]
    if part.data_ptr() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).reshape(entry["shape"])


def write_unit(url: str, version: int, unit: str, worker: str, tensors: Mapping[str, Tensor]) -> UnitWritten:
    """Write one unit of a checkpoint; blocks until the storage has it."""
    payload = to_payload(tensors)
    digest = hashlib.sha256(payload).hexdigest()
    # named by content: a late writer of a history that was set back cannot replace what a manifest names
    file = f"{unit.replace('+', '_')}-{digest[:16]}.safetensors"
    write_atomically(f"{version_url(url, version)}/{file}", payload)
    return UnitWritten(worker=worker, version=version, unit=unit, file=file, size_bytes=len(payload), sha256=digest)


def read_unit(url: str, manifest: Manifest, unit: str) -> dict[str, Tensor]:
    """Read one unit of a checkpoint; nobody else has the tensors' memory.

    Raises:
        CheckpointDamaged: when the file is missing or differs from the manifest.
        CheckpointError: when it is unreadable.
    """
    entry = next((entry for entry in manifest.units if entry.unit == unit), None)
    if entry is None:
        raise CheckpointDamaged(f"{version_url(url, manifest.version)}: the manifest lacks unit {unit}")
    return from_payload(read_file(url, manifest.version, entry))
