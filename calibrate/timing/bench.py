"""Runs one section by itself: the worker's own code on mock inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from morph.cutting import BoundaryTensor, CutModel, Section
from morph.jobs.job import Job, Precision
from morph.runtime.state.accumulators import Accumulator, ExactAccumulator, FastAccumulator, change_like
from morph.runtime.state.fixed_point import first_exponent
from morph.runtime.state.parts import Memory
from morph.runtime.step.stage import AddGradient, SectionForward, run_section, section_backward, seed_section

_MOCK_GRADIENT = 1e-4
LoadEntries = Callable[[Sequence[str]], Mapping[str, Tensor]]


@dataclass
class Bench:
    """A section on its device, with border tensors, gradients of its outputs, a batch and parameters.

    ``add`` gets the gradients of parameters, and changes of buffers.
    """

    section: Section
    inputs: tuple[Tensor, ...]
    output_gradients: tuple[Tensor | None, ...]
    batch: Mapping[str, Tensor]
    parameters: dict[str, Tensor]
    add: AddGradient
    precision: Precision
    device: torch.device

    def forward(self, sample: int) -> SectionForward:
        """Seed the generators and run forward, as a stage does."""
        seed_section(0, sample, 0, self.section.index)
        return run_section(self.section, self.inputs, self.batch, self.parameters, self.precision)

    def backward(self, run: SectionForward) -> None:
        """Run backward, adding gradients as a stage does."""
        section_backward(self.section, run, self.output_gradients, self.parameters, self.add)

    def both(self) -> None:
        """Run one forward and one backward."""
        self.backward(self.forward(0))

    def given_bytes(self) -> int:
        """Return the bytes that must be kept to run the section again."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.inputs, *self.batch.values()))


def make_bench(
    job: Job,
    section: Section,
    initial: Mapping[str, Tensor],
    load: LoadEntries,
    device: torch.device,
    add: AddGradient | None = None,
) -> Bench:
    """Set a section up with random border tensors, a real batch, and initial parameters; ``add`` gets the gradients."""
    generator = torch.Generator().manual_seed(section.index)
    parameters = {name: initial[name].detach().to(device, copy=True).requires_grad_() for name in section.parameters}
    buffers = {name: initial[name].detach().to(device, copy=True) for name in section.buffers}
    is_loss = section.outputs[0].shape == () and section.outputs[0].requires_grad
    gradients = (
        (torch.ones(()) if is_loss else mock(spec, generator, _MOCK_GRADIENT)) if spec.requires_grad else None
        for spec in section.outputs
    )
    return Bench(
        section=section,
        inputs=tuple(mock(spec, generator, 1.0).to(device) for spec in section.inputs),
        output_gradients=tuple(None if gradient is None else gradient.to(device) for gradient in gradients),
        batch={key: tensor.to(device) for key, tensor in load(section.batch_keys).items()},
        parameters=parameters | buffers,
        add=add or _accumulator(job, parameters, buffers, device).add,
        precision=job.precision,
        device=device,
    )


def one_of_each(model: CutModel) -> list[Section]:
    """Return the first section of each kind: equal operations and shapes take equal time."""
    kinds: dict[str, Section] = {}
    for section in model.sections:
        kinds.setdefault(section.signature, section)
    return list(kinds.values())


def mock(spec: BoundaryTensor, generator: torch.Generator, scale: float) -> Tensor:
    """Return a random tensor in place of one from another section; integers are 0 or 1."""
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return (torch.randn(spec.shape, generator=generator) * scale).to(spec.dtype)
    return torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype)


def _accumulator(
    job: Job, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], device: torch.device
) -> Accumulator:
    exact = job.accumulation == "exact"
    summed = {**parameters, **{name: change_like(buffer, exact=exact) for name, buffer in buffers.items()}}
    if not exact:
        return FastAccumulator(summed, memory=Memory(device))
    exponents = dict.fromkeys(summed, first_exponent(job.batch_size))
    return ExactAccumulator(summed, exponents, job.batch_size, memory=Memory(device))
