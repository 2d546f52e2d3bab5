"""torch's compiler is not loaded for an optimizer's sake.

The first optimizer of a process makes torch load ``torch._dynamo``, and sympy with it: a second of processor time and
100 MB, for two functions that do nothing where nothing is being compiled. A stand-in has these two, and becomes the
real module as soon as anybody asks it for anything else, as ``torch.compile`` and ``torch.export`` do.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"
_lock = threading.RLock()


def defer_compiler() -> None:
    """Let torch's compiler be loaded when it is used, unless it is there already. May be called any number of times."""
    with _lock:
        spec = importlib.util.find_spec(NAME) if NAME not in sys.modules else None
        if spec is not None:
            stand_in = importlib.util.module_from_spec(spec)
            stand_in.__class__ = _StandIn
            sys.modules[NAME] = stand_in
            torch._dynamo = stand_in


def prepare_torch() -> None:
    """Load at once what torch loads with a process's first backward, and the compiler not before it is used.

    For processes that are to lose no time later. No thread is started.
    """
    defer_compiler()
    importlib.import_module("torch.fx.experimental.symbolic_shapes")


def _graph_break(_message: str = "") -> None:
    """As torch's, which does nothing but where a graph is made."""


def _disable(function: Callable[..., Any], recursive: bool = True, **settings: Any) -> Callable[..., Any]:
    """As torch's: keeps a function from being compiled. What this returns is kept, also once the compiler is there."""

    def undisturbed(*args: Any, **kwargs: Any) -> Any:
        if isinstance(sys.modules.get(NAME), _StandIn):
            return function(*args, **kwargs)
        disable: Any = torch._dynamo.disable
        return disable(function, recursive, **settings)(*args, **kwargs)

    return undisturbed


_ENOUGH: dict[str, Any] = {"graph_break": _graph_break, "disable": _disable}


_ABOUT = frozenset({"__class__", "__spec__", "__name__", "__package__", "__loader__", "__file__", "__cached__"})
"""What import statements look at, and who goes through all modules. Not ``__path__``: submodules need the module."""


class _StandIn(ModuleType):
    """The module before it is loaded."""

    def __getattribute__(self, name: str) -> Any:
        if name in _ENOUGH:
            return _ENOUGH[name]
        if name not in _ABOUT:
            with _lock:  # another thread waits here until the module is whole; the one that loads it comes by again
                _load(self)
        return ModuleType.__getattribute__(self, name)  # it may be none of this class by now


def _load(module: ModuleType) -> None:
    attributes = object.__getattribute__(module, "__dict__")
    if object.__getattribute__(module, "__class__") is not _StandIn or attributes.get("_loading"):
        return
    attributes["_loading"] = True
    spec = attributes["__spec__"]
    spec._initializing = True
    try:
        spec.loader.exec_module(module)
        module.__class__ = ModuleType
    finally:
        spec._initializing = False
        attributes.pop("_loading", None)
