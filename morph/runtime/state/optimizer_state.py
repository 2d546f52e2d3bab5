"""Converts the state of any optimizer, and of its schedule, to named tensors and plain numbers, with the same bits."""

from __future__ import annotations

import inspect
import json
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler

from morph.checkpoint.manifest import ALIGNMENT, DEVICE_ALIGNMENT
from morph.contract.errors import JobError, wrong_job
from morph.optimizers import parts_of
from morph.runtime.device.staging import moved

MakeOptimizer = Callable[[Iterable[tuple[str, Parameter]]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]

_SEVERAL = (
    "morph.Optimizers, which leaves out parts without parameters; where each has a loss of its own (GAN), "
    "`morph elastic`, because a job's step minimises one loss over all parameters"
)
_HOST = torch.device("cpu")
NOT_HYPERPARAMETERS = ("params", "param_names")
_ELEMENTWISE = (SGD, Adam, AdamW, RMSprop)
"""Optimizers that compute each element's step from that element, its gradient, its state and the group's settings."""
_KIND = "~"


def prepare_torch() -> None:
    """Load the modules that torch loads with the first optimizer and backward: a second of processor time."""
    SGD([Parameter(torch.zeros(1))])


def build_optimizer(make_optimizer: MakeOptimizer, parameters: Mapping[str, Parameter]) -> Optimizer:
    """Call the job's factory for some parameters; a unit of buffers has none, and needs no call.

    Raises JobError unless it returns one optimizer of these parameters that does not evaluate the loss itself.
    """
    if not parameters:
        return SGD([{"params": []}])
    try:
        optimizer = make_optimizer(list(parameters.items()))
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        problem = (
            f"makes an optimizer of no parameters, when it is called for those of one section: {', '.join(parameters)}"
        )
        raise wrong_job("optimizer", problem, allowed=f"an empty parameter group; or {_SEVERAL}") from error
    if not isinstance(optimizer, Optimizer):
        allowed = f"a torch.optim.Optimizer; for several, {_SEVERAL}"
        raise _wrong("optimizer", "does not return an optimizer", optimizer, allowed)
    if (part := next(filter(_needs_argument, parts_of(optimizer)), None)) is not None:
        allowed = "optimizers whose step() needs no closure: Morph runs the model, once per step"
        raise _wrong("optimizer", "returns an optimizer whose step needs a closure", part, allowed)
    for group in optimizer.param_groups:  # each unit's schedule would change a learning rate in a shared tensor
        group.update({key: value.clone() for key, value in group.items() if isinstance(value, Tensor)})
    return optimizer


def build_scheduler(make_scheduler: MakeScheduler, optimizer: Optimizer) -> LRScheduler:
    """Call the job's factory for one optimizer.

    Raises JobError for no scheduler, one that needs a metric, or one whose state is not plain numbers.
    """
    scheduler = make_scheduler(optimizer)
    if not isinstance(scheduler, LRScheduler):
        allowed = "a torch.optim.lr_scheduler.LRScheduler"
        raise _wrong("lr_scheduler", "does not return a scheduler", scheduler, allowed)
    if _needs_argument(scheduler):
        allowed = "schedules that are a function of the number of steps alone, not of a loss"
        raise _wrong("lr_scheduler", "returns a scheduler whose step needs a value", scheduler, allowed)
    scheduler_numbers(scheduler)
    return scheduler


def build_both(
    make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None, parameters: Mapping[str, Parameter]
) -> tuple[Optimizer, LRScheduler | None, dict[str, Any], bool]:
    """Build an optimizer and its schedule; return also their settings as plain values, and ``is_elementwise``."""
    optimizer = build_optimizer(make_optimizer, parameters)
    groups, joins = group_numbers(optimizer), is_elementwise(optimizer)
    scheduler = build_scheduler(make_scheduler, optimizer) if make_scheduler and parameters else None
    scheduled = {
        key
        for before, after in zip(groups, group_numbers(optimizer), strict=True)
        for key, value in after.items()
        if key == "lr" or before.get(key) != value
    }
    said = {
        "groups": groups,
        "scheduled": sorted(scheduled) if scheduler else [],
        "scheduler": scheduler_numbers(scheduler) if scheduler else None,
    }
    return optimizer, scheduler, said, joins


def _needs_argument(thing: Optimizer | LRScheduler) -> bool:
    arguments = inspect.signature(thing.step).parameters.values()
    required = [argument for argument in arguments if argument.default is inspect.Parameter.empty]
    return any(argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD) for argument in required)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may step with others: torch's own, not hooked. Call it before adding a schedule."""
    own = vars(optimizer)
    watched = "step" in own or own.get("_optimizer_step_pre_hooks") or own.get("_optimizer_step_post_hooks")
    return type(optimizer) in _ELEMENTWISE and not watched


def step_together(optimizers: Sequence[Optimizer]) -> None:
    """Let optimizers step in one call; ``is_elementwise`` holds for all, and ``kernels_of`` is the same."""
    if len(optimizers) < 2:
        for optimizer in optimizers:
            optimizer.step()
        return
    groups: list[dict[str, Any]] = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        settings = _settings(group)
        same = next((others for others in groups if _settings(others) == settings), None)
        if same is None:
            groups.append(same := {**settings, "params": []})
        same["params"].extend(group["params"])
    joint = copy(optimizers[0])  # with its own groups and state, and without attributes added to the original
    joint.param_groups = groups
    joint.state = defaultdict(dict)
    for optimizer in optimizers:
        joint.state.update(optimizer.state)
    joint.step()


def kernels_of(optimizer: Optimizer) -> Any:
    """Return the facts, after a step, on which an optimizer's choice of kernels depends; None: it steps alone.

    Torch chooses for all tensors of a group, so these must have equal type, device, layout and entries of state.
    """
    kernels = set()
    for group in optimizer.param_groups:
        if any(isinstance(value, Tensor) for value in _settings(group).values()):
            return None
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            tensors = (parameter, parameter.grad, *(value for value in state.values() if isinstance(value, Tensor)))
            is_plain = type(parameter) is Parameter and not parameter.is_complex() and parameter.numel()
            if not (is_plain and all(tensor is not None and tensor.is_contiguous() for tensor in tensors)):
                return None
            kinds = tuple((key, getattr(value, "dtype", None)) for key, value in sorted(state.items()))
            kernels.add((parameter.device, parameter.dtype, parameter.grad.dtype, kinds))
    return (type(optimizer), *kernels) if len(kernels) == 1 else None


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_HYPERPARAMETERS}


def optimizer_state(
    optimizer: Optimizer, parameters: Mapping[str, Parameter]
) -> tuple[dict[tuple[str, str], Tensor], dict[str, Any]]:
    """Return tensors by (parameter, key), and everything else as plain values by parameter."""
    tensors: dict[tuple[str, str], Tensor] = {}
    plain: dict[str, Any] = {}
    names = {id(parameter): name for name, parameter in parameters.items()}
    for owner, entries in optimizer.state.items():
        name = names.get(id(owner))
        if name is None:
            allowed = "state that belongs to a parameter"
            raise _wrong("optimizer", "keeps state that belongs to no parameter", optimizer, allowed)
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[name, key] = value
            else:
                plain.setdefault(name, {})[key] = _plain("optimizer", f"state {key!r}", optimizer, value)
    return tensors, plain


def load_optimizer_state(
    optimizer: Optimizer,
    parameters: Mapping[str, Parameter],
    tensors: Mapping[tuple[str, str], Tensor],
    plain: Mapping[str, Any],
    *,
    for_good: bool = False,
) -> None:
    """Load the result of ``optimizer_state``; ``for_good``: nothing else uses the tensors' memory."""
    optimizer.state.clear()
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        state = {key: from_plain(value) for key, value in plain.get(name, {}).items()}
        group = groups.get(id(parameter), {})
        # as in Optimizer.load_state_dict: counters stay on the host unless the step itself runs on the device
        counters_on_device = bool(group.get("capturable") or group.get("fused"))
        for (owner, key), value in tensors.items():
            if owner == name:
                on_device = counters_on_device or value.dim() > 0
                own = value if for_good and is_aligned(value) else value.clone()
                state[key] = moved(own, parameter.device if on_device else _HOST)
        if state:
            optimizer.state[parameter] = state


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor is aligned like torch's own; if not, torch may pick kernels that round differently."""
    alignment = ALIGNMENT if tensor.device.type == "cpu" else DEVICE_ALIGNMENT
    return tensor.is_contiguous() and tensor.data_ptr() % alignment == 0


def group_numbers(optimizer: Optimizer) -> list[Any]:
    """Return the hyperparameters of each parameter group, as plain values."""
    return [
        {
            key: _plain("optimizer", f"hyperparameter {key!r}", optimizer, value)
            for key, value in group.items()
            if key not in NOT_HYPERPARAMETERS
        }
        for group in optimizer.param_groups
    ]


def load_settings(
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    numbers: Mapping[str, Any],
    said: Mapping[str, Any],
) -> None:
    """Load the saved groups and schedule, except for settings that the job has changed since then.

    A changed schedule is advanced as if it had been used from the beginning. ``numbers``: what the job saved, and what
    it ``said``; the argument ``said``: this job's settings, from ``build_both``, and what they depend on.
    """
    before = numbers.get("said")
    if before is None or not says_otherwise(numbers, said):
        load_groups(optimizer, numbers["groups"])
        if scheduler is not None and numbers.get("scheduler"):
            load_scheduler(scheduler, numbers["scheduler"])
        return
    if scheduler is not None:
        _advance(scheduler, numbers["num_applied"])
    scheduled = {*before["scheduled"], *said["scheduled"]}
    every = zip(optimizer.param_groups, numbers["groups"], before["groups"], said["groups"], strict=True)
    for group, values, was, now in every:
        kept = {key for key in values if key not in scheduled and was.get(key) == now.get(key)}
        group.update({key: from_plain(values[key]) for key in kept})


def load_groups(optimizer: Optimizer, saved: Iterable[Mapping[str, Any]]) -> None:
    """Load the result of ``group_numbers``."""
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: from_plain(value) for key, value in values.items()})


def load_scheduler(scheduler: LRScheduler, saved: Any) -> None:
    """Load the result of ``scheduler_numbers``."""
    scheduler.load_state_dict(from_plain(saved))


def says_otherwise(numbers: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Return whether a saved state comes from a job with another setting; False if it has no such setting."""
    before = numbers.get("said")
    return before is not None and json.dumps(before, sort_keys=True) != json.dumps(said, sort_keys=True)


def _advance(scheduler: LRScheduler, num_steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch asks for steps of the optimizer between these
        try:
            for _ in range(num_steps):
                scheduler.step()
        except Exception as error:
            allowed = f"a schedule that reaches step {num_steps}, where the run is"
            raise _wrong("lr_scheduler", f"failed: {type(error).__name__}: {error}", scheduler, allowed) from error


def scheduler_numbers(scheduler: LRScheduler) -> Any:
    """Return a schedule's state as plain values."""
    return _plain("lr_scheduler", "state", scheduler, dict(scheduler.state_dict()))


def _plain(field: str, what: str, owner: object, value: Any) -> Any:
    try:
        return to_plain(value)
    except ValueError as error:
        allowed = "tensors per parameter, and numbers, texts, lists and dicts of them"
        raise _wrong(field, f"keeps {what} of type {error}, which cannot be saved", owner, allowed) from error


def _wrong(field: str, message: str, value: object, allowed: str) -> JobError:
    return wrong_job(field, message, type(value).__name__, allowed)


def to_plain(value: Any, tensors: list[Tensor] | None = None) -> Any:
    """Write a value with JSON's types; tuples, dicts, counters and tensors of one number are marked.

    Other tensors are appended to ``tensors``, if given. Raises ValueError naming a type that cannot be written.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_plain(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": [to_plain(item, tensors) for item in value]}
    if isinstance(value, Tensor) and value.numel() == 1 and not value.dtype.is_complex:
        return {_KIND: str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "number": value.item()}
    if isinstance(value, Tensor) and tensors is not None:
        tensors.append(value.detach())
        return {_KIND: "apart", "place": len(tensors) - 1}
    if type(value) in (dict, Counter, defaultdict, OrderedDict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {_KIND: kind, "items": [[to_plain(key), to_plain(item, tensors)] for key, item in value.items()]}
    raise ValueError(type(value).__name__)


def from_plain(value: Any, tensors: Sequence[Tensor] = ()) -> Any:
    """Read a value written by ``to_plain``; a defaultdict or an OrderedDict comes back as a dict."""
    if isinstance(value, list):
        return [from_plain(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[_KIND]
    if kind == "tuple":
        return tuple(from_plain(item, tensors) for item in value["items"])
    if kind == "apart":
        return tensors[value["place"]]
    if kind in ("dict", "counter"):
        pairs = {from_plain(key): from_plain(item, tensors) for key, item in value["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    dtype: torch.dtype = getattr(torch, kind)
    return torch.tensor(value["number"], dtype=dtype).reshape(value["shape"])
