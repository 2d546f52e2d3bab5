"""Finds the line of the user's code that makes the exported graph depend on the number of samples."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torch import nn

from morph.contract.errors import ExportError
from morph.cutting.source.locate import is_users

TRANSFORMS = ("torch._functorch.eager_transforms", "torch._functorch.vmap", "torch._functorch.predispatch")
"""Modules that implement torch.func."""
_CALLER = str(Path(__file__).parents[1] / "trial_run" / "trial.py")  # the file that calls the user's loss


@dataclass(frozen=True)
class Guard:
    """A condition on the number of samples that held in the trial, and on which the trace relies.

    ``strength``: 2 if it fixes the number, 1 if it allows a range, 0 if it only says that two sizes are equal.
    ``module``: class of the innermost running module, if it is torch's own.
    """

    text: str
    strength: int
    line: str | None
    module: str | None
    transformed: bool = False


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a class or module while the block runs, where torch offers no mode for the purpose."""
    if not hasattr(owner, name):
        raise ExportError(
            f"has no {owner.__name__}.{name}, which Morph replaces while it traces a model",
            source=_version_of(owner),
            allowed="the versions in Morph's constraints.txt",
        )
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _version_of(owner: Any) -> str:
    package = (owner.__name__ if isinstance(owner, ModuleType) else owner.__module__).partition(".")[0]
    return f"{package} {getattr(sys.modules.get(package), '__version__', '')}".rstrip()


@contextmanager
def watched_guards() -> Iterator[list[Guard]]:
    """Collect the guards that are made while the block runs."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    guards: list[Guard] = []
    original = ShapeEnv._log_guard

    def log_guard(self: Any, prefix: str, guard: Any, *args: Any, **kwargs: Any) -> None:
        strength = (2 if len(guard.free_symbols) == 1 else 0) if type(guard).__name__ == "Equality" else 1
        guards.append(Guard(str(guard), strength, line_in_loss(), _running_module(), _in_a_transform()))
        original(self, prefix, guard, *args, **kwargs)

    with replaced(ShapeEnv, "_log_guard", log_guard):
        yield guards


def decisive(guards: list[Guard]) -> Guard | None:
    """Return the guard to report: preferably in the user's code, and then one that fixes the number of samples."""
    return max(guards, key=lambda guard: (guard.line is not None, guard.strength), default=None)


def line_in_loss() -> str | None:
    """Return ``file:line`` of the innermost frame of the user's code in the running loss; None outside of it."""
    line: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CALLER:
        if line is None and is_users(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None if frame is None else line


def _in_a_transform() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in TRANSFORMS:
        frame = frame.f_back
    return frame is not None


def _running_module() -> str | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module):
            return type(module).__name__ if type(module).__module__.startswith("torch.") else None
        frame = frame.f_back
    return None
