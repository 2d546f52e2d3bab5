"""Who drives which stage, where each unit's state comes from, and who writes it: pure and deterministic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from morph.contract.messages import Slot, Source, UnitId, WorkerId
from morph.contract.plan import Plan

Holdings = Mapping[WorkerId, Set[UnitId]]


def units_by_stage(plan: Plan, units: Mapping[UnitId, Sequence[int]]) -> tuple[tuple[UnitId, ...], ...]:
    """Return the units that each stage needs, in the order of ``units``."""
    return tuple(
        tuple(unit for unit, sections in units.items() if any(section in stage.sections for section in sections))
        for stage in plan.stages
    )


def place(
    plan: Plan,
    workers: Sequence[WorkerId],
    held: Holdings,
    needed: Sequence[Sequence[UnitId]],
    sizes: Mapping[UnitId, int],
) -> tuple[Slot, ...]:
    """Assign workers to slots so that few bytes have to move; ordered by (stage, replica).

    Greedy by overlap (bytes a worker holds of what a stage needs), then workers and stages are exchanged
    pairwise while that raises the total overlap. Ties go to earlier workers and stages. Workers may be left over.
    """
    overlap = {
        worker: [sum(sizes[unit] for unit in units if unit in held.get(worker, ())) for units in needed]
        for worker in workers
    }
    choices = sorted(
        (-overlap[worker][stage], order, stage) for order, worker in enumerate(workers) for stage in range(len(needed))
    )
    stage_of: dict[WorkerId, int | None] = dict.fromkeys(workers)
    room = [plan.num_replicas] * len(needed)
    for _, order, stage in choices:
        if room[stage] and stage_of[workers[order]] is None:
            stage_of[workers[order]] = stage
            room[stage] -= 1
    _exchange(stage_of, overlap)
    slots: list[Slot] = []
    for stage in range(len(needed)):
        drivers = [worker for worker in workers if stage_of[worker] == stage]
        slots += [Slot(worker=worker, stage=stage, replica=replica) for replica, worker in enumerate(drivers)]
    return tuple(slots)


def _exchange(stage_of: dict[WorkerId, int | None], overlap: Mapping[WorkerId, Sequence[int]]) -> None:
    """Exchange the stages of two workers (or give one's to an idle one) while the total overlap grows."""

    def gain_of(worker: WorkerId, stage: int | None) -> int:
        return 0 if stage is None else overlap[worker][stage]

    workers = tuple(stage_of)
    improved = True
    while improved:
        improved = False
        for index, first in enumerate(workers):
            for second in workers[index + 1 :]:
                a, b = stage_of[first], stage_of[second]
                now = gain_of(first, a) + gain_of(second, b)
                if gain_of(first, b) + gain_of(second, a) > now:
                    stage_of[first], stage_of[second] = b, a
                    improved = True


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
    load = dict.fromkeys(held, 0)
    sources: list[Source] = []
    for slot in slots:
        for unit in needed[slot.stage]:
            holders = [worker for worker, units in held.items() if unit in units]
            if slot.worker in holders:
                sources.append(Source(worker=slot.worker, unit=unit, kind="keep"))
            elif holders:
                peer = min(holders, key=lambda worker: load[worker])
                load[peer] += sizes[unit]
                sources.append(Source(worker=slot.worker, unit=unit, kind="peer", peer=peer))
            else:
                assert restore in ("checkpoint", "initial"), f"unit {unit} has no source"
                kind = "checkpoint" if restore == "checkpoint" else "initial"
                sources.append(Source(worker=slot.worker, unit=unit, kind=kind))
    return tuple(sources)


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
