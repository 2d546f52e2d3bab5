"""User code that acts on gradients: checkpoints become plain calls, hooks and ``autograd.grad`` are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from morph.contract.errors import ExportError, JobError
from morph.cutting.source.guards import line_in_loss, replaced
from morph.cutting.source.locate import calling_line, definition_line
from morph.cutting.source.refusal import OR_MARK

_INSTEAD = (
    "an operation of the forward with a backward of its own: a torch.autograd.Function, or "
    "torch.library.custom_op with register_autograd"
)
_REGISTER = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Make ``torch.utils.checkpoint``, by any name, a plain call, because sections have their own recompute."""
    with (
        replaced(checkpoint.CheckpointFunction, "apply", _call),
        replaced(checkpoint, "_checkpoint_without_reentrant_generator", _nothing_around),
    ):
        yield


def _call(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    """Call a reentrant checkpoint: without an input that requires a gradient, its parameters get none either."""
    follows = any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args)
    with torch.set_grad_enabled(follows and torch.is_grad_enabled()):
        return function(*args)


def _nothing_around(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def refuse_parameter_hooks(model: nn.Module) -> None:
    """Refuse hooks on parameters: sections get other tensors, without these hooks."""
    for name, parameter in model.named_parameters():
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            for hook in (hooks or {}).values():
                raise JobError(
                    f"a hook on the gradient of {name} would not run",
                    source=definition_line(hook),
                    field="model",
                    allowed=f"{_INSTEAD}, called on the parameter where it is used",
                )


def refuse_module_hooks(model: nn.Module) -> None:
    """Refuse backward hooks of modules, which are not part of a graph."""
    everywhere = [*modules._global_backward_hooks.values(), *modules._global_backward_pre_hooks.values()]
    for hook in everywhere:
        raise _refused("a backward hook of all modules would not run", definition_line(hook))
    for name, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            raise _refused(f"the backward hook of {name or 'the model'} would not run", definition_line(hook))


class _Calls(TorchFunctionMode):
    """Refuses hooks on tensors, and ``torch.autograd.grad``; ``numbers``: lines that read numbers, by symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, str | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            raise ExportError(
                "a gradient that the forward or the loss takes (torch.autograd.grad) is not traced",
                source=calling_line(),
                allowed="a loss of outputs alone" + OR_MARK,
            )
        if func in _REGISTER:
            raise _refused(f"a hook on a gradient ({func.__name__}) would not run", calling_line())
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool):
            self.numbers.setdefault(str(result), line_in_loss())
        return result


@contextmanager
def gradients_refused() -> Iterator[Mapping[str, str | None]]:
    """While a model is traced, refuse hooks and gradients; yield the lines that read numbers, by symbol."""
    with _Calls() as calls:
        yield calls.numbers


def _refused(what: str, line: str | None) -> ExportError:
    return ExportError(what, source=line, allowed=_INSTEAD + OR_MARK)
