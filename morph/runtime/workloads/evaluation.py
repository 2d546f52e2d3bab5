"""Evaluation: forward passes of the pipeline, without dropout, at the version that a worker holds.

The cut is that of training; sections of the model's own code run in evaluation mode. Randomness other than dropout
stays, and depends on (seed, version, micro-batch, section) alone.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from morph.contract.errors import wrong_job
from morph.contract.evaluation import (
    MOST_SAMPLE_BYTES,
    Array,
    BestRule,
    EvaluationSize,
    EvaluationTotals,
    FinishedMetrics,
)
from morph.contract.messages import SAMPLES, CommitOrder, Evaluation, MicroBatchLoss, StepOrder
from morph.cutting import CutModel, Section
from morph.cutting.exporting.functional import WRITTEN
from morph.cutting.marked.marked_run import MarkedCode
from morph.cutting.sections.section import BoundaryTensor
from morph.cutting.sections.statistics import PLAIN, use_statistics
from morph.data import DataWorkers
from morph.data.evaluation import EvaluationLoader
from morph.data.lengths import IGNORED
from morph.data.loader import data_of, lengths_of, order_of, recipe_of, with_step
from morph.data.seeding import own_generators, seed_of
from morph.jobs.job import Job, Precision
from morph.runtime.device.links import Receiver, Sender
from morph.runtime.device.staging import placed
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.step.generation import Generation, StageWork
from morph.runtime.step.stage import run_section, seed_section
from morph.runtime.step.sums import told_losses
from morph.runtime.step.training_step import Attendant, Units

MAX_SENDING = 4
"""The largest number of micro-batches on their way to the next stage."""

aten = torch.ops.aten
_OFF: dict[object, tuple[int, str, bool | float]] = {
    aten.dropout.default: (2, "train", False),
    aten.native_dropout.default: (2, "train", False),
    aten.alpha_dropout.default: (2, "train", False),
    aten.feature_dropout.default: (2, "train", False),
    aten.feature_alpha_dropout.default: (2, "train", False),
    aten.rrelu.default: (3, "training", False),
    aten.scaled_dot_product_attention.default: (4, "dropout_p", 0.0),
}
"""By operation: position, name and value of the argument that switches off its dropout."""


def evaluation_sections(model: CutModel) -> tuple[Section, ...]:
    """Return a model's sections without dropout. Raises JobError if dropout cannot be told from other randomness."""
    return tuple(_without_dropout(section) for section in model.sections)


def _without_dropout(section: Section) -> Section:
    code = section.code
    if isinstance(code, MarkedCode):
        return replace(section, code=_InEvaluationMode(code), _on_device={})
    assert isinstance(code, GraphModule)
    quiet = copy.deepcopy(code)
    _read_only(quiet.graph, len(section.outputs))
    for module in quiet.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                _switch_off(node, section)
            module.recompile()
    return replace(section, code=quiet, writes=(), _on_device={})


def _read_only(graph: Graph, num_outputs: int) -> None:
    """Make a graph read the committed values of written buffers, and normalise with the running statistics."""
    output = graph.output_node()
    output.args = (output.args[0][:num_outputs],)  # type: ignore[index]
    placeholders = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    for node in list(graph.nodes):
        if WRITTEN in node.meta:
            node.replace_all_uses_with(placeholders[node.meta[WRITTEN]])
    for node in list(graph.nodes):
        if node.target in PLAIN:
            use_statistics(node)


@dataclass(frozen=True)
class _InEvaluationMode:
    """A section that runs the model's own code, whose modules are in evaluation mode while it runs."""

    code: MarkedCode

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        modes = [(module, module.training) for module in self.code.whole.modules()]
        self.code.whole.eval()
        try:
            return self.code(*given)
        finally:
            for module, training in modes:
                module.training = training


def _switch_off(node: Node, section: Section) -> None:
    if node.target in (aten.bernoulli.p, aten.bernoulli.default):
        raise wrong_job(
            "eval_data",
            f"the dropout in section {section.index} ({section.label}) cannot be switched off for evaluation",
            allowed="a model that changes no activation in place, or plain nn.Dropout",
        )
    if node.target not in _OFF:
        return
    place, name, off = _OFF[node.target]
    if len(node.args) > place:
        node.update_arg(place, off)
    elif name in node.kwargs:
        node.update_kwarg(name, off)


@dataclass(frozen=True)
class EvaluationStage:
    """One stage's sections and batch entries, by the number of an evaluation micro-batch, at one version."""

    sections_of: Callable[[int], Sequence[Section]]
    parameters: Mapping[str, Tensor]
    load_batch: Callable[[int, Sequence[str]], Mapping[str, Tensor]]
    precision: Precision
    seed: int
    version: int

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run one micro-batch; the sections' graphs are dropped one by one."""
        values = tuple(inputs)
        for section in self.sections_of(micro_batch):
            batch = self.load_batch(micro_batch, section.batch_keys) if section.batch_keys else {}
            seed_section(self.seed, -1 - self.version, micro_batch, section.index)
            run = run_section(section, values, batch, self.parameters, self.precision)
            values = tuple(output.detach() for output in run.outputs)
        return values


def run_evaluation(stage: EvaluationStage, work: StageWork, interrupt: Interrupt) -> tuple[MicroBatchLoss, ...]:
    """Run this stage's part of an evaluation; only last stages return losses. Raises as ``Interrupt.wait_for`` does."""
    activations_in, _, activations_out, _ = work.links
    arriving, count = None, len(work.micro_batches)
    if activations_in:
        arriving = Receiver(
            activations_in, work.inputs, count, specs_of=lambda place: work.inputs_of(work.micro_batches[place])
        )
    leaving = Sender(activations_out) if activations_out else None
    outputs_of: dict[int, Sequence[Tensor]] = {}
    for done, micro_batch in enumerate(work.micro_batches):
        interrupt.check()
        inputs: tuple[Tensor, ...] = ()
        if arriving is not None:
            _await(arriving, done, interrupt)
            inputs = arriving.take()
        outputs = stage.forward(micro_batch, inputs)
        if leaving is None:
            outputs_of[micro_batch] = outputs
            continue
        leaving.send(outputs)
        if done % MAX_SENDING == MAX_SENDING - 1:
            leaving.flush()
    if leaving is not None:
        leaving.flush()
    losses = told_losses(outputs_of, work.metric_names, dict(enumerate(work.shares)))
    arrays = _arrays(outputs_of, work.metric_names, work.outputs)
    if not arrays:
        return tuple(losses)
    return tuple(entry.model_copy(update={"samples": arrays[entry.micro_batch]}) for entry in losses)


def _arrays(
    outputs_of: Mapping[int, Sequence[Tensor]], names: Sequence[str], longest: Sequence[BoundaryTensor]
) -> dict[int, dict[str, Array]]:
    """Return the values of each sample, by micro-batch, padded to the longest; bf16, which numpy lacks, is widened."""
    places = {name.removesuffix(SAMPLES): place for place, name in enumerate(names, 1) if name.endswith(SAMPLES)}
    if not places:
        return {}
    arrays_of: dict[int, dict[str, Array]] = {}
    for micro_batch, outputs in outputs_of.items():
        arrays = {}
        for name, place in places.items():
            values = _as_long_as(outputs[place].detach(), longest[place].shape).cpu()
            array = (values.float() if values.dtype is torch.bfloat16 else values).contiguous().numpy()
            arrays[name] = Array(dtype=str(array.dtype), shape=array.shape, data=array.tobytes())
        arrays_of[micro_batch] = arrays
    return arrays_of


def _as_long_as(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad with a value that losses ignore, as transformers' Trainer does."""
    if values.shape[1:] == torch.Size(shape[1:]):
        return values
    padded = values.new_full((len(values), *shape[1:]), False if values.dtype is torch.bool else IGNORED)
    padded[tuple(slice(size) for size in values.shape)] = values
    return padded


def _await(arriving: Receiver, done: int, interrupt: Interrupt) -> None:
    interrupt.wait_for(lambda: arriving.arrived() > done, "activations of an evaluation")


def batch_keys(sections: Iterable[Section]) -> set[str]:
    """Return the batch entries that some sections load."""
    return {key for section in sections for key in section.batch_keys}


class Evaluator(Attendant):
    """One worker's part in a job's evaluations."""

    def __init__(self, job: Job, model: CutModel, device: torch.device, prefetcher: DataWorkers | None = None) -> None:
        assert job.eval_data is not None
        self._job, self._model, self._device = job, model, device
        self._sections = {size: evaluation_sections(cut) for size, cut in model.every().items()}
        recipe, data = recipe_of(job), data_of(job, "eval_data")
        sample, m, lengths = recipe.like(data_of(job)), model.micro_batch_size, lengths_of(job, "eval_data")
        self._loader = EvaluationLoader(data, job.seed, sample, m, job.eval_samples, prefetcher, recipe, lengths)

    @property
    def size(self) -> EvaluationSize:
        """When evaluations are due, how large they are, and what follows from them."""
        job, epochs = self._job, order_of(self._job).epochs
        every, best = job.eval_every_epochs, job.best
        samples = epochs.num_samples if epochs.end == "fill" else epochs.num_steps * job.batch_size
        return EvaluationSize(
            every_steps=job.eval_every_steps,
            every_samples=None if every is None else every * samples,
            batch_size=job.batch_size,
            num_micro_batches=self._loader.num_micro_batches,
            best=None if best is None else BestRule(**asdict(best)),
            finishes=job.eval_metrics is not None,
        )

    def at_version(self, current: Generation, order: StepOrder | CommitOrder, held: Units) -> dict[str, Any]:  # noqa: ARG002
        """Evaluate this version if that is due, and compute the job's metrics from the totals in the order, if any."""
        totals = order.evaluated
        version = order.step if isinstance(order, StepOrder) else order.version
        again = isinstance(order, CommitOrder) and totals is not None and totals.version == version
        finishes = totals is not None and self._job.eval_metrics is not None
        return {
            "finished": self.finish(totals) if finishes and totals is not None else None,
            "evaluation": None if again else self.run_if_due(current, version),
        }

    def run_if_due(self, current: Generation, version: int) -> Evaluation | None:
        """Evaluate this version, if due; None on all stages but the last. Raises as ``Interrupt.wait_for`` does."""
        if current.slot is None or not self.size.is_due(version):
            return None
        total = self._loader.num_micro_batches
        share = current.plan.share_of(current.slot.replica, range(total))
        work = current.stage_work(self._model, share, self._loader.size, self._device)
        work = replace(work, shares=self._loader.shares)
        indices = current.plan.stages[current.slot.stage].sections
        stage = EvaluationStage(
            sections_of=lambda number: [self._sections[self._loader.size(number)][index] for index in indices],
            parameters={name: tensor for state in current.units.values() for name, tensor in state.values.items()},
            load_batch=partial(self._load, version),
            precision=self._job.precision,
            seed=self._job.seed,
            version=version,
        )
        keys = batch_keys(self._model.sections[index] for index in indices)
        self._loader.expect(work.micro_batches, keys, lambda: current.interrupt.over)
        losses = run_evaluation(stage, work, current.interrupt)
        if not current.plan.is_last(current.slot.stage):
            return None
        self._check_size(losses, total)
        finishes = self._job.eval_metrics is not None
        return Evaluation(version=version, num_micro_batches=total, losses=losses, finishes=finishes)

    def finish(self, totals: EvaluationTotals) -> FinishedMetrics:
        """Compute the job's metrics of a whole evaluation."""
        job = self._job
        assert job.eval_metrics is not None
        given: dict[str, Any] = {name: math.nan if value is None else value for name, value in totals.values.items()}
        for name, array in totals.samples.items():
            rows = np.frombuffer(bytearray(array.data), dtype=array.dtype).reshape(array.shape)
            given[name] = rows if job.lengths is None else rows[self._loader.order()]
        with own_generators(seed_of(job.seed, "evaluation", totals.version)):
            try:
                metrics = job.eval_metrics(given)
            except Exception as error:
                problem = f"fails: {type(error).__name__}: {error}"
                raise wrong_job("eval_metrics", problem) from error
        if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
            kind, allowed = type(metrics).__name__, "a dict of numbers by name"
            raise wrong_job("eval_metrics", "does not return a dict", kind, allowed)
        values: dict[str, float | None] = {}
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError) as error:
                kind = type(value).__name__
                problem = f"returns a value for {name!r} that is not a number"
                raise wrong_job("eval_metrics", problem, kind, "a number") from error
            values[name] = number if math.isfinite(number) else None
        return FinishedMetrics(version=totals.version, values=values)

    def _check_size(self, losses: Sequence[MicroBatchLoss], total: int) -> None:
        sizes: Counter[str] = Counter()
        for entry in losses[:1]:
            sizes.update({name: total * len(array.data) for name, array in entry.samples.items()})
        if sizes.total() > MOST_SAMPLE_BYTES:
            name, size_bytes = sizes.most_common(1)[0]
            raise wrong_job(
                "loss",
                f"returns {sizes.total()} bytes for all samples of an evaluation, {size_bytes} of them as {name!r}",
                allowed=f"{MOST_SAMPLE_BYTES} bytes; return only what eval_metrics needs, such as the argmax, or "
                "morph.Sum, or set eval_samples",
            )

    def _load(self, version: int, micro_batch: int, keys: Sequence[str]) -> Mapping[str, Tensor]:
        batch = with_step(self._loader.load(micro_batch, keys), self._job, version)
        return placed(batch, self._device)
