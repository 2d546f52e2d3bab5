"""Run the user's own code from one mark to the next.

A section runs ``loss(model, batch)`` from its beginning. Until the section's first mark is reached, modules that do not
contain the mark are not run: they return zeros of the shape that they had in a trial. At the mark the border tensor
takes the place of what was computed; at the next mark the run ends. Code between modules, such as masks made from the
batch, is run again in every section.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

Call = tuple[str, int]
"""Name of a module, and which of its calls it is."""

RunCall = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_ORIGINAL: Callable[..., Any] = nn.Module.__call__


class _Reached(BaseException):
    """The section's end, with the tensor that is there; no error, and no user's code catches it."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class Mark:
    """A place where the user's code is cut.

    Attributes:
        call: The module in front of which it lies.
        enclosing: Calls that are under way there.
        value: The tensor that crosses, of the trial.
        source: ``file:line`` of the call.
        flops: Work done before, in the trial.
    """

    call: Call
    enclosing: frozenset[Call]
    value: Any
    source: str | None
    flops: int


@dataclass
class Trial:
    """What a run of everything shows: the marks in order, and what each call returns."""

    marks: list[Mark] = field(default_factory=list)
    returned: dict[Call, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Zeros:
    shape: tuple[int, ...]
    dtype: torch.dtype


def run_whole(
    whole: nn.Module,
    parameters: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    is_mark: Callable[[str, nn.Module], bool],
    flops: Callable[[], int],
) -> tuple[tuple[Tensor, ...], Trial]:
    """Run everything; returns loss and metrics, and what was seen."""
    trial, under_way, seen = Trial(), list[Call](), Counter[str]()

    def run(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = (name, seen[name])
        seen[name] += 1
        if is_mark(name, module):
            value = args[0] if args else None
            trial.marks.append(Mark(call, frozenset(under_way), value, _calling_line(), flops()))
        under_way.append(call)
        result = _ORIGINAL(module, *args, **kwargs)
        under_way.pop()
        trial.returned[call] = tree_map(_zeros_like, result)
        return result

    with _calls_go_to(run, whole):
        result = functional_call(whole, _named(parameters), (dict(batch),))
    return _as_tuple(result), trial


@dataclass(eq=False)
class MarkedCode:
    """The code of one section, called as :class:`Section` calls its code.

    Attributes:
        whole: Model and loss.
        keys: Of the batch.
        names: Of the parameters.
        entry: Where the section begins; None for the first.
        end: Where it ends; None for the last.
        returned: What each call returned in the trial.
        needs_gradient: Whether the tensor at the end carries one.
    """

    whole: nn.Module
    keys: tuple[str, ...]
    names: tuple[str, ...]
    entry: Mark | None
    end: Mark | None
    returned: Mapping[Call, Any]
    needs_gradient: bool
    called: list[str] = field(default_factory=list)
    """Modules that the latest run called, outermost first, those left out that a border runs through."""

    def forget_trial(self) -> None:
        """Let go of the tensors of the trial."""
        self.entry = None if self.entry is None else replace(self.entry, value=None)
        self.end = None if self.end is None else replace(self.end, value=None)

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Run from mark to mark."""
        num_inputs = 0 if self.entry is None else 1
        border = given[:num_inputs]
        batch = dict(zip(self.keys, given[num_inputs:], strict=False))
        parameters = dict(zip(self.names, given[num_inputs + len(self.keys) :], strict=True))
        device = given[0].device if given else torch.device("cpu")
        _move(self.whole, device)
        with _calls_go_to(_Walk(self, border, device).run, self.whole):
            try:
                result = functional_call(self.whole, _named(parameters), (batch,))
            except _Reached as reached:
                value: Tensor = reached.value
                return (value.contiguous() if self.needs_gradient else value.detach().contiguous(),)
        if self.end is not None:
            raise RuntimeError(f"the forward did not come to {self.end.call[0]} this time")
        return _as_tuple(result)


class _Walk:
    """One run of a section."""

    def __init__(self, code: MarkedCode, border: tuple[Tensor, ...], device: torch.device) -> None:
        self._code, self._border, self._device = code, border, device
        self._inside = code.entry is None
        self._seen: Counter[str] = Counter()
        code.called = []

    def run(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one call, or what stands for it."""
        entry, end = self._code.entry, self._code.end
        call = (name, self._seen[name])
        self._seen[name] += 1
        if not self._inside and entry is not None:
            if call == entry.call:
                self._inside = True
                args = (*self._border, *args[1:])
            elif call not in entry.enclosing:
                return tree_map(self._fill, self._code.returned[call])
        if self._inside and end is not None and call == end.call:
            raise _Reached(args[0])
        if not any(mark is not None and call in mark.enclosing for mark in (entry, end)):
            self._code.called.append(name)
        return _ORIGINAL(module, *args, **kwargs)

    def _fill(self, value: Any) -> Any:
        return torch.zeros(value.shape, dtype=value.dtype, device=self._device) if isinstance(value, _Zeros) else value


@contextmanager
def _calls_go_to(run: RunCall, whole: nn.Module) -> Iterator[None]:
    names = {id(module): name for name, module in whole.named_modules()}

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(self))
        return _ORIGINAL(self, *args, **kwargs) if name is None else run(name, self, args, kwargs)

    with mock.patch.object(nn.Module, "__call__", call):
        yield


def _named(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in parameters.items()}


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _zeros_like(value: Any) -> Any:
    return _Zeros(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _move(whole: nn.Module, device: torch.device) -> None:
    """Bring buffers and frozen parameters to a device; trainable parameters go on taking no memory."""
    for tensor in (*whole.parameters(), *whole.buffers()):
        if tensor.device != device:
            without_memory = tensor.requires_grad
            moved = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
            tensor.data = moved if without_memory else tensor.to(device)


def _calling_line() -> str | None:
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_OURS)]
    outside = [frame for frame in frames if "unittest" not in frame.filename]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else None
