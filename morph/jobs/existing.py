"""Makes fields of a job from existing objects: a model, its optimizer and schedule, a data loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from copy import copy, deepcopy
from dis import get_instructions
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader

from morph.contract.errors import JobError, wrong_job

_OF_THE_MODEL = ("params", "param_names")


def copied(
    model: nn.Module, clone: Callable[[Tensor], Tensor] = Tensor.clone, memo: dict[int, Any] | None = None
) -> nn.Module:
    """Return a copy of a model, for ``Job.model``: its tensors are cloned, which can be traced, instead of its
    storages.

    ``clone``: makes a new tensor for each tensor, without a graph. ``memo``: receives the copies, as in ``deepcopy``.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, Tensor):
                made = clone(tensor.detach())
                is_parameter = isinstance(tensor, Parameter)
                memo[id(tensor)] = Parameter(made, tensor.requires_grad) if is_parameter else made
    return deepcopy(model, memo)


def order_of(loader: DataLoader[Any]) -> Callable[[Any, int, int], list[int]]:
    """Return the order in which a loader reads samples, as ``Job.sampler``; with ``drop_last``, only whole batches."""
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # a wrapper of accelerate
        batches = batches.batch_sampler
    sampler = batches.sampler

    def order(_dataset: Any, _seed: int, epoch: int) -> list[int]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        numbers = list(sampler)
        return numbers[: len(numbers) - len(numbers) % batches.batch_size] if batches.drop_last else numbers

    return order


class WholeModel:
    """A ``Job.model`` that copies an existing model, which is not trained elsewhere; its weights must be the same in
    every process.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self) -> nn.Module:
        return copied(self._model)

    def digest(self) -> str:
        """Return a digest of the weights, by which workers detect weights other than those with which the run began."""
        state = xxhash.xxh3_128()
        for name, tensor in sorted(self._model.state_dict().items()):
            state.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            state.update(memoryview(flat))
        return state.hexdigest()


class WholeModelOptimizer:
    """Copies an existing optimizer for some parameters, with all of its groups; some of these may be empty.

    ``optimizer``: an optimizer that has these parameters in its groups, and has made no step. ``scheduler``: the
    optimizer's schedule, at its beginning.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Parameter]],
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
    ) -> None:
        self._names = {id(parameter): name for name, parameter in named}
        self._whole, self._scheduler = optimizer, scheduler
        self._optimizers: dict[int, Optimizer] = {}
        for where, value, is_in_function in _held(optimizer, type(optimizer).__name__, {}):
            if isinstance(value, Optimizer) and not is_in_function:
                self._optimizers[id(value)] = value
            elif isinstance(value, nn.Module | Optimizer) or id(value) in self._names:
                allowed = "hooks that use only the optimizer that they are given; attributes that are plain values"
                raise wrong_job("optimizer", "holds a part of the whole model, which no worker has", where, allowed)

    @property
    def has_scheduler(self) -> bool:
        """Whether there is a schedule to copy."""
        return self._scheduler is not None

    def optimizer(self, named: Iterable[tuple[str, Parameter]]) -> Optimizer:
        """Return a copy of the optimizer that has these parameters, as ``Job.optimizer`` does.

        Settings, state, attributes and hooks are those of the original.
        """
        own = dict(named)
        ours = {key: own[name] for key, name in self._names.items() if name in own}
        memo: dict[int, Any] = {**ours}
        for whole in self._optimizers.values():
            memo[id(whole)] = object.__new__(type(whole))
        for whole in self._optimizers.values():
            _add_groups(whole, memo)
        for whole in self._optimizers.values():
            for name, value in vars(whole).items():
                where = f"{type(whole).__name__}.{name}"
                if name == "step" and getattr(value, "__wrapped__", None) is type(whole).step:
                    continue  # a schedule wrapped the class's own step to count calls
                try:
                    made = deepcopy(value, memo)
                except (TypeError, RuntimeError) as error:
                    raise _not_copied(where, f"cannot be copied: {error}") from error
                if name not in ("param_groups", "state") and (apart := _difference(where, value, made, {})):
                    raise _not_copied(*apart)
                vars(memo[id(whole)])[name] = made
        whole_copy: Optimizer = memo[id(self._whole)]
        return whole_copy

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return a copy of the existing schedule for another optimizer, as ``Job.lr_scheduler`` does."""
        assert self._scheduler is not None, "there is no schedule to copy"
        LambdaLR(optimizer, lambda _step: 1.0)  # makes the optimizer record its steps, which every schedule checks
        for group, whole in zip(optimizer.param_groups, self._whole.param_groups, strict=True):
            group.update({key: value for key, value in whole.items() if key not in _OF_THE_MODEL})
        return deepcopy(self._scheduler, {id(self._whole): optimizer})


def _not_copied(where: str, why: str) -> JobError:
    allowed = "attributes and hooks of which a copy for some of the parameters does the same"
    return wrong_job("optimizer", why, where, allowed)


def _add_groups(whole: Optimizer, memo: dict[int, Any]) -> None:
    """Add copies of groups and state to the memo, which has the copies of some of the parameters."""
    state = memo[id(whole.state)] = copy(whole.state)
    state.clear()
    groups = memo[id(whole.param_groups)] = []
    for group in whole.param_groups:
        if id(group) not in memo:
            kept = [number for number, parameter in enumerate(group["params"]) if id(parameter) in memo]
            made = memo[id(group)] = {"params": [memo[id(group["params"][number])] for number in kept]}
            memo[id(group["params"])] = made["params"]
            for key in (key for key in group if key != "params"):
                value = group[key]
                made[key] = [value[number] for number in kept] if key == "param_names" else deepcopy(value, memo)
            if "initial_lr" in group:
                made["lr"] = made["initial_lr"]
        groups.append(memo[id(group)])
    for owner, entries in whole.state.items():
        if id(owner) in memo:
            own = memo[id(owner)]
            state[own] = {key: _fitted(deepcopy(value, memo), owner, own) for key, value in entries.items()}
        elif not isinstance(owner, Tensor):
            state[owner] = deepcopy(entries, memo)


def _fitted(value: Any, whole: Tensor, own: Tensor) -> Any:
    """Return an entry of the state as it is for a copy of its parameter, which may be smaller, elsewhere or wider."""
    if not isinstance(value, Tensor) or value.shape != whole.shape or not value.dim():
        return value
    part = value[tuple(slice(length) for length in own.shape)]
    return part.to(own.device, own.dtype if part.dtype == whole.dtype else part.dtype).contiguous()


def _held(value: Any, where: str, seen: dict[int, Any], in_function: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Yield optimizers, modules and parameters that an optimizer's attributes hold, each with its place and whether
    a function holds it, of which there is no copy. Its groups and its state are left out.
    """
    if isinstance(value, Optimizer | nn.Module | Parameter):
        yield where, value, in_function
    if id(value) in seen or isinstance(value, nn.Module | Tensor | type | ModuleType):
        return
    seen[id(value)] = value
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, FunctionType):
        in_function, where = True, f"{where} ({value.__qualname__})"
        parts = ((where, part) for part in _used_by(value))
    elif isinstance(value, Optimizer):
        seen |= {id(group["params"]): group for group in value.param_groups}
        kept = {key: part for key, part in vars(value).items() if key not in ("param_groups", "state", "step")}
        own = vars(value).get("step", type(value).step)
        kept["step"] = type(value).step if getattr(own, "__wrapped__", None) is type(value).step else own
        parts = ((f"{where}.{key}", part) for key, part in kept.items())
    elif isinstance(value, Mapping):
        parts = ((where, part) for part in value.values())
    elif isinstance(value, list | tuple | Set | deque):
        parts = ((where, part) for part in value)
    elif isinstance(value, MethodType):
        parts = ((where, part) for part in (value.__self__, value.__func__))
    elif isinstance(value, partial):
        parts = ((where, part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, ref):
        parts = ((where, value()),)
    else:
        parts = ((f"{where}.{key}", part) for key, part in getattr(value, "__dict__", {}).items())
    for place, part in parts:
        yield from _held(part, place, seen, in_function)


def _used_by(function: FunctionType) -> Iterator[Any]:
    """Yield what a function holds: enclosed values, defaults, and the functions and parts of a model among globals."""
    if (function.__module__ or "").startswith("torch."):
        return
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell that is still empty
            yield cell.cell_contents
    yield function.__defaults__
    yield function.__kwdefaults__
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in {read.argval for read in get_instructions(code) if read.opname == "LOAD_GLOBAL"}:
            found = function.__globals__.get(name)
            if isinstance(found, FunctionType | nn.Module | Optimizer | Tensor):
                yield found


def _difference(where: str, value: Any, made: Any, seen: dict[int, Any]) -> tuple[str, str] | None:
    """Return where a copy differs from the original, and how; None: nowhere. Optimizers are compared by themselves."""
    if value is made or isinstance(value, Optimizer) or id(value) in seen:
        return None
    seen[id(value)] = value
    pairs: list[tuple[str, Any, Any]] = []
    same = type(value) is type(made)
    if isinstance(value, Tensor) and same:
        same = value.dtype == made.dtype and torch.equal(value, made)
    elif isinstance(value, Mapping) and same:
        same = len(value) == len(made)
        pairs = [(where, *pair) for pair in zip(value.items(), made.items(), strict=False)]
    elif isinstance(value, list | tuple | deque) and same:
        same = len(value) == len(made)
        pairs = [(where, *pair) for pair in zip(value, made, strict=False)]
    elif isinstance(value, MethodType) and same:
        same, pairs = value.__func__ is made.__func__, [(where, value.__self__, made.__self__)]
    elif isinstance(value, partial) and same:
        pairs = [(where, (value.func, value.args, value.keywords), (made.func, made.args, made.keywords))]
    elif hasattr(value, "__dict__") and same:
        same = vars(value).keys() == vars(made).keys()
        pairs = [(f"{where}.{key}", part, vars(made).get(key)) for key, part in vars(value).items()]
    elif same:
        same = bool(np.all(value == made))
    if not same:
        return where, f"is {value!r}, and {made!r} in a copy"
    return next((found for pair in pairs if (found := _difference(*pair, seen))), None)
