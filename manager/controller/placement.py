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
    """Assign workers to slots so that the fewest bytes have to move; ordered by (stage, replica).

    Exact: the assignment has the largest overlap (bytes a worker holds of what its stage needs). There must be
    enough workers; some may be left over, later ones first where it makes no difference.
    """
    overlap = [
        [sum(sizes[unit] for unit in units if unit in held.get(worker, ())) for worker in workers] for units in needed
    ]
    stages = [stage for stage in range(len(needed)) for _ in range(plan.num_replicas)]
    chosen = _largest_assignment([overlap[stage] for stage in stages])
    drivers: list[list[int]] = [[] for _ in needed]
    for stage, column in zip(stages, chosen, strict=True):
        drivers[stage].append(column)
    return tuple(
        Slot(worker=workers[column], stage=stage, replica=replica)
        for stage, columns in enumerate(drivers)
        for replica, column in enumerate(sorted(columns))
    )


def _largest_assignment(gain: Sequence[Sequence[int]]) -> list[int]:
    """Give each row a column of its own so that the sum of gains is largest.

    The Hungarian method with potentials (Kuhn 1955, Munkres 1957), O(rows^2 columns); no more rows than columns.
    """
    num_rows, num_columns = len(gain), len(gain[0])
    row_potential, column_potential = [0] * (num_rows + 1), [0] * (num_columns + 1)
    row_of = [0] * (num_columns + 1)
    for row in range(1, num_rows + 1):
        row_of[0], column = row, 0
        slack: list[float] = [float("inf")] * (num_columns + 1)
        before, seen = [0] * (num_columns + 1), [False] * (num_columns + 1)
        while row_of[column]:
            seen[column] = True
            here, delta, following = row_of[column], float("inf"), 0
            for other in range(1, num_columns + 1):
                if seen[other]:
                    continue
                cost = -gain[here - 1][other - 1] - row_potential[here] - column_potential[other]
                if cost < slack[other]:
                    slack[other], before[other] = cost, column
                if slack[other] < delta:
                    delta, following = slack[other], other
            step = int(delta)
            for other in range(num_columns + 1):
                if seen[other]:
                    row_potential[row_of[other]] += step
                    column_potential[other] -= step
                else:
                    slack[other] -= step
            column = following
        while column:
            row_of[column] = row_of[before[column]]
            column = before[column]
    columns = [0] * num_rows
    for column, row in enumerate(row_of[1:]):
        if row:
            columns[row - 1] = column
    return columns


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
