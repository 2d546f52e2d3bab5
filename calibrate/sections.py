"""Measure F_i(m) and B_i(m): the worker's own code, on mock inputs, one section of each kind.

Sections with the same operations and shapes take the same time, so one of each kind is measured. The kinds take
turns, so that caches are as cold as in a stage that runs several sections.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from calibrate.samples import compute_clock_s, no_garbage_collection, timing
from morph.contract.profile import Timing
from morph.cutting import BoundaryTensor, CutModel, Section
from morph.data import MicroBatchLoader
from morph.job import Job, Precision
from morph.runtime.accumulators import Accumulator, ExactAccumulator, FastAccumulator
from morph.runtime.fixed_point import first_exponent
from morph.runtime.random_streams import seed_section
from morph.runtime.section_run import SectionRun, run_section, section_backward

MIN_SAMPLES = 5
_WARM_UP = 2
_MOCK_GRADIENT = 1e-4


@dataclass(frozen=True)
class SectionMeasurement:
    """What was measured of one kind of section at one m; bytes are per sample, rounded up."""

    forward: Timing
    backward: Timing
    input_bytes_per_sample: int
    activation_bytes_per_sample: int


@dataclass
class _Bench:
    """One section with everything it needs to run."""

    section: Section
    inputs: tuple[Tensor, ...]
    output_gradients: tuple[Tensor | None, ...]
    batch: Mapping[str, Tensor]
    parameters: dict[str, Tensor]
    accumulator: Accumulator
    precision: Precision

    def forward(self, sample: int) -> SectionRun:
        """Seed and run, as a stage does."""
        seed_section(0, sample, 0, self.section.index)
        return run_section(self.section, self.inputs, self.batch, self.parameters, self.precision)

    def backward(self, run: SectionRun) -> None:
        """Backward, adding gradients as a stage does."""
        section_backward(self.section, run, self.output_gradients, self.parameters, self.accumulator.add)


def measure_sections(
    job: Job,
    model: CutModel,
    initial: Mapping[str, Tensor],
    loader: MicroBatchLoader,
    *,
    num_samples: int,
    budget_s: float,
) -> dict[str, SectionMeasurement]:
    """Measure one section of each kind, by signature.

    Args:
        job: For its kind of accumulation.
        model: Cut for the m to measure.
        initial: Parameters by name; copied, never changed.
        loader: Gives real batch entries of m samples.
        num_samples: Rounds wanted.
        budget_s: No new round is begun after this, once there are ``MIN_SAMPLES``.
    """
    benches = [_bench(job, section, initial, loader) for section in _one_of_each(model)]
    held = [_activation_bytes(bench) for bench in benches]
    forward: list[list[float]] = [[] for _ in benches]
    backward: list[list[float]] = [[] for _ in benches]
    for sample in range(_WARM_UP):
        for bench in benches:
            bench.backward(bench.forward(sample))
    with no_garbage_collection():
        end_s = time.perf_counter() + budget_s
        for sample in range(num_samples):
            if sample >= MIN_SAMPLES and time.perf_counter() > end_s:
                break
            for bench, forward_s, backward_s in zip(benches, forward, backward, strict=True):
                start_s = compute_clock_s()
                run = bench.forward(sample)
                middle_s = compute_clock_s()
                bench.backward(run)
                backward_s.append(compute_clock_s() - middle_s)
                forward_s.append(middle_s - start_s)
    m = model.micro_batch_size
    return {
        bench.section.signature: SectionMeasurement(
            forward=timing(forward[place]),
            backward=timing(backward[place]),
            input_bytes_per_sample=ceil(_bytes((*bench.inputs, *bench.batch.values())) / m),
            activation_bytes_per_sample=ceil(held[place] / m),
        )
        for place, bench in enumerate(benches)
    }


def _one_of_each(model: CutModel) -> list[Section]:
    kinds: dict[str, Section] = {}
    for section in model.sections:
        kinds.setdefault(section.signature, section)
    return list(kinds.values())


def _bench(job: Job, section: Section, initial: Mapping[str, Tensor], loader: MicroBatchLoader) -> _Bench:
    generator = torch.Generator().manual_seed(section.index)
    parameters = {name: initial[name].detach().clone().requires_grad_() for name in section.parameters}
    is_loss = section.outputs[0].shape == () and section.outputs[0].requires_grad
    return _Bench(
        section=section,
        inputs=tuple(mock(spec, generator, 1.0) for spec in section.inputs),
        output_gradients=tuple(
            (torch.ones(()) if is_loss else mock(spec, generator, _MOCK_GRADIENT)) if spec.requires_grad else None
            for spec in section.outputs
        ),
        batch=loader.load(0, 0, section.batch_keys),
        parameters=parameters,
        accumulator=make_accumulator(job, parameters),
        precision=job.precision,
    )


def make_accumulator(job: Job, parameters: Mapping[str, Tensor]) -> Accumulator:
    """Return the accumulator that a worker would use."""
    if job.accumulation == "fast":
        return FastAccumulator(parameters)
    contributions = job.batch_size
    return ExactAccumulator(parameters, dict.fromkeys(parameters, first_exponent(contributions)), contributions)


def mock(spec: BoundaryTensor, generator: torch.Generator, scale: float) -> Tensor:
    """Return a random tensor in place of what another section would send; integers are 0 or 1."""
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return (torch.randn(spec.shape, generator=generator) * scale).to(spec.dtype)
    return torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype)


def _activation_bytes(bench: _Bench) -> int:
    """Bytes that autograd holds between forward and backward, without the section's inputs and parameters."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*bench.inputs, *bench.parameters.values())}
    known |= {tensor.untyped_storage().data_ptr() for tensor in bench.batch.values()}
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run = bench.forward(0)
    bench.backward(run)
    return sum(held.values())


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
