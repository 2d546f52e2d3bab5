"""Who drives which stage, where each unit's state comes from, and who writes it: pure and deterministic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

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
) -> tuple[Slot, ...]:
    """Assign workers to slots so that the fewest bytes have to move; ordered by (stage, replica).

    Exact: the assignment has the largest overlap (bytes a worker holds of what its stage needs). Workers that hold
    the same are interchangeable, so kinds of workers are dealt to stages, and the cost hardly grows with their
    number. There must be enough workers; some may be left over, later ones first where it makes no difference. Among
    workers that hold the same, replicas of a stage go to different VMs; see ``spreading``.
    """
    kinds: dict[frozenset[UnitId], list[int]] = {}
    for index, worker in enumerate(workers):
        kinds.setdefault(frozenset(held.get(worker, ())), []).append(index)
    overlap = [[sum(sizes[unit] for unit in units if unit in kind) for kind in kinds] for units in needed]
    dealt = largest_overlap(overlap, [plan.num_replicas] * len(needed), [len(queue) for queue in kinds.values()])
    return tuple(
        Slot(worker=workers[index], stage=stage, replica=replica)
        for stage, indices in enumerate(spread(workers, list(kinds.values()), dealt))
        for replica, index in enumerate(indices)
    )


def choose_sources(
    slots: Sequence[Slot],
    needed: Sequence[Sequence[UnitId]],
    held: Holdings,
    sizes: Mapping[UnitId, int],
    restore: str | None,
) -> tuple[Source, ...]:
    """Say, for each worker and unit of its stage, where the state comes from.

    Keep what is held; else a living holder, the load in bytes spread evenly and only over workers that hold
    the unit already (no chains); else ``restore``, "checkpoint" or "initial", which then must be given.
    """
    holders_of: dict[UnitId, list[WorkerId]] = {}
    for worker, units in held.items():
        for unit in units:
            holders_of.setdefault(unit, []).append(worker)
    wanted = [(slot.worker, unit) for slot in slots for unit in needed[slot.stage]]
    lacked = [(worker, unit) for worker, unit in wanted if unit not in held.get(worker, ()) and unit in holders_of]
    senders = _share_sending(lacked, holders_of, sizes)
    sources: list[Source] = []
    for worker, unit in wanted:
        if (worker, unit) in senders:
            sources.append(Source(worker=worker, unit=unit, kind="peer", peer=senders[worker, unit]))
        elif unit in held.get(worker, ()):
            sources.append(Source(worker=worker, unit=unit, kind="keep"))
        else:
            assert restore in ("checkpoint", "initial"), f"unit {unit} has no source"
            kind = "checkpoint" if restore == "checkpoint" else "initial"
            sources.append(Source(worker=worker, unit=unit, kind=kind))
    return tuple(sources)


def _share_sending(
    lacked: Sequence[tuple[WorkerId, UnitId]],
    holders_of: Mapping[UnitId, Sequence[WorkerId]],
    sizes: Mapping[UnitId, int],
) -> dict[tuple[WorkerId, UnitId], WorkerId]:
    """Choose a sender for each unit that a worker lacks, to the least loaded holder.

    Units with the fewest holders come first, for they leave the least choice; of those the largest.
    """
    load: dict[WorkerId, int] = {}
    senders: dict[tuple[WorkerId, UnitId], WorkerId] = {}
    for worker, unit in sorted(lacked, key=lambda entry: (len(holders_of[entry[1]]), -sizes[entry[1]])):
        sender = min(holders_of[unit], key=lambda holder: load.get(holder, 0))
        load[sender] = load.get(sender, 0) + sizes[unit]
        senders[worker, unit] = sender
    return senders


def share_units(
    slots: Sequence[Slot], needed: Sequence[Sequence[UnitId]], sizes: Mapping[UnitId, int]
) -> dict[UnitId, WorkerId]:
    """Choose one writer per unit among the workers that hold it; largest units first, to the least loaded."""
    load = {slot.worker: 0 for slot in slots}
    writers: dict[UnitId, WorkerId] = {}
    for unit in sorted(sizes, key=lambda unit: (-sizes[unit], unit)):
        holders = [slot.worker for slot in slots if unit in needed[slot.stage]]
        writers[unit] = min(holders, key=lambda worker: load[worker])
        load[writers[unit]] += sizes[unit]
    return writers
