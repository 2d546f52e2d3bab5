"""A worker's part of one generation: its slot, its groups and its units at the reshape's version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from morph.contract.messages import ReshapeOrder, Slot, StepOrder
from morph.contract.plan import Plan
from morph.contract.salvage import Salvage, share_in
from morph.contract.timeline import StepTimeline
from morph.cutting.sections.section import BoundaryTensor, CutModel
from morph.data.lengths import Size
from morph.runtime.device.links import Link, link_over
from morph.runtime.groups.channels import Channel, GroupSet, Ring
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.topology import Topology, edge_name, worker_at
from morph.runtime.state.unit_state import UnitState
from morph.runtime.step.executor import Executor, Neighbours, StageWork
from morph.runtime.step.section_run import borders_may_lack_gradients


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

    def neighbours(self, device: torch.device) -> Neighbours:
        """Return the links that carry a device's tensors to and from the previous and next stages."""
        activations_in, gradients_out, activations_out, gradients_in = (
            None if channel is None else self.mailboxes.get(channel.name) or link_over(channel, device, self.interrupt)
            for channel in self.edges()
        )
        return Neighbours(activations_in, gradients_out, activations_out, gradients_in)

    def edges(self) -> tuple[Channel | None, Channel | None, Channel | None, Channel | None]:
        """Return channels to the previous and next stages, in the order of ``Neighbours``."""
        assert self.slot is not None
        stage = self.slot.stage
        before = None if self.plan.is_first(stage) else stage - 1
        behind = None if self.plan.is_last(stage) else stage
        return (
            self._edge(before, "act") if before is not None else None,
            self._edge(before, "grad") if before is not None else None,
            self._edge(behind, "act") if behind is not None else None,
            self._edge(behind, "grad") if behind is not None else None,
        )

    def _edge(self, boundary: int, kind: str) -> Channel:
        assert self.slot is not None
        sender_stage = boundary if kind == "act" else boundary + 1
        sender = worker_at(self.order.slots, sender_stage, self.slot.replica)
        return self.groups.channel(edge_name(self.order.generation, self.slot.replica, boundary, kind), sender)

    def salvage_in(self, order: StepOrder) -> Salvage | None:
        """Return the partial sums from which a step continues, if there are any.

        They exist only for the first attempt at the generation's first step.
        """
        return self.order.salvage if order.step == self.order.version and order.attempt == 0 else None

    def micro_batches_in(self, order: StepOrder) -> Sequence[int]:
        """Return the micro-batches that this worker's replica runs in a step."""
        assert self.slot is not None
        return share_in(self.plan, self.slot.replica, self.salvage_in(order), order.num_micro_batches)

    def num_micro_batches(self, order: StepOrder) -> int:
        """Return the number of a step's micro-batches, over all replicas."""
        return order.num_micro_batches or self.plan.num_micro_batches

    def stage_work(self, model: CutModel, micro_batches: Sequence[int], size_of: Callable[[int], Size]) -> StageWork:
        """Return the tasks of this worker's stage for these micro-batches, given their lengths and sizes."""
        assert self.slot is not None
        stage = self.plan.stages[self.slot.stage]
        work = self.work_between(
            micro_batches, model.sections[stage.first_section].inputs, model.sections[stage.end_section - 1].outputs
        )
        names = model.metric_names if stage.end_section == len(model.sections) else ()
        borders = {}
        for micro_batch in micro_batches if model.by_length or model.by_samples else ():
            sections = model.at(*size_of(micro_batch)).sections
            borders[micro_batch] = sections[stage.first_section].inputs, sections[stage.end_section - 1].outputs
        may_lack = borders_may_lack_gradients(model)
        return replace(work, metric_names=names, gradients_may_lack=may_lack, borders=borders)

    def work_between(
        self, micro_batches: Sequence[int], inputs: tuple[BoundaryTensor, ...], outputs: tuple[BoundaryTensor, ...]
    ) -> StageWork:
        """Return the tasks of this worker's stage, given the tensors at its borders."""
        assert self.slot is not None
        stage = self.plan.stages[self.slot.stage]
        return StageWork(
            micro_batches=micro_batches,
            order=self.plan.order_of(self.slot.stage, len(micro_batches)),
            window=stage.window,
            opportunistic=self.plan.schedule == "varuna",
            inputs=inputs,
            outputs=outputs,
        )

    def timeline(self, step: int, executor: Executor) -> StepTimeline:
        """Return the recorded timeline of a step's executor."""
        assert self.slot is not None
        return StepTimeline(
            worker=self.slot.worker,
            stage=self.slot.stage,
            replica=self.slot.replica,
            shape=self.plan.shape,
            schedule=self.plan.schedule,
            window=self.plan.stages[self.slot.stage].window,
            step=step,
            start_ns=executor.stopwatch.start_ns,
            peaks=executor.peaks,
            spans=tuple(executor.stopwatch.spans),
        )
