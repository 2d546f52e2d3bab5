"""The workload of a user's job: its model, cut into sections, on a real device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from morph.checkpoint.frozen_weights import FrozenWeights
from morph.contract.errors import ProfileError, wrong_job
from morph.contract.evaluation import EvaluationSize
from morph.contract.job_facts import Epochs, JobFacts
from morph.contract.messages import StepOrder, WorkerSetup
from morph.cutting import CutModel
from morph.cutting.cache.cut_job import load_and_cut
from morph.cutting.sections.section import BoundaryTensor, ParameterUnit
from morph.cutting.trial_run.trial import run_users_code
from morph.data import DataWorkers, MicroBatchLoader
from morph.data.loader import data_facts, data_of, order_of, recipe_of, with_step
from morph.data.seeding import kept_generators
from morph.jobs.changes import require_same
from morph.jobs.existing import WholeModel
from morph.jobs.job import Job
from morph.optimizers import kind_of
from morph.runtime.device.staging import moved, placed
from morph.runtime.device.task_clock import clock_of, linger
from morph.runtime.groups.channels import Carrier, Channel
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.fixed_point import prepare
from morph.runtime.state.optimizer_state import (
    build_optimizer,
    build_scheduler,
    group_numbers,
    prepare_torch,
    scheduler_numbers,
)
from morph.runtime.state.unit_state import UnitState, update_rules
from morph.runtime.step.compilation import compile_all, compiled, refuse_marked
from morph.runtime.step.executor import Executor
from morph.runtime.step.generation import Generation
from morph.runtime.step.kernels import kernels_for, kernels_now, prepare_cublas, set_kernels
from morph.runtime.step.stage import Stage
from morph.runtime.step.sums import MicroBatchSums
from morph.runtime.step.training_step import Attendant
from morph.runtime.workloads.evaluation import Evaluator, batch_keys

_SMALL = 4
_FIELDS = (
    *("batch_size", "micro_batch_size", "epoch_end", "buckets", "padding", "num_sections", "seed", "accumulation"),
    *("precision", "boundary", "master_weights", "compile", "effective_loss_scaling", "clip_grad_norm"),
    *("optimizer_device", "eval_every_steps", "eval_every_epochs", "eval_samples", "best", "step_entry"),
)
_PROBE_SIZE = 0.01


def check_training(job: Job, model: CutModel) -> dict[str, str]:
    """Build each unit's optimizer and schedule without memory, check the evaluation data, and return the settings."""
    _check_step_entry(job)
    known = settings(job, model) | _needs(job, model)
    if job.compile:
        refuse_marked(model)
    if job.eval_data is not None:
        Evaluator(job, model, torch.device("cpu"))
    return known


def _check_step_entry(job: Job) -> None:
    if job.step_entry is None:
        return
    first = recipe_of(job).like(data_of(job))
    entry = first.get(job.step_entry)
    if entry is None or entry.dtype != torch.int64 or entry.dim():
        shown = "nothing" if entry is None else f"{tuple(entry.shape)} {entry.dtype}"
        raise wrong_job(
            "step_entry",
            f"names an entry of the batch for the number of the step, which is {shown} in a sample",
            job.step_entry,
            "a whole number in each sample, such as 0",
        )


def settings(job: Job, model: CutModel) -> dict[str, str]:
    """Return a job's settings as text by name: its fields, and numbers of each unit's optimizer and schedule."""
    values = {name: repr(getattr(job, name)) for name in _FIELDS}
    if isinstance(job.model, WholeModel):
        values["model"] = job.model.digest()
    for unit in model.units:
        if not unit.parameters:
            continue
        specs = {name: model.parameter_specs[name] for name in unit.parameters}
        parameters = {
            n: Parameter(torch.empty(shape, dtype=dtype, device="meta")) for n, (shape, dtype) in specs.items()
        }
        make = partial(build_optimizer, job.optimizer, parameters)
        optimizer = run_users_code(make, job, None, "optimizer")
        values[f"optimizer({unit.id})"] = kind_of(optimizer)
        values[f"optimizer({unit.id}) groups"] = str(len(optimizer.param_groups))
        values[f"lr_scheduler({unit.id})"] = "None"
        groups = run_users_code(partial(group_numbers, optimizer), job, None, "optimizer")
        for index, group in enumerate(groups):
            values |= {f"optimizer({unit.id})[{index}][{key!r}]": repr(value) for key, value in group.items()}
        if job.lr_scheduler is not None:
            schedule = partial(build_scheduler, job.lr_scheduler, optimizer)
            scheduler = run_users_code(schedule, job, None, "lr_scheduler")
            values[f"lr_scheduler({unit.id})"] = type(scheduler).__name__
            numbers = scheduler_numbers(scheduler)
            values |= {f"lr_scheduler({unit.id})[{key!r}]": repr(value) for key, value in numbers.items()}
    return values


def _needs(job: Job, model: CutModel) -> dict[str, str]:
    """Return the keys of state that each unit's optimizer needs for its second step, found with small parameters."""
    needs: dict[str, str] = {}
    for unit in model.units:
        shapes = [model.parameter_specs[name] for name in unit.parameters]
        small = [(tuple(min(size, _SMALL) for size in shape), dtype) for shape, dtype in shapes]
        make = partial(_stepped, job, unit.parameters, small)
        with kept_generators(), suppress(Exception):
            keys = sorted({key for entries in make().state.values() for key in entries}) if shapes else []
            needs[f"optimizer({unit.id}) needs"] = ", ".join(key for key in keys if not _steps_without(make(), key))
    return needs


def _stepped(job: Job, names: Sequence[str], specs: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Optimizer:
    parameters = [Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in specs]
    optimizer = build_optimizer(job.optimizer, dict(zip(names, parameters, strict=True)))
    _step(optimizer)
    return optimizer


def _steps_without(optimizer: Optimizer, key: str) -> bool:
    for entries in optimizer.state.values():
        entries.pop(key, None)
    try:
        _step(optimizer)
    except Exception:
        return False
    return True


def _step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


class JobWorkload:
    """Loads the job of a setup and cuts its model, which takes seconds unless a cut was kept. See ``Workload``."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._device = torch.device(setup.device)
        self._clock = clock_of(self._device)
        prepare_cublas()  # importing the job may start CUDA
        loaded = load_and_cut(
            setup.job_path,
            num_sections=setup.num_sections,
            micro_batch_size=setup.micro_batch_size,
            handed=setup.cut,
        )
        self._job, self._model, self._initial = loaded.job, loaded.model, loaded.initial
        self._data_workers = self._start_data_workers(setup) if self._job.data_workers else None
        set_kernels(kernels_for(self._job.accumulation, kernels_now()))
        frozen = FrozenWeights(setup.checkpoint_url)
        self._rules = update_rules(self._job, self._device, setup.code.sha256 if setup.code else "", frozen.digest)
        for constants in self._model.constants if frozen else ():
            constants.take(frozen)
        if self._model.fingerprint != setup.fingerprint:
            raise ProfileError(
                "the profile belongs to another model; calibrate again",
                source=setup.job_path,
                field="fingerprint",
                value=self._model.fingerprint,
                allowed=setup.fingerprint,
            )
        if setup.known_by != JobFacts():
            facts = JobFacts(data=data_facts(self._job), settings=settings(self._job, self._model))
            require_same(facts, setup.known_by, setup.job_path)
        if self._job.accumulation == "exact":
            prepare(self._device)
        prepare_torch()  # here, because every worker would wait for it in a change of shape
        self._loader = MicroBatchLoader.of(self._job, setup.micro_batch_size, self._data_workers)
        self._run_model = self._model
        if self._job.compile:
            self._run_model = compiled(self._model)
            for (length, size), cut in self._run_model.every().items():
                compile_all(cut, partial(self._example, length, size), self._job.precision, self._device)
        self._evaluator = (
            Evaluator(self._job, self._model, self._device, self._data_workers) if self._job.eval_data else None
        )

    @property
    def units(self) -> tuple[ParameterUnit, ...]:
        return self._model.units

    @property
    def evaluation(self) -> EvaluationSize | None:
        return None if self._evaluator is None else self._evaluator.size

    @property
    def attendants(self) -> tuple[Attendant, ...]:
        return () if self._evaluator is None else (self._evaluator,)

    @property
    def epochs(self) -> Epochs | None:
        epochs = order_of(self._job).epochs
        return None if epochs.end == "fill" else epochs

    def make_unit(self, unit: str, num_micro_batches: int, *, empty: bool = False) -> UnitState:
        described = next(entry for entry in self._model.units if entry.id == unit)
        return UnitState(
            described,
            {
                name: self._initial.empty(name, self._device) if empty else moved(self._initial[name], self._device)
                for name in described.names
            },
            self._job.optimizer,
            num_micro_batches=num_micro_batches,
            exact=self._job.accumulation == "exact",
            rules=self._rules,
            for_good=empty,
        )

    def incoming_state(self, channel: Channel, interrupt: Interrupt) -> Carrier:  # noqa: ARG002
        return channel

    def make_unit_copy(self, unit: str, num_micro_batches: int) -> UnitState:
        return self.make_unit(unit, num_micro_batches, empty=True)

    def arrive(self, num_bytes: int) -> None:
        """See ``Workload.arrive``: received bytes arrive at once."""

    def adopt(self, unit_copy: UnitState) -> UnitState:
        return unit_copy

    def take_place(self, current: Generation) -> None:
        """See ``Workload.take_place``: constants, including frozen weights, are read from their sources."""
        if current.slot is not None:
            sections = current.plan.stages[current.slot.stage].sections
            self._run_model.keep_constants_of(sections)
            for section in self._run_model.sections[sections.start : sections.stop]:
                for name in section.constants:
                    section.constant_values.on(name, self._device)

    def executor(self, current: Generation, order: StepOrder, faults: FaultPlan) -> Executor:
        assert current.slot is not None
        plan = current.plan.stages[current.slot.stage]
        size_of = partial(self._loader.size, order.step)
        if self._data_workers is not None:
            self._expect(current, order)
        stage = Stage(
            self._run_model,
            plan.sections,
            recompute=plan.recompute,
            live_sections=plan.live_sections,
            parameters={name: tensor for unit in current.units.values() for name, tensor in unit.values.items()},
            load_batch=lambda micro_batch, keys: self._load(order.step, micro_batch, keys),
            seed=self._job.seed,
            step=order.step,
            precision=self._job.precision,
        )
        stage.size_of = size_of
        work = current.stage_work(self._model, current.micro_batches_in(order), size_of, self._device)
        short, num = self._job.short_step, current.num_micro_batches(order)
        work = replace(
            work,
            record_timeline=order.record_timeline,
            shares=self._loader.shares(order.step) if short is None else (),
            factor=num / current.plan.num_micro_batches if short is not None and short.of_whole else 1.0,
        )
        executor = Executor(
            stage, work, current.interrupt, faults, self._device, clock=self._clock, slowness=faults.slowness
        )
        executor.stopwatch.in_groups = len(plan.groups) > 1
        return executor

    def probe(self, sections: range, held: Mapping[str, UnitState], faults: FaultPlan) -> Callable[[], float]:
        """See ``Workload.probe``. The gradients are summed as in a step, into unused sums."""
        used = [unit for unit in self._model.units if set(unit.sections) & set(sections)]
        units = [held.get(unit.id) or self.make_unit(unit.id, 1) for unit in used]
        sums = {name: total for unit in units for total in (unit.new_accumulator(),) for name in unit.values}
        stage = Stage(
            self._run_model,
            sections,
            recompute=False,
            parameters={name: tensor for unit in units for name, tensor in unit.values.items()},
            load_batch=lambda micro_batch, keys: self._load(0, micro_batch, keys),
            seed=self._job.seed,
            step=0,
            precision=self._job.precision,
        )
        stage.size_of = partial(self._loader.size, 0)
        sink = MicroBatchSums(lambda _, name, gradient: sums[name].add(name, gradient), lambda _: None)
        typical = self._loader.typical()
        model = self._model.at(*self._loader.size(0, typical))
        inputs = [self._made(spec) for spec in model.sections[sections.start].inputs]
        outputs = model.sections[sections.stop - 1].outputs
        gradients = [self._made(spec) if spec.requires_grad else None for spec in outputs]

        def run() -> float:
            start = self._clock.mark()
            stage.forward(typical, inputs)
            stage.backward(typical, gradients, sink)
            linger(self._clock, start, faults.slowness)
            end = self._clock.mark()
            self._clock.wait(end)
            return self._clock.seconds(start, end)

        return run

    def collect_notes(self) -> tuple[str, ...]:
        notes = () if self._data_workers is None else self._data_workers.notes
        return tuple(notes.popleft() for _ in range(len(notes))) if notes else ()

    def samples_of(self, step: int) -> tuple[int, ...]:
        return self._loader.samples_of(step)

    def _start_data_workers(self, setup: WorkerSetup) -> DataWorkers:
        """Start data workers as soon as the job is known: their imports and setup take as long as the rest of it."""
        pinned = self._device.type != "cpu"
        return DataWorkers(self._job.data_workers, setup.job_path, known=setup.known_by.data, pinned=pinned)

    def _expect(self, current: Generation, order: StepOrder) -> None:
        """Have this step's micro-batches prefetched, and those of the next step, if this shape runs it."""
        assert current.slot is not None
        plan = current.plan.stages[current.slot.stage]
        num_later = self._loader.num_micro_batches(order.step + 1)
        later = current.plan.share_of(current.slot.replica, range(num_later))
        self._loader.expect(
            [
                *((order.step, micro_batch) for micro_batch in current.micro_batches_in(order)),
                *((order.step + 1, micro_batch) for micro_batch in later),
            ],
            batch_keys(self._model.sections[plan.first_section : plan.end_section]),
            lambda: current.interrupt.over,
            plan.window,
        )

    def _made(self, spec: BoundaryTensor) -> Tensor:
        """Return a tensor like those at a cut-point, with small values so that no sum overflows."""
        if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            return torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
        numbers = torch.linspace(-_PROBE_SIZE, _PROBE_SIZE, max(1, math.prod(spec.shape)), device=self._device)
        return numbers.reshape(spec.shape).to(spec.dtype)

    def _example(self, length: int | None, num_samples: int, keys: Sequence[str]) -> Mapping[str, Tensor]:
        """Return entries of a micro-batch of this length and number of samples."""
        return placed(self._loader.example(length, keys, num_samples), self._device)

    def _load(self, step: int, micro_batch: int, keys: Sequence[str]) -> Mapping[str, Tensor]:
        batch = with_step(self._loader.load(step, micro_batch, keys), self._job, step)
        return placed(batch, self._device)
