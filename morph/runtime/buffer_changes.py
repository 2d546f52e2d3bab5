"""How a micro-batch changes a buffer, as numbers that are summed as gradients are; what a step makes of the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from morph.contract.errors import JobError

_EXACT_IN_FLOAT64 = 2**52


def change_of(old: Tensor, new: Tensor) -> Tensor:
    """Return by how much one micro-batch changes a buffer, in float64."""
    if not old.is_floating_point():
        return (new.to(torch.int64) - old.to(torch.int64)).to(torch.float64)
    # what stays infinite does not change
    return torch.where(new == old, 0.0, new.to(torch.float64) - old.to(torch.float64))


def change_like(buffer: Tensor, *, exact: bool) -> Tensor:
    """Return a tensor, without memory, of the shape, type and device of the mean change."""
    dtype = torch.float64 if exact or buffer.dtype == torch.float64 else torch.float32
    return torch.empty((), dtype=dtype, device=buffer.device).expand(buffer.shape)


def apply_change(name: str, buffer: Tensor, change: Tensor) -> None:
    """Change a buffer, in place, by the mean over the micro-batches of a step; integers change by whole numbers.

    Raises:
        JobError: an integer changes by more than float64 holds exactly.
    """
    with torch.no_grad():
        if buffer.is_floating_point():
            buffer.copy_(buffer.to(torch.float64) + change)
            return
        if bool((change.abs() > _EXACT_IN_FLOAT64).any()):
            raise JobError(
                f"the forward changes integer buffer {name} by a number that is too large",
                source="Job",
                field="model",
                allowed=f"changes up to {_EXACT_IN_FLOAT64}",
            )
        buffer.copy_(buffer.to(torch.int64) + change.round().to(torch.int64))
