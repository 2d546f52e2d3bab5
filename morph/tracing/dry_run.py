"""Runs a training step of a cut model in one process: all sections, their backward, and one optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.optim import Optimizer

from morph.cutting import CutModel, Section
from morph.cutting.source.locate import definition_line
from morph.jobs.job import Job
from morph.runtime.state.optimizer_state import build_optimizer
from morph.runtime.step.stage import run_step, seed_section
from morph.tracing.findings import SourceLocation
from morph.tracing.model_mode import ModelMode
from morph.tracing.optimizer_mode import OptimizerMode
from morph.tracing.recorder import Recorder
from morph.tracing.trials import StepFunction

Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_NUM_STEPS = 3
_STAND_IN_SIZES = (64, 16, 8, 4, 2)


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
