"""A mode in which samples cannot meet by chance or by statistics: every draw is the same, and batch norm is frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_STATISTICS = {"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm"}
_MIDDLE = 0.5


class EqualDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Draws one constant for each sample, keeps all of a dropout, and gives batch norm mean 0 and variance 1.

    So the loss of a batch can be held against the losses of its samples, in training mode.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out ``func``, with these exceptions."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2].removesuffix("_")
        if name in _STATISTICS and torch.is_tensor(args[0]):
            return _normalised(args)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        torch.default_generator.manual_seed(0)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.numel():
            if name == "randperm":
                result.copy_(torch.arange(len(result)))
            elif name == "bernoulli":
                result.fill_(1)
            elif name.startswith(("rand", "normal", "uniform", "exponential", "log_normal", "cauchy")):
                result.fill_(_MIDDLE if result.is_floating_point() else result.flatten()[0].item())
        return result


def _normalised(args: Any) -> tuple[Tensor, Tensor, Tensor]:
    values, weight, bias = args[:3]
    shape = (1, -1, *(1 for _ in values.shape[2:]))
    for scale, apply in ((weight, torch.mul), (bias, torch.add)):
        values = values if scale is None else apply(values, scale.view(shape))
    empty = values.new_zeros(0)
    return values.clone(), empty, empty
