"""Runs the user's own code from one mark to the next.

Until a section's first mark is reached, modules without it are not run: they return zeros of the shape that they had in
a trial. At the mark the border tensor replaces the computed one; at the next mark the run ends. Code between modules,
such as masks made from the batch, is run again in every section.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from morph.contract.errors import JobError
from morph.cutting.exporting.gradient_hooks import plain_checkpoints
from morph.cutting.source.guards import line_in_loss
from morph.cutting.source.refusal import changes_requires_grad

PlaceT = TypeVar("PlaceT")
_SMALL = 16
_PLAIN: Callable[..., Any] = nn.Module._call_impl
Call = tuple[str, int]
"""Name of a module, and the number of the call."""
RunCall = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class Choices(TorchDispatchMode, Generic[PlaceT]):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Collects each (place, ``file:line``) at which Python reads a number that depends on torch's generator."""

    def __init__(self, place: Callable[[], PlaceT]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._place = place
        self._drawn: dict[int, Tensor] = {}
        self.found: list[tuple[PlaceT, str | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        by_chance = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and "dropout" not in str(func)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_drawn = [id(leaf) in self._drawn for leaf in given]
        alone = all(drawn or not leaf.dim() for drawn, leaf in zip(is_drawn, given, strict=True))  # no activation
        if by_chance or (any(is_drawn) and alone):
            if func is torch.ops.aten._local_scalar_dense.default:
                self.found.append((self._place(), line_in_loss()))
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.numel() <= _SMALL:
                    self._drawn[id(leaf)] = leaf  # kept, so that no other tensor gets its id
        return result


@dataclass(frozen=True)
class _Zeros:
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _PackedZeros:
    """A result with as many steps as the module's packed sequence."""

    features: tuple[int, ...]
    dtype: torch.dtype


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedSequence)


def remember(result: Any) -> Any:
    """Return the part of a module's result to keep."""
    return tree_map(_remembered, result, is_leaf=_is_packed)


def _remembered(value: Any) -> Any:
    if isinstance(value, PackedSequence):
        return _PackedZeros(tuple(value.data.shape[1:]), value.data.dtype)
    return _Zeros(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def fill(remembered: Any, args: tuple[Any, ...], device: torch.device) -> Any:
    """Return zeros in the form of a remembered result, for a call with ``args``."""
    packed = next(filter(_is_packed, tree_leaves(args, is_leaf=_is_packed)), None)

    def filled(value: Any) -> Any:
        if isinstance(value, _PackedZeros) and packed is not None:
            zeros = torch.zeros((len(packed.data), *value.features), dtype=value.dtype, device=device)
            return PackedSequence(zeros, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        return torch.zeros(value.shape, dtype=value.dtype, device=device) if isinstance(value, _Zeros) else value

    return tree_map(filled, remembered)


class _Reached(BaseException):
    """Signals the section's end, with its tensor; not an error, so that the user's code does not catch it."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class Mark:
    """A place where the user's code is cut, before the module of ``call``, while ``enclosing`` calls are active."""

    call: Call
    enclosing: frozenset[Call]
    value: Any
    source: str | None
    flops: int


@dataclass
class Trial:
    """A run of the whole code: each call's result, and for each random choice the marks passed, call and line."""

    marks: list[Mark] = field(default_factory=list)
    returned: dict[Call, Any] = field(default_factory=dict)
    choices: list[tuple[int, Call, str | None]] = field(default_factory=list)


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts floating-point operations; torch's own counter puts hooks on modules, which ``autograd.grad`` refuses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        self.total += formula(*args, **kwargs, out_val=result) if formula is not None else 0
        return result


def run_whole(
    whole: nn.Module,
    parameters: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    is_mark: Callable[[str, nn.Module], bool],
    flops: Callable[[], int],
) -> tuple[tuple[Tensor, ...], Trial]:
    """Run the whole code; return loss, metrics and findings. Random numbers are seeded anew after each mark."""
    trial, under_way, seen = Trial(), list[Call](), Counter[str]()

    def run(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = (name, seen[name])
        seen[name] += 1
        if is_mark(name, module):
            value = args[0] if args else None
            trial.marks.append(Mark(call, frozenset(under_way), value, line_in_loss(), flops()))
            seed_behind(len(trial.marks))
        under_way.append(call)
        result = _PLAIN(module, *args, **kwargs)
        under_way.pop()
        trial.returned[call] = remember(result)
        return result

    with _calls_go_to(run, whole), Choices(lambda: (len(trial.marks), under_way[-1])) as choices:
        result = functional_call(whole, named(parameters), (dict(batch),))
    trial.choices = [(*place, line) for place, line in choices.found]
    return _as_tuple(result), trial


@dataclass(eq=False)
class MarkedCode:
    """The code of one section from ``entry`` to ``end``, called as :class:`Section` calls its code."""

    whole: nn.Module
    keys: tuple[str, ...]
    names: tuple[str, ...]
    entry: Mark | None
    end: Mark | None
    returned: Mapping[Call, Any]
    needs_gradient: bool
    frozen: tuple[tuple[str, nn.Parameter], ...]
    called: list[str] = field(default_factory=list)
    """Modules that the latest run called, outermost first, without those that contain a border."""
    seeded: Mapping[Call, int] = field(default_factory=dict)
    """Marks after which random numbers are reseeded, with the seeds, because earlier sections draw other numbers."""
    foreign: frozenset[str] = frozenset()
    """Modules whose parameters the section does not hold, because the trial did not reach them in this section."""
    _border_shape: tuple[int, ...] | None = None

    def forget_trial(self) -> None:
        """Release the tensors of the trial; from now on, calls that the trial did not show are refused."""
        given = {f"model.{name}" for name in self.names}
        held = {id(p) for name, p in self.whole.named_parameters(remove_duplicate=False) if name in given}
        self.foreign = frozenset(name for name, module in self.whole.named_modules() if _lacks(module, held))
        self._border_shape = None if self.end is None else tuple(self.end.value.shape)
        self.seeded = {}
        self.entry = None if self.entry is None else replace(self.entry, value=None)
        self.end = None if self.end is None else replace(self.end, value=None)

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        num_inputs = 0 if self.entry is None else 1
        border = given[:num_inputs]
        num_others = num_inputs + len(self.keys)
        batch = dict(zip(self.keys, given[num_inputs:num_others], strict=True))
        parameters = dict(zip(self.names, given[num_others:], strict=True))
        device = given[0].device if given else torch.device("cpu")
        _move(self.whole, device)
        walk = _Walk(self, border, device)
        with _calls_go_to(walk.run, self.whole):
            try:
                result = functional_call(self.whole, named(parameters), (batch,))
                self._refuse_thawed()
            except _Reached as reached:
                self._refuse_thawed()
                value: Tensor = reached.value
                if self._border_shape not in {None, tuple(value.shape)}:
                    raise self.otherwise(self.end, f"with a tensor of shape {list(value.shape)}") from None
                if value.requires_grad and not self.needs_gradient:
                    raise self.otherwise(self.end, "with a tensor that depends on a parameter") from None
                return (value.contiguous() if self.needs_gradient else value.detach().contiguous(),)
        if self.end is not None or not walk.inside:
            raise self.otherwise(self.end or self.entry, "not at all")
        return _as_tuple(result)

    def _refuse_thawed(self) -> None:
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise changes_requires_grad(name, None if self.entry is None else self.entry.source)

    def otherwise(self, mark: Mark | None, how: str) -> JobError:
        """Return an error: a run differs from the trial at a mark."""
        assert mark is not None
        shape = f" (shape {list(self._border_shape)})" if self._border_shape is not None else ""
        return JobError(
            f"the forward reaches the cut in front of {mark.call[0].removeprefix('model.')} {how}, unlike with the "
            "first samples",
            source=mark.source,
            field="cut_points",
            allowed=f"marks that every forward reaches in the same order, with the same shapes{shape}; put what "
            "depends on data into modules between them",
        )


class _Walk:
    def __init__(self, code: MarkedCode, border: tuple[Tensor, ...], device: torch.device) -> None:
        self._code, self._border, self._device = code, border, device
        self.inside = code.entry is None
        self._seen: Counter[str] = Counter()
        code.called = []

    def run(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one call, or return its replacement."""
        entry, end = self._code.entry, self._code.end
        call = (name, self._seen[name])
        self._seen[name] += 1
        if not self.inside and entry is not None:
            if call == entry.call:
                self._see_line(entry)
                self.inside = True
                args = (*self._border, *args[1:])
            elif call not in entry.enclosing:
                return self._stand_in(call, module, args, kwargs)
        if self.inside and call in self._code.seeded:
            seed_behind(self._code.seeded[call])
        if self.inside and end is not None and call == end.call:
            self._see_line(end)
            raise _Reached(args[0])
        if not any(mark is not None and call in mark.enclosing for mark in (entry, end)):
            self._code.called.append(name)
            if name in self._code.foreign:
                raise JobError(
                    "the section does not hold this module's parameters: with the first samples the forward did not "
                    "reach it here",
                    source=line_in_loss(),
                    field="model",
                    value=name.removeprefix("model."),
                    allowed="modules that every forward calls; put the choice into a module that holds the others",
                )
        return _PLAIN(module, *args, **kwargs)

    def _see_line(self, mark: Mark) -> None:
        if line_in_loss() != mark.source:
            raise self._code.otherwise(mark, f"from {line_in_loss()}")

    def _stand_in(self, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call in self._code.returned:
            return fill(self._code.returned[call], args, self._device)
        with torch.no_grad():  # the trial did not show it; its result is replaced at the mark
            return _PLAIN(module, *args, **kwargs)


def _lacks(module: nn.Module, held: set[int]) -> bool:
    """Return whether the module's own parameters, or all parameters within it, are not held."""
    own, inside = ([id(p) for p in module.parameters(recurse) if p.requires_grad] for recurse in (False, True))
    return not held.issuperset(own) or (bool(inside) and held.isdisjoint(inside))


def seed_behind(num_marks: int) -> None:
    """Seed the random numbers that the trial draws after this many marks."""
    torch.default_generator.manual_seed(num_marks)


@contextmanager
def _calls_go_to(run: RunCall, whole: nn.Module) -> Iterator[None]:
    """Intercept only calls of the model's own modules, through the hook of ``Module.compile``."""
    modules = list(whole.named_modules())
    before = [module._compiled_call_impl for _, module in modules]
    try:
        for name, module in modules:
            module._compiled_call_impl = _calling(run, name, module)
        with plain_checkpoints():
            yield
    finally:
        for (_, module), compiled in zip(modules, before, strict=True):
            module._compiled_call_impl = compiled


def _calling(run: RunCall, name: str, module: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(name, module, args, kwargs)


def named(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the names of parameters in the module of model and loss."""
    return {f"model.{name}": tensor for name, tensor in parameters.items()}


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _move(whole: nn.Module, device: torch.device) -> None:
    """Move buffers and frozen parameters to a device; trainable parameters still take no memory."""
    for tensor in (*whole.parameters(), *whole.buffers()):
        if tensor.device != device:
            without_memory = tensor.requires_grad
            moved = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
            tensor.data = moved if without_memory else tensor.to(device)
