"""A worker's part of one generation: its slot, groups and units, and the work of its stage in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from morph.contract.messages import WEIGHT, ReshapeOrder, Slot, StepOrder
from morph.contract.plan import Plan
from morph.contract.salvage import share_in
from morph.cutting.sections.section import BoundaryTensor, CutModel
from morph.data.lengths import Size
from morph.runtime.device.links import Link, link_over
from morph.runtime.groups.channels import Channel, GroupSet, Ring
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.topology import Topology, edge_name, worker_at
from morph.runtime.state.unit_state import UnitState
from morph.runtime.step.stage import borders_may_lack_gradients

Borders = tuple[BoundaryTensor, ...]
Edges = tuple[Channel | None, Channel | None, Channel | None, Channel | None]
Links = tuple[Link | None, Link | None, Link | None, Link | None]
"""To and from the neighbours, None at the pipeline's ends: activations in, gradients out, activations out, gradients
in."""


@dataclass(frozen=True)
class StageWork:
    """The work of one stage in one step, with the links to its neighbours.

    ``borders``, ``shares``: of each micro-batch, if they differ; ``factor``: of each loss, besides share and loss
    scale.
    """

    micro_batches: Sequence[int]
    order: str
    window: int
    opportunistic: bool
    inputs: Borders
    outputs: Borders
    links: Links = (None, None, None, None)
    metric_names: tuple[str, ...] = ()
    gradients_may_lack: bool = False
    record_timeline: bool = False
    borders: Mapping[int, tuple[Borders, Borders]] = field(default_factory=dict)
    shares: Sequence[float] = ()
    factor: float = 1.0

    def inputs_of(self, micro_batch: int) -> Borders:
        """Return the inputs of a micro-batch."""
        return self.borders[micro_batch][0] if micro_batch in self.borders else self.inputs

    def outputs_of(self, micro_batch: int) -> Borders:
        """Return the outputs of a micro-batch."""
        return self.borders[micro_batch][1] if micro_batch in self.borders else self.outputs

    def share_of(self, micro_batch: int) -> float | None:
        """Return the share of a micro-batch; None: all are alike."""
        return self.shares[micro_batch] if self.shares else None

    def factor_of(self, micro_batch: int) -> float:
        """Return the factor of a micro-batch's loss; one with a weight of its own has no share."""
        share = None if WEIGHT in self.metric_names else self.share_of(micro_batch)
        return self.factor if share is None else self.factor * share


@dataclass(frozen=True)
class Generation:
    """One generation as seen by one of its workers; ``slot`` is None for a worker that only sends state."""

    order: ReshapeOrder
    slot: Slot | None
    topology: Topology
    groups: GroupSet
    interrupt: Interrupt
    units: dict[str, UnitState]
    mailboxes: Mapping[str, Link] = field(default_factory=dict)
    """Links by the names of the channels that they replace."""

    @property
    def plan(self) -> Plan:
        """The generation's plan."""
        return self.order.plan

    def ring_of(self, unit: str) -> Ring | None:
        """Return the reduction group of a unit."""
        return self.groups.ring(self.topology.unit_rings[unit])

    @cached_property
    def edges(self) -> Edges:
        """The channels to the previous and next stages, in the order of ``Links``."""
        assert self.slot is not None
        stage = self.slot.stage
        incoming = None if self.plan.is_first(stage) else stage - 1
        outgoing = None if self.plan.is_last(stage) else stage
        return (
            self._edge(incoming, "act") if incoming is not None else None,
            self._edge(incoming, "grad") if incoming is not None else None,
            self._edge(outgoing, "act") if outgoing is not None else None,
            self._edge(outgoing, "grad") if outgoing is not None else None,
        )

    def _edge(self, boundary: int, kind: str) -> Channel:
        assert self.slot is not None
        sender_stage = boundary if kind == "act" else boundary + 1
        sender = worker_at(self.order.slots, sender_stage, self.slot.replica)
        return self.groups.channel(edge_name(self.order.generation, self.slot.replica, boundary, kind), sender)

    def micro_batches_in(self, order: StepOrder) -> Sequence[int]:
        """Return the micro-batches that this worker's replica runs in a step."""
        assert self.slot is not None
        return share_in(self.plan, self.slot.replica, self.order.salvage_in(order), order.num_micro_batches)

    def num_micro_batches(self, order: StepOrder) -> int:
        """Return the number of a step's micro-batches, over all replicas."""
        return order.num_micro_batches or self.plan.num_micro_batches

    def stage_work(
        self, model: CutModel, micro_batches: Sequence[int], size_of: Callable[[int], Size], device: torch.device
    ) -> StageWork:
        """Return the work of this worker's stage on a device for these micro-batches, given their lengths and sizes."""
        assert self.slot is not None
        stage = self.plan.stages[self.slot.stage]
        borders = {}
        for micro_batch in micro_batches if model.by_length or model.by_samples else ():
            sections = model.at(*size_of(micro_batch)).sections
            borders[micro_batch] = sections[stage.first_section].inputs, sections[stage.end_section - 1].outputs
        activations_in, gradients_out, activations_out, gradients_in = (
            None if edge is None else self.mailboxes.get(edge.name) or link_over(edge, device, self.interrupt)
            for edge in self.edges
        )
        return replace(
            self.work_between(
                micro_batches,
                model.sections[stage.first_section].inputs,
                model.sections[stage.end_section - 1].outputs,
                (activations_in, gradients_out, activations_out, gradients_in),
            ),
            metric_names=model.metric_names if stage.end_section == len(model.sections) else (),
            gradients_may_lack=borders_may_lack_gradients(model),
            borders=borders,
        )

    def work_between(self, micro_batches: Sequence[int], inputs: Borders, outputs: Borders, links: Links) -> StageWork:
        """Return the work of this worker's stage, given the tensors at its borders and the links that carry them."""
        assert self.slot is not None
        stage = self.plan.stages[self.slot.stage]
        return StageWork(
            micro_batches=micro_batches,
            order=self.plan.order_of(self.slot.stage, len(micro_batches)),
            window=stage.window,
            opportunistic=self.plan.schedule == "varuna",
            inputs=inputs,
            outputs=outputs,
            links=links,
        )
