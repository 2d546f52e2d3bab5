"""A model's plain state_dict as one file: safetensors, or torch's own; written whole or not at all.

Only safetensors files are read, entry by entry: nothing is unpickled.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from morph.contract.errors import InputError

SAFETENSORS, TORCH = ".safetensors", (".pt", ".pth", ".bin")


class PlainFile:
    """An opened file, or all files of a folder; entries are read when they are requested. Nothing in it is executed.

    Raises InputError if the file is missing, unreadable, or not a safetensors file; or two files have an entry of the
    same name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        paths = sorted(path.glob(f"*{SAFETENSORS}")) if path.is_dir() else [path]
        if not all(file.is_file() for file in paths) or not paths:
            allowed = "a .safetensors file, or a folder of them"
            problem = "holds no such file" if path.is_dir() else "no such file"
            raise InputError(problem, source=str(path), allowed=allowed)
        for file in paths:
            try:
                opened: Any = safe_open(str(file), framework="pt")
                names = list(opened.keys())
                shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
            except (SafetensorError, OSError) as error:
                allowed = "a file that safetensors wrote; convert others with safetensors.torch.save_file"
                raise InputError(f"is not a safetensors file: {error}", source=str(file), allowed=allowed) from error
            twice = next((name for name in names if name in self.shapes), None)
            if twice is not None:
                raise InputError("is in two files of the folder", source=str(path), field=twice, value=file.name)
            self.shapes |= shapes
            self._files |= dict.fromkeys(names, opened)

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"cannot be read: {error}", source=str(self.path), field=name) from error
        return tensor


def check_plain_name(path: Path) -> None:
    """Refuse a file whose name does not show its format."""
    if path.suffix.lower() not in (SAFETENSORS, *TORCH):
        allowed = (
            f"a name that ends in {SAFETENSORS}, or in {', '.join(TORCH)} for a file of torch.save; none: a folder"
        )
        raise InputError("has a name that does not show the wanted format", source=str(path), allowed=allowed)


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Write a folder, whole or not at all; existing files of the same names are replaced."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir(parents=True)
        write(partial)
        for written in sorted(file for file in partial.rglob("*") if file.is_file()):
            with written.open("rb") as opened:
                os.fsync(opened.fileno())
            if path.exists():
                target = path / written.relative_to(partial)
                target.parent.mkdir(parents=True, exist_ok=True)
                written.replace(target)
        if not path.exists():
            partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot be written: {error}", source=str(path)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give each name its own memory: safetensors has no entry with two names."""
    first_names: dict[int, str] = {}
    return {
        name: tensor.detach() if first_names.setdefault(id(tensor), name) == name else tensor.detach().clone()
        for name, tensor in tensors.items()
    }


def write_plain_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a state_dict in the format that the file's name shows.

    ``load_state_dict`` takes either, read by ``safetensors.torch.load_file`` or ``torch.load(weights_only=True)``.
    """
    check_plain_name(path)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == SAFETENSORS:
            safetensors.torch.save_file(apart(tensors), str(partial), metadata={"format": "pt"})
        else:
            torch.save({name: tensor.detach() for name, tensor in tensors.items()}, str(partial))
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    except KeyError as error:  # a type that safetensors does not know
        wrong = next((name for name, tensor in tensors.items() if tensor.dtype in error.args), None)
        allowed = f"types that safetensors can store, or a name that ends in {TORCH[0]}"
        raise InputError(
            "cannot be written", source=str(path), field=wrong, value=error.args[0], allowed=allowed
        ) from error
    except (OSError, SafetensorError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot be written: {error}", source=str(path)) from error
