"""Stores one unit's state as a safetensors file, every byte of which is checked on load. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from morph.checkpoint.manifest import ALIGNMENT, DEVICE_ALIGNMENT, PIECE_BYTES, read_file, version_url, write_atomically
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
"""Types by the names that safetensors gives them."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
AS_REALS = "complex"
"""Key in the metadata for the names of complex tensors, which safetensors lacks: they have a last dimension of 2."""


def layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """Return the safetensors header for these tensors, and the order of their bytes after it.

    Unlike in the library's files, large tensors come first, so that each can be used in place once all are in memory:
    first those aligned for a device, then those aligned for a processor.
    """
    header: dict[str, Any] = {}
    end = 0
    unaligned = {
        name: [tensor.nbytes % size != 0 for size in (DEVICE_ALIGNMENT, ALIGNMENT)] for name, tensor in tensors.items()
    }
    names = sorted(tensors, key=lambda name: (unaligned[name], name))
    as_reals = [name for name in names if tensors[name].is_complex() and tensors[name].dtype not in NAMES]
    if as_reals:
        header["__metadata__"] = {AS_REALS: json.dumps(as_reals)}
    for name in names:
        tensor, begin, end = tensors[name], end, end + tensors[name].nbytes
        dtype, shape = (
            (tensor.dtype.to_real(), (*tensor.shape, 2)) if name in as_reals else (tensor.dtype, tensor.shape)
        )
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), names


def parts_of(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Return host tensors as a safetensors file, in parts that are not copied; equal tensors give equal bytes."""
    text, names = layout(tensors)
    flat = [tensors[name].detach().reshape(-1).view(torch.uint8) for name in names if tensors[name].numel()]
    return [len(text).to_bytes(8, "little"), text, *(memoryview(part.numpy()) for part in flat)]  # type: ignore[arg-type]


def to_payload(tensors: Mapping[str, Tensor]) -> bytes:
    """Return host tensors as a safetensors file in one piece."""
    return b"".join(parts_of(tensors))


def from_payload(payload: bytes | memoryview) -> dict[str, Tensor]:
    """Return the tensors of a payload: the inverse of ``to_payload``. They are views of it if it is writable.

    Raises ValueError if the payload is not a safetensors file.
    """
    data = memoryview(payload)
    if data.readonly:
        data = memoryview(bytearray(data))
    begin = 8 + int.from_bytes(data[:8], "little")
    if begin > len(data):
        raise ValueError("a unit's state has an incomplete header")
    _, make = views(bytes(data[8:begin]))
    return make(torch.frombuffer(data, dtype=torch.uint8)[begin:])


def views(header: bytes) -> tuple[list[tuple[int, int]], Callable[[Tensor], dict[str, Tensor]]]:
    """Return begin and end of each tensor after a header, and a function that makes tensors of these bytes."""
    entries = json.loads(header)
    as_reals = json.loads(entries.pop("__metadata__", {}).get(AS_REALS, "[]"))
    offsets = sorted((int(first), int(end)) for entry in entries.values() for first, end in (entry["data_offsets"],))

    def made(body: Tensor) -> dict[str, Tensor]:
        tensors = {name: _view(body, name, entry) for name, entry in entries.items()}
        return tensors | {name: torch.view_as_complex(tensors[name].clone()) for name in as_reals}

    return offsets, made


def _view(body: Tensor, name: str, entry: Mapping[str, Any]) -> Tensor:
    """Return one tensor as a view of the data after the header; a copy if it is not aligned for its type."""
    dtype, (first, end) = DTYPES.get(entry["dtype"]), entry["data_offsets"]
    if dtype is None or not 0 <= first <= end <= len(body) or end - first != math.prod(entry["shape"]) * dtype.itemsize:
        raise ValueError(f"a unit's state does not match its header: {name}")
    part = body[first:end]
    if part.data_ptr() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).reshape(entry["shape"])


def write_unit(url: str, version: int, unit: str, worker: str, tensors: Mapping[str, Tensor]) -> UnitWritten:
    """Write one unit of a checkpoint, and return its entry; blocks until the storage has it."""
    parts = parts_of(tensors)
    sha256, xxh3 = hashlib.sha256(), xxhash.xxh3_128()
    for part in [memoryview(part) for part in parts]:
        for begin in range(0, len(part), PIECE_BYTES):  # the second hash reads the piece from the processor's cache
            sha256.update(part[begin : begin + PIECE_BYTES])
            xxh3.update(part[begin : begin + PIECE_BYTES])
    digest, size_bytes = sha256.hexdigest(), sum(len(part) for part in parts)
    # named by content: a late writer of an abandoned history cannot replace a file that a manifest names
    file = f"{unit.replace('+', '_')}-{digest[:16]}.safetensors"
    write_atomically(f"{version_url(url, version)}/{file}", *parts)
    return UnitWritten(
        worker=worker,
        version=version,
        unit=unit,
        file=file,
        size_bytes=size_bytes,
        sha256=digest,
        xxh3_128=xxh3.hexdigest(),
    )


def read_unit(url: str, manifest: Manifest, unit: str) -> dict[str, Tensor]:
    """Return the tensors of one unit of a checkpoint, in memory that is not shared.

    Raises CheckpointDamaged if the file is missing or differs from the manifest.
    """
    entry = next((entry for entry in manifest.units if entry.unit == unit), None)
    if entry is None:
        raise CheckpointDamaged(f"{version_url(url, manifest.version)}: the manifest lacks unit {unit}")
    return from_payload(read_file(url, manifest.version, entry))
