"""Runs the optimizer's steps under a dispatch mode that knows whose data tensors and numbers from ``item()`` hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from morph.tracing.operations import Influence, influences_of, is_random, name_of, takes_only_shapes, tensors_in
from morph.tracing.recorder import Key, Recorder
from morph.tracing.source_lines import here
from morph.tracing.storages import Known, Storages, Tag, covers_its_storage

_TO_PYTHON = {"_local_scalar_dense", "equal", "is_nonzero"}
_LIFTING = {"lift_fresh", "lift"}
_OUT_OF_TORCH = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "numpy"}
FIRST_SETTLED_EPOCH = 2  # state may be made in the first step


class OptimizerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches what the optimizer does. Epoch 0 is its construction, epochs 1, 2, 3 are its steps.

    ``unit_of``: unit of each parameter, by the parameter's name.
    """

    def __init__(self, unit_of: Mapping[str, str], recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit_of = unit_of
        self.storages = Storages()
        self._recorder = recorder
        self._numbers: tuple[Tag, ...] = ()
        self._listed: list[Sequence[Any]] = []

    @contextmanager
    def watching(self, epoch: int) -> Iterator[None]:
        """Watch the operations in the block."""
        self.storages.epoch = epoch
        with _PythonExits(self), self:
            yield

    def own(self, parameters: Mapping[str, Tensor], optimizer: Optimizer | None = None) -> None:
        """Name the owners of parameters, gradients and the optimizer's saved state; called before each step."""
        for name, parameter in parameters.items():
            known = self.storages.find(parameter)
            if known is not None and known.owner is None:  # its data was replaced during the step
                self._reach(known.tag, self.unit_of[name])
        self.storages.disown_all()
        for name, parameter in parameters.items():
            unit = self.unit_of[name]
            self.storages.own(parameter, unit, holds_data=True, label=name)
            if parameter.grad is not None:
                self.storages.own(parameter.grad, unit, holds_data=True, label=f"gradient of {name}")
            for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
                if isinstance(value, Tensor):
                    self.storages.own(value, unit, holds_data=False, label=f"{key} of {name}")
        for group in optimizer.param_groups if optimizer else ():
            for value in group.values():
                if isinstance(value, Tensor):
                    self.storages.see(value, outside=False).kept = True

    @contextmanager
    def with_numbers(self, arguments: Sequence[Any]) -> Iterator[None]:
        """Treat numbers among a call's arguments as tensors that the operations inside read.

        A number in a list belongs to the entry at its place, as in ``torch._foreach_``.
        """
        before = self._numbers, self._listed
        self._numbers = tuple(argument.tag for argument in arguments if isinstance(argument, _Number))
        self._listed = [argument for argument in arguments if isinstance(argument, list | tuple)]
        try:
            yield
        finally:
            self._numbers, self._listed = before

    def number(self, tensor: Tensor, value: Any) -> Any:
        """Return the result of ``item()`` as a number that knows whose data it holds, if possible."""
        known = self.storages.find(tensor)
        tag = known.tag if known else None
        return _Number(value, tag, self) if type(value) is float and tag else value

    def joined(self, operator: str, first: Tag, second: Tag) -> Tag:
        """Return the tag of a number made from two; units that meet in it for the first time are a finding."""
        units, roots = first.units | second.units, first.roots | second.roots
        if units not in (first.units, second.units):
            key: Key = ("mixing", operator, here())
            self._recorder.add("mixing", "optimizer", operator, key[2], units, detail="number")
            roots |= {key}
        return Tag(units, roots)

    def _tags_at(self, index: int, num_influences: int) -> list[Tag]:
        """Return the tags of the numbers that go into one influence of the present call."""
        listed = (entries[index] for entries in self._listed if len(entries) == num_influences > index)
        return [*self._numbers, *(entry.tag for entry in listed if isinstance(entry, _Number))]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        lifting = name_of(func) in _LIFTING
        for tensor in tensors_in((*args, *options.values())):
            self.storages.see(tensor, outside=not lifting)
        result = func(*args, **options)
        influences = influences_of(func, args, options, result)
        num_entries = len(tensors_in(args[0])) if args else 0
        for index, influence in enumerate(influences):
            self._influence(func, influence, self._tags_at(index, num_entries))
        if is_random(func) and influences:
            units = {
                unit
                for influence in influences
                for known in self._all(influence)
                if known.tag
                for unit in known.tag.units
            }
            self._recorder.add("random", "optimizer", name_of(func), here(), units, tensors_in(result))
        return result

    def leaves(self, operator: str, tensors: tuple[Tensor, ...]) -> None:
        """Record that tensors became Python values."""
        tags = [known.tag for known in (self.storages.see(tensor, outside=True) for tensor in tensors) if known.tag]
        if tags and not any(tag.roots for tag in tags):
            units = {unit for tag in tags for unit in tag.units}
            self._recorder.add("leaves", "optimizer", operator, here(), units, tensors)

    def _all(self, influence: Influence) -> list[Known]:
        tensors = (*influence.reads, *influence.writes, *influence.results)
        return [self.storages.see(tensor, outside=False) for tensor in tensors]

    def _influence(self, func: Any, influence: Influence, numbers: list[Tag]) -> None:
        reads = [self.storages.see(tensor, outside=True) for tensor in influence.reads]
        writes = [self.storages.see(tensor, outside=True) for tensor in influence.writes]
        tag = None if takes_only_shapes(func) else self._join(func, influence, reads, writes, numbers)
        self._note_carried(func, influence, reads, writes)
        if name_of(func) in _TO_PYTHON:
            self.leaves({"_local_scalar_dense": "item"}.get(name_of(func), name_of(func)), influence.reads)
        for known, tensor in zip(writes, influence.writes, strict=True):
            self._write(known, tensor, tag, overwrites=influence.overwrites)
        for tensor in influence.results:
            if self.storages.find(tensor) is None:
                made = self.storages.see(tensor, outside=False)
                made.tag = tag
                made.sources = () if tag else self._sources(reads)

    def _join(
        self, func: Any, influence: Influence, reads: list[Known], writes: list[Known], numbers: list[Tag]
    ) -> Tag | None:
        """Return the tag of the results; units that meet here for the first time are a finding."""
        tags = [*numbers, *(known.tag for known in reads if known.tag)]
        tags += [known.tag for known in writes if known.owner and known.tag]
        single = frozenset(unit for tag in tags if len(tag.units) == 1 for unit in tag.units)
        mixed = frozenset(unit for tag in tags if len(tag.units) > 1 for unit in tag.units)
        roots = frozenset(root for tag in tags for root in tag.roots)
        for known in reads:
            if known.tag is None:
                for source in (known, *known.sources):
                    source.users.update(single)
                if known.outside and single and known.read_at is None:
                    known.read_at = (name_of(func), here())
        if len(single) > 1 or (mixed and not single <= mixed):
            roots |= {self._mixing(func, influence, single | mixed)}
        return Tag(single | mixed, roots) if tags else None

    def _write(self, known: Known, tensor: Tensor, tag: Tag | None, *, overwrites: bool) -> None:
        if known.owner is not None:
            self._reach(tag, known.owner)
        elif overwrites and covers_its_storage(tensor):
            known.tag = tag
        elif tag is not None:
            before = known.tag or Tag(frozenset())
            known.tag = Tag(before.units | tag.units, before.roots | tag.roots)
        if overwrites and covers_its_storage(tensor):
            known.born = self.storages.epoch

    def _reach(self, tag: Tag | None, unit: str) -> None:
        for root in tag.roots if tag else ():
            self._recorder.records[root].reached.add(unit)

    def _note_carried(self, func: Any, influence: Influence, reads: list[Known], writes: list[Known]) -> None:
        """Find values that live from step to step in a place that Morph does not save."""
        now = self.storages.epoch
        if now < FIRST_SETTLED_EPOCH:
            return
        for known, tensor in zip(writes, influence.writes, strict=True):
            replaced = influence.overwrites and covers_its_storage(tensor)
            if not known.kept and known.born < now and not replaced:
                self._carried(func, known, tensor)
        for known, tensor in zip(reads, influence.reads, strict=True):
            if not known.kept and not known.outside and FIRST_SETTLED_EPOCH <= known.born < now:
                self._carried(func, known, tensor)

    def _carried(self, func: Any, known: Known, tensor: Tensor) -> None:
        known.changed = True
        units = set(known.tag.units) if known.tag else set(known.users)
        kind: Any = "unsaved" if len(units) == 1 and known.tag else "common"
        self._recorder.add(kind, "optimizer", name_of(func), here(), units, (tensor,))

    def _sources(self, reads: list[Known]) -> tuple[Known, ...]:
        older = {id(known): known for known in reads if known.outside or known.born < self.storages.epoch}
        for known in reads:
            older |= {id(source): source for source in known.sources}
        return tuple(older.values())

    def _mixing(self, func: Any, influence: Influence, units: frozenset[str]) -> Key:
        key: Key = ("mixing", name_of(func), here())
        tensors = (*influence.reads, *influence.writes)
        logical = any(tensor.dtype == torch.bool for tensor in tensors)
        self._recorder.add("mixing", "optimizer", key[1], key[2], units, tensors, detail="logical" if logical else "")
        return key

    def finish(self) -> None:
        """Record outside tensors that several units read and that nothing changed: they are equal on every worker."""
        for known in self.storages.entries():
            if known.read_at is not None and not known.changed and len(known.users) > 1:
                operator, place = known.read_at
                self._recorder.add("constant", "optimizer", operator, place, known.users).handled = True


class _Number(float):
    """A Python number that knows whose data it holds; so do the results of its arithmetic."""

    tag: Tag
    mode: OptimizerMode

    def __new__(cls, value: float, tag: Tag, mode: OptimizerMode) -> _Number:
        made = super().__new__(cls, value)
        made.tag, made.mode = tag, mode
        return made

    def __deepcopy__(self, _memory: object) -> _Number:
        return self

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _arithmetic(name: str) -> Callable[..., Any]:
    plain = getattr(float, f"__{name}__")

    def apply(self: _Number, *others: Any) -> Any:
        value = plain(self, *others)
        if type(value) is not float:
            return value
        tag = self.tag
        for other in others:
            if isinstance(other, _Number):
                tag = self.mode.joined(name.removeprefix("r"), tag, other.tag)
        return _Number(value, tag, self.mode)

    return apply


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    setattr(_Number, f"__{_name}__", _arithmetic(_name))
    setattr(_Number, f"__r{_name}__", _arithmetic(f"r{_name}"))
for _name in ("neg", "pos", "abs"):
    setattr(_Number, f"__{_name}__", _arithmetic(_name))


class _PythonExits(TorchFunctionMode):
    """Watches ways to Python that run no operation (``tolist``, ``numpy``), and numbers that come back from there."""

    def __init__(self, mode: OptimizerMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OUT_OF_TORCH and args and isinstance(args[0], torch.Tensor):
            self._mode.leaves(_OUT_OF_TORCH[func], (args[0],))
        options = kwargs or {}
        with self._mode.with_numbers((*args, *options.values())):
            result = func(*args, **options)
        return self._mode.number(args[0], result) if func is Tensor.item else result
