"""Counts the operations and bytes of work that is run on tensors without contents, and times them by a data sheet.

An operation takes as long as its arithmetic or its memory traffic (each operand once), whichever is longer (Williams et
al. 2009, "Roofline"), and at least as long as its launch; times add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from calibrate.estimating.data_sheets import DataSheet, Reached
from morph.contract.errors import JobError

aten = torch.ops.aten
_FREE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_READS_ROWS = {aten.embedding, aten.index, aten.index_select, aten.gather}
"""Operations that read as many elements of their operand as they return."""


@dataclass(frozen=True)
class Operation:
    """The cost of one kernel. ``dtype``: of the operands of its matrix product; empty: it has none."""

    num_bytes: int
    num_flops: int = 0
    dtype: str = ""

    def time_s(self, sheet: DataSheet, reached: Reached) -> float:
        """Return its time; JobError: the device cannot compute with these operands."""
        moved_s = self.num_bytes / (reached.memory * sheet.memory_bytes_per_s)
        return max(self._computed_s(sheet, reached), moved_s, reached.launch_s)

    def _computed_s(self, sheet: DataSheet, reached: Reached) -> float:
        if not self.num_flops:
            return 0.0
        peak = sheet.flops_per_s.get(self.dtype) or sheet.flops_per_s["float32"] * (self.dtype == "tf32")
        if not peak:
            known = ", ".join(name for name in sheet.flops_per_s if name != "tf32")
            raise JobError(
                f"{sheet.device} has no matrix products in {self.dtype}",
                source="estimate",
                field="precision",
                value=self.dtype,
                allowed=f"{known}, or another device",
            )
        return self.num_flops / (reached.compute * peak)


def total_s(operations: Iterable[Operation], sheet: DataSheet, reached: Reached) -> float:
    """Return the time of operations that run one after the other."""
    return sum(operation.time_s(sheet, reached) for operation in operations)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch ships no types for it
    """Lists the operations that are run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        if not (_only_views(func, given, made) or func.overloadpacket in _FREE):
            formula: Any = _FORMULAS.get(func._schema.name) or flop_registry.get(func.overloadpacket)
            num_flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
            read = [] if func.overloadpacket in _READS_ROWS else given
            rows = made if func.overloadpacket in _READS_ROWS else []
            num_bytes = _num_bytes(read) + _num_bytes(rows) + _num_bytes(made)
            dtype = next((_type_of(tensor) for tensor in given if tensor.is_floating_point()), "") if num_flops else ""
            self.operations.append(Operation(num_bytes, num_flops, dtype))
        return result


class _DropoutInKernel(TorchFunctionMode):
    """Runs attention without dropout: it is part of a GPU's kernel, but the CPU's, which give the shapes, lack it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (aten.scaled_dot_product_attention.default, torch.nn.functional.scaled_dot_product_attention):
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)


@contextmanager
def counted() -> Iterator[list[Operation]]:
    """Count the block's operations into the list."""
    with _DropoutInKernel(), Counting() as counting:
        yield counting.operations


def _only_views(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    known = {tensor.untyped_storage()._cdata for tensor in given}
    return not func._schema.is_mutable and all(tensor.untyped_storage()._cdata in known for tensor in made)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; an expanded one has those of its storage."""
    return sum(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in tensors)


def _type_of(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return "tf32" if name == "float32" and torch.get_float32_matmul_precision() != "highest" else name


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = query.shape, key.shape, value.shape
    return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call] # as above


def _attention_backward(out_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = out_gradient.shape, query.shape, key.shape, value.shape
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call] # as above


def _grouped_product(rows: Tensor, matrices: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Return the operations of a product whose rows [S, in] are each multiplied with one of several matrices."""
    if rows.dim() == matrices.dim() == 2:  # the groups are of the inner dimension
        return 2 * rows.shape[-1] * out_val.shape[-2] * out_val.shape[-1]
    return 2 * rows.shape[-1] * out_val.numel()


def _grouped_product_backward(rows: Tensor, _: Tensor, __: Tensor, out_gradient: Tensor, **___: Any) -> int:
    return 4 * rows.shape[-1] * out_gradient.numel()


_FORMULAS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_grouped_mm": _grouped_product,
    "transformers::grouped_mm_fallback": _grouped_product,
    "transformers::grouped_mm_fallback_backward": _grouped_product_backward,
}
"""Beside those of torch."""
