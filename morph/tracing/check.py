"""``check_dependencies``: runs a step of a job on trial, and reports which of its dependencies Morph handles."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.optim import Optimizer

from morph.contract.errors import JobError, MorphError
from morph.cutting import CutModel, ExportedJob, Section, cut, export_job
from morph.cutting.source.locate import definition_line, user_line
from morph.cutting.trial_run.trial import example_batch, run_really
from morph.data import MicroBatchLoader
from morph.data.seeding import kept_generators
from morph.jobs.job import Job
from morph.runtime.state.optimizer_state import build_optimizer
from morph.runtime.step.stage import run_step, seed_section
from morph.tracing.findings import DependencyReport, SourceLocation
from morph.tracing.model_mode import ModelMode
from morph.tracing.optimizer_mode import OptimizerMode
from morph.tracing.recorder import Recorder
from morph.tracing.source_lines import keep_lines_of
from morph.tracing.trials import StepFunction, TrialResult, run_trials

MAX_REAL_ELEMENTS = 1_000_000
"""The largest number of elements of a model that runs with real numbers, for about a second."""
Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_NUM_STEPS = 3
_STAND_IN_SIZES = (64, 16, 8, 4, 2)


def check_dependencies(
    job: Job,
    *,
    num_sections: int | None = None,
    micro_batch_size: int | None = None,
    step_function: StepFunction | None = None,
    exported: ExportedJob | None = None,
    max_real_elements: int = MAX_REAL_ELEMENTS,
) -> DependencyReport:
    """Run one whole training step and report every dependency between sections.

    ``num_sections``: None: the job's, else Morph's choice. ``micro_batch_size``: None: the job's, else 2 (1 for a batch
    that 2 does not divide). ``step_function``: to look at a step of another loop; None: ``optimizer.step()``, as Morph
    does. Models of more than ``max_real_elements`` run without numbers, and the optimizer on smaller parameters.
    """
    keep_lines_of(job.loss)
    program = exported or export_job(job)
    m = micro_batch_size_of(job, micro_batch_size)
    wanted = num_sections if num_sections is not None else job.num_sections
    model = cut(program, num_sections=wanted, micro_batch_size=m)
    model = model.at(MicroBatchLoader.of(job, m).size(0, 0)[0])
    recorder = Recorder()
    with kept_generators():
        notes = _dry_run(job, program, model, step_function or _step, recorder, max_real_elements)
    _what_morph_does(job, model, recorder)
    findings = recorder.findings(job.allowed_dependencies)
    unknown = sorted(set(job.allowed_dependencies) - {finding.id for finding in findings})
    if unknown:
        notes = (*notes, f"allowed but not found: {', '.join(unknown)}")
    return DependencyReport(
        job=job.name,
        num_sections=len(model.sections),
        micro_batch_size=m,
        units=tuple(unit.id for unit in model.units),
        findings=findings,
        notes=notes,
    )


def micro_batch_size_of(job: Job, given: int | None = None) -> int:
    """Return m of a dry run: as given, else the job's, else 2, so that samples can interact (1 if 2 does not fit)."""
    return given or job.micro_batch_size or (2 if job.batch_size % 2 == 0 else 1)


def require_no_violation(report: DependencyReport, source: str) -> None:
    """Refuse a job with an unhandled violation."""
    if not report.violations:
        return
    first, more = report.violations[0], len(report.violations) - 1
    others = f" (and {more} more)" if more else ""
    raise JobError(
        f"{first.message}{others}; `morph trace-deps {source}` shows all",
        source=first.place.text,
        field=first.id,
        allowed=first.advice,
    )


def _step(optimizer: Optimizer, _parameters: Mapping[str, Parameter]) -> None:
    optimizer.step()


def _dry_run(
    job: Job, program: ExportedJob, model: CutModel, step: StepFunction, recorder: Recorder, max_real_elements: int
) -> tuple[str, ...]:
    specs = model.parameter_specs
    read = {name: section.constant_values for section in model.sections for name in section.constants}
    frozen = {name: held.specs[name] for name, held in read.items()}
    large = sum(prod(shape) for shape, _ in (*specs.values(), *frozen.values())) > max_real_elements
    if large:
        parameters, constants = _without_memory(specs), _without_memory(frozen)
    else:
        parameters = {name: program.initial_parameters[name] for name in specs}
        constants = {name: held[name] for name, held in read.items()}
    buffers = {name: program.initial_buffers[name] for name in model.buffer_specs}
    given = ModelStep(parameters, buffers, constants, _batch(job, model), fake=large)
    try:
        gradients = run_model(model, given, recorder, job.seed)
    except MorphError:
        raise
    except Exception:
        if not large:
            run_really(job, example_batch(job))  # the error of the job's own code is reported with its line
        raise
    if large:
        shapes = stand_ins(specs, max_real_elements)
        parameters = {name: _drawn(shapes[name], specs[name][1]) for name in specs}
        gradients = {name: _drawn(shapes[name], specs[name][1]) for name in specs}
    gradients = {name: gradients[name] if name in gradients else torch.zeros_like(parameters[name]) for name in specs}
    unit_of = {name: unit.id for unit in model.units for name in unit.parameters}
    if job.master_weights:
        parameters, gradients = _widened(parameters), _widened(gradients)
    try:
        run_optimizer(job, step, parameters, gradients, unit_of, recorder)
    except MorphError:
        raise
    except Exception as error:
        if large:
            return (f"the optimizer was not checked: it failed on smaller parameters ({error})",)
        line = user_line(error, job, None) or definition_line(job.optimizer)
        raise JobError(f"optimizer failed: {type(error).__name__}: {error}", source=line) from error
    optimized = [replace(unit, buffers=()) for unit in model.units if unit.parameters]
    _judge(run_trials(parameters, optimized, job.optimizer, step), job, recorder)
    reason = f"more than {max_real_elements:,} parameters, so"
    return (f"{reason} a step is checked on shapes alone, and the optimizer on smaller parameters",) if large else ()


def _without_memory(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in specs.items()}


def _batch(job: Job, model: CutModel) -> dict[str, Tensor]:
    keys = sorted({key for section in model.sections for key in section.batch_keys})
    return MicroBatchLoader.of(job, model.micro_batch_size).load(0, 0, keys)


def _drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def _widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that an optimizer works on under ``Job.master_weights``."""
    narrow = {name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.dtype.itemsize < 4}
    return {name: tensor.float() if name in narrow else tensor for name, tensor in tensors.items()}


def _judge(result: TrialResult, job: Job, recorder: Recorder) -> None:
    """Let the trials judge numbers that left torch for Python, and add findings that only the trials saw."""
    same = not (result.differing or result.refused)
    numbers = [record for record in recorder.of("mixing") if record.detail == "number"]
    for record in numbers:
        record.handled = same and not record.reached
    met = not all(record.handled for record in numbers)
    for record in recorder.of("leaves"):
        record.handled, record.detail = same or met, "met" if met else ""
    place = SourceLocation(definition_line(job.optimizer), None, getattr(job.optimizer, "__name__", "optimizer"))
    for unit, error in result.refused.items():
        detail = f"cannot be built for unit {unit} alone: {error}"
        recorder.add("refused", "optimizer", "optimizer", place, (unit,), detail=detail)
    explained = recorder.of("mixing", "leaves", "random", "common")
    if result.differing and not explained:
        detail = ", ".join(sorted(set(result.differing.values())))
        recorder.add("differs", "optimizer", "step", place, result.differing, detail=detail)
    if result.lost and not recorder.of("unsaved", "common", "random"):
        recorder.add("unsaved", "optimizer", "step", place, result.lost)


def _what_morph_does(job: Job, model: CutModel, recorder: Recorder) -> None:
    units = [unit.id for unit in model.units]
    if job.clip_grad_norm is not None:
        text = "the gradients' norm is taken over all units, and all are scaled alike"
        place = SourceLocation(None, None, "Job.clip_grad_norm")
        recorder.add("morph", "optimizer", "clip_grad_norm", place, units, detail=text).handled = True
    if job.effective_loss_scaling is not None:
        text = "an overflow in one unit skips the step of all, and all have the same loss scale"
        place = SourceLocation(None, None, "Job.loss_scaling")
        recorder.add("morph", "optimizer", "loss_scaling", place, units, detail=text).handled = True


@dataclass(frozen=True)
class ModelStep:
    """The inputs of the model's part of a step.

    ``buffers``: those that the forward writes. ``fake``: whether to run without numbers and without memory for them;
    then only shapes and types of ``parameters`` matter.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    fake: bool


def run_model(model: CutModel, given: ModelStep, recorder: Recorder, seed: int) -> dict[str, Tensor]:
    """Run forward and backward of one micro-batch, section by section; returns each parameter's gradient."""
    fake = FakeTensorMode(allow_non_fake_inputs=True) if given.fake else None
    mode = ModelMode(recorder)
    gradients: dict[str, Tensor] = {}

    def add(name: str, gradient: Tensor) -> None:
        if name in given.buffers:
            return
        gradients[name] = gradients[name] + gradient if name in gradients else gradient

    def followed(section: Section) -> Section:
        seed_section(seed, 0, 0, section.index)
        return mode.follow(section, constants)

    with fake or nullcontext():
        tensors = {name: _prepared(tensor, fake).requires_grad_() for name, tensor in given.parameters.items()}
        tensors |= {name: _prepared(tensor, fake) for name, tensor in given.buffers.items()}
        constants = {name: _prepared(tensor, fake) for name, tensor in given.constants.items()}
        batch = {name: _prepared(tensor, fake) for name, tensor in given.batch.items()}
        mode.know(model, tensors)
        mode.know_batch(batch)
        run_step(model.sections, batch, tensors, add, followed)
    mode.finish()
    return gradients


def _prepared(tensor: Tensor, fake: FakeTensorMode | None) -> Tensor:
    if fake is None:
        return tensor.detach().clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def run_optimizer(
    job: Job,
    step: StepFunction,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    unit_of: Mapping[str, str],
    recorder: Recorder,
) -> None:
    """Build the job's optimizer over all parameters and run three of its steps."""
    mode = OptimizerMode(unit_of, recorder)
    leaves = {name: Parameter(tensor.detach().clone()) for name, tensor in parameters.items()}
    mode.own(leaves)
    with mode.watching(0):
        optimizer = build_optimizer(job.optimizer, leaves)
        scheduler = job.lr_scheduler(optimizer) if job.lr_scheduler else None
    for epoch in range(1, _NUM_STEPS + 1):
        for name, leaf in leaves.items():
            leaf.grad = gradients[name] * (1.0 / epoch)
        mode.own(leaves, optimizer)
        before = _numbers(optimizer)
        with mode.watching(epoch):
            step(optimizer, leaves)
            if scheduler is not None:
                scheduler.step()
        for leaf in leaves.values():
            leaf.grad = None
    for name, value in _numbers(optimizer).items():
        if before[name] != value:
            recorder.add("unsaved", "optimizer", name, _defined(optimizer), set(unit_of.values()))
    mode.finish()


def _numbers(optimizer: Optimizer) -> dict[str, Any]:
    found = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)}
    return {f"self.{name}": value for name, value in found.items()}


def _defined(optimizer: Optimizer) -> SourceLocation:
    return SourceLocation(definition_line(type(optimizer).step), None, "step")


def stand_ins(specs: Specs, max_elements: int) -> dict[str, tuple[int, ...]]:
    """Return shapes of the same parameters, made small enough to try optimizers on; unchanged if they are small."""
    for size in (max(max(shape, default=1) for shape, _ in specs.values()), *_STAND_IN_SIZES):
        shapes = {name: tuple(min(length, size) for length in shape) for name, (shape, _) in specs.items()}
        if sum(torch.Size(shape).numel() for shape in shapes.values()) <= max_elements:
            break
    return shapes
