"""The groups of a shape and their members. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from morph.contract.messages import ReshapeOrder, Slot, StateSource
from morph.contract.plan import Plan
from morph.contract.salvage import Salvage
from morph.cutting.sections.section import ParameterUnit
from morph.runtime.groups.channels import GroupSpec


@dataclass(frozen=True)
class Topology:
    """Groups of one generation, in the global forming order, each unit's reduction group, and the links between stages.

    ``edges``: the sender before the receiver. ``split_units``: reduced last, as several stages of a pipeline hold them.
    ``rounds``: by section, the round of the other units (:func:`morph.contract.plan.reduction_rounds`).
    """

    groups: tuple[GroupSpec, ...]
    unit_rings: dict[str, str]
    split_units: frozenset[str] = frozenset()
    edges: tuple[GroupSpec, ...] = ()
    rounds: tuple[int, ...] = ()

    @property
    def rings(self) -> tuple[GroupSpec, ...]:
        """The reduction groups, in their forming order."""
        names = set(self.unit_rings.values())
        return tuple(group for group in self.groups if group.name in names)


def worker_at(slots: Sequence[Slot], stage: int, replica: int) -> str:
    """Return the worker that drives one stage of one replica."""
    return next(slot.worker for slot in slots if slot.stage == stage and slot.replica == replica)


def slot_of(slots: Sequence[Slot], worker: str) -> Slot | None:
    """A worker's slot; None for a worker without one."""
    return next((slot for slot in slots if slot.worker == worker), None)


def units_of_stage(plan: Plan, stage: int, units: Sequence[ParameterUnit]) -> tuple[ParameterUnit, ...]:
    """The units that a stage's sections use, tied ones included."""
    sections = plan.stages[stage].sections
    return tuple(unit for unit in units if any(section in sections for section in unit.sections))


def edge_name(generation: int, replica: int, boundary: int, direction: str) -> str:
    """Name of the channel between stage ``boundary`` and the next one (direction: act or grad)."""
    return f"g{generation}/r{replica}/b{boundary}/{direction}"


def move_name(generation: int, sender: str, receiver: str) -> str:
    """Name of the channel over which state moves from one worker to another."""
    return f"g{generation}/move/{sender}/{receiver}"


def moves_of(sources: Sequence[StateSource], salvage: Salvage | None = None) -> tuple[tuple[str, str], ...]:
    """Distinct (sender, receiver) pairs, sorted."""
    pairs = {
        (source.peer, source.worker) for source in sources if source.kind in ("peer", "checkpoint") and source.peer
    }
    if salvage is not None:
        pairs |= {(entry.holder, entry.receiver) for entry in salvage.sums if entry.holder != entry.receiver}
    return tuple(sorted(pairs))


def topology(order: ReshapeOrder, units: Sequence[ParameterUnit]) -> Topology:
    """Lay out the groups of a reshape, in one order for all workers, so that forming them cannot dead-lock.

    No worker forms two groups in one round, so that those of a long pipeline do not wait from end to end.
    """
    plan, slots, generation = order.plan, order.slots, order.generation
    groups = [GroupSpec(move_name(generation, *pair), pair) for pair in moves_of(order.sources, order.salvage)]
    edges = []
    for replica in range(plan.num_replicas):
        for boundary in plan.stages_of(replica)[:-1]:
            pair = (worker_at(slots, boundary, replica), worker_at(slots, boundary + 1, replica))
            forth, back = (edge_name(generation, replica, boundary, kind) for kind in ("act", "grad"))
            groups += [GroupSpec(forth, pair), GroupSpec(back, pair)]
            edges += [GroupSpec(forth, pair), GroupSpec(back, pair[::-1])]
    rings: dict[str, GroupSpec] = {}
    unit_rings: dict[str, str] = {}
    split_units = set()
    pipelines = dict.fromkeys(plan.stages_of(replica) for replica in range(plan.num_replicas))
    for unit in units:
        stages = [s for s in range(len(plan.stages)) if unit in units_of_stage(plan, s, units)]
        members = tuple(worker_at(slots, stage, replica) for stage in stages for replica in plan.replicas_of(stage))
        name = f"g{generation}/ring/{'+'.join(map(str, stages))}"
        rings.setdefault(name, GroupSpec(name, members))
        unit_rings[unit.id] = name
        if any(len(set(stages).intersection(pipeline)) > 1 for pipeline in pipelines):
            split_units.add(unit.id)
    return Topology(
        groups=in_rounds((*groups, *rings.values())),
        unit_rings=unit_rings,
        split_units=frozenset(split_units),
        edges=tuple(edges),
        rounds=plan.reduction_rounds,
    )


def in_rounds(groups: Sequence[GroupSpec]) -> tuple[GroupSpec, ...]:
    """Order groups by rounds: each goes into the first in which none of its members forms another group."""
    busy: dict[str, set[int]] = {}
    rounds: list[list[GroupSpec]] = []
    for group in groups:
        taken = set().union(*(busy.setdefault(member, set()) for member in group.members))
        number = next(index for index in range(len(taken) + 1) if index not in taken)
        for member in group.members:
            busy[member].add(number)
        while len(rounds) <= number:
            rounds.append([])
        rounds[number].append(group)
    return tuple(group for entry in rounds for group in entry)
