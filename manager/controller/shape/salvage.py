"""Chooses the part of an abandoned step that the next shape need not repeat (decision 0019). Pure and deterministic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from operator import itemgetter

from manager.controller.state.config import ControllerConfig
from manager.controller.state.transition import Transition
from morph.contract.messages import Slot, UnitId, WorkerId
from morph.contract.plan import Plan
from morph.contract.salvage import (
    LOSSES,
    PartialSum,
    Salvage,
    SalvagedSum,
    counted_in,
    partial_sum,
    share_in,
    spans_of,
)

Kept = Mapping[WorkerId, Sequence[PartialSum]]


def choose_salvage(
    kept: Kept,
    plan: Plan,
    slots: Sequence[Slot],
    needed: Sequence[Sequence[UnitId]],
    units: Mapping[UnitId, Sequence[int]],
    sizes: Mapping[UnitId, int],
    num_micro_batches: int,
) -> Salvage | None:
    """Choose which partial sums count in a shape, and which worker continues each; None if no micro-batch is spared.

    Sums cannot be split: of overlapping ones, the largest counts. ``needed``: units by stage; ``units``: the sections
    that use each; ``sizes``: bytes, by which receiving is balanced; ``num_micro_batches``: over all replicas.
    """
    if not kept:
        return None
    last = plan.num_sections - 1
    places: dict[UnitId, Sequence[int]] = {**units, LOSSES: (last,)}
    users = _users(plan, slots, needed, places)
    chosen: dict[UnitId, list[tuple[WorkerId, PartialSum]]] = {}
    complete = whole = (1 << num_micro_batches) - 1
    by_unit: defaultdict[UnitId, list[tuple[WorkerId, PartialSum]]] = defaultdict(list)
    for worker, sums in kept.items():
        for total in sums:
            by_unit[total.unit].append((worker, total))
    for unit, sections in places.items():
        chosen[unit], counted = _disjoint(by_unit.get(unit, ()), users[unit])
        for section in sections:
            complete &= counted.get(section, 0)
    if not complete:
        return None
    load = dict.fromkeys((slot.worker for slot in slots), 0)
    salvaged = []
    for unit, entries in chosen.items():
        for holder, total in entries:
            receiver = holder
            if holder not in users[unit]:
                receiver = min(users[unit], key=load.__getitem__)
                load[receiver] += sizes.get(unit, 0)
            salvaged.append(SalvagedSum.model_construct(holder=holder, receiver=receiver, sum=total))
    remaining, spared = spans_of(whole & ~complete), complete.bit_count()
    return Salvage.model_construct(sums=tuple(salvaged), remaining=remaining, num_spared=spared)


def keeps_sums(config: ControllerConfig, plan: Plan) -> bool:
    """Whether workers in a shape keep the sums of an abandoned step; with "auto", only where memory has the room."""
    if config.policy.redundancy != "auto":
        return config.policy.redundancy == "salvage"
    device, host, expected = config.device_memory_bytes, config.host_memory_bytes, plan.expected
    return (device is None or expected.memory_with_sums_bytes <= device) and (
        host is None or expected.host_with_sums_bytes <= host
    )


def note_prepared(transition: Transition) -> None:
    """Record the sums of workers that had prepared the abandoned step, even if the abort reached them afterwards."""
    state = transition.state
    step = state.step
    if not step.reports or step.attempt:
        return
    assert state.reshape is not None, "no generation was formed"
    if not state.reshape.keep_sums:
        return
    plan, kept = state.reshape.plan, dict(step.kept)
    num = state.num_micro_batches(plan)
    salvage = state.reshape.salvage if state.version == state.reshape.version else None
    for slot in state.slots:
        report = step.reports.get(slot.worker)
        if report is None or report.overflowed or report.non_finite:
            continue
        units = state.member_units[slot.worker]
        sums = [
            partial_sum(unit, dict.fromkeys(sections, (1 << num) - 1))
            for unit, sections in state.config.units.items()
            if unit in units
        ]
        losses = partial_sum(LOSSES, losses_of(plan, slot, salvage, num))
        kept[slot.worker] = (*sums, losses) if losses.counted else tuple(sums)
    transition.change_step(kept=kept)


def losses_of(plan: Plan, slot: Slot, salvage: Salvage | None, num_micro_batches: int) -> dict[int, int]:
    """Return a mask of the micro-batches whose losses a worker reports, by the last section; {} for other stages."""
    if not plan.is_last(slot.stage):
        return {}
    last = plan.num_sections - 1
    mask, known, mine = sum(1 << number for number in share_in(plan, slot.replica, salvage, num_micro_batches)), 0, 0
    for entry in () if salvage is None else salvage.sums:
        if entry.sum.unit == LOSSES:
            known |= counted_in(entry.sum)[last]
            mine |= counted_in(entry.sum)[last] if entry.receiver == slot.worker else 0
    return {last: mask & ~known | mine}


def _users(
    plan: Plan, slots: Sequence[Slot], needed: Sequence[Sequence[UnitId]], places: Iterable[UnitId]
) -> dict[UnitId, dict[WorkerId, None]]:
    """Return the workers that continue each unit, in the order of the slots; for losses, those of the last stage."""
    stages: list[dict[WorkerId, None]] = [{} for _ in needed]
    for slot in slots:
        stages[slot.stage][slot.worker] = None
    users: dict[UnitId, dict[WorkerId, None]] = {unit: {} for unit in places}
    for index, units in enumerate(needed):
        for unit in units:
            users[unit] = users[unit] | stages[index] if users[unit] else stages[index]
    users[LOSSES] = {slot.worker: None for slot in slots if plan.is_last(slot.stage)}
    return users


def _disjoint(
    sums: Sequence[tuple[WorkerId, PartialSum]], users: Container[WorkerId]
) -> tuple[list[tuple[WorkerId, PartialSum]], dict[int, int]]:
    """Choose sums of one unit that do not overlap, the largest first; return them and the contributions in them."""
    measured = []
    for worker, total in sums:
        size = 0
        for entry in total.counted:
            size += entry.mask.bit_count()
        measured.append((-size, worker not in users, worker, total))
    measured.sort(key=itemgetter(0, 1))
    chosen: list[tuple[WorkerId, PartialSum]] = []
    counted: dict[int, int] = {}
    for _, _, worker, total in measured:
        for entry in total.counted:
            if counted.get(entry.section, 0) & entry.mask:
                break
        else:
            chosen.append((worker, total))
            for entry in total.counted:
                counted[entry.section] = counted.get(entry.section, 0) | entry.mask
    return chosen, counted
