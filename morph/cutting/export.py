"""Export a job's model and loss as one graph, with the batch size symbolic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from morph.contract.errors import ExportError, JobError, MorphError
from morph.cutting.construct import BuiltModel, LazyTensors, build_model, build_really
from morph.cutting.functional import make_functional
from morph.cutting.locate import definition_line, user_line
from morph.cutting.recordable import quiet_fakes
from morph.cutting.refusal import explain, first_line
from morph.cutting.tape import CannotRecord
from morph.data.loader import check_sample, stack_entry
from morph.job import Job

_PREFIX = "model."
_EXAMPLE_SAMPLES = 3
_MAX_SAMPLES = 1 << 20
_MAX_REAL_BYTES = 2 << 30
ResultT = TypeVar("ResultT")


class _Whole(nn.Module):
    """The whole step of a micro-batch as one module: the loss of the model, then its metrics by name."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, dict[str, Tensor]], Any]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        result = self._loss(self.model, dict(batch))
        if not isinstance(result, tuple):
            loss: Tensor = result
            return loss
        loss, metrics = result
        return (loss, *(metrics[name].detach().clone() for name in sorted(metrics)))


@dataclass(frozen=True)
class Source:
    """What a graph input holds: a trainable parameter, a constant (buffer, frozen parameter), or a batch entry."""

    kind: str
    name: str


@dataclass(frozen=True)
class ExportedJob:
    """The graph of ``loss(model, batch)``, and what it starts from.

    Attributes:
        graph_module: Graph of the loss (and the metrics) without in-place operations or assertions.
        sources: What each placeholder of the graph holds, by placeholder name.
        batch_symbol: The symbol that stands for the number of samples (a sympy symbol).
        initial_parameters: Trainable parameters by their first name in the model, on CPU, each made when it is asked
            for. A tied one comes once.
        initial_constants: Constants by the placeholder that holds them, made likewise.
        aliases: Further names of tied parameters, with the name they are kept under.
        num_sections: What the job asks for, if anything.
        cut_points: Names of modules in front of which the job wants to be cut, if any.
        model_line: Where the model is defined, ``file:line``, for errors.
        not_recorded: Why initial values cannot be made one by one; None when they can.
        metric_names: What the loss returns besides, in the order in which the graph does, behind the loss.
    """

    graph_module: GraphModule
    sources: dict[str, Source]
    batch_symbol: Any
    initial_parameters: LazyTensors
    initial_constants: LazyTensors
    aliases: dict[str, str]
    num_sections: int | None
    cut_points: tuple[str, ...]
    model_line: str
    not_recorded: str | None
    metric_names: tuple[str, ...] = ()


def export_job(job: Job) -> ExportedJob:
    """Build the model without memory for its weights and export it with its loss, in training mode.

    Raises:
        JobError: the model, data set or loss fails by itself, or the model changes a buffer while training.
        ExportError: torch.export refuses the model; names the line and what to do.
    """
    built = _build_model(job)
    batch = _example_batch(job)
    _try_loss(job, built, batch)
    program, metric_names = _export(job, built, batch)
    graph_module = make_functional(program, _PREFIX)
    canonical, aliases = _parameter_names(built.model)
    sources = _sources(program, batch, canonical)
    first = next(node for node in graph_module.graph.nodes if node.op == "placeholder" and _is_batch(sources, node))
    return ExportedJob(
        graph_module=graph_module,
        sources=sources,
        batch_symbol=first.meta["val"].shape[0].node.expr,
        initial_parameters=LazyTensors(
            {name: value for name, value in built.model.named_parameters() if value.requires_grad}, built.tape
        ),
        initial_constants=_constants(program, sources, built),
        aliases=aliases,
        num_sections=job.num_sections,
        cut_points=job.cut_points,
        model_line=definition_line(type(built.model)),
        not_recorded=built.not_recorded,
        metric_names=metric_names,
    )


def _build_model(job: Job) -> BuiltModel:
    built = _run_users_code(lambda: build_model(job.model, job.seed), job, None, "model")
    model = built.model
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
    model.train()
    return built


def _try_loss(job: Job, built: BuiltModel, batch: dict[str, Tensor]) -> None:
    """Run the loss once: what the model keeps from its first call is there when it is exported.

    On a fake model a failure may be one of fakes alone; then the export decides.
    """
    entries = {key: built.like(entry) for key, entry in batch.items()}
    with torch.random.fork_rng(devices=[]):
        try:
            with built.running(), quiet_fakes():
                loss = job.loss(built.model, entries)
        except Exception as error:
            if built.tape is None:
                raise _users_error(error, job, built.model, "loss") from error
            return
    _check_loss(loss)


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
        raise _users_error(error, job, model, field) from error


def _users_error(error: Exception, job: Job, model: nn.Module | None, field: str) -> JobError:
    line = user_line(error, job, model) or definition_line(getattr(job, field))
    return JobError(f"{field} failed: {type(error).__name__}: {first_line(error)}", source=line)


def _check_loss(result: object) -> None:
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    shown = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise JobError(
            "does not return a scalar", source="Job", field="loss", value=shown, allowed="a tensor of shape ()"
        )
    if not loss.requires_grad:
        raise JobError("does not depend on the model's parameters", source="Job", field="loss")
    _check_metrics(metrics)


def _check_metrics(metrics: object) -> None:
    allowed = "(loss, {name: tensor of shape ()})"
    if not isinstance(metrics, Mapping):
        raise JobError(
            "returns no dict of metrics", source="Job", field="loss", value=type(metrics).__name__, allowed=allowed
        )
    for name, value in metrics.items():
        is_scalar = isinstance(value, Tensor) and value.dim() == 0 and not value.dtype.is_complex
        if not isinstance(name, str) or not is_scalar:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise JobError(f"metric {name!r} is no scalar", source="Job", field="loss", value=shown, allowed=allowed)


def _export(job: Job, built: BuiltModel, batch: dict[str, Tensor]) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Return the program and the names of the metrics behind its loss."""
    names: list[str] = []

    def loss(model: nn.Module, entries: dict[str, Tensor]) -> Any:
        result = job.loss(model, entries)
        if isinstance(result, tuple):
            _check_loss(result)
            names[:] = sorted(result[1])
        return result

    samples = Dim("samples", min=1, max=_MAX_SAMPLES)
    shapes = ({key: {0: samples} for key in batch},)
    model = built.model
    try:
        with warnings.catch_warnings(), built.tracing():
            warnings.simplefilter("ignore")
            program = torch.export.export(_Whole(model, loss), (batch,), dynamic_shapes=shapes, strict=False)
    except JobError:
        raise
    except Exception as error:
        _blame_the_job(job, built, batch)
        line = user_line(error, job, model) or definition_line(type(model).forward)
        reason, advice = explain(error)
        raise ExportError(
            f"{type(model).__name__} cannot be exported: {reason}", source=line, allowed=advice
        ) from error
    return program, tuple(names)


def _blame_the_job(job: Job, built: BuiltModel, batch: dict[str, Tensor]) -> None:
    """Run model and loss on real numbers, where they fit, so that an error of theirs is told as one."""
    if built.tape is None or _parameter_bytes(built.model) > _MAX_REAL_BYTES:
        return
    model = build_really(job.model, job.seed).train()
    with torch.random.fork_rng(devices=[]):
        _check_loss(_run_users_code(lambda: job.loss(model, dict(batch)), job, model, "loss"))


def _parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


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
        trainable = spec.kind == InputKind.PARAMETER and _held(program, target).requires_grad
        sources[placeholder] = Source("parameter", canonical[name]) if trainable else Source("constant", name)
    return sources


def _constants(program: ExportedProgram, sources: dict[str, Source], built: BuiltModel) -> LazyTensors:
    held = {
        spec.arg.name: _held(program, str(spec.target))
        for spec in program.graph_signature.input_specs
        if sources[spec.arg.name].kind == "constant"
    }
    try:
        return LazyTensors(held, built.tape)
    except CannotRecord as error:
        raise ExportError(
            "a constant is made from the batch and kept", source=definition_line(type(built.model).forward)
        ) from error


def _held(program: ExportedProgram, target: str) -> Tensor:
    value: Tensor = program.state_dict[target] if target in program.state_dict else program.constants[target]
    return value


def _is_batch(sources: dict[str, Source], node: Node) -> bool:
    return sources[node.name].kind == "batch"
