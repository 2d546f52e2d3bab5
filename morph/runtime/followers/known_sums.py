"""The partial sums of a worker, its own and others', for its current step or an abandoned one."""

from __future__ import annotations

from collections.abc import Sequence

from morph.contract.messages import StepOrder
from morph.contract.salvage import KeptSums
from morph.runtime.followers.lane import FollowerLane
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.pre_copy.state_moves import held_sum
from morph.runtime.step.generation import Generation
from morph.runtime.step.sums import HeldSum, Rings, StepSums


class KnownSums:
    """The known partial sums. ``parts`` are the sums of an abandoned step.

    ``followers``: holds copies of others' sums, and receives copies of this worker's sums.
    """

    def __init__(self, worker: str, followers: FollowerLane, faults: FaultPlan) -> None:
        self._worker, self._followers, self._faults = worker, followers, faults
        self.parts: list[HeldSum] = []
        self._step: int | None = None
        self._running: StepSums | None = None

    def begin(self, current: Generation, order: StepOrder) -> StepSums:
        """Return the sums of a step that begins, or that begins again in another shape with its kept sums."""
        assert current.slot is not None
        salvage = current.salvage_in(order)
        mine = [] if salvage is None else [entry for entry in salvage.sums if entry.receiver == self._worker]
        every, micro_batches = current.order.copy_sums_every, current.micro_batches_in(order)
        keep = current.order.keep_sums and order.attempt == 0  # no other worker has the scales of a later attempt

        def counted(num: int) -> None:
            # counted from the end: the last copy has the time of ``every`` micro-batches to travel before the reduction
            left = len(micro_batches) - num
            running = self._running  # no reference to this frame: sums in a cycle would outlive their step
            if running is not None and keep and every and left and left % every == 0:
                self._followers.offer_sums(order.step, running.copies)

        running = StepSums(
            current.units,
            current.plan.stages[current.slot.stage].sections,
            micro_batches,
            current.num_micro_batches(order),
            current.plan.num_sections - 1,
            Rings(
                current.topology.unit_rings,
                current.topology.split_units,
                current.topology.rounds,
                current.ring_of,
                current.interrupt,
                self._faults,
            ),
            salvage=salvage,
            held=[held_sum(entry.sum, self.parts) for entry in mine],
            keep=keep,
            counted=counted,
        )
        for accumulator in running.accumulators.values():
            accumulator.bears_non_finite |= order.bears_non_finite
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
            self.parts = [*self._running.partial_sums(), *self._followers.copies(self._step)]
            self._running = None

    def drop(self) -> None:
        """Release everything."""
        self.parts, self._step, self._running = [], None, None
