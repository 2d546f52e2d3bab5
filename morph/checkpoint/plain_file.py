"""A model's plain state_dict as one safetensors file: read entry by entry, written whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from morph.contract.errors import InputError


class PlainFile:
    """An opened file; entries are read when they are asked for. Nothing in it is executed.

    Raises:
        InputError: it is missing, unreadable, or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise InputError("no such file", source=str(path), allowed="a .safetensors file")
        try:
            opened: Any = safe_open(str(path), framework="pt")
            self._file = opened
            self.shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in list(opened.keys())}
        except (SafetensorError, OSError) as error:
            allowed = "a file that safetensors wrote; convert others with safetensors.torch.save_file"
            raise InputError(f"is not a safetensors file: {error}", source=str(path), allowed=allowed) from error

    def __getitem__(self, name: str) -> Tensor:
        """Read one entry."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"cannot be read: {error}", source=str(self.path), field=name) from error
        return tensor


def write_plain_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a state_dict so that ``load_state_dict`` and transformers' ``from_pretrained`` take it.

    Raises:
        InputError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(dict(tensors), str(partial), metadata={"format": "pt"})
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    except KeyError as error:  # a type that safetensors does not know
        wrong = next((name for name, tensor in tensors.items() if tensor.dtype in error.args), None)
        allowed = "types that safetensors can store"
        raise InputError(
            "cannot be written", source=str(path), field=wrong, value=error.args[0], allowed=allowed
        ) from error
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot be written: {error}", source=str(path)) from error
