"""Lets a traced model of transformers choose its attention masks as the plain model does.

Untraced, transformers omits a mask that is plainly causal or masks nothing, and calls attention with ``is_causal`` and
grouped keys, as flash kernels require; under torch.export it always makes the mask. Therefore the function that makes
masks for ``sdpa`` is set in transformers' registry (``AttentionMaskInterface``, from 4.53), and may omit those that
depend on no entry of the batch. For every library, ``needless_masks`` finds masks in the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import statically_known_true

from morph.cutting.source.guards import replaced

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_EXPAND = torch.ops.aten.expand.default
_MOST_ENTRIES = 1 << 26  # the largest mask that is examined, with 8,192 tokens
Indices = Callable[[Tensor], "Tensor | None"]
MakeMask = Callable[..., "Tensor | None"]


@contextmanager
def masks_as_untraced() -> Iterator[None]:
    """While the block runs, transformers omits the masks that it omits in an untraced call."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    masks, packed = masking.ALL_MASK_ATTENTION_FUNCTIONS, "find_packed_sequence_indices"
    plain = masks["sdpa"]
    with ExitStack() as stack:
        masks.register("sdpa", _none_where_allowed(plain))
        stack.callback(masks.register, "sdpa", plain)
        if hasattr(masking, packed):  # from 4.54
            stack.enter_context(replaced(masking, packed, _none_for_one_sequence(getattr(masking, packed))))
        yield


def _none_where_allowed(plain: MakeMask) -> MakeMask:
    def mask(*args: Any, **given: Any) -> Tensor | None:
        return None if not args and _is_needless(given) else plain(*args, **given)

    return mask


def _is_needless(given: Mapping[str, Any]) -> bool:
    """Whether attention gives the same result without the mask that transformers requests with these arguments."""
    num_queries = given["q_length"] if "q_length" in given else given["cache_position"].shape[0]  # until 5.1
    num_keys, window = given["kv_length"], given.get("local_size")
    if given.get("attention_mask") is not None or (window is not None and num_keys >= window):
        return False
    if given.get("allow_is_bidirectional_skip", False):
        return True
    is_whole = any(statically_known_true(num_queries == number) for number in (1, num_keys))
    return is_whole and given.get("allow_is_causal_skip", True)


def _none_for_one_sequence(indices_of: Indices) -> Indices:
    def indices(position_ids: Tensor) -> Tensor | None:
        known = known_numbers(position_ids)
        if known is not None:
            with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
                indices = indices_of(known)
                one_sequence = indices is None or not bool(indices.any())
            if one_sequence:
                return None
        return indices_of(position_ids)

    return indices


def needless_masks(graph_module: GraphModule) -> Iterator[Node]:
    """Yield each attention node whose constant mask is equivalent to ``is_causal``, or masks nothing."""
    judged: dict[Node, bool] = {}
    for node in graph_module.graph.find_nodes(op="call_function", target=_ATTENTION):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if isinstance(mask, Node):
            if mask not in judged:
                judged[mask] = _hides_nothing_else(mask)
            if judged[mask]:
                yield node


def _hides_nothing_else(mask: Node) -> bool:
    shape = mask.meta["val"].shape[-2:]
    if not all(isinstance(size, int) for size in shape) or shape.numel() > _MOST_ENTRIES:
        return False
    try:
        values: Tensor = _computed(mask, {})
    except _UnknownError:
        return False
    shown = values if values.dtype == torch.bool else values == 0
    if not bool((shown | _is_hidden(values)).all()):
        return False  # its other entries are not zero
    return bool(shown.all()) or bool((shown == torch.ones(shape, dtype=torch.bool).tril()).all())


def _is_hidden(mask: Tensor) -> Tensor:
    """Return where a mask hides entries; floating-point masks are added to the scores."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def known_numbers(tensor: Tensor) -> Tensor | None:
    """Return the values (on CPU) that a tensor has in every run of the program under export, if there are any.

    A dimension of size m (samples) along which the values are equal has size 1 in the result.
    """
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:
        return None
    with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            values: Tensor = _computed(slot.proxy.node, {})
        except _UnknownError:
            return None
    return values


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
