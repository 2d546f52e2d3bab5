"""A worker's sums of a step: the gradients of its units, with the micro-batches in each sum (decision 0019)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from morph.contract.messages import MARKS, SAMPLES, WEIGHT, MicroBatchLoss, StepOrder
from morph.contract.salvage import LOSSES, KeptSums, PartialSum, Salvage, counted_in, partial_sum
from morph.runtime.groups.channels import Ring
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.accumulators import Accumulator
from morph.runtime.state.reduction import Reduction
from morph.runtime.state.unit_state import UnitState
from morph.runtime.step.generation import Generation


@dataclass(frozen=True)
class HeldSum:
    """A partial sum of a worker: the tensors of a unit, or ``losses``."""

    total: PartialSum
    tensors: Mapping[str, Tensor]
    losses: tuple[MicroBatchLoss, ...] = ()


@dataclass(frozen=True)
class MicroBatchSums:
    """A ``GradientSink`` for one micro-batch."""

    add: Callable[[int, str, Tensor], None]
    done: Callable[[int], None]


@dataclass(frozen=True)
class Rings:
    """The reduction of a worker's units: by unit, its group's name, and the ring (None: alone).

    ``split``: units of several stages of one pipeline; ``rounds``: by section, the round of the others.
    """

    of_unit: Mapping[str, str]
    split: Set[str]
    rounds: Sequence[int]
    ring_of: Callable[[str], Ring | None]
    interrupt: Interrupt
    faults: FaultPlan


class StepSums:
    """The sums of one worker's units in one step; each is reduced as soon as it is complete.

    ``num_micro_batches`` is N, over all replicas. ``salvage``: kept partial sums of all workers, ``held``: this one's.
    ``keep``: whether ``partial_sums`` are needed if the step is abandoned.
    """

    def __init__(  # noqa: PLR0913 (one call builds it)
        self,
        units: Mapping[str, UnitState],
        sections: range,
        micro_batches: Sequence[int],
        num_micro_batches: int,
        last_section: int,
        rings: Rings,
        *,
        salvage: Salvage | None = None,
        held: Sequence[HeldSum] = (),
        keep: bool = False,
        counted: Callable[[int], None] = lambda _num: None,
    ) -> None:
        self.accumulators: dict[str, Accumulator] = {name: state.new_accumulator() for name, state in units.items()}
        self._known_losses: dict[int, MicroBatchLoss] = {}
        self._outputs: dict[int, Sequence[Tensor]] = {}
        self._shares: dict[int, float] = {}
        self._unit_of = {name: unit for unit, state in units.items() for name in state.values}
        self._sections_of = {unit: state.unit.sections for unit, state in units.items()}
        own = [(unit, section) for unit, used in self._sections_of.items() for section in used if section in sections]
        self._losses = LOSSES, last_section
        if last_section in sections:
            own.append(self._losses)
        self._own = tuple(own)
        self.counted = counted
        self._whole = (1 << num_micro_batches) - 1
        self._keep = keep
        self._num_counted = 0
        self._micro_batches = micro_batches
        self._rings = rings
        self._metric_names: Sequence[str] = ()
        self._reduction = Reduction(rings.interrupt, num_micro_batches)
        split = units.keys() & rings.split
        completes = {name: min(self._sections_of[name]) for name in units.keys() - split}
        turns = sorted((rings.rounds[section], -section, name) for name, section in completes.items())
        self._to_reduce = deque((name, completes[name]) for _, _, name in turns)
        self._passed: set[int] = set()
        """Sections whose last backward is done."""
        self._last = sorted(split, key=lambda name: (rings.of_unit[name], name))
        self._gradients: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
        """Gradients by unit of the section whose backward is still running; they are added together."""
        self._before: dict[tuple[str, int], int] = {}
        self._counted: dict[tuple[str, int], int] = {}
        for entry in () if salvage is None else salvage.sums:
            _count(self._before, entry.sum)
        for part in held:
            _count(self._counted, part.total)
            self._known_losses |= {loss.micro_batch: loss for loss in part.losses}
            if part.total.unit in self.accumulators:
                self.accumulators[part.total.unit].merge(part.tensors)

    def of(self, micro_batch: int) -> MicroBatchSums:
        """Return the sink of one micro-batch's gradients."""
        return MicroBatchSums(partial(self._add, micro_batch), partial(self._section_done, micro_batch))

    def _add(self, micro_batch: int, section: int, name: str, gradient: Tensor) -> None:
        """Add the gradients of one micro-batch's backward through one section, unless they are in a sum already."""
        unit = self._unit_of[name]
        if not (self._before and self._before.get((unit, section), 0) >> micro_batch & 1):
            self._gradients[unit].append((name, gradient))

    def add_loss(
        self, micro_batch: int, outputs: Sequence[Tensor], metric_names: Sequence[str], share: float | None = None
    ) -> None:
        """Record the loss and metrics of a micro-batch, unless a worker has them; waits for no device."""
        if not self._before.get(self._losses, 0) >> micro_batch & 1:
            if share is not None:
                self._shares[micro_batch] = share
            one_each = [not name.endswith(SAMPLES) for name in ("", *metric_names)]
            self._outputs[micro_batch] = list(compress(outputs, one_each))
            self._metric_names = list(compress(metric_names, one_each[1:]))

    @property
    def losses(self) -> dict[int, MicroBatchLoss]:
        """Return the losses and metrics of the micro-batches that were run; waits for the device once."""
        outputs, self._outputs = self._outputs, {}
        losses = told_losses(outputs, self._metric_names, self._shares)
        self._known_losses |= {loss.micro_batch: loss for loss in losses}
        return self._known_losses

    def count(self, micro_batch: int) -> None:
        """Count a micro-batch whose backward through every section of the stage is done."""
        self._num_counted += 1
        for place in self._own:
            if not self._before.get(place, 0) >> micro_batch & 1:
                self._counted[place] = self._counted.get(place, 0) | 1 << micro_batch
        self.counted(self._num_counted)

    def _section_done(self, micro_batch: int, section: int) -> None:
        """Handle the end of a section's backward; the last one completes units that no earlier section uses."""
        for unit, gradients in self._gradients.items():
            self.accumulators[unit].add_all(gradients)
        self._gradients.clear()
        if micro_batch == self._micro_batches[-1]:
            self._passed.add(section)
            while self._to_reduce and self._to_reduce[0][1] in self._passed:
                self._reduce([self._to_reduce.popleft()[0]])

    def finish_reduction(self) -> None:
        """Reduce the remaining units, wait for all. Raises as ``Interrupt.wait_for``.

        All workers use one order, units that several stages hold last, so that no two wait for each other.
        """
        self._reduce([name for name, _ in self._to_reduce])
        self._to_reduce.clear()
        self._reduce(self._last)
        self._reduction.finish()

    def _reduce(self, units: Iterable[str]) -> None:
        for unit in units:
            self._rings.faults.reach("reduce")
            self._reduction.put(self.accumulators[unit], self._rings.ring_of(unit))

    def copies(self) -> list[HeldSum]:
        """Return the partial sums so far, in new memory."""
        return [
            replace(part, tensors={name: value.clone() for name, value in part.tensors.items()})
            for part in self.partial_sums()
        ]

    def partial_sums(self) -> list[HeldSum]:
        """Return the sums that would be missing if the step ran again elsewhere: whole sums after the reduction."""
        if not self._keep:
            return []
        held = []
        for unit, accumulator in self.accumulators.items():
            counted = {section: self._counted.get((unit, section), 0) for section in self._sections_of[unit]}
            if accumulator.is_reduced:
                counted = dict.fromkeys(counted, self._whole)
            tensors = accumulator.partial()
            if tensors is not None and any(counted.values()):
                held.append(HeldSum(partial_sum(unit, counted), tensors))
        mask = self._counted.get(self._losses, 0)
        if mask:
            losses = tuple(loss for number, loss in sorted(self.losses.items()) if mask >> number & 1)
            held.append(HeldSum(partial_sum(LOSSES, {self._losses[1]: mask}), {}, losses))
        return held


def told_losses(
    outputs: Mapping[int, Sequence[Tensor]], metric_names: Sequence[str], shares: Mapping[int, float]
) -> list[MicroBatchLoss]:
    """Return the last section's outputs by micro-batch, without per-sample values, in one copy from the device."""
    if not outputs:
        return []
    kept = [place for place, name in enumerate(("", *metric_names)) if not name.endswith(SAMPLES)]
    names = [name for name in metric_names if not name.endswith(SAMPLES)]
    scalars = [some[place].detach().to(torch.float64) for some in outputs.values() for place in kept]
    numbers = torch.stack(scalars).tolist()
    losses = []
    for micro_batch in outputs:
        loss, *metrics = numbers[: len(kept)]
        del numbers[: len(kept)]
        named, share = dict(zip(names, metrics, strict=True)), shares.get(micro_batch)
        if share is not None:
            loss = loss if WEIGHT in named else loss * share
            means = [name for name in names if not name.endswith(MARKS) and name + WEIGHT not in named]
            named |= {name: named[name] * share for name in means}
        losses.append(MicroBatchLoss(micro_batch=micro_batch, loss=loss, metrics=named, share=share))
    return losses


def _count(places: dict[tuple[str, int], int], total: PartialSum) -> None:
    for section, mask in counted_in(total).items():
        place = total.unit, section
        assert not places.get(place, 0) & mask, f"micro-batches of section {section} are in two sums of {total.unit}"
        places[place] = places.get(place, 0) | mask


def held_sum(total: PartialSum, sums: Sequence[HeldSum]) -> HeldSum:
    """Find the sum that an order names among those that a worker has."""
    return next(held for held in sums if held.total == total)


class KnownSums:
    """The partial sums of a worker for its current step or an abandoned one, whose sums are ``parts``.

    ``offer``: called when a copy of the sums is due elsewhere; ``copies``: returns other workers' that are here.
    """

    def __init__(
        self,
        worker: str,
        faults: FaultPlan,
        offer: Callable[[int, Callable[[], Sequence[HeldSum]]], None],
        copies: Callable[[int], Sequence[HeldSum]],
    ) -> None:
        self._worker, self._faults, self._offer, self._copies = worker, faults, offer, copies
        self.parts: list[HeldSum] = []
        self._step: int | None = None
        self._running: StepSums | None = None

    def begin(self, current: Generation, order: StepOrder) -> StepSums:
        """Return the sums of a step that begins, or that begins again in another shape with its kept sums."""
        assert current.slot is not None
        salvage = current.order.salvage_in(order)
        mine = [] if salvage is None else [entry for entry in salvage.sums if entry.receiver == self._worker]
        every, micro_batches = current.order.copy_sums_every, current.micro_batches_in(order)
        keep = current.order.keep_sums and order.attempt == 0  # no other worker has the scales of a later attempt

        def counted(num: int) -> None:
            # counted from the end: the last copy has the time of ``every`` micro-batches to travel before the reduction
            left = len(micro_batches) - num
            running = self._running  # no reference to this frame: sums in a cycle would outlive their step
            if running is not None and keep and every and left and left % every == 0:
                self._offer(order.step, running.copies)

        of = current.topology
        running = StepSums(
            current.units,
            current.plan.stages[current.slot.stage].sections,
            micro_batches,
            current.num_micro_batches(order),
            current.plan.num_sections - 1,
            Rings(of.unit_rings, of.split_units, of.rounds, current.ring_of, current.interrupt, self._faults),
            salvage=salvage,
            held=[held_sum(entry.sum, self.parts) for entry in mine],
            keep=keep,
            counted=counted,
        )
        for accumulator in running.accumulators.values():
            accumulator.allows_non_finite |= order.bears_non_finite
        self._step, self._running, self.parts = order.step, running, []
        return running

    def keep(self, step: int) -> None:
        """Prepare for a new shape, in which this step begins again if it was begun."""
        if self._step == step:
            self._settle()
        else:  # it is decided: its sums need not be read first
            self.drop()
            self._step = step

    def add(self, received: Sequence[HeldSum]) -> None:
        """Keep the partial sums of other workers."""
        self.parts += received

    def told(self) -> KeptSums | None:
        """Return the report to the manager when an order is given up."""
        self._settle()
        if self._step is None or not self.parts:
            return None
        return KeptSums(step=self._step, sums=tuple(part.total for part in self.parts))

    def forget_before(self, version: int) -> None:
        """Release the sums of decided steps."""
        if self._step is not None and self._step < version:
            self.drop()

    def _settle(self) -> None:
        """Abandon the current step: its sums keep their present contents, whatever arrives later."""
        if self._running is not None and self._step is not None:
            self.parts = [*self._running.partial_sums(), *self._copies(self._step)]
            self._running = None

    def drop(self) -> None:
        """Release everything."""
        self.parts, self._step, self._running = [], None, None
