"""A simulated worker's sums of a step: every contribution by unit, section and micro-batch (decision 0019)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from morph.contract.messages import ReshapeOrder, Slot, UnitId, WorkerId
from morph.contract.salvage import LOSSES, KeptSums, PartialSum, counted_in, mask_of, partial_sum, share_in

UnitSection = tuple[UnitId, int]
"""A unit, and one of the sections that use it."""


class StepStart:
    """The state before a step of a shape; ``first``: the generation's first step, first tried, with salvaged sums."""

    def __init__(self, units: Mapping[UnitId, Sequence[int]], order: ReshapeOrder, *, first: bool) -> None:
        self._order, self._salvage = order, order.salvage if first else None
        self._places = [
            tuple((unit, section) for unit, used in units.items() for section in used if section in sections)
            for sections in [stage.sections for stage in order.plan.stages]
        ]
        self._shares: dict[int, Sequence[int]] = {}
        self.counted: dict[UnitSection, int] = {}
        self._parts: dict[WorkerId, list[PartialSum]] = {}
        for entry in () if self._salvage is None else self._salvage.sums:
            _add(self.counted, entry.sum)
            self._parts.setdefault(entry.receiver, []).append(entry.sum)

    def places(self, slot: Slot) -> tuple[UnitSection, ...]:
        """Return the places that a worker's stage sums."""
        return self._places[slot.stage]

    def share(self, slot: Slot) -> Sequence[int]:
        """Return the micro-batches that a worker runs."""
        if slot.replica not in self._shares:
            self._shares[slot.replica] = share_in(self._order.plan, slot.replica, self._salvage)
        return self._shares[slot.replica]

    def parts(self, slot: Slot) -> Sequence[PartialSum]:
        """Return the sums that a worker continues with."""
        return self._parts.get(slot.worker, ())

    @property
    def whole(self) -> int:
        """The set of all micro-batches of a step."""
        return (1 << self._order.plan.num_micro_batches) - 1


@dataclass
class WorkerSums:
    """The sums of one worker. ``units``: the sections that use each unit; ``LOSSES`` belong to the last section.

    ``parts``: the sums of an abandoned step; ``counted``: the content of this worker's sums of the running step.
    """

    units: Mapping[UnitId, Sequence[int]]
    step: int | None = None
    parts: list[PartialSum] = field(default_factory=list)
    counted: dict[UnitSection, int] | None = None
    before: Mapping[UnitSection, int] = field(default_factory=dict)
    share: Sequence[int] = ()
    whole: int = 0
    _places: tuple[UnitSection, ...] = ()

    def begin(self, start: StepStart, slot: Slot, step: int) -> bool:
        """Begin a step; returns whether this worker has the sums that the order tells it to continue with."""
        self.whole, self.share, self._places = start.whole, start.share(slot), start.places(slot)
        self.before, self.counted = start.counted, {}
        has_all, known = True, set(map(id, self.parts))
        for part in start.parts(slot):
            has_all &= id(part) in known or part in self.parts
            _add(self.counted, part)
        self.step, self.parts = step, []
        return has_all

    def run(self, num_micro_batches: int | None = None) -> None:
        """Run the first micro-batches of the share, or all of it."""
        assert self.counted is not None
        share = self.share[:num_micro_batches]
        if isinstance(share, range):
            ran = mask_of([(share.start, share.stop)])
        else:
            ran = functools.reduce(operator.or_, [1 << number for number in share], 0)
        if not self.before:
            self.counted = dict.fromkeys(self._places, ran) if ran else {}
            return
        for place in self._places:
            if added := ran & ~self.before.get(place, 0):
                present = self.counted.get(place, 0)
                assert not present & added, f"{present & added:b} are counted twice in {place}"
                self.counted[place] = present | added

    def keep(self, step: int, *, prepared: Iterable[UnitId] = ()) -> None:
        """Abandon the step, and keep the sums; for units whose step is ``prepared``, these are the reduced sums."""
        if self.counted is not None:
            units: dict[UnitId, dict[int, int]] = {}
            for (unit, section), mask in self.counted.items():
                units.setdefault(unit, {})[section] = mask
            for unit in prepared:
                units[unit] = dict.fromkeys(self.units[unit], self.whole)
            parts = [partial_sum(unit, masks) for unit, masks in units.items()]
            self.parts, self.counted = [part for part in parts if part.counted], None
        if self.step != step:
            self.step, self.parts = step, []

    def told(self) -> KeptSums | None:
        """Return the report to the manager."""
        return (
            None
            if self.step is None or not self.parts
            else KeptSums.model_construct(step=self.step, sums=tuple(self.parts))
        )


def with_losses(units: Mapping[UnitId, Sequence[int]], num_sections: int) -> dict[UnitId, Sequence[int]]:
    """Return the units and, among them, the losses, which belong to the last section."""
    return {**units, LOSSES: (num_sections - 1,)}


def _add(places: dict[UnitSection, int], part: PartialSum) -> None:
    for section, mask in counted_in(part).items():
        assert not places.get((part.unit, section), 0) & mask, f"{part} is counted twice"
        places[part.unit, section] = places.get((part.unit, section), 0) | mask
