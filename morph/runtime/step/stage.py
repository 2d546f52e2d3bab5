"""Runs one stage's sections in order, and keeps the tensors for the backward of each micro-batch in flight.

A section on one micro-batch is the atom of all arithmetic. Forward, recompute and backward always go section by
section, with inputs detached at each section border, so that no result depends on how sections are grouped into stages.
The forward pass always runs with autograd on, even if its graph is dropped and made again later, so that it uses the
same kernels as the recompute. Random numbers depend only on (job seed, step, micro-batch, section), never on the shape.

A section is a graph of ATen operations, and autocast acts where those are dispatched, so it works on sections as on
the user's own code. Weights are cast once per run of a section; the backward follows the types of the forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule

from morph.cutting.exporting.user_functions import UserFunction
from morph.cutting.sections.section import CutModel, Section
from morph.cutting.source.refusal import changes_requires_grad
from morph.data.lengths import Size
from morph.jobs.job import Precision
from morph.runtime.state.accumulators import change_of
from morph.runtime.step.kernels import raise_if_refused

_TORCHS_OWN = {"aten", "prims"}
"""Namespaces of torch's own operations."""
AddGradient = Callable[[str, Tensor], None]
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LoadBatch = Callable[[int, Sequence[str]], Mapping[str, Tensor]]


class StageTasks(Protocol):
    """The executor's interface of a stage: see ``Stage``."""

    @property
    def num_stored(self) -> int:
        """Micro-batches for which only the stage's input is kept."""

    @property
    def num_live(self) -> int:
        """Micro-batches whose graphs are kept for the backward."""

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the forward of one micro-batch; returns the stage's outputs, detached."""

    def recompute(self, micro_batch: int) -> None:
        """Run the forward again from the stored input, keeping the graphs for the backward."""

    def backward(
        self, micro_batch: int, output_gradients: Sequence[Tensor | None], sink: GradientSink
    ) -> tuple[Tensor | None, ...]:
        """Run the backward of one micro-batch; returns the gradients of the stage's inputs."""


class Stage:
    """Runs tasks of one stage in one step; with ``recompute``, only its input is kept between forward and backward.

    The inputs of each group of ``live_sections`` (None: all), counted from the end, are then kept, and a group is
    recomputed before its backward. ``load_batch``: gives batch entries, by global number and keys.
    """

    def __init__(
        self,
        model: CutModel,
        sections: range,
        *,
        recompute: bool,
        parameters: Mapping[str, Tensor],
        load_batch: LoadBatch,
        seed: int,
        step: int,
        precision: Precision = "fp32",
        live_sections: int | None = None,
    ) -> None:
        self._model = model
        self.size_of: Callable[[int], Size] = lambda _: (None, model.micro_batch_size)
        """Length and number of samples of each micro-batch, by number, if they vary."""
        self._sections = sections
        self._groups = _groups(sections, live_sections if recompute and live_sections else len(sections))
        self._recompute = recompute
        self._parameters = parameters
        self._load_batch = load_batch
        self._seed = seed
        self._step = step
        self._precision = precision
        self._may_lack = borders_may_lack_gradients(model)
        self._stored: dict[int, list[tuple[Tensor, ...]]] = {}
        self._earlier_inputs: dict[int, list[tuple[Tensor, ...]]] = {}
        """Inputs of the earlier groups, for micro-batches whose last group was recomputed."""
        self._runs: dict[int, list[SectionForward]] = {}

    @property
    def num_stored(self) -> int:
        return len(self._stored)

    @property
    def num_live(self) -> int:
        return len(self._runs)

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not self._recompute:
            runs = self._runs[micro_batch] = self._run(self._sections, micro_batch, inputs)
            return _detached(runs[-1])
        values, stored = tuple(inputs), []
        for group in self._groups:
            stored.append(values)
            for section in self._of(group, micro_batch):
                values = _detached(self._run_one(section, micro_batch, values))  # the section's graph is dropped here
        self._stored[micro_batch] = stored
        return values

    def recompute(self, micro_batch: int) -> None:
        """Run the forward again from the stored input, keeping the graphs of the last group for the backward."""
        stored = self._stored.pop(micro_batch)
        self._runs[micro_batch] = self._run(self._groups[-1], micro_batch, stored.pop())
        self._earlier_inputs[micro_batch] = stored

    def backward(
        self, micro_batch: int, output_gradients: Sequence[Tensor | None], sink: GradientSink
    ) -> tuple[Tensor | None, ...]:
        gradients = tuple(output_gradients)
        runs, earlier = self._runs.pop(micro_batch), self._earlier_inputs.pop(micro_batch, [])
        for group in reversed(self._groups):
            runs = runs or self._run(group, micro_batch, earlier.pop())
            for section in reversed(self._of(group, micro_batch)):
                run, add_here = runs.pop(), partial(sink.add, section.index)
                gradients = section_backward(section, run, gradients, self._parameters, add_here)
                if not self._may_lack:
                    gradients = _filled(gradients, run.inputs)
                sink.done(section.index)
                del run  # drop its graph before another group's is made
        return gradients

    def _of(self, group: range, micro_batch: int) -> tuple[Section, ...]:
        sections = self._model.at(*self.size_of(micro_batch)).sections
        return tuple(sections[index] for index in group)

    def _run(self, group: range, micro_batch: int, inputs: Sequence[Tensor]) -> list[SectionForward]:
        runs: list[SectionForward] = []
        values = tuple(inputs)
        for section in self._of(group, micro_batch):
            runs.append(self._run_one(section, micro_batch, values))
            values = runs[-1].outputs
        return runs

    def _run_one(self, section: Section, micro_batch: int, values: Sequence[Tensor]) -> SectionForward:
        batch = self._load_batch(micro_batch, section.batch_keys) if section.batch_keys else {}
        seed_section(self._seed, self._step, micro_batch, section.index)
        return run_section(section, values, batch, self._parameters, self._precision)


def _filled(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return zeros for absent gradients, as in messages between stages if no gradient may be absent."""
    return tuple(
        torch.zeros_like(tensor) if gradient is None and tensor.requires_grad else gradient
        for gradient, tensor in zip(gradients, inputs, strict=True)
    )


def _detached(run: SectionForward) -> tuple[Tensor, ...]:
    return tuple(output.detach() for output in run.outputs)


def _groups(sections: range, size: int) -> list[range]:
    """Split sections into groups of ``size``; the first may be smaller."""
    first = len(sections) % size or size
    return [sections[:first], *(sections[start : start + size] for start in range(first, len(sections), size))]


def stream_seed(seed: int, step: int, micro_batch: int, section: int) -> int:
    """Return a 63-bit seed for one section's run on one micro-batch."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}/{section}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_section(seed: int, step: int, micro_batch: int, section: int) -> None:
    """Set torch's generators before a section runs, in the forward pass and in the recompute alike.

    ``torch.manual_seed`` is slow: it stores the call, with its stack, for each unused kind of device.
    """
    section_seed = stream_seed(seed, step, micro_batch, section)
    torch.default_generator.manual_seed(section_seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch ships no types for it
        torch.cuda.manual_seed_all(section_seed)


class GradientSink(Protocol):
    """Receives the results of one micro-batch's backward."""

    def add(self, section: int, name: str, gradient: Tensor) -> None:
        """Receive the gradient of a parameter through a section, or the change of a buffer."""

    def done(self, section: int) -> None:
        """Handle that a section's backward is complete."""


@dataclass(frozen=True)
class SectionForward:
    """A section's inputs and outputs with the autograd graph between them, and new values of buffers."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    written: tuple[Tensor, ...] = ()


def run_section(
    section: Section,
    inputs: Sequence[Tensor],
    batch: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    precision: Precision = "fp32",
) -> SectionForward:
    """Run a section's forward with a fresh autograd graph; the caller seeds the generators.

    Outputs have the types of the cut model in every precision, so that sent tensors equal those that the next section
    of the same stage gets; a section widens narrower inputs, so that their gradients are narrow too.
    """
    leaves = tuple(
        tensor.detach().requires_grad_(spec.requires_grad) for tensor, spec in zip(inputs, section.inputs, strict=True)
    )
    device_type = next((tensor.device.type for tensor in (*leaves, *parameters.values(), *batch.values())), "cpu")
    try:
        with torch.enable_grad():
            with autocast(precision, device_type):
                dtypes = [spec.wide_dtype or spec.dtype for spec in section.inputs]
                given = tuple(leaf.to(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True))
                results = section(given, batch, parameters)
            outputs, written = results[: len(section.outputs)], results[len(section.outputs) :]
            outputs = tuple(
                _carried_out(output.to(spec.dtype)) for output, spec in zip(outputs, section.outputs, strict=True)
            )
    except RuntimeError as error:
        raise_if_refused(error, section.source)
        raise
    for name in section.parameters:
        if not parameters[name].requires_grad:
            raise changes_requires_grad(name, section.source)
    return SectionForward(inputs=leaves, outputs=outputs, written=written)


def run_step(
    sections: Sequence[Section],
    batch: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    add: AddGradient,
    prepared: Callable[[Section], Section] = lambda section: section,
    precision: Precision = "fp32",
    factor: float = 1.0,
) -> tuple[Tensor, ...]:
    """Run all sections forward, then backward, with gradients to ``add``; return the last one's outputs.

    ``prepared``: called with each section before its forward; returns the section to run in its place.
    """
    runs: list[SectionForward] = []
    values: tuple[Tensor, ...] = ()
    for section in sections:
        runs.append(run_section(prepared(section), values, batch, parameters, precision))
        values = runs[-1].outputs
    following: tuple[Tensor | None, ...] = (torch.full_like(values[0], factor), *(None for _ in values[1:]))
    for section in reversed(sections):
        following = section_backward(section, runs.pop(), following, parameters, add)
    return values


def section_backward(
    section: Section,
    run: SectionForward,
    output_gradients: Sequence[Tensor | None],
    parameters: Mapping[str, Tensor],
    add: AddGradient,
) -> tuple[Tensor | None, ...]:
    """Run a section's backward; give gradients and buffers' changes to ``add``, return input gradients.

    ``output_gradients``: None for an output that has none. Inputs and parameters that lead to no output with a gradient
    have none either, as in an undivided model.
    """
    for name, new in zip(section.writes, run.written, strict=True):
        add(name, change_of(parameters[name], new))
    pairs = [
        (output, gradient)
        for output, gradient in zip(run.outputs, output_gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    wanted_inputs = [tensor for tensor in run.inputs if tensor.requires_grad]
    wanted = [*wanted_inputs, *(parameters[name] for name in section.parameters)]
    if not wanted or not pairs:  # frozen sections at the model's beginning, or no later section uses this one
        return (None,) * len(run.inputs)
    outputs, seeds = [output for output, _ in pairs], [gradient for _, gradient in pairs]
    try:
        computed = iter(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True))
    except RuntimeError as error:
        raise_if_refused(error, section.source)
        raise
    input_gradients = tuple(_maybe(next(computed)) if tensor.requires_grad else None for tensor in run.inputs)
    for name, gradient in zip(section.parameters, computed, strict=True):
        if gradient is not None:
            add(name, gradient.to_dense() if gradient.is_sparse else gradient)
    return input_gradients


@lru_cache(maxsize=4)
def borders_may_lack_gradients(model: CutModel) -> bool:
    """Return whether a border tensor may lack its gradient: if sections, or their backward, are the user's code."""
    codes = [section.code for section in model.sections]
    return any(not isinstance(code, GraphModule) or _has_backward_of_users(code) for code in codes)


def _has_backward_of_users(code: GraphModule) -> bool:
    graphs = [module.graph for module in code.modules() if isinstance(module, GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes]
    return any(
        isinstance(target, UserFunction) or (isinstance(target, OpOverload) and target.namespace not in _TORCHS_OWN)
        for target in targets
    )


def _maybe(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else _carried_out(gradient)


def _carried_out(tensor: Tensor) -> Tensor:
    """Carry out conjugation and negation that torch only marks: kernels that read such a mark may round differently."""
    return tensor.resolve_conj().resolve_neg()


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """Return the context in which sections run forward, in the forward pass and in the recompute alike."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type, dtype=_TYPES[precision])
