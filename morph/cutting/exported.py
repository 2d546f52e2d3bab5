"""What is known of a job before it is cut: as a graph, or as the user's own code with marks in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from morph.cutting.construct import LazyTensors
from morph.cutting.trial import Whole
from morph.job import Job


@dataclass(frozen=True, kw_only=True)
class ExportedJob:
    """What both kinds have.

    Attributes:
        initial_parameters: Trainable parameters by their first name in the model, on CPU, each made when it is asked
            for. A tied one comes once.
        aliases: Further names of tied parameters, with the name they are kept under.
        num_sections: What the job asks for, if anything.
        cut_points: Names of modules in front of which the job wants to be cut, if any.
        model_line: Where the model is defined, ``file:line``, for errors.
        not_recorded: Why initial values cannot be made one by one; None when they can.
        metric_names: What the loss returns besides, in the order in which sections do, behind the loss.
    """

    initial_parameters: LazyTensors
    aliases: dict[str, str]
    num_sections: int | None
    cut_points: tuple[str, ...]
    model_line: str
    not_recorded: str | None
    metric_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What a graph input holds: a trainable parameter, a constant (buffer, frozen parameter), or a batch entry."""

    kind: str
    name: str


@dataclass(frozen=True, kw_only=True)
class GraphJob(ExportedJob):
    """The graph of ``loss(model, batch)``, and what it starts from.

    Attributes:
        graph_module: Graph of the loss (and the metrics) without in-place operations or assertions.
        sources: What each placeholder of the graph holds, by placeholder name.
        batch_symbol: The symbol that stands for the number of samples (a sympy symbol).
        initial_constants: Constants by the placeholder that holds them, made when they are asked for.
    """

    graph_module: GraphModule
    sources: dict[str, Source]
    batch_symbol: Any
    initial_constants: LazyTensors


@dataclass(frozen=True, kw_only=True)
class MarkedJob(ExportedJob):
    """A job that torch.export refuses, with marks where to cut.

    Attributes:
        job: The job.
        whole: Model and loss as one module, its trainable parameters without memory; buffers and frozen parameters
            are real.
        batch: Some samples, stacked, to try the model on.
        refusal: Why it was not exported.
    """

    job: Job
    whole: Whole
    batch: dict[str, Tensor]
    refusal: str
