"""Measures the end of a step for a parameter unit: sums become gradients, the optimizer steps, new sums are made."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from calibrate.computing.peak import peak_bytes
from calibrate.computing.subject import Subject
from calibrate.timing.clocks import clock_of
from calibrate.timing.samples import Sampling, no_garbage_collection, timing
from morph.contract.decided import Decided
from morph.contract.profile import Timing
from morph.cutting import CutModel
from morph.cutting.trial_run.trial import run_users_code
from morph.jobs.job import Job
from morph.runtime.state.accumulators import Accumulator, change_of
from morph.runtime.state.unit_state import UnitState, norms_sq, update_rules

_WARM_UP = 2
_MOCK_GRADIENT = 1e-3


@dataclass(frozen=True)
class UnitMeasurement:
    """Measurements of one parameter unit; bytes as in ``SectionProfile``."""

    step: Timing
    optimizer_bytes: int
    reduced_bytes: int
    finish_bytes: int
    step_bytes: int


def measure_units(subject: Subject, model: CutModel, sampling: Sampling) -> dict[str, UnitMeasurement]:
    """Step each unit's optimizer, as a worker does; units of the same shapes in the same order are measured once."""
    by_shapes: dict[tuple[tuple[tuple[int, ...], torch.dtype], ...], UnitMeasurement] = {}
    result: dict[str, UnitMeasurement] = {}
    job, device, initial = subject.job, subject.device, subject.loaded.initial
    for unit in model.units:
        shapes = tuple(model.specs[name] for name in unit.names)
        if shapes not in by_shapes:
            state = UnitState(
                unit,
                {name: initial[name].to(device) for name in unit.names},
                job.optimizer,
                num_micro_batches=job.batch_size,
                exact=job.accumulation == "exact",
                rules=update_rules(job, device),
            )
            by_shapes[shapes] = _measure(state, job, device, sampling)
        result[unit.id] = by_shapes[shapes]
    return result


def _measure(state: UnitState, job: Job, device: torch.device, sampling: Sampling) -> UnitMeasurement:
    clock, num_micro_batches = clock_of(device), job.batch_size

    def apply(version: int) -> None:
        decided = Decided(version=version, gradient_norm=None if job.clip_grad_norm is None else 1.0)
        run_users_code(partial(state.apply, decided), job, None, "optimizer")

    generator = torch.Generator().manual_seed(0)
    gradients = {
        name: (torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * _MOCK_GRADIENT).to(
            state.device
        )
        for name, parameter in state.parameters.items()
    }
    gradients |= {name: change_of(buffer, buffer) for name, buffer in state.buffers.items()}
    samples_s: list[float] = []
    with no_garbage_collection():
        sums = state.new_accumulator()
        begun_s, number = time.perf_counter(), 0
        while sampling.wants_more([samples_s], time.perf_counter() - begun_s):
            _fill(sums, gradients)
            for gradient in gradients.values():
                gradient.neg_()  # one direction for hundreds of steps would let estimated step sizes grow without end
            clock.settle()
            start = clock.mark()
            _finish(state, sums, num_micro_batches, number)
            number += 1
            apply(number)
            sums = state.new_accumulator()
            end = clock.mark()
            clock.settle()
            if number > _WARM_UP:
                samples_s.append(clock.between_s(start, end))
    _fill(sums, gradients)
    finish_peak = peak_bytes(lambda: _finish(state, sums, num_micro_batches, number), device)
    assert state.reduced is not None
    reduced_bytes = bytes_of(state.reduced.gradients.values())
    return UnitMeasurement(
        step=timing(samples_s),
        optimizer_bytes=bytes_of(value for entry in state.optimizer.state.values() for value in entry.values())
        + state.master_bytes,
        reduced_bytes=reduced_bytes,
        finish_bytes=max(0, finish_peak - reduced_bytes),
        step_bytes=peak_bytes(lambda: apply(number + 1), device),
    )


def _finish(state: UnitState, sums: Accumulator, num_micro_batches: int, number: int) -> None:
    """Finish the sums, as a worker does before a step is decided."""
    state.reduced = sums.finish(num_micro_batches, number)
    norms_sq({state.unit.id: state})


def bytes_of(values: Iterable[object]) -> int:
    """Return the bytes of those values that are tensors."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def _fill(sums: Accumulator, gradients: Mapping[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        sums.add(name, gradient)
