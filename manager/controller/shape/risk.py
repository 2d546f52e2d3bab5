"""Estimates how often state is lost that only a checkpoint can restore."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from manager.controller.shape.selection import cost_of_morph_s
from manager.controller.state.state import ControllerState
from morph.contract.messages import Slot, UnitId
from morph.contract.salvage import Follow
from morph.contract.vm_names import vm_of


def losses_per_vm_s(state: ControllerState, now_s: float) -> float:
    """Return the rate (1/s) of one VM's losses: the mean of a Gamma posterior of expected and observed losses."""
    expected, seen = state.config.expected_losses, state.saving.save_times
    appeared_s: dict[str, float] = {}
    for worker, entry in state.workers.items():
        vm = vm_of(worker)
        if vm not in appeared_s or entry.appeared_s < appeared_s[vm]:
            appeared_s[vm] = entry.appeared_s
    seen_s = seen.vm_s + sum([max(0.0, now_s - since_s) for since_s in appeared_s.values()])
    weight_s = expected.weight_vm_h * 3600
    return (expected.per_vm_h / 3600 * weight_s + seen.num_lost) / (weight_s + seen_s)


def mean_s_to_fatal_loss(state: ControllerState, now_s: float, holders: Set[frozenset[str]] | None = None) -> float:
    """Return the mean time (seconds) until some unit has no holder left, or the whole cluster is lost.

    A loss takes one VM or, as a bulk loss, each VM of a zone with the same probability. Not every loss is fatal. With
    one VM, this is 4.3 of the thesis on Spotify. ``holders``: the VMs that hold each unit, instead of the present ones.
    """
    sets, expected = _held_by(state) if holders is None else holders, state.config.expected_losses
    rate = losses_per_vm_s(state, now_s)
    alone, bulk = rate * (1 - expected.bulk_share), rate * expected.bulk_share
    heal_s = cost_of_morph_s(state) + state.config.policy.heartbeat_timeout_s
    sole: set[str] = set().union(*(vms for vms in sets if len(vms) == 1))
    rates = [1 / (expected.cluster_h * 3600), alone * len(sole)]
    for num in sorted(len(vms) for vms in sets if len(vms) > 1):  # sorted: sums depend on the order
        rates.append(math.factorial(num) * alone**num * heal_s ** (num - 1))
    if expected.bulk_fraction > 0:
        for together in _by_zone(state, sets).values():
            survives = math.prod(1 - expected.bulk_fraction**num for num in sorted(map(len, together)))
            rates.append(bulk / expected.bulk_fraction * (1 - survives))
    return 1 / math.fsum(rates)


def _by_zone(state: ControllerState, sets: Set[frozenset[str]]) -> dict[tuple[str, str], list[frozenset[str]]]:
    """Group the sets of VMs within one zone by zone; sets over several zones survive the loss of one zone."""
    zones = {vm_of(worker): (entry.facts.region, entry.facts.zone) for worker, entry in state.workers.items()}
    vms_in: dict[tuple[str, str], list[frozenset[str]]] = {}
    for vms in sets:
        of_these = {zones.get(vm, ("", "")) for vm in vms}
        if len(of_these) == 1:
            vms_in.setdefault(of_these.pop(), []).append(vms)
    return vms_in


def holders_of(
    slots: Sequence[Slot], needed: Sequence[Sequence[UnitId]], follows: Sequence[Follow]
) -> set[frozenset[str]]:
    """Return the sets of VMs that hold the units with these followers, without sets that contain a smaller one."""
    vms = vms_of(slots, needed)
    for follow in follows:
        for unit in follow.units:
            vms[unit] |= {vm_of(follow.follower)}
    sets = set(vms.values())
    return {of for of in sets if not any(other < of for other in sets)}


def vms_of(slots: Sequence[Slot], needed: Sequence[Sequence[UnitId]]) -> dict[UnitId, frozenset[str]]:
    """Return the VMs that drive each unit in a shape."""
    stages: list[list[str]] = [[] for _ in needed]
    for slot in slots:
        stages[slot.stage].append(vm_of(slot.worker))
    vms: dict[UnitId, frozenset[str]] = {}
    for units, of in zip(needed, map(frozenset, stages), strict=True):
        for unit in units if of else ():
            vms[unit] = vms[unit] | of if unit in vms else of
    return vms


def _held_by(state: ControllerState) -> set[frozenset[str]]:
    """Return the sets of holders for the present shape; of followers, only those that are in step."""
    if state.reshape is None or not state.slots:
        return set()
    workers = state.workers
    in_step = [
        follow
        for follow in state.reshape.follows
        if follow.units and follow.follower in workers and workers[follow.follower].holds.issuperset(follow.units)
    ]
    return holders_of(state.slots, state.config.units_of(state.reshape.plan), in_step)
