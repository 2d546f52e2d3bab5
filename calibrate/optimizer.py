"""Measure what ends a step for a parameter unit: sums to gradients, the optimizer's step, the next empty sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.samples import compute_clock_s, no_garbage_collection, timing
from morph.contract.profile import Timing
from morph.cutting import CutModel, ParameterUnit
from morph.job import Job
from morph.runtime.unit_state import UnitState

_WARM_UP = 2
_MOCK_GRADIENT = 1e-3


@dataclass(frozen=True)
class UnitMeasurement:
    """Of one parameter unit."""

    step: Timing
    optimizer_bytes: int


def measure_units(
    job: Job, model: CutModel, initial: Mapping[str, Tensor], *, num_samples: int
) -> dict[str, UnitMeasurement]:
    """Step each unit's optimizer; units with the same shapes in the same order are measured once."""
    by_shapes: dict[tuple[tuple[tuple[int, ...], torch.dtype], ...], UnitMeasurement] = {}
    result: dict[str, UnitMeasurement] = {}
    for unit in model.units:
        shapes = tuple(model.parameter_specs[name] for name in unit.parameters)
        if shapes not in by_shapes:
            by_shapes[shapes] = _measure(job, unit, initial, num_samples)
        result[unit.id] = by_shapes[shapes]
    return result


def _measure(job: Job, unit: ParameterUnit, initial: Mapping[str, Tensor], num_samples: int) -> UnitMeasurement:
    state = UnitState(unit, initial, job.optimizer, num_micro_batches=job.batch_size, exact=job.accumulation == "exact")
    generator = torch.Generator().manual_seed(0)
    gradients = {
        name: torch.randn(parameter.shape, generator=generator) * _MOCK_GRADIENT
        for name, parameter in state.parameters.items()
    }
    samples_s: list[float] = []
    with no_garbage_collection():
        sums = state.new_accumulator()
        for sample in range(_WARM_UP + num_samples):
            for name, gradient in gradients.items():
                sums.add(name, gradient)
            start_s = compute_clock_s()
            state.reduced = sums.finish(job.batch_size, sample)
            state.apply()
            sums = state.new_accumulator()
            if sample >= _WARM_UP:
                samples_s.append(compute_clock_s() - start_s)
    held = [value for entry in state.optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return UnitMeasurement(timing(samples_s), sum(value.numel() * value.element_size() for value in held))
