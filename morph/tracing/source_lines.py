"""Finds the user's line and the library's in a Python stack, or in a stack that export recorded."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import torch
import torch.fx.proxy

import morph
from morph.tracing.findings import SourceLocation

_TORCH = str(Path(torch.__file__).parent) + "/"
_TORCH_SHOWN = tuple(_TORCH + folder for folder in ("nn/", "optim/", "amp/"))
_MORPH = str(Path(morph.__file__).parent) + "/"
_TRACING = str(Path(__file__).parent) + "/"
_WATCHING = tuple(_TRACING + file for file in ("source_lines.py", "optimizer_mode.py"))
_INSTALLED = tuple({sysconfig.get_path(name) + "/" for name in ("purelib", "platlib")})
_STANDARD = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib")})
_RECORDED = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')

Frame = tuple[str, int, str]


def here() -> SourceLocation:
    """Return the place of the running operation, from the frames between the dry run and the modes that watch it."""
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TRACING) and file not in _WATCHING:
            break
        frames.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return place_of(frames)


def keep_lines_of(function: Callable[..., object]) -> None:
    """Let export record lines of a function besides those of modules' forwards, if this torch can."""
    register = getattr(torch.fx.proxy, "_register_stack_trace_anchor", None)
    if register is not None:
        register(inspect.unwrap(function))


def recorded(stack_trace: str | None) -> SourceLocation:
    """Return the place that export recorded with a node; torch's own modules are named only if nothing else is."""
    frames = [(file, int(line), function) for file, line, function in _RECORDED.findall(stack_trace or "")]
    outside = [frame for frame in reversed(frames) if not frame[0].startswith(_TORCH)]
    place = place_of(outside)
    return place if place.user or place.library else place_of(reversed(frames))


def place_of(frames: Iterable[Frame]) -> SourceLocation:
    """Pick the user's and the library's line from frames, innermost first."""
    user: Frame | None = None
    library: Frame | None = None
    for frame in frames:
        file = frame[0]
        if file.startswith(_MORPH) or file.startswith("<"):
            continue
        if file.startswith(_TORCH):
            if library is None and file.startswith(_TORCH_SHOWN):
                library = frame
        elif "/site-packages/" in file or file.startswith(_INSTALLED):
            library = library if library is not None and not library[0].startswith(_TORCH) else frame
        elif not file.startswith(_STANDARD):
            user = frame
            break
    nearest = user or library
    return SourceLocation(_line(user), _line(library), nearest[2] if nearest else "loss")


def _line(frame: Frame | None) -> str | None:
    return f"{frame[0]}:{frame[1]}" if frame else None
