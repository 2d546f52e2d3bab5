"""What a worker does in a step: ``Training.step`` reads from top to bottom.

It applies the step before as all workers decided it, tells the attendants, loads micro-batches and runs them forward
and backward, sums and reduces their gradients meanwhile, and reports. The gradients of the step itself are held until
every worker has reported: a step commits everywhere or nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from morph.contract.decided import Decided
from morph.contract.errors import NonFiniteGradient
from morph.contract.messages import CommitOrder, Committed, NamedSamples, Prepared, ReshapeOrder, StepOrder
from morph.runtime.device.staging import release_unused
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.accumulators import finish_all
from morph.runtime.state.unit_state import UnitState, apply_all, norms_sq
from morph.runtime.step.executor import Executor
from morph.runtime.step.generation import Generation
from morph.runtime.step.stopwatch import Pace
from morph.runtime.step.sums import HeldSum, KnownSums
from morph.words import listed

Units = Mapping[str, UnitState]
Answers = Mapping[str, Any]
"""Fields of the answer to an order."""


class StepSource(Protocol):
    """Makes a worker's steps, of a job or of an emulated device. Implemented by ``Workload``, in a higher layer."""

    def executor(self, current: Generation, order: StepOrder, faults: FaultPlan) -> Executor:
        """Return one step up to its reductions, ready to be run on this worker's stage."""

    def samples_of(self, step: int) -> tuple[int, ...]:
        """Return the indices of a step's samples in the data set, in the order of the step; empty: no data set."""


class Attendant:
    """Accompanies the steps of a worker; it does nothing at the moments that it does not need."""

    def before_apply(self, units: Units, decided: Decided | None) -> None:
        """Act before the held gradients of these units are applied as decided."""

    def at_version(self, current: Generation, order: StepOrder | CommitOrder, held: Units) -> Answers | None:
        """Act when every unit of the stage is at the order's version. ``held``: also others' units, in step here."""

    def offer_sums(self, step: int, copies: Callable[[], Sequence[HeldSum]]) -> None:
        """Act when a copy of this worker's partial sums is due on another worker."""

    def after_reduction(self, current: Generation) -> Answers | None:
        """Act when the mean gradients of an undecided step are held."""

    def before_answer(self, step: int, interrupt: Interrupt) -> None:
        """Block until the worker may say that it has prepared a step."""

    def in_step(self, version: int) -> Units | None:
        """Return others' units that are here at this version, or with the gradients that lead to it."""

    def sums_of_others(self, step: int) -> Sequence[HeldSum] | None:
        """Return the copies of other workers' partial sums of a step."""

    def hand_in(self, version: int) -> Units | None:
        """Stop following other workers; return those of their units that are in step with this version."""

    def before_reshape(self, order: ReshapeOrder) -> None:
        """Act when the worker leaves its shape."""

    def after_reshape(self, order: ReshapeOrder, held: Units, interrupt: Interrupt) -> None:
        """Act when the state of a new shape has moved. ``held``: units of its version that were here before."""

    def end_reshape(self) -> None:
        """Act when a change of shape is over, whether it succeeded or not."""


class Training:
    """What a worker keeps from step to step: the units that it holds, its sums and its pace."""

    def __init__(
        self, worker: str, device: torch.device, source: StepSource, attendants: Sequence[Attendant], faults: FaultPlan
    ) -> None:
        self._worker, self._device, self._source = worker, device, source
        self._attendants, self._faults = attendants, faults
        self.held: dict[str, UnitState] = {}
        self.pace = Pace()
        self.sums = KnownSums(worker, faults, self._offer_sums, self._sums_of_others)

    def step(self, current: Generation, order: StepOrder) -> Prepared:
        """Run one step up to its reduced gradients. Raises as ``Interrupt.wait_for``, and NonFiniteGradient."""
        self._faults.begin(order.step)
        self._faults.reach("after_commit")

        # apply
        self._bring_to(current, order.step, order.decided)
        self._faults.reach("applied")
        answer = self._tell(current, order)
        self._forget_gradients(current, order)

        # load, forward and backward; sums are reduced as soon as they are complete
        sums = self.sums.begin(current, order)
        executor = self._source.executor(current, order, self._faults)
        executor.stopwatch.finished = partial(self.pace.note, order.generation)
        assert all(state.loss_scale == order.loss_scale for state in current.units.values()), "another loss scale"
        executor.run(sums, 1.0 if order.loss_scale is None else order.loss_scale.factor)

        # reduce
        executor.reduce(sums)
        executor.finish()
        try:
            means = finish_all(sums.accumulators, current.num_micro_batches(order), order.step)
        except NonFiniteGradient as error:
            raise NonFiniteGradient(f"{error}{self._of_samples(order.step)}") from error
        for name, reduced in means.items():
            current.units[name].reduced = reduced
        norms = norms_sq(current.units)

        # report
        for attendant in self._attendants:
            answer |= attendant.after_reduction(current) or {}
        self._faults.reach("before_commit")
        if order.samples_of is not None:
            answer["named"] = NamedSamples(step=order.samples_of, samples=self._source.samples_of(order.samples_of))
        rates = [rate for state in current.units.values() for rate in state.learning_rates]
        prepared = Prepared(
            worker=self._worker,
            generation=order.generation,
            step=order.step,
            attempt=order.attempt,
            overflowed=any(reduced.overflowed for reduced in means.values()),
            unit_norms_sq=norms,
            non_finite=any(reduced.non_finite for reduced in means.values()),
            losses=tuple(sums.losses.values()),
            learning_rates=(min(rates), max(rates)) if rates else None,
            times=executor.stopwatch.times(),
            timeline=executor.timeline(current, order.step) if order.record_timeline else None,
            **answer,
        )
        for attendant in self._attendants:
            attendant.before_answer(order.step, current.interrupt)
        return prepared

    def commit(self, current: Generation, order: CommitOrder) -> Committed:
        """Apply the decided step, and run no other."""
        self._bring_to(current, order.version, order.decided)
        reports = self._tell(current, order)
        return Committed(worker=self._worker, generation=order.generation, version=order.version, **reports)

    def roll_forward(self, version: int, decided: Decided | None) -> None:
        """Apply the held gradients of the step before ``version`` as decided, if that step was decided."""
        assert decided is None or decided.version == version
        due = {
            name: state
            for name, state in self.held.items()
            if state.version == version - 1 and state.reduced is not None
        }
        for attendant in self._attendants:
            attendant.before_apply(due, decided)
        apply_all(due.values(), decided)

    def hand_in(self, version: int) -> None:
        """Hold others' units that are in step with this version as own ones, because their workers may be gone."""
        for attendant in self._attendants:
            self.held = {**(attendant.hand_in(version) or {}), **self.held}

    def _bring_to(self, current: Generation, version: int, decided: Decided | None) -> None:
        """Bring every unit of the stage to a version, and release state that the generation does not use."""
        self.sums.forget_before(version)
        before, self.held = set(self.held), dict(current.units)
        for attendant in self._attendants:
            self.held = {**(attendant.in_step(version) or {}), **self.held}
        if before - self.held.keys():  # other workers have these units now
            release_unused(self._device, current.interrupt)
        self.roll_forward(version, decided)
        for name, state in current.units.items():
            assert state.version == version, f"unit {name} is at version {state.version}, not {version}"

    def _tell(self, current: Generation, order: StepOrder | CommitOrder) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        for attendant in self._attendants:
            answers |= attendant.at_version(current, order, self.held) or {}
        return answers

    def _forget_gradients(self, current: Generation, order: StepOrder) -> None:
        """Drop the previous attempt's gradients, even if the next attempt has none; adopt scales that fit."""
        for state in current.units.values():
            if state.reduced is not None and state.reduced.overflowed:
                state.rescale(state.reduced)
            state.reduced = None
        if order.attempt:
            for name in self.held.keys() - current.units.keys():
                self.held[name].reduced = None

    def _of_samples(self, step: int) -> str:
        samples = self._source.samples_of(step)
        return f"; the samples of the step: {listed(samples)}" if samples else ""

    def _offer_sums(self, step: int, copies: Callable[[], Sequence[HeldSum]]) -> None:
        for attendant in self._attendants:
            attendant.offer_sums(step, copies)

    def _sums_of_others(self, step: int) -> Sequence[HeldSum]:
        return [held for attendant in self._attendants for held in attendant.sums_of_others(step) or ()]
