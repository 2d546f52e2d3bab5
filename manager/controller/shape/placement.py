"""Decides which worker drives each stage, and where each unit's state comes from and goes. Pure and deterministic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from manager.controller.shape.overlap import largest_overlap
from manager.controller.shape.spreading import spread
from morph.contract.messages import Slot, StateSource, UnitId, WorkerId
from morph.contract.plan import Plan

Holdings = Mapping[WorkerId, Set[UnitId]]


def place(
    plan: Plan,
    workers: Sequence[WorkerId],
    held: Holdings,
    needed: Sequence[Sequence[UnitId]],
    sizes: Mapping[UnitId, int],
    zones: Mapping[WorkerId, str] = MappingProxyType({}),
    types: Mapping[WorkerId, str] = MappingProxyType({}),
) -> tuple[Slot, ...]:
    """Assign workers to slots so that the fewest bytes have to move; returns slots ordered by (stage, replica).

    The result is exact: it has the largest overlap between the bytes that workers hold and those that their stages
    need. Workers of one type that hold the same units are interchangeable, so whole kinds of workers are assigned to
    stages, and the cost hardly grows with the number of workers. There must be enough workers of each stage's type;
    among equal workers, the later ones are left over. Replicas of a stage go to different VMs, or zones, as far as
    possible; see ``spread``.
    """
    kinds: dict[tuple[frozenset[UnitId], str], list[int]] = {}
    for index, worker in enumerate(workers):
        kinds.setdefault((frozenset(held.get(worker, ())), types.get(worker, "")), []).append(index)
    never = -(1 + len(workers) * sum(sizes.values()))  # more than all other assignments together could gain
    overlap = [
        [
            never if stage.node_type not in ("", of) else sum(sizes[unit] for unit in units if unit in holds)
            for holds, of in kinds
        ]
        for stage, units in zip(plan.stages, needed, strict=True)
    ]
    dealt = largest_overlap(
        overlap,
        [len(plan.replicas_of(stage)) for stage in range(len(needed))],
        [len(queue) for queue in kinds.values()],
    )
    fits = all(gain >= 0 or not num for row in zip(overlap, dealt, strict=True) for gain, num in zip(*row, strict=True))
    assert fits, f"no workers of the types that {plan.shape} needs: {plan.pool}"
    firsts = frozenset(stage for stage in range(len(needed)) if plan.is_first(stage))
    sections = [stage.sections for stage in plan.stages]
    return tuple(
        _slot(workers[index], stage, replica)
        for stage, indices in enumerate(spread(workers, list(kinds.values()), dealt, zones, firsts, sections))
        for replica, index in zip(plan.replicas_of(stage), indices, strict=True)
    )


def choose_sources(
    slots: Sequence[Slot],
    needed: Sequence[Sequence[UnitId]],
    held: Holdings,
    sizes: Mapping[UnitId, int],
    restore: str | None,
    unable: Set[WorkerId] = frozenset(),
) -> tuple[StateSource, ...]:
    """Return, for each worker and unit of its stage, where the state comes from.

    A worker keeps what it holds. Other units come from living holders, with the bytes to send spread evenly and only
    over workers that hold a unit already (no chains). Units without a holder come from ``restore``: "checkpoint" or
    "initial". Workers in ``unable`` cannot load: others read their units and send them, spread as evenly.
    """
    stages = [frozenset(units) for units in needed]
    lacked: dict[WorkerId, list[UnitId]] = {}
    for slot in slots:
        missing_here = stages[slot.stage].difference(held.get(slot.worker, ()))
        lacked[slot.worker] = [unit for unit in needed[slot.stage] if unit in missing_here] if missing_here else []
    holders_of = {
        unit: [worker for worker, units in held.items() if unit in units]
        for unit in dict.fromkeys(unit for units in lacked.values() for unit in units)
    }
    wanted = [(worker, unit) for worker, units in lacked.items() for unit in units if holders_of[unit]]
    senders = _share_sending(wanted, holders_of, sizes)
    readers: dict[tuple[WorkerId, UnitId], WorkerId] = {}
    if unable and restore == "checkpoint":
        able = [worker for worker in held if worker not in unable]
        unread = [(worker, unit) for worker, units in lacked.items() for unit in units if not holders_of[unit]]
        load = {one: sum(sizes[unit] for worker, unit in unread if worker == one) for one in able}
        relayed = [entry for entry in unread if entry[0] in unable]
        readers = _share_sending(relayed, dict.fromkeys(holders_of, able), sizes, load)
    sources: list[StateSource] = []
    for slot in slots:
        worker, units, missing = slot.worker, needed[slot.stage], lacked[slot.worker]
        if not missing:
            sources += _all_kept(worker, tuple(units))
            continue
        for unit in units:
            if unit not in missing:
                sources.append(_source(worker, unit, "keep"))
            elif holders_of[unit]:
                sources.append(_source(worker, unit, "peer", senders[worker, unit]))
            else:
                assert restore in ("checkpoint", "initial"), f"unit {unit} has no source"
                kind: Literal["checkpoint", "initial"] = "checkpoint" if restore == "checkpoint" else "initial"
                sources.append(_source(worker, unit, kind, readers.get((worker, unit))))
    return tuple(sources)


@lru_cache(maxsize=2**12)
def _all_kept(worker: WorkerId, units: tuple[UnitId, ...]) -> tuple[StateSource, ...]:
    return tuple(_source(worker, unit, "keep") for unit in units)


@lru_cache(maxsize=2**15)
def _source(
    worker: WorkerId, unit: UnitId, kind: Literal["keep", "peer", "checkpoint", "initial"], peer: WorkerId | None = None
) -> StateSource:
    """Return a cached source: most of them stay the same from one shape to the next."""
    return StateSource.model_construct(worker=worker, unit=unit, kind=kind, peer=peer)


@lru_cache(maxsize=2**13)
def _slot(worker: WorkerId, stage: int, replica: int) -> Slot:
    return Slot.model_construct(worker=worker, stage=stage, replica=replica)


def _share_sending(
    lacked: Sequence[tuple[WorkerId, UnitId]],
    holders_of: Mapping[UnitId, Sequence[WorkerId]],
    sizes: Mapping[UnitId, int],
    load: Mapping[WorkerId, int] = MappingProxyType({}),
) -> dict[tuple[WorkerId, UnitId], WorkerId]:
    """Choose the least loaded holder (``load``: bytes) to send each missing unit: rarest unit first, then largest."""
    loads = defaultdict(int, load)
    senders: dict[tuple[WorkerId, UnitId], WorkerId] = {}
    for worker, unit in sorted(lacked, key=lambda entry: (len(holders_of[entry[1]]), -sizes[entry[1]])):
        sender = min(holders_of[unit], key=loads.__getitem__)
        loads[sender] += sizes[unit]
        senders[worker, unit] = sender
    return senders


def share_units(
    slots: Sequence[Slot], needed: Sequence[Sequence[UnitId]], sizes: Mapping[UnitId, int]
) -> dict[UnitId, WorkerId]:
    """Choose one writer per unit among its holders: largest units first, each to the least loaded holder."""
    load = {slot.worker: 0 for slot in slots}
    holders_of: dict[UnitId, list[WorkerId]] = {unit: [] for unit in sizes}
    for stage, group in groupby(slots, key=lambda slot: slot.stage):
        workers = [slot.worker for slot in group]
        for unit in needed[stage]:
            holders_of[unit] += workers
    writers: dict[UnitId, WorkerId] = {}
    for unit in sorted(sizes, key=lambda unit: (-sizes[unit], unit)):
        writers[unit] = min(holders_of[unit], key=load.__getitem__)
        load[writers[unit]] += sizes[unit]
    return writers
