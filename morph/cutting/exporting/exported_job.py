"""A job before it is cut: as a graph, or as the user's own code with marks in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from morph.cutting.deferred_init.construct import LazyTensors
from morph.cutting.trial_run.trial import Whole
from morph.jobs.job import Boundary, Job


class InitialState(Mapping[str, Tensor]):
    """Initial values of everything that changes while training, made on request."""

    def __init__(self, *parts: LazyTensors) -> None:
        self._parts = {name: part for part in parts for name in part}

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def empty(self, name: str, device: torch.device) -> Tensor:
        return self._parts[name].empty(name, device)


@dataclass(frozen=True, kw_only=True)
class ExportedJob:
    """The fields of both kinds of exported jobs.

    Attributes:
        initial_parameters: Trainable parameters by their first name in the model, on CPU, each made on request. Tied
            parameters appear once.
        initial_buffers: Buffers that the forward writes, likewise.
        aliases: Further names of tied parameters, each with the name under which the parameter is kept.
        cut_points: Names of modules before which the job should be cut.
        model_line: Where the model is defined, ``file:line``, for errors.
        not_recorded: Why initial values cannot be made one by one; None if they can.
        metric_names: In the order in which sections return them after the loss.
    """

    initial_parameters: LazyTensors
    initial_buffers: LazyTensors
    aliases: dict[str, str]
    num_sections: int | None
    cut_points: tuple[str, ...]
    model_line: str
    not_recorded: str | None
    boundary: Boundary = "same"
    metric_names: tuple[str, ...] = ()
    buckets: tuple[int, ...] = ()

    @property
    def initial_state(self) -> InitialState:
        """Initial values of parameters and written buffers, which change while training."""
        return InitialState(self.initial_parameters, self.initial_buffers)


@dataclass(frozen=True)
class GraphInput:
    """A ``parameter`` (trainable), ``buffer`` (written by the forward), other ``constant``, or ``batch`` entry."""

    kind: str
    name: str


@dataclass(frozen=True, kw_only=True)
class GraphJob(ExportedJob):
    """The graph of ``loss(model, batch)``, and its initial values.

    Attributes:
        graph_module: Graph of loss, metrics and new values of buffers, without in-place operations or assertions.
        written: The buffers whose new values the graph returns, in that order.
        sources: The content of each placeholder of the graph, by placeholder name.
        batch_symbol: The symbol that stands for the number of samples (a sympy symbol).
        initial_constants: Constants by the placeholder that holds them, made on request.
        length_symbol: The symbol that stands for ``length``, that of a micro-batch, if lengths vary.
    """

    graph_module: GraphModule
    sources: dict[str, GraphInput]
    batch_symbol: Any
    initial_constants: LazyTensors
    written: tuple[str, ...] = ()
    length_symbol: Any = None
    length: int | None = None


@dataclass(frozen=True, kw_only=True)
class MarkedJob(ExportedJob):
    """A job that torch.export refuses, with marks where to cut; ``batches``: samples by bucket, if lengths vary.

    ``whole``: model and loss as one module, its trainable parameters without memory.
    """

    job: Job
    whole: Whole
    batch: dict[str, Tensor]
    refusal: str
    batches: Mapping[int, dict[str, Tensor]] = field(default_factory=dict)
