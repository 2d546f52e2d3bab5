"""The workload of a user's job: its model, cut into sections, on a real device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from morph.contract.errors import ProfileError
from morph.contract.messages import Evaluation, StepOrder, WorkerSetup
from morph.cutting import cut, export_job
from morph.cutting.section import ParameterUnit
from morph.data import MicroBatchLoader
from morph.job import load_job
from morph.runtime.accumulators import Accumulator
from morph.runtime.channels import Carrier, Channel
from morph.runtime.evaluation import Evaluator
from morph.runtime.executor import Executor, reduce_all
from morph.runtime.faults import FaultPlan
from morph.runtime.generation import Generation
from morph.runtime.interrupt import Interrupt
from morph.runtime.stage import Stage
from morph.runtime.unit_state import UnitState
from morph.runtime.update_rules import update_rules


class JobWorkload:
    """Loads the job of a setup and cuts its model: seconds. See ``Workload``.

    Raises:
        InputError: on a wrong job, or one that the profile does not belong to.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._device = torch.device(setup.device)
        self._job = load_job(setup.job_path)
        self._rules = update_rules(self._job, self._device)
        exported = export_job(self._job)
        self._model = cut(exported, num_sections=setup.num_sections, micro_batch_size=setup.micro_batch_size)
        self._initial = exported.initial_parameters
        if self._model.fingerprint != setup.fingerprint:
            raise ProfileError(
                "the profile belongs to another model; calibrate again",
                source=setup.job_path,
                field="fingerprint",
                value=self._model.fingerprint,
                allowed=setup.fingerprint,
            )
        self._loader = MicroBatchLoader(
            self._job.dataset(), self._job.seed, self._job.batch_size, setup.micro_batch_size
        )
        self._evaluator = Evaluator(self._job, self._model, self._device) if self._job.eval_data else None

    @property
    def units(self) -> tuple[ParameterUnit, ...]:
        """See ``Workload.units``."""
        return self._model.units

    def make_unit(self, unit: str, num_micro_batches: int) -> UnitState:
        """See ``Workload.make_unit``."""
        found = next(entry for entry in self._model.units if entry.id == unit)
        return UnitState(
            found,
            {name: self._initial[name].to(self._device) for name in found.parameters},
            self._job.optimizer,
            num_micro_batches=num_micro_batches,
            exact=self._job.accumulation == "exact",
            rules=self._rules,
        )

    def incoming_state(self, channel: Channel, interrupt: Interrupt) -> Carrier:  # noqa: ARG002
        """See ``Workload.incoming_state``."""
        return channel

    def executor(self, current: Generation, order: StepOrder, faults: FaultPlan) -> Executor:
        """See ``Workload.executor``."""
        assert current.slot is not None
        plan = current.plan.stages[current.slot.stage]
        stage = Stage(
            self._model,
            plan.sections,
            recompute=plan.recompute,
            parameters={name: tensor for unit in current.units.values() for name, tensor in unit.parameters.items()},
            load_batch=lambda micro_batch, keys: self._load(order.step, micro_batch, keys),
            seed=self._job.seed,
            step=order.step,
            precision=self._job.precision,
        )
        work = replace(current.stage_work(self._model), record_timeline=order.record_timeline)
        return Executor(stage, work, current.neighbours(), current.interrupt, faults, self._device)

    def reduce(
        self, current: Generation, accumulators: Mapping[str, Accumulator], faults: FaultPlan, executor: Executor
    ) -> None:
        """See ``Workload.reduce``."""
        reduce_all(accumulators, {name: current.ring_of(name) for name in accumulators}, faults, executor.stopwatch)

    def evaluate(self, current: Generation, version: int) -> Evaluation | None:
        """See ``Workload.evaluate``."""
        return self._evaluator.run_if_due(current, version, self._model) if self._evaluator is not None else None

    def _load(self, step: int, micro_batch: int, keys: Sequence[str]) -> dict[str, Tensor]:
        batch = self._loader.load(step, micro_batch, keys)
        return {key: tensor.to(self._device) for key, tensor in batch.items()}
