"""The interface of a worker's work: a job's cut model, or an emulated device with a profile's times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from morph.contract.evaluation import EvaluationSize
from morph.contract.job_facts import Epochs
from morph.contract.messages import WorkerSetup
from morph.cutting.sections.section import ParameterUnit
from morph.runtime.groups.channels import Carrier, Channel
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.unit_state import UnitState
from morph.runtime.step.generation import Generation
from morph.runtime.step.training_step import Attendant, StepSource


class Workload(StepSource, Protocol):
    """Everything that a worker needs from a loaded job. Used only in the order lane."""

    @property
    def units(self) -> tuple[ParameterUnit, ...]:
        """Every parameter unit of the model."""

    @property
    def evaluation(self) -> EvaluationSize | None:
        """Interval and size of evaluations; None: never."""

    @property
    def attendants(self) -> tuple[Attendant, ...]:
        """What it does beside its steps: evaluations."""

    @property
    def epochs(self) -> Epochs | None:
        """How epochs divide into steps; None: all steps are whole."""

    def make_unit(self, unit: str, num_micro_batches: int, *, empty: bool = False) -> UnitState:
        """Return a unit's state at version 0; ``empty``: it is about to be loaded, so its parameters are undefined."""

    def incoming_state(self, channel: Channel, interrupt: Interrupt) -> Carrier:
        """Return the channel over which this worker receives a unit's state."""

    def make_unit_copy(self, unit: str, num_micro_batches: int) -> UnitState:
        """Return an empty unit that will follow another worker's; made and used outside the order lane."""

    def arrive(self, num_bytes: int) -> None:
        """Block until this many pre-copied bytes have arrived; called outside the order lane."""

    def adopt(self, unit_copy: UnitState) -> UnitState:
        """Turn a unit that followed another worker's into this worker's own."""

    def take_place(self, current: Generation) -> None:
        """Read the data besides units that a generation's stage needs, and release those of an earlier stage."""

    def probe(self, sections: range, held: Mapping[str, UnitState], faults: FaultPlan) -> Callable[[], float]:
        """Return a function that runs a micro-batch without peers and returns its seconds; ``held`` is not changed."""

    def collect_notes(self) -> tuple[str, ...]:
        """Return news about its data workers since the last call, for the user; from any thread; never blocks."""


def load_workload(setup: WorkerSetup) -> Workload:
    """Return the workload that a setup describes."""
    if setup.emulation is not None:
        from morph.runtime.emulation.workload import EmulatedWorkload

        return EmulatedWorkload(setup)
    from morph.runtime.workloads.job_workload import JobWorkload

    return JobWorkload(setup)
