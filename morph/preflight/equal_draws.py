"""Keeps samples from affecting each other by random draws or statistics: draws are equal, batch norm is frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_STATISTICS = {"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"}
_MIDDLE = 0.5
_CONSTANT = ("rand", "normal", "uniform", "exponential", "log_normal", "cauchy")
"""Prefixes of operations whose draws do not depend on a sample."""
_DROPOUT = {"dropout_p", "dropout"}
"""Names of dropout arguments of attention and of recurrent layers."""


class EqualDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Draws the same constant for each sample, keeps all of a dropout, and gives batch norm mean 0 and variance 1.

    A draw from a distribution that a tensor describes gives its mean or likeliest element. ``coarsest``: the largest
    ``eps`` of the types used. ``has_other_backward``: a backward does not fit its changed result.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.coarsest = 0.0
        self.has_other_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload):
            is_draw = torch.Tag.nondeterministic_seeded in func.tags and _name(func) != "native_dropout"
            self.has_other_backward |= is_draw or _name(func) in _STATISTICS
        result = _carry_out(func, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.coarsest = max(self.coarsest, torch.finfo(leaf.dtype).eps)
        return result


def _name(func: OpOverload) -> str:
    return func._schema.name.partition("::")[2].removesuffix("_")


def _carry_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not isinstance(func, OpOverload):
        return func(*args, **kwargs)
    name = _name(func)
    if name in _STATISTICS and torch.is_tensor(args[0]):
        return _normalised(args)
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs)
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    given |= {key: 0.0 for key in given.keys() & _DROPOUT if isinstance(given[key], float)}
    places = [argument.name for argument in func._schema.arguments][: len(args)]
    described = _described(name, given)
    torch.default_generator.manual_seed(0)
    result = func(*(given[key] for key in places), **{key: given[key] for key in kwargs})
    drawn = result[0] if isinstance(result, tuple) else result
    if isinstance(drawn, Tensor) and drawn.numel():
        if described is not None:
            drawn.copy_(described)
        elif name == "randperm":
            drawn.copy_(torch.arange(len(drawn)))
        elif name in {"bernoulli", "geometric"}:
            drawn.fill_(1)
        elif name.startswith(_CONSTANT):
            drawn.fill_(_MIDDLE if drawn.is_floating_point() else drawn.flatten()[0].item())
    return result


def _described(name: str, given: dict[str, Any]) -> Any:
    """Return the value drawn from a distribution that a tensor describes; None for other operations."""
    if name.startswith("rrelu_with_noise"):
        slope = (given.get("lower", 1 / 8) + given.get("upper", 1 / 3)) / 2
        return torch.nn.functional.leaky_relu(given["self"], slope)
    if name == "multinomial":
        count, again = given["num_samples"], given.get("replacement", False)
        likeliest = given["self"].topk(1 if again else count, dim=-1).indices
        return likeliest.expand(*likeliest.shape[:-1], count)
    if name == "binomial":
        return given["count"] * given["prob"]
    if name == "_sample_dirichlet":
        return given["self"] / given["self"].sum(-1, keepdim=True)
    if name in {"poisson", "_standard_gamma"}:
        return given["self"]
    mean = given.get("mean")
    return mean if name == "normal" and isinstance(mean, Tensor) else None


def _normalised(args: Any) -> tuple[Tensor, Tensor, Tensor]:
    values, weight, bias = args[:3]
    shape = (1, -1, *(1 for _ in values.shape[2:]))
    for scale, apply in ((weight, torch.mul), (bias, torch.add)):
        values = values if scale is None else apply(values, scale.view(shape))
    empty = values.new_zeros(0)
    return values.clone(), empty, empty
