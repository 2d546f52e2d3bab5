"""Where the user's code chooses by random numbers, which sections would each draw anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from morph.cutting.source.guards import line_in_loss

PlaceT = TypeVar("PlaceT")
_SMALL = 16


class Choices(TorchDispatchMode, Generic[PlaceT]):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Collects (place, ``file:line``) wherever Python reads a number that torch's generator has decided.

    Only small tensors are followed from where they are drawn.
    """

    def __init__(self, place: Callable[[], PlaceT]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._place = place
        self._drawn: dict[int, Tensor] = {}
        self.found: list[tuple[PlaceT, str | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out ``func``."""
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
                    self._drawn[id(leaf)] = leaf  # kept, so that its id is not another's
        return result
