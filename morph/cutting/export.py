"""Export a job's model and loss as one graph, with the batch size symbolic."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from morph.contract.errors import ExportError, JobError, MorphError
from morph.cutting.functional import make_functional
from morph.cutting.locate import definition_line, user_line
from morph.data.loader import check_sample, stack_entry
from morph.job import Job

_PREFIX = "model."
_EXAMPLE_SAMPLES = 3
_MAX_SAMPLES = 1 << 20
ResultT = TypeVar("ResultT")


class _Whole(nn.Module):
    """The whole step of a micro-batch as one module: the loss of the model."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self._loss(self.model, dict(batch))


@dataclass(frozen=True)
class Source:
    """What a graph input holds: a trainable parameter, a constant (buffer, frozen parameter), or a batch entry."""

    kind: str
    name: str
    constant: Tensor | None = None


@dataclass(frozen=True)
class ExportedJob:
    """The graph of ``loss(model, batch)``, and what it starts from.

    Attributes:
        graph_module: Single-output graph without in-place operations or assertions.
        sources: What each placeholder of the graph holds, by placeholder name.
        batch_symbol: The symbol that stands for the number of samples (a sympy symbol).
        initial_parameters: Trainable parameters by their first name in the model, on CPU. A tied one comes once.
        aliases: Further names of tied parameters, with the name they are kept under.
        num_sections: What the job asks for, if anything.
        model_line: Where the model is defined, ``file:line``, for errors.
    """

    graph_module: GraphModule
    sources: dict[str, Source]
    batch_symbol: Any
    initial_parameters: dict[str, Tensor]
    aliases: dict[str, str]
    num_sections: int | None
    model_line: str


def export_job(job: Job) -> ExportedJob:
    """Build the model on CPU (weights drawn from ``job.seed``) and export it with its loss, in training mode.

    Raises:
        JobError: the model, data set or loss fails by itself, or the model changes a buffer while training.
        ExportError: torch.export refuses the model; names the line and what to do.
    """
    model = _build_model(job)
    batch = _example_batch(job)
    with torch.random.fork_rng(devices=[]):
        _run_users_code(lambda: _check_loss(job.loss(model, dict(batch))), job, model, "loss")
    program = _export(job, model, batch)
    graph_module = make_functional(program, _PREFIX)
    canonical, aliases = _parameter_names(model)
    sources = _sources(program, batch, canonical)
    first = next(node for node in graph_module.graph.nodes if node.op == "placeholder" and _is_batch(sources, node))
    return ExportedJob(
        graph_module=graph_module,
        sources=sources,
        batch_symbol=first.meta["val"].shape[0].node.expr,
        initial_parameters={
            name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad
        },
        aliases=aliases,
        num_sections=job.num_sections,
        model_line=definition_line(type(model)),
    )


def _build_model(job: Job) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        model = _run_users_code(job.model, job, None, "model")
    if not isinstance(model, nn.Module):
        raise JobError(
            "does not return a module",
            source="Job",
            field="model",
            value=type(model).__name__,
            allowed="torch.nn.Module",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError("has no trainable parameter", source="Job", field="model", allowed="at least one")
    return model.train()


def _example_batch(job: Job) -> dict[str, Tensor]:
    """Stack the first samples; keys sorted, so that the order of graph inputs is known."""
    dataset = _run_users_code(job.dataset, job, None, "dataset")
    if len(dataset) == 0:
        raise JobError("is empty", source="Job", field="dataset", allowed="at least one sample")
    indices = [position % len(dataset) for position in range(_EXAMPLE_SAMPLES)]
    samples = [check_sample(_run_users_code(partial(dataset.__getitem__, i), job, None, "dataset"), i) for i in indices]
    return {key: stack_entry(samples, key) for key in sorted(samples[0])}


def _run_users_code(function: Callable[[], ResultT], job: Job, model: nn.Module | None, field: str) -> ResultT:
    try:
        return function()
    except MorphError:
        raise
    except Exception as error:
        line = user_line(error, job, model) or definition_line(getattr(job, field))
        raise JobError(f"{field} failed: {type(error).__name__}: {_first_line(error)}", source=line) from error


def _check_loss(loss: object) -> None:
    shown = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise JobError(
            "does not return a scalar", source="Job", field="loss", value=shown, allowed="a tensor of shape ()"
        )
    if not loss.requires_grad:
        raise JobError("does not depend on the model's parameters", source="Job", field="loss")


def _export(job: Job, model: nn.Module, batch: dict[str, Tensor]) -> ExportedProgram:
    samples = Dim("samples", min=1, max=_MAX_SAMPLES)
    shapes = ({key: {0: samples} for key in batch},)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(_Whole(model, job.loss), (batch,), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        line = user_line(error, job, model) or definition_line(type(model).forward)
        reason, advice = _explain(error)
        raise ExportError(
            f"{type(model).__name__} cannot be exported: {reason}", source=line, allowed=advice
        ) from error


def _explain(error: Exception) -> tuple[str, str]:
    text = str(error)
    if "Constraints violated" in text or "specialized" in text:
        return (
            "it fixes the number of samples in a micro-batch",
            "any number of samples; take it from tensor.shape[0] instead of writing it down",
        )
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__ or "unbacked" in text:
        return (
            "control flow or a shape depends on values in a tensor",
            "branches and shapes known before the data; use torch.where, or move the choice into the data set",
        )
    return (
        f"{type(error).__name__}: {_first_line(error)}",
        "plain tensor operations; rewrite this line, or move it into the data set",
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def _parameter_names(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Return (kept name of every name, kept name of every alias): tied parameters are kept under their first name."""
    kept_by_identity: dict[int, str] = {}
    canonical: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical[name] = kept_by_identity.setdefault(id(parameter), name)
    return canonical, {name: kept for name, kept in canonical.items() if name != kept}


def _sources(program: ExportedProgram, batch: dict[str, Tensor], canonical: dict[str, str]) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    keys = iter(batch)
    for spec in program.graph_signature.input_specs:
        placeholder = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            sources[placeholder] = Source("batch", next(keys))
            continue
        target = str(spec.target)
        name = target.removeprefix(_PREFIX)
        value = program.state_dict[target] if target in program.state_dict else program.constants[target]
        if spec.kind == InputKind.PARAMETER and value.requires_grad:
            sources[placeholder] = Source("parameter", canonical[name])
        else:
            sources[placeholder] = Source("constant", name, value.detach())
    return sources


def _is_batch(sources: dict[str, Source], node: Node) -> bool:
    return sources[node.name].kind == "batch"
