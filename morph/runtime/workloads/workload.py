"""What a worker trains, behind one interface: a job's cut model, or an emulated device with a profile's times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from morph.contract.evaluation import EvaluationSize, EvaluationTotals, FinishedMetrics
from morph.contract.messages import Evaluation, StepOrder, WorkerSetup
from morph.cutting.sections.section import ParameterUnit
from morph.runtime.groups.channels import Carrier, Channel
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.unit_state import UnitState
from morph.runtime.step.executor import Executor
from morph.runtime.step.generation import Generation
from morph.runtime.step.sums import StepSums


class Workload(Protocol):
    """Everything that a worker needs of a job, once the job is loaded. Used in the order lane alone."""

    @property
    def units(self) -> tuple[ParameterUnit, ...]:
        """Every parameter unit of the model."""

    @property
    def evaluation(self) -> EvaluationSize | None:
        """How often the job is evaluated, and on how much; None: never."""

    def make_unit(self, unit: str, num_micro_batches: int, *, empty: bool = False) -> UnitState:
        """A unit's state at version 0; ``empty``: one that is about to be loaded, with anything in its parameters."""

    def incoming_state(self, channel: Channel, interrupt: Interrupt) -> Carrier:
        """The channel over which this worker receives a unit's state."""

    def make_shadow(self, unit: str, num_micro_batches: int) -> UnitState:
        """An empty unit that is to be kept in step with another worker's; made and used beside the order lane."""

    def arrive(self, num_bytes: int) -> None:
        """Block until so many bytes that were pre-copied are there; called beside the order lane."""

    def adopt(self, shadow: UnitState) -> UnitState:
        """Make a unit that was kept in step as this worker's own."""

    def take_place(self, current: Generation) -> None:
        """Read what the stage of a generation needs that is no state of a unit, and let go of an earlier stage's."""

    def executor(self, current: Generation, order: StepOrder, faults: FaultPlan) -> Executor:
        """Everything of one step up to its reductions, ready to run on this worker's stage."""

    def reduce(self, current: Generation, sums: StepSums, executor: Executor) -> None:
        """Finish the reduction of every unit that this worker holds. Raises as ``Interrupt.wait_for``."""

    def probe(self, sections: range, held: Mapping[str, UnitState], faults: FaultPlan) -> Callable[[], float]:
        """Make what a probe needs; the result runs a micro-batch's forward and backward and returns its seconds.

        ``held`` units are read and never changed; what is missing is made. No peer is needed.
        """

    def evaluate(self, current: Generation, version: int) -> Evaluation | None:
        """Evaluate a version that every unit is at; None when none is due, or not on a last stage."""

    def samples_of(self, step: int) -> tuple[int, ...]:
        """Name the samples of a step by their numbers in the data set, in its order; empty: there is none."""

    def collect_notes(self) -> tuple[str, ...]:
        """What the user should know of its data workers since the last call; from any thread, and never blocks."""

    def finish(self, totals: EvaluationTotals) -> FinishedMetrics | None:
        """Compute the job's own metrics of a whole evaluation; None: it has none. Raises as the user's function."""


def load_workload(setup: WorkerSetup) -> Workload:
    """Make what a setup describes.

    Raises:
        InputError: on a wrong job, or one that the profile does not belong to.
    """
    if setup.emulation is not None:
        from morph.runtime.emulation.workload import EmulatedWorkload

        return EmulatedWorkload(setup)
    from morph.runtime.workloads.job_workload import JobWorkload

    return JobWorkload(setup)
