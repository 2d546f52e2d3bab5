"""Second holders, and what of a step that was given up need not be run again: partial sums, and what is in them.

Sums of gradients are of integers (decision 0001), so it does not matter in which order, by whom and in which shape a
micro-batch was added, only that each was added once. A worker that gives up a step keeps its sums and tells what is in
them; the next shape runs what is missing (decision 0019). Sets of micro-batches are bit masks here, and spans where
they travel.
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
"""In place of a unit: losses and metrics of micro-batches, which belong to the last section."""


class Follow(Value):
    """A second holder on another VM: what ``worker`` has is beside it on ``follower``.

    ``units`` are kept in step there: their state, and each step's reduced gradients before the step is decided. The
    follower has those of ``known`` already. Without units it is given partial sums alone.
    """

    worker: str
    follower: str
    units: tuple[str, ...] = ()
    known: tuple[str, ...] = ()


class Counted(Value):
    """Micro-batches of which a sum holds what the backward of one section gave."""

    section: Number
    micro_batches: tuple[Span, ...]

    @cached_property
    def mask(self) -> int:
        """The same as a set."""
        return mask_of(self.micro_batches)


class PartialSum(Value):
    """A sum of one unit's gradients: of each section that uses the unit, what is in it."""

    unit: str
    counted: tuple[Counted, ...]


class KeptSums(Value):
    """What a worker has of the step ``step``, which was not decided."""

    step: Number
    sums: tuple[PartialSum, ...]


class SalvagedSum(Value):
    """One that counts in the next shape: ``holder`` has it, ``receiver`` (or it itself) goes on with it."""

    holder: str
    receiver: str
    sum: PartialSum


class Salvage(Value):
    """What the first step of a generation begins with.

    No contribution is in two of the sums. ``remaining``: the micro-batches of which one is missing somewhere; they run
    again, and each is added only where it is missing.
    """

    sums: tuple[SalvagedSum, ...] = Field(min_length=1)
    remaining: tuple[Span, ...]


def share_in(plan: Plan, replica: int, salvage: Salvage | None) -> Sequence[int]:
    """Return the micro-batches that a replica runs in a step of which so much is there."""
    if salvage is None:
        return plan.micro_batches_of(replica)
    remaining = [number for first, end in salvage.remaining for number in range(first, end)]
    return plan.share_of(replica, remaining)


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
    """Return what is in a sum: micro-batches by section."""
    return {entry.section: entry.mask for entry in total.counted}


def partial_sum(unit: str, counted: dict[int, int]) -> PartialSum:
    """Return the sum of a unit that has these micro-batches by section."""
    entries = tuple([_counted(section, counted[section]) for section in sorted(counted) if counted[section]])
    return PartialSum.model_construct(unit=unit, counted=entries)


def _counted(section: int, mask: int) -> Counted:
    counted = Counted.model_construct(section=section, micro_batches=spans_of(mask))
    vars(counted)["mask"] = mask  # it need not be worked out again
    return counted
