"""What an emulated message carries at its head: when it is due, whose it is, and a number that depends on its past."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from morph.contract.emulation import HEADER_NUMBERS
from morph.cutting.section import BoundaryTensor


@dataclass(frozen=True)
class Head:
    """``value`` stands for the message's contents; step and micro-batch show a message that went astray."""

    step: int
    micro_batch: int
    value: float


def border(real_bytes: int) -> BoundaryTensor:
    """The tensor of so many bytes that crosses an emulated cut-point."""
    return BoundaryTensor("emulated", (max(HEADER_NUMBERS, real_bytes // 8),), torch.float64, True)


def write_head(message: Tensor, head: Head) -> None:
    """Put a head on a message."""
    message[1:HEADER_NUMBERS] = torch.tensor([head.step, head.micro_batch, head.value], dtype=torch.float64)


def read_head(message: Tensor, step: int, micro_batch: int) -> float:
    """The value of a message that must be of this step and micro-batch."""
    found_step, found_micro_batch, value = message[1:HEADER_NUMBERS].tolist()
    assert (found_step, found_micro_batch) == (step, micro_batch), (
        f"a message of step {found_step:g}, micro-batch {found_micro_batch:g} came for {step}, {micro_batch}"
    )
    return float(value)


def stamp(message: Tensor, due_s: float) -> None:
    """Write down when a message is due."""
    message[0] = due_s


def due_s(message: Tensor) -> float:
    """When a message is due."""
    return float(message[0])
