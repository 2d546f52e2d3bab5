"""Export a job's model and loss as one graph, with the batch size symbolic."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from morph.contract.errors import ExportError, JobError
from morph.cutting.construct import BuiltModel, LazyTensors, build_really
from morph.cutting.cut_point import CutPoint
from morph.cutting.exported import ExportedJob, GraphJob, MarkedJob, Source
from morph.cutting.functional import make_functional
from morph.cutting.locate import definition_line, node_line, user_line
from morph.cutting.refusal import OR_MARK, explain
from morph.cutting.tape import CannotRecord
from morph.cutting.trial import Whole, blame_the_job, built_model, check_loss, example_batch, try_loss
from morph.job import Job

__all__ = ["ExportedJob", "GraphJob", "MarkedJob", "Source", "export_job"]

_PREFIX = "model."
_MAX_SAMPLES = 1 << 20


def export_job(job: Job) -> ExportedJob:
    """Build the model without memory for its weights and export it with its loss, in training mode.

    Returns:
        A :class:`GraphJob`; a :class:`MarkedJob` where torch.export refuses a model with marks where to cut.

    Raises:
        JobError: the model, data set or loss fails by itself, or the model changes a buffer while training.
        ExportError: torch.export refuses a model without marks; names the line and what to do.
    """
    built = built_model(job)
    batch = example_batch(job)
    try_loss(job, built, batch)
    try:
        return _graph_job(job, built, batch)
    except ExportError as refusal:
        if not job.cut_points and not any(isinstance(module, CutPoint) for module in built.model.modules()):
            raise
        return _marked_job(job, built, batch, refusal)


def _graph_job(job: Job, built: BuiltModel, batch: dict[str, Tensor]) -> GraphJob:
    program, metric_names = _export(job, built, batch)
    graph_module = make_functional(program, _PREFIX)
    canonical, aliases = _parameter_names(built.model)
    sources = _sources(program, batch, canonical)
    first = next(node for node in graph_module.graph.nodes if node.op == "placeholder" and _is_batch(sources, node))
    batch_symbol = first.meta["val"].shape[0].node.expr
    _refuse_sizes_of_data(graph_module, batch_symbol)
    return GraphJob(
        graph_module=graph_module,
        sources=sources,
        batch_symbol=batch_symbol,
        initial_parameters=_trainable(built),
        initial_constants=_constants(program, sources, built),
        aliases=aliases,
        num_sections=job.num_sections,
        cut_points=job.cut_points,
        model_line=definition_line(type(built.model)),
        not_recorded=built.not_recorded,
        metric_names=metric_names,
    )


def _marked_job(job: Job, built: BuiltModel, batch: dict[str, Tensor], refusal: ExportError) -> MarkedJob:
    model = build_really(job.model, job.seed).train()
    initial = _trainable(built)
    for parameter in {id(p): p for p in model.parameters() if p.requires_grad}.values():
        parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    return MarkedJob(
        job=job,
        whole=Whole(model, job.loss),
        batch=batch,
        refusal=str(refusal),
        initial_parameters=initial,
        aliases=_parameter_names(model)[1],
        num_sections=job.num_sections,
        cut_points=job.cut_points,
        model_line=definition_line(type(model)),
        not_recorded=built.not_recorded,
    )


def _trainable(built: BuiltModel) -> LazyTensors:
    return LazyTensors(
        {name: value for name, value in built.model.named_parameters() if value.requires_grad}, built.tape
    )


def _export(job: Job, built: BuiltModel, batch: dict[str, Tensor]) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Return the program and the names of the metrics behind its loss."""
    names: list[str] = []

    def loss(model: nn.Module, entries: dict[str, Tensor]) -> Any:
        result = job.loss(model, entries)
        if isinstance(result, tuple):
            check_loss(result)
            names[:] = sorted(result[1])
        return result

    samples = Dim("samples", min=1, max=_MAX_SAMPLES)
    shapes = ({key: {0: samples} for key in batch},)
    model = built.model
    try:
        with warnings.catch_warnings(), built.tracing():
            warnings.simplefilter("ignore")
            program = torch.export.export(Whole(model, loss), (batch,), dynamic_shapes=shapes, strict=False)
    except JobError:
        raise
    except Exception as error:
        blame_the_job(job, built, batch)
        line = user_line(error, job, model) or definition_line(type(model).forward)
        reason, advice = explain(error)
        raise ExportError(
            f"{type(model).__name__} cannot be exported: {reason}", source=line, allowed=advice
        ) from error
    return program, tuple(names)


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


def _refuse_sizes_of_data(graph_module: GraphModule, batch_symbol: Any) -> None:
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        sizes = [size for tensor in tree_leaves(value) if isinstance(tensor, Tensor) for size in tensor.shape]
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.free_symbols - {batch_symbol}:
                raise ExportError(
                    "the model has a size that depends on the data",
                    source=node_line(node),
                    value=str(node.target),
                    allowed="sizes known from the shapes of the batch; pad in the data set" + OR_MARK,
                )


def _is_batch(sources: dict[str, Source], node: Node) -> bool:
    return sources[node.name].kind == "batch"
