"""Who drives which stage, where each unit's state comes from, and who writes it: pure and deterministic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from manager.controller.shape.spreading import spread
from manager.controller.shape.transport import largest_overlap
from morph.contract.messages import Slot, Source, UnitId, WorkerId
from morph.contract.plan import Plan

Holdings = Mapping[WorkerId, Set[UnitId]]


def place(
    plan: Plan,
    workers: Sequence[WorkerId],
    held: Holdings,
    needed: Sequence[Sequence[UnitId]],
    sizes: Mapping[UnitId, int],
    zones: Mapping[WorkerId, str] = MappingProxyType({}),
) -> tuple[Slot, ...]:
    """Assign workers to slots so that the fewest bytes have to move; ordered by (stage, replica).

    Exact: the assignment has the largest overlap (bytes a worker holds of what its stage needs). Workers that hold
    the same are interchangeable, so kinds of workers are dealt to stages, and the cost hardly grows with their
    number. There must be enough workers; some may be left over, later ones first where it makes no difference. Among
    workers that hold the same, replicas of a stage go to different VMs, or zones; see ``spreading``.
    """
    kinds: dict[frozenset[UnitId], list[int]] = {}
    for index, worker in enumerate(workers):
        kinds.setdefault(frozenset(held.get(worker, ())), []).append(index)
    overlap = [[sum(sizes[unit] for unit in units if unit in kind) for kind in kinds] for units in needed]
    dealt = largest_overlap(overlap, [plan.num_replicas] * len(needed), [len(queue) for queue in kinds.values()])
    return tuple(
        _slot(workers[index], stage, replica)
        for stage, indices in enumerate(spread(workers, list(kinds.values()), dealt, zones))
        for replica, index in enumerate(indices)
    )


def choose_sources(
    slots: Sequence[Slot],
    needed: Sequence[Sequence[UnitId]],
    held: Holdings,
    sizes: Mapping[UnitId, int],
    restore: str | None,
    unable: Set[WorkerId] = frozenset(),
) -> tuple[Source, ...]:
    """Say, for each worker and unit of its stage, where the state comes from.

    Keep what is held; else a living holder, the load in bytes spread evenly and only over workers that hold
    the unit already (no chains); else ``restore``, "checkpoint" or "initial", which then must be given. What ``unable``
    workers would have to load is read and sent by others, as evenly.
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
    sources: list[Source] = []
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
def _all_kept(worker: WorkerId, units: tuple[UnitId, ...]) -> tuple[Source, ...]:
    return tuple(_source(worker, unit, "keep") for unit in units)


@lru_cache(maxsize=2**15)
def _source(
    worker: WorkerId, unit: UnitId, kind: Literal["keep", "peer", "checkpoint", "initial"], peer: WorkerId | None = None
) -> Source:
    """Make one, once: from one shape to the next most of them stay the same."""
    return Source.model_construct(worker=worker, unit=unit, kind=kind, peer=peer)


@lru_cache(maxsize=2**13)
def _slot(worker: WorkerId, stage: int, replica: int) -> Slot:
    return Slot.model_construct(worker=worker, stage=stage, replica=replica)


def _share_sending(
    lacked: Sequence[tuple[WorkerId, UnitId]],
    holders_of: Mapping[UnitId, Sequence[WorkerId]],
    sizes: Mapping[UnitId, int],
    load: Mapping[WorkerId, int] = MappingProxyType({}),
) -> dict[tuple[WorkerId, UnitId], WorkerId]:
    """Choose a sender for each unit that a worker lacks, to the least loaded holder; ``load``: bytes before.

    Units with the fewest holders come first, for they leave the least choice; of those the largest.
    """
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
    """Choose one writer per unit among the workers that hold it; largest units first, to the least loaded."""
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
