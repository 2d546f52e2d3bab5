"""Runs one section on one micro-batch: the atom of all arithmetic.

Forward, recompute and backward always go section by section, with inputs detached at each section border, so that no
result depends on how sections are grouped into stages. The forward pass always runs with autograd on, even if its graph
is dropped and made again later, so that it uses the same kernels as the recompute.

A section is a graph of ATen operations, and autocast acts where those are dispatched, so it works on sections as on
the user's own code. Weights are cast once per run of a section; the backward follows the types of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule

from morph.cutting.exporting.user_functions import UserFunction
from morph.cutting.sections.section import CutModel, Section
from morph.cutting.source.refusal import changes_requires_grad
from morph.jobs.job import Precision
from morph.runtime.state.accumulators import change_of
from morph.runtime.step.kernels import kernels_refused

_TORCHS_OWN = {"aten", "prims"}
"""Namespaces of torch's own operations."""
AddGradient = Callable[[str, Tensor], None]
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class GradientSink(Protocol):
    """Receives the results of one micro-batch's backward."""

    def add(self, section: int, name: str, gradient: Tensor) -> None:
        """Receive the gradient of a parameter through a section, or the change of a buffer."""

    def done(self, section: int) -> None:
        """Handle that a section's backward is complete."""


@dataclass(frozen=True)
class SectionRun:
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
) -> SectionRun:
    """Run a section's forward with a fresh autograd graph. The caller seeds the generators.

    Outputs have the types of the cut model in every precision, and conjugates are carried out, so that sent tensors
    equal those that the next section of the same stage gets. If narrower types cross a job's cuts, the section widens
    its inputs, so that their gradients are also narrow.
    """
    leaves = tuple(
        tensor.detach().requires_grad_(spec.requires_grad) for tensor, spec in zip(inputs, section.inputs, strict=True)
    )
    device_type = next((tensor.device.type for tensor in (*leaves, *parameters.values(), *batch.values())), "cpu")
    with torch.enable_grad(), kernels_refused(section.source):
        with autocast(precision, device_type):
            given = tuple(leaf.to(spec.computed_dtype) for leaf, spec in zip(leaves, section.inputs, strict=True))
            results = section(given, batch, parameters)
        outputs, written = results[: len(section.outputs)], results[len(section.outputs) :]
        outputs = tuple(
            _carried_out(output.to(spec.dtype)) for output, spec in zip(outputs, section.outputs, strict=True)
        )
    for name in section.parameters:
        if not parameters[name].requires_grad:
            raise changes_requires_grad(name, section.source)
    return SectionRun(inputs=leaves, outputs=outputs, written=written)


def run_step(
    sections: Sequence[Section],
    batch: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    add: AddGradient,
    prepared: Callable[[Section], Section] = lambda section: section,
    precision: Precision = "fp32",
    factor: float = 1.0,
) -> tuple[Tensor, ...]:
    """Run all sections forward, and then backward from the loss; return the outputs of the last one.

    ``add``: receives each gradient, as in ``section_backward``. ``prepared``: called with each section before its
    forward; returns the section to run in its place.
    """
    runs: list[SectionRun] = []
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
    run: SectionRun,
    output_gradients: Sequence[Tensor | None],
    parameters: Mapping[str, Tensor],
    add: AddGradient,
) -> tuple[Tensor | None, ...]:
    """Run a section's backward; give dense parameter gradients to ``add``, and return input gradients.

    ``output_gradients`` aligns with the outputs; None if an output needs no gradient, or has none because later
    sections do not use it. Inputs and parameters that lead to no output with a gradient have none either, as in an
    undivided model. Changes of buffers also go to ``add``, because a micro-batch has one backward, however often its
    forward ran.
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
    with kernels_refused(section.source):
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs], wanted, [gradient for _, gradient in pairs], allow_unused=True
            )
        )
    input_gradients = tuple(_maybe(next(found)) if tensor.requires_grad else None for tensor in run.inputs)
    for name, gradient in zip(section.parameters, found, strict=True):
        if gradient is not None:
            add(name, gradient.to_dense() if gradient.is_sparse else gradient)
    return input_gradients


@lru_cache(maxsize=4)
def borders_may_lack_gradients(model: CutModel) -> bool:
    """Return whether a border tensor that carries a gradient may get none in some micro-batches.

    This is possible if sections are the user's code, which may branch, or run the user's own backward, which may return
    None. Other graphs are cut so that a border that carries a gradient always gets one.
    """
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
