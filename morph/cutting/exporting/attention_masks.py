"""Let a traced model of transformers choose its attention masks as the plain model does.

Untraced, transformers leaves a mask out where it is the plain causal one, or masks nothing: attention is then called
with ``is_causal`` and grouped keys, which is what flash kernels need. Under torch.export it always makes the mask, and
repeats the keys, because a program may be run with other lengths than its example's. Morph's programs are not: only the
number of samples is free. (``transformers.masking_utils``: ``_ignore_causal_mask_sdpa``,
``find_packed_sequence_indices``.)

A mask that depends on an entry of the batch (``attention_mask``, ``position_ids``) is made in either case: what
it hides is known only when the batch is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot

from morph.cutting.source.guards import replaced

_EXPAND = torch.ops.aten.expand.default
Indices = Callable[[Tensor], "Tensor | None"]


@contextmanager
def masks_as_untraced() -> Iterator[None]:
    """Within: transformers' masks are left out where they are when its model is called plainly.

    Versions of transformers without these functions are left alone; their traced models make every mask.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "find_packed_sequence_indices") or not hasattr(masking, "is_torchdynamo_exporting"):
        yield
        return
    found = _none_for_one_sequence(masking.find_packed_sequence_indices)  # type: ignore[union-attr]
    with (
        replaced(masking, "is_torchdynamo_exporting", lambda: False),
        replaced(masking, "find_packed_sequence_indices", found),
    ):
        yield


def _none_for_one_sequence(indices_of: Indices) -> Indices:
    def indices(position_ids: Tensor) -> Tensor | None:
        known = known_numbers(position_ids)
        if known is not None:
            with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
                found = indices_of(known)
                one_sequence = found is None or not bool(found.any())
            if one_sequence:
                return None
        return indices_of(position_ids)

    return indices


def known_numbers(tensor: Tensor) -> Tensor | None:
    """Return what a tensor of the export under way holds in every run, on CPU.

    A dimension of as many as there are samples, along which it is the same, counts one. None where it depends on the
    batch, weights or random numbers, or no export is under way.
    """
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:
        return None
    with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            found: Tensor = _computed(slot.proxy.node, {})
        except _UnknownError:
            return None
    return found


class _UnknownError(Exception):
    """A value depends on more than constants."""


def _computed(node: Node, known: dict[Node, Any]) -> Any:
    if node in known:
        return known[node]
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        raise _UnknownError
    args: Any = node.args
    if node.target is _EXPAND:
        sizes = [1 if isinstance(size, Node) else size for size in args[1]]
        args = (args[0], sizes, *args[2:])
    given, named = torch.fx.node.map_arg((args, node.kwargs), lambda argument: _computed(argument, known))
    if "device" in named:
        named = {**named, "device": torch.device("cpu")}
    known[node] = node.target(*given, **named)
    return known[node]
