"""Followers, and partial sums of an abandoned step, whose micro-batches then need not run again.

Sums of gradients are sums of integers (decision 0001), so the order, the worker and the shape in which a micro-batch
was added do not matter, only that each was added once. A worker that abandons a step keeps its sums and reports their
contents; the next shape runs the missing micro-batches (decision 0019). Sets of micro-batches are bit masks in memory
and spans in messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Annotated

from pydantic import Field

from morph.contract.base import Value
from morph.contract.plan import Plan

Number = Annotated[int, Field(ge=0)]
Span = tuple[Number, Number]
"""Micro-batches ``first .. end - 1``."""

LOSSES = "losses"
"""The name that stands for a unit in sums of losses and metrics, which belong to the last section."""


class Follow(Value):
    """A copy on another VM: ``follower`` also holds the state of ``worker``, up to date before each step is decided.

    It already has the units of ``known``; without ``units``, it gets only partial sums.
    """

    worker: str
    follower: str
    units: tuple[str, ...] = ()
    known: tuple[str, ...] = ()


class Counted(Value):
    """Micro-batches whose gradients of one section are in a sum."""

    section: Number
    micro_batches: tuple[Span, ...]

    @cached_property
    def mask(self) -> int:
        """The micro-batches as a set."""
        return mask_of(self.micro_batches)


class PartialSum(Value):
    """A sum of one unit's gradients, with its contents for each section that uses the unit."""

    unit: str
    counted: tuple[Counted, ...]


class KeptSums(Value):
    """The partial sums of a worker for the undecided step ``step``."""

    step: Number
    sums: tuple[PartialSum, ...]


class SalvagedSum(Value):
    """A sum that counts in the next shape: ``holder`` has it, and ``receiver`` (or the holder) continues it."""

    holder: str
    receiver: str
    sum: PartialSum


class Salvage(Value):
    """The partial sums with which the first step of a generation begins.

    No contribution is in two sums. ``remaining``: the micro-batches that are missing in a sum; they run again, and each
    is added only where it is missing. ``num_spared``: the number of the others.
    """

    sums: tuple[SalvagedSum, ...] = Field(min_length=1)
    remaining: tuple[Span, ...]
    num_spared: Number

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """The numbers of the micro-batches that run again."""
        return tuple([number for first, end in self.remaining for number in range(first, end)])


def share_in(plan: Plan, replica: int, salvage: Salvage | None, num_micro_batches: int | None = None) -> Sequence[int]:
    """Return the micro-batches that a replica runs in a step, which may be short or partly salvaged."""
    return plan.share_of(replica, salvage.missing if salvage else range(num_micro_batches or plan.num_micro_batches))


def mask_of(spans: Iterable[Span]) -> int:
    """Return the set of micro-batches in some spans."""
    mask = 0
    for first, end in spans:
        mask |= (1 << end) - (1 << first)
    return mask


@lru_cache(maxsize=2**12)
def spans_of(mask: int) -> tuple[Span, ...]:
    """Return a set of micro-batches as the fewest spans, ascending."""
    spans, passed = [], 0
    while mask:
        gap = (mask & -mask).bit_length() - 1
        mask >>= gap
        length = ((mask + 1) & -(mask + 1)).bit_length() - 1
        mask >>= length
        spans.append((passed + gap, passed + gap + length))
        passed += gap + length
    return tuple(spans)


def counted_in(total: PartialSum) -> dict[int, int]:
    """Return the contents of a sum: micro-batches by section."""
    return {entry.section: entry.mask for entry in total.counted}


def partial_sum(unit: str, counted: dict[int, int]) -> PartialSum:
    """Return the sum of a unit with these micro-batches by section."""
    entries = tuple([_counted(section, counted[section]) for section in sorted(counted) if counted[section]])
    return PartialSum.model_construct(unit=unit, counted=entries)


def _counted(section: int, mask: int) -> Counted:
    counted = Counted.model_construct(section=section, micro_batches=spans_of(mask))
    vars(counted)["mask"] = mask  # cached, so that it is computed once
    return counted
