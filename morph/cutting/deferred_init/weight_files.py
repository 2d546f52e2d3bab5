"""Records weights that a constructor loads from safetensors files as places in files, to be read on demand.

Their storages are in a mapping of the process, which gives file and place; the constructor gets a fake tensor instead.
So a worker reads only the bytes of its own sections' weights.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from morph.contract.errors import JobError
from morph.cutting.deferred_init.tape import Tape

_MAPPINGS = Path("/proc/self/maps")
_PROOF_BYTES = 4096
_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
"""A setting of transformers: ``from_pretrained`` then reads in the calling thread, whose operations are recorded."""


def read_slice(path: str, offset: int, num_bytes: int, proof: str) -> Tensor:
    """Read bytes of a file, as a tensor of uint8."""
    read = torch.empty(num_bytes, dtype=torch.uint8)
    content = memoryview(read.numpy())  # type: ignore[arg-type]  # as in checkpoint/unit_files.py
    try:
        with Path(path).open("rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < num_bytes and (more := file.readinto(content[done:])):
                done += more
    except OSError as error:
        raise JobError(
            f"cannot be read, although the job's model is built from it: {error.strerror or error}",
            source=path,
            allowed="the same file at the same path on every machine of the run",
        ) from error
    if done < num_bytes or proof != _proof(content):
        raise JobError(
            "holds other weights than when the model was cut",
            source=path,
            field=f"bytes {offset} to {offset + num_bytes}",
            allowed="the same file for the whole run; restore it, or begin a new run",
        )
    return read


def require_files(tape: Tape) -> None:
    """Check that the files that a tape reads are on this machine."""
    paths = {operation.args[0] for operation in tape.operations if operation.function is read_slice}
    for path in sorted(paths):
        if not Path(path).is_file():
            raise JobError(
                "is missing on this machine, although the job's model is built from it",
                source=path,
                allowed="the same file at the same path on every machine of the run",
            )


@contextmanager
def weights_left_in_files(tape: Tape) -> Iterator[None]:
    """While the block runs, tensors made of a mapped file become places in that file, on the tape."""
    before = os.environ.get(_IN_TURN)
    os.environ[_IN_TURN] = "1"
    try:
        with _LeavesInFiles(tape):
            yield
    finally:
        if before is None:
            del os.environ[_IN_TURN]
        else:
            os.environ[_IN_TURN] = before


class _LeavesInFiles(TorchFunctionMode):
    """Handles ``torch.asarray`` of a storage, by which safetensors makes every tensor: fake tensors have no storage."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape, self._mappings = tape, _Mappings()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.asarray or not args or not isinstance(args[0], torch.UntypedStorage):
            return func(*args, **kwargs)
        with unset_fake_temporarily():  # on the CPU, whatever the requested device: each worker moves its own tensors
            tensor: Tensor = func(*args, **{key: value for key, value in kwargs.items() if key != "device"})
        place = self._mappings.place_of(tensor.untyped_storage())
        if place is None or tensor.dtype is not torch.uint8 or not tensor.is_contiguous():
            return tensor
        path, offset = place
        sys.audit("open", path, "rb", os.O_RDONLY)  # Python does not see safetensors open it
        first = offset + tensor.storage_offset()
        content = memoryview(tensor.numpy())  # type: ignore[arg-type]
        return self._tape.made_by(read_slice, (path, first, tensor.numel(), _proof(content)), tensor)


@dataclass
class _Mappings:
    """Files that are mapped into this process's memory.

    ``starts``: the beginning of each range of addresses, ascending. ``ranges``: for each, its end, the file's path, and
    its offset in the file. ``held``: storages in the ranges; references keep their addresses from being reused.
    """

    starts: list[int] = field(default_factory=list)
    ranges: list[tuple[int, str, int]] = field(default_factory=list)
    held: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def place_of(self, storage: torch.UntypedStorage) -> tuple[str, int] | None:
        """Return the path of the file that contains the storage, and the offset there; None: it is in no file."""
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for look_again in (False, True):
            if look_again:
                self._look()
            place = bisect_right(self.starts, start) - 1
            if place >= 0 and end <= self.ranges[place][0] and (look_again or place in self.held):
                self.held.setdefault(place, storage)
                _, path, offset = self.ranges[place]
                return path, offset + start - self.starts[place]
        return None

    def _look(self) -> None:
        self.starts.clear()
        self.ranges.clear()
        lines = _MAPPINGS.read_text().splitlines() if _MAPPINGS.exists() else []
        kept, self.held = list(self.held.values()), {}
        for line in lines:
            addresses, _, offset, _, _, *path = line.split(maxsplit=5)
            if path and path[0].startswith("/") and Path(path[0]).is_file():
                start, _, end = addresses.partition("-")
                self.starts.append(int(start, 16))
                self.ranges.append((int(end, 16), path[0], int(offset, 16)))
        for storage in kept:
            self.held[bisect_right(self.starts, storage.data_ptr()) - 1] = storage


def _proof(content: memoryview) -> str:
    """Return a digest of the first and the last bytes: training changes every tensor everywhere."""
    return xxhash.xxh3_64_hexdigest(bytes(content[:_PROOF_BYTES]) + bytes(content[-_PROOF_BYTES:]))
