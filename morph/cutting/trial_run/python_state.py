"""Compares Python state that persists between forwards: random number generators, attributes, globals."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from morph.cutting.source.locate import is_users, user_files
from morph.jobs.job import Job

_TORCHS_OWN = vars(nn.Module()).keys()
_MAX_ENTRIES = 1000
_MAX_DEPTH = 4
_MAX_BYTES = 1 << 20
NUMPY = "numpy's random numbers"
PYTHON = "Python's random numbers"


@dataclass
class KeptState:
    """State, except tensors, that the forward of a job might change; each part has a name for messages."""

    job: Job
    model: nn.Module
    files: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.files = user_files(self.job, self.model)

    def now(self) -> dict[str, object]:
        """Return the present state, for comparison with a later one."""
        return {name: self._told(read()) for name, read in self._places()}

    def line_of_change(self, name: str, run: Callable[[], object]) -> str | None:
        """Run once more; return the ``file:line`` of the user's code after which ``name`` has changed."""

        def look() -> object:
            return next((self._told(read()) for place, read in self._places(name) if place == name), None)

        return _line_of_change(look, run)

    def _places(self, wanted: str | None = None) -> Iterator[tuple[str, Callable[[], object]]]:
        yield NUMPY, lambda: np.random.get_state(legacy=True)  # the global generator, from which users may draw
        yield PYTHON, random.getstate
        if wanted in {NUMPY, PYTHON}:
            return
        for path, module in self.model.named_modules():
            for key, value in list(vars(module).items()):
                if key not in _TORCHS_OWN:
                    yield f"attribute {path}.{key}".replace(" .", " "), functools.partial(_same, value)
        methods = (
            value
            for kind in {type(module) for module in self.model.modules()}
            if self._is_own(kind)
            for value in vars(kind).values()
        )
        attributes = (value for module in self.model.modules() for value in vars(module).values())
        seen: set[int] = set()
        waiting: list[object] = [self.job.loss, *(f for f in (*methods, *attributes) if isinstance(f, FunctionType))]
        while waiting:
            function = waiting.pop()
            if id(function) not in seen:
                seen.add(id(function))
                for name, value in _reachable(function):
                    yield name, functools.partial(_same, value)
                    if isinstance(value, FunctionType) and value.__code__.co_filename in self.files:
                        waiting.append(value)

    def _is_own(self, kind: type) -> bool:
        return getattr(sys.modules.get(kind.__module__), "__file__", None) in self.files

    def _told(self, value: object, depth: int = 0) -> object:
        """Return a comparable summary of a value; values with equal summaries count as equal."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
            return repr(value)
        state = _generator_state(value)
        if state is not None:
            return state
        if isinstance(value, np.ndarray) and value.nbytes <= _MAX_BYTES:
            return value.dtype.str, value.shape, value.tobytes()
        if depth == _MAX_DEPTH:
            return type(value).__name__
        if isinstance(value, list | tuple | set | frozenset | deque):
            return len(value), [self._told(entry, depth + 1) for entry in itertools.islice(value, _MAX_ENTRIES)]
        if isinstance(value, Mapping):
            entries = itertools.islice(value.items(), _MAX_ENTRIES)
            return len(value), [(repr(key), self._told(entry, depth + 1)) for key, entry in entries]
        if self._is_own(type(value)) and not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
            return [(key, self._told(entry, depth + 1)) for key, entry in vars(value).items()]
        return type(value).__name__


def _same(value: object) -> object:
    return value


def _generator_state(value: object) -> object:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    return repr(value) if isinstance(value, itertools.count) else None


def _reachable(function: object) -> Iterator[tuple[str, object]]:
    """Yield external values that a function can reach: globals that it names, closures, the object of a method."""
    if isinstance(function, functools.partial):
        yield from _reachable(function.func)
        yield from ((f"argument {place} of the loss", value) for place, value in enumerate(function.args))
        yield from ((f"argument {key} of the loss", value) for key, value in function.keywords.items())
    elif isinstance(function, MethodType):
        yield from _attributes(function.__self__)
        yield from _reachable(function.__func__)
    elif isinstance(function, FunctionType):
        names = set(_names(function.__code__))
        yield from ((f"global {name}", function.__globals__[name]) for name in names & function.__globals__.keys())
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # the cell is not set yet
                yield f"variable {name}", cell.cell_contents
    else:
        yield from _attributes(function)
        yield from _reachable(type(function).__call__) if callable(function) else ()


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    if not isinstance(thing, nn.Module):
        kind = type(thing).__name__
        yield from ((f"attribute {kind}.{key}", value) for key, value in vars(thing).items())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _line_of_change(look: Callable[[], object], run: Callable[[], object]) -> str | None:
    last, place = look(), None
    lines: list[str | None] = []

    def check(frame: FrameType | None) -> None:
        nonlocal last, place
        now = look()
        if now != last:
            lines.append(place)
        last, place = now, frame and f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if lines or not is_users(frame.f_code.co_filename):
            return None
        caller = frame.f_back
        while event == "return" and caller is not None and not is_users(caller.f_code.co_filename):
            caller = caller.f_back
        check(caller if event == "return" else frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    check(None)
    return next(iter(lines), None)


def changed(*states: Mapping[str, object]) -> Iterable[str]:
    """Return the names of values that differ between consecutive states, the most informative first."""
    names = dict.fromkeys(name for state in states for name in state)
    return [name for name in names if any(a.get(name) != b.get(name) for a, b in itertools.pairwise(states))]
