"""Keeps each ``torch.autograd.Function`` of the user as one operation, so that its own backward is run.

While a model is traced, ``apply`` is redirected to one operation that stands for any such call; then its nodes get the
function itself as their target.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function, FunctionCtx, _SingleLevelFunction
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from morph.contract.errors import ExportError
from morph.cutting.source.guards import replaced
from morph.cutting.source.locate import definition_line
from morph.cutting.source.refusal import OR_MARK

_OPERATION = "morph::user_function"
_PURE = "a function of its arguments alone: give every tensor that it reads to `apply`, and return new ones"
_calls: list[UserFunction] = []
"""Calls in the model that is being traced; the graph refers to them by their index."""


@dataclass(frozen=True)
class _Given:
    """Place of an argument that is known only when the function is called: a tensor, or a number that depends on m."""

    is_tensor: bool
    index: int


@dataclass(eq=False)
class UserFunction:
    """A call of a ``torch.autograd.Function``, as the target of a graph's node; ``results`` are known once it ran.

    ``leaves``: the arguments in flat order, without tensors and symbolic numbers. ``needs_input_grad``: of each.
    """

    function: type[Function]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    needs_input_grad: tuple[bool, ...]
    results: tuple[Any, ...] = ()
    results_spec: TreeSpec | None = None
    differentiable: tuple[bool, ...] = ()
    flops: Any = 0

    def __post_init__(self) -> None:
        self.__module__ = self.function.__module__
        self.__name__ = self.function.__name__

    def __str__(self) -> str:
        """Return the function's name and constants; equal in every process."""
        constants = ", ".join(_text(leaf) for leaf in self.leaves)
        return f"{self.function.__module__}.{self.function.__qualname__}({constants})"

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        """Run the user's forward; autograd will run the user's backward."""
        args, kwargs = self.arguments(tensors, numbers)
        results = self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]

    def arguments(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments; a device becomes that of the tensors."""

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, _Given):
                return (tensors if leaf.is_tensor else numbers)[leaf.index]
            return tensors[0].device if isinstance(leaf, torch.device) and tensors else leaf

        args, kwargs = tree_unflatten([fill(leaf) for leaf in self.leaves], self.spec)
        return args, kwargs

    def put_together(self, tensors: Sequence[Tensor]) -> Any:
        """Return the function's result from the tensors in it."""
        assert self.results_spec is not None
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, _Given) else leaf for leaf in self.results]
        return tree_unflatten(leaves, self.results_spec)

    def dry_run(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        """Run the forward on fake tensors to learn what it returns, in memory of its own. Raises ExportError."""
        args, kwargs = self.arguments(tensors, numbers)
        context = _Context(self.needs_input_grad)
        versions = [tensor._version for tensor in tensors]
        with torch.no_grad(), _Watch(self.function, tensors) as watch:
            if self.function.setup_context is not Function.setup_context:
                results = self.function.forward(*args, **kwargs)
                self.function.setup_context(context, args, results)
            else:
                results = self.function.forward(context, *args, **kwargs)
        if context.dirty_tensors or versions != [tensor._version for tensor in tensors]:
            raise _refused(self.function, "changes a tensor that it is given")
        leaves, self.results_spec = tree_flatten(results)
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        excluded = {id(tensor) for tensor in context.non_differentiable}
        self.results = tuple(_Given(True, 0) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self.differentiable = tuple(
            (tensor.is_floating_point() or tensor.is_complex()) and id(tensor) not in excluded for tensor in made
        )
        self.flops = watch.flops
        return [tensor.new_empty_strided(tensor.shape, tensor.stride()) for tensor in made]


@contextmanager
def kept_whole() -> Iterator[None]:
    """While a model is traced and its graph is processed, keep each ``apply`` of the user as one node."""
    _calls.clear()
    try:
        with replaced(_SingleLevelFunction, "apply", classmethod(_apply)):
            yield
    finally:
        _calls.clear()


def put_back(graph_module: GraphModule) -> None:
    """Make the user's functions the targets of the nodes that stand for their calls."""
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.morph.user_function.default):
            number, tensors, numbers = node.args
            node.target, node.args = _calls[number], (tensors, numbers)
        module.recompile()


def _apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Replace ``apply`` in the base class of ``Function``, for calls by the user's code but not by torch."""
    mode = _get_dispatch_mode_pre_dispatch(  # type: ignore[no-untyped-call]  # torch does not annotate it
        torch._C._TorchDispatchModeKey.PROXY
    )
    if mode is None:
        original = super(_SingleLevelFunction, function)
        return original.apply(*args, **kwargs)  # type: ignore[attr-defined]  # the method of torch's C code
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    numbers = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt | torch.SymFloat)]
    if any(isinstance(leaf, nn.Module) for leaf in leaves):
        raise _refused(function, "is given a module")
    call = UserFunction(function, tuple(_left_out(leaves)), spec, tuple(_needs_gradient(leaf) for leaf in args))
    _calls.append(call)
    return call.put_together(torch.ops.morph.user_function(len(_calls) - 1, tensors, numbers))


def _left_out(leaves: Sequence[Any]) -> Iterator[Any]:
    tensors, numbers = count(), count()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield _Given(True, next(tensors))
        elif isinstance(leaf, torch.SymInt | torch.SymFloat):
            yield _Given(False, next(numbers))
        else:
            yield leaf


def _needs_gradient(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad


def _dry_run(call: int, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
    mode = detect_fake_mode(tensors)
    shapes = mode.shape_env if mode is not None else None
    with shapes.ignore_fresh_unbacked_symbols() if shapes is not None else nullcontext():
        return _calls[call].dry_run(tensors, numbers)


def _never(*_: Any) -> Any:
    raise AssertionError("a model is traced forward only")


torch.library.define(_OPERATION, "(int call, Tensor[] tensors, Scalar[] numbers) -> Tensor[]")
torch.library.register_fake(_OPERATION, _dry_run)
torch.library.register_autograd(_OPERATION, _never)


class _Context(FunctionCtx):
    """The ``ctx`` of a forward."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.dirty_tensors: tuple[Tensor, ...] = ()
        self.non_differentiable: tuple[Tensor, ...] = ()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Refuses a forward that reads a tensor of the model that is not an argument: sections would not provide it."""

    def __init__(self, function: type[Function], given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._function = function
        self.flops: Any = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in given}
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        if any(tensor.untyped_storage()._cdata not in self._known for tensor in read):
            raise _refused(self._function, "reads a tensor that it is not given")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        self.flops += formula(*args, **kwargs, out_val=result) if formula is not None else 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._alive.append(leaf)  # kept alive, so that no other storage gets its identity
                self._known.add(leaf.untyped_storage()._cdata)
        return result


def _refused(function: type[Function], what: str) -> ExportError:
    return ExportError(
        f"{function.__name__}, an autograd.Function, {what}",
        source=definition_line(function.forward),
        allowed=_PURE + OR_MARK,
    )


def _text(leaf: Any) -> str:
    if isinstance(leaf, _Given):
        return "tensor" if leaf.is_tensor else "number"
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | torch.dtype):
        return repr(leaf)
    if isinstance(leaf, torch.device):
        return "device"
    named = leaf if inspect.isroutine(leaf) or inspect.isclass(leaf) else type(leaf)
    return f"{named.__module__}.{named.__qualname__}"
