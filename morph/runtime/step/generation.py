"""What a worker holds of one generation: its slot, its groups and its units at the reshape's version."""

from __future__ import annotations

from dataclasses import dataclass, replace

from morph.contract.messages import ReshapeOrder, Slot
from morph.contract.plan import Plan
from morph.cutting.sections.section import BoundaryTensor, CutModel
from morph.runtime.groups.channels import Channel, GroupSet, Ring
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.topology import Topology, edge_name, worker_at
from morph.runtime.state.unit_state import UnitState
from morph.runtime.step.executor import Neighbours, StageWork


@dataclass(frozen=True)
class Generation:
    """One membership as seen by one of its workers; ``slot`` is None for a worker that only gives state."""

    order: ReshapeOrder
    slot: Slot | None
    topology: Topology
    groups: GroupSet
    interrupt: Interrupt
    units: dict[str, UnitState]

    @property
    def plan(self) -> Plan:
        """The generation's plan."""
        return self.order.plan

    def ring_of(self, unit: str) -> Ring | None:
        """The reduction group of a unit."""
        return self.groups.ring(self.topology.unit_rings[unit])

    def neighbours(self) -> Neighbours:
        """Channels to the stages before and behind this worker's."""
        assert self.slot is not None
        stage = self.slot.stage
        before, behind = stage - 1, stage if stage + 1 < self.plan.pipeline_depth else None
        return Neighbours(
            activations_in=self._edge(before, "act") if stage else None,
            gradients_out=self._edge(before, "grad") if stage else None,
            activations_out=self._edge(behind, "act") if behind is not None else None,
            gradients_in=self._edge(behind, "grad") if behind is not None else None,
        )

    def _edge(self, boundary: int, kind: str) -> Channel:
        assert self.slot is not None
        sender_stage = boundary if kind == "act" else boundary + 1
        sender = worker_at(self.order.slots, sender_stage, self.slot.replica)
        return self.groups.channel(edge_name(self.order.generation, self.slot.replica, boundary, kind), sender)

    def stage_work(self, model: CutModel) -> StageWork:
        """The tasks of this worker's stage in every step of the generation."""
        assert self.slot is not None
        stage = self.plan.stages[self.slot.stage]
        work = self.work_between(
            model.sections[stage.first_section].inputs, model.sections[stage.end_section - 1].outputs
        )
        return replace(work, metric_names=model.metric_names) if stage.end_section == len(model.sections) else work

    def work_between(self, inputs: tuple[BoundaryTensor, ...], outputs: tuple[BoundaryTensor, ...]) -> StageWork:
        """The same, given what crosses the stage's borders."""
        assert self.slot is not None
        stage = self.plan.stages[self.slot.stage]
        micro_batches = self.plan.micro_batches_of(self.slot.replica)
        return StageWork(
            micro_batches=micro_batches,
            order=self.plan.orders[len(micro_batches)][self.slot.stage],
            window=stage.window,
            opportunistic=self.plan.schedule == "varuna",
            inputs=inputs,
            outputs=outputs,
        )
