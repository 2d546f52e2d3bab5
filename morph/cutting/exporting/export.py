"""Exports a job's model and loss as one graph with a symbolic batch size."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from morph.contract.errors import ExportError, InputError, JobError
from morph.cutting.deferred_init.construct import (
    BuiltModel,
    LazyTensors,
    build_really,
    training_mode,
    write_assigned_buffers,
)
from morph.cutting.deferred_init.recordable import unvalidated_distributions
from morph.cutting.deferred_init.tape import CannotRecord
from morph.cutting.exporting.attention_masks import masks_as_untraced
from morph.cutting.exporting.exported_job import ExportedJob, GraphInput, GraphJob, MarkedJob
from morph.cutting.exporting.functional import Functional, make_functional
from morph.cutting.exporting.gradient_hooks import (
    gradients_refused,
    plain_checkpoints,
    refuse_module_hooks,
    refuse_parameter_hooks,
)
from morph.cutting.exporting.user_functions import kept_whole, put_back
from morph.cutting.exporting.written_buffers import settle_writes
from morph.cutting.sections.cut_point import CutPoint
from morph.cutting.source.guards import TRANSFORMS, decisive, watched_guards
from morph.cutting.source.locate import (
    definition_line,
    forward_line,
    model_line,
    module_paths,
    node_line,
    user_line,
)
from morph.cutting.source.refusal import OR_MARK, explain, transform_refused
from morph.cutting.trial_run.trial import (
    Whole,
    blame_the_job,
    built_model,
    check_loss,
    example_batch,
    loss_of_entries,
    try_loss,
)
from morph.data.loader import form_of, varying_dims
from morph.jobs.job import Job
from morph.losses import names_of

__all__ = ["ExportedJob", "GraphInput", "GraphJob", "MarkedJob", "export_job"]

_PREFIX = "model."
_NUMBERS: set[object] = {torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default}
_MAX_SAMPLES = 1 << 20


def export_job(job: Job) -> ExportedJob:
    """Build the model without memory for its weights and export it with its loss, in training mode.

    If torch.export refuses it, the result is a :class:`MarkedJob`; ExportError if it must be cut and has no marks.
    """
    built = built_model(job)
    batch = example_batch(job)
    _refuse_cumulative_averages(job, built.model)
    try_loss(job, built, batch)
    built.drop_results_of_a_run()
    refuse_parameter_hooks(built.model)
    try:
        with _placed(forward_line(job, built.model)):
            return _graph_job(job, built, batch)
    except ExportError as refusal:
        has_marks = job.cut_points or any(isinstance(module, CutPoint) for module in built.model.modules())
        if not has_marks and job.num_sections != 1:
            raise
        return _marked_job(job, built, batch, refusal)


def _refuse_cumulative_averages(job: Job, model: nn.Module) -> None:
    for name, module in model.named_modules():
        averages = isinstance(module, _NormBase) and module.training and module.track_running_stats
        if averages and module.momentum is None:
            raise JobError(
                f"{name} averages its statistics over all batches so far, with a weight that depends on their number",
                source=model_line(job, model),
                field="model",
                value="momentum=None",
                allowed="a number, such as momentum=0.1",
            )


def _graph_job(job: Job, built: BuiltModel, batch: dict[str, Tensor]) -> GraphJob:
    refuse_module_hooks(built.model)
    with kept_whole():
        program, metric_names, numbers = _export(job, built, batch)
        functional = make_functional(program)
        put_back(functional.graph_module)
    graph_module = functional.graph_module
    canonical, aliases = _first_names(built.model.named_parameters(remove_duplicate=False))
    sources = _sources(program, batch, canonical, _written_names(functional, program, built))
    first = next(node for node in graph_module.graph.nodes if node.op == "placeholder" and _is_batch(sources, node))
    batch_symbol = first.meta["val"].shape[0].node.expr
    length_symbol = _length_symbol(job, graph_module, sources)
    _refuse_what_is_not_traced(job, graph_module, numbers)
    _refuse_sizes_of_data(job, graph_module, {batch_symbol, length_symbol})
    settle_writes(functional, sources)
    written = tuple(sources[placeholder].name for placeholder in functional.written)
    return GraphJob(
        graph_module=graph_module,
        sources=sources,
        batch_symbol=batch_symbol,
        initial_parameters=_trainable(built),
        initial_buffers=built.initial_buffers.only(written),
        initial_constants=_constants(program, sources, built),
        aliases=aliases,
        num_sections=job.num_sections,
        cut_points=job.cut_points,
        boundary=job.boundary,
        model_line=model_line(job, built.model),
        not_recorded=built.not_recorded,
        metric_names=metric_names,
        written=written,
        buckets=job.buckets,
        length_symbol=length_symbol,
        length=job.buckets[-1] if job.buckets else None,
    )


def _length_symbol(job: Job, graph_module: GraphModule, sources: dict[str, GraphInput]) -> Any:
    if len(job.buckets) < 2:
        return None
    varying = varying_dims(job)
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if _is_batch(sources, node) and (dims := varying.get(sources[node.name].name)):
            return node.meta["val"].shape[dims[0]].node.expr
    return None


def _marked_job(job: Job, built: BuiltModel, batch: dict[str, Tensor], refusal: ExportError) -> MarkedJob:
    model = training_mode(build_really(job.model, job.seed))
    initial = _trainable(built)
    for parameter in {id(p): p for p in model.parameters() if p.requires_grad}.values():
        parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    return MarkedJob(
        job=job,
        whole=Whole(model, partial(loss_of_entries, job.loss, form_of(job))),
        batch=batch,
        batches={bucket: example_batch(job, bucket) for bucket in job.buckets},
        buckets=job.buckets,
        refusal=str(refusal),
        initial_parameters=initial,
        initial_buffers=built.initial_buffers.only(()),
        aliases=_first_names(model.named_parameters(remove_duplicate=False))[1],
        num_sections=job.num_sections,
        cut_points=job.cut_points,
        boundary=job.boundary,
        model_line=model_line(job, model),
        not_recorded=built.not_recorded,
    )


def _trainable(built: BuiltModel) -> LazyTensors:
    return LazyTensors(
        {name: value for name, value in built.model.named_parameters() if value.requires_grad}, built.tape
    )


def _export(
    job: Job, built: BuiltModel, batch: dict[str, Tensor]
) -> tuple[ExportedProgram, tuple[str, ...], Mapping[str, str | None]]:
    """Return the program, the names of its metrics, and the lines at which numbers are taken out of tensors."""
    names: list[str] = []
    form = form_of(job)

    def loss(model: nn.Module, entries: dict[str, Tensor]) -> Any:
        buffers = dict(model.named_buffers())
        result = job.loss(model, form.build(entries))
        write_assigned_buffers(model, buffers)
        if not isinstance(result, Tensor):
            check_loss(job, result)
            names[:] = names_of(result)
        return result

    samples = Dim("samples", min=1, max=_MAX_SAMPLES)
    length = Dim("length", min=job.buckets[0], max=job.buckets[-1]) if len(job.buckets) > 1 else None
    varying = {} if length is None else varying_dims(job)
    shapes = ({key: {0: samples, **dict.fromkeys(varying.get(key, ()), length)} for key in batch},)
    model = built.model
    try:
        with (
            warnings.catch_warnings(),
            redirect_stderr(StringIO()),  # torch prints the graphs of models that it refuses
            built.tracing(),
            plain_checkpoints(),
            gradients_refused() as numbers,
            masks_as_untraced(),
            unvalidated_distributions(),
            watched_guards() as guards,
        ):
            warnings.simplefilter("ignore")
            program = torch.export.export(Whole(model, loss), (batch,), dynamic_shapes=shapes, strict=False)
    except (JobError, ExportError):
        raise
    except Exception as error:
        blame_the_job(job, built, batch)
        guard = decisive(guards)
        line = user_line(error, job, model) or (guard.line if guard else None) or forward_line(job, model)
        reason, advice = explain(error, guard)
        raise ExportError(
            f"{type(model).__name__} cannot be exported: {reason}", source=line, allowed=advice
        ) from error
    return program, tuple(names), numbers


def _first_names(named: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the kept name for every name, and for every alias: tied tensors are kept under their first name."""
    kept_by_identity: dict[int, str] = {}
    canonical: dict[str, str] = {}
    for name, tensor in named:
        canonical[name] = kept_by_identity.setdefault(id(tensor), name)
    return canonical, {name: kept for name, kept in canonical.items() if name != kept}


def _written_names(functional: Functional, program: ExportedProgram, built: BuiltModel) -> dict[str, str]:
    """Return the names of the buffers that the forward writes, by placeholder."""
    targets = program.graph_signature.inputs_to_buffers
    canonical, _ = _first_names(built.model.named_buffers(remove_duplicate=False))
    return {name: canonical[targets[name].removeprefix(_PREFIX)] for name in functional.written}


def _sources(
    program: ExportedProgram, batch: dict[str, Tensor], canonical: dict[str, str], written: dict[str, str]
) -> dict[str, GraphInput]:
    sources: dict[str, GraphInput] = {}
    keys = iter(batch)
    for spec in program.graph_signature.input_specs:
        placeholder = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            sources[placeholder] = GraphInput("batch", next(keys))
            continue
        target = str(spec.target)
        name = target.removeprefix(_PREFIX)
        trainable = spec.kind == InputKind.PARAMETER and _held(program, target).requires_grad
        if placeholder in written:
            sources[placeholder] = GraphInput("buffer", written[placeholder])
        else:
            sources[placeholder] = (
                GraphInput("parameter", canonical[name])
                if trainable
                else GraphInput("constant", canonical.get(name, name))
            )
    return sources


def _constants(program: ExportedProgram, sources: dict[str, GraphInput], built: BuiltModel) -> LazyTensors:
    held = {
        spec.arg.name: _held(program, str(spec.target))
        for spec in program.graph_signature.input_specs
        if sources[spec.arg.name].kind == "constant"
    }
    try:
        return LazyTensors(held, built.tape)
    except CannotRecord as error:
        allowed = "a buffer that is changed in place (self.NAME.copy_(...)), or a tensor that each forward makes anew"
        raise ExportError("a constant is made from the batch and kept", allowed=allowed) from error


@contextmanager
def _placed(line: str) -> Iterator[None]:
    """Give a refusal without a line (of an operation that torch's own modules call) the line of the model."""
    try:
        yield
    except InputError as error:
        if error.source is not None:
            raise
        raise type(error)(
            error.message, source=line, field=error.field, value=error.value, allowed=error.allowed
        ) from error


def _held(program: ExportedProgram, target: str) -> Tensor:
    value: Tensor = program.state_dict[target] if target in program.state_dict else program.constants[target]
    return value


def _refuse_what_is_not_traced(job: Job, graph_module: GraphModule, numbers: Mapping[str, str | None]) -> None:
    """Refuse code whose graph cannot be run: torch.vmap, and numbers that are taken out of tensors."""
    for node in graph_module.graph.nodes:
        if str(getattr(node.target, "__module__", "")).startswith(TRANSFORMS):
            reason, allowed = transform_refused()
            raise ExportError(reason, source=_line_of(job, node), allowed=allowed + OR_MARK)
        value = node.meta.get("val")
        if node.target in _NUMBERS and not isinstance(value, torch.SymInt):
            raise ExportError(
                "a number that is taken out of a tensor (.item(), float(), int()) is not traced",
                source=numbers.get(str(value)) or _line_of(job, node),
                allowed="the tensor itself, in operations or as a metric" + OR_MARK,
            )


def _line_of(job: Job, node: Node) -> str | None:
    """Return a node's line, or the loss's if it is in no module of the model; None inside torch's own modules."""
    return node_line(node) or (None if module_paths(node) else definition_line(job.loss))


def _refuse_sizes_of_data(job: Job, graph_module: GraphModule, known: set[Any]) -> None:
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        sizes = [size for tensor in tree_leaves(value) if isinstance(tensor, Tensor) for size in tensor.shape]
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.free_symbols - known:
                raise ExportError(
                    "the model has a size that depends on the data",
                    source=_line_of(job, node),
                    value=str(node.target),
                    allowed="sizes known from the shapes of the batch; pad in the data set" + OR_MARK,
                )


def _is_batch(sources: dict[str, GraphInput], node: Node) -> bool:
    return sources[node.name].kind == "batch"
