"""How often state is lost that only a checkpoint brings back."""

from __future__ import annotations

import math

from manager.controller.shape.choosing import cost_of_morph_s
from manager.controller.state.state import ControllerState
from morph.contract.vm_names import vm_of


def losses_per_vm_s(state: ControllerState, now_s: float) -> float:
    """Return the rate at which one VM is lost, per second: what was expected, corrected by what this run has seen.

    The mean of a Gamma distribution, after that many losses in that much time of VMs (Poisson).
    """
    expected, seen = state.config.expected_losses, state.saves
    appeared_s: dict[str, float] = {}
    for worker, entry in state.workers.items():
        vm = vm_of(worker)
        appeared_s[vm] = min(entry.appeared_s, appeared_s.get(vm, entry.appeared_s))
    seen_s = seen.vm_s + sum(max(0.0, now_s - since_s) for since_s in appeared_s.values())
    weight_s = expected.weight_vm_h * 3600
    return (expected.per_vm_h / 3600 * weight_s + seen.num_lost) / (weight_s + seen_s)


def mean_s_to_fatal_loss(state: ControllerState, now_s: float) -> float:
    """Return the mean time, seconds, until some unit has no holder left, or the whole cluster is lost.

    Of a VM's losses a share comes alone, the rest in bulk, when each VM of a zone is taken with the same probability. A
    loss that comes alone is fatal where a VM is the only one that holds something, or where the others that do are
    lost too before the state was sent to a new one. (The interval of Spotify's thesis, section 4.3, takes each loss for
    fatal, which is so for one VM.)
    """
    sets, expected = _holders(state), state.config.expected_losses
    rate = losses_per_vm_s(state, now_s)
    alone, bulk = rate * (1 - expected.bulk_share), rate * expected.bulk_share
    heal_s = cost_of_morph_s(state) + state.config.policy.heartbeat_timeout_s
    sole: set[str] = set().union(*(vms for vms in sets if len(vms) == 1))
    fatal = 1 / (expected.cluster_h * 3600) + alone * len(sole)
    for vms in sets:
        if len(vms) > 1:
            fatal += math.factorial(len(vms)) * alone ** len(vms) * heal_s ** (len(vms) - 1)
    if expected.bulk_fraction > 0:
        for together in _by_zone(state, sets).values():
            survives = math.prod(1 - expected.bulk_fraction ** len(vms) for vms in together)
            fatal += bulk / expected.bulk_fraction * (1 - survives)
    return 1 / fatal


def _by_zone(state: ControllerState, sets: set[frozenset[str]]) -> dict[tuple[str, str], list[frozenset[str]]]:
    """Sort the sets that lie in one zone by that; a set over several zones is not lost with one of them."""
    zones = {vm_of(worker): (entry.facts.region, entry.facts.zone) for worker, entry in state.workers.items()}
    found: dict[tuple[str, str], list[frozenset[str]]] = {}
    for vms in sets:
        of_these = {zones.get(vm, ("", "")) for vm in vms}
        if len(of_these) == 1:
            found.setdefault(of_these.pop(), []).append(vms)
    return found


def _holders(state: ControllerState) -> set[frozenset[str]]:
    """Return for each stage the VMs that hold it; a unit of several stages is lost only with one of these."""
    by_stage: dict[int, set[str]] = {}
    for slot in state.slots:
        by_stage.setdefault(slot.stage, set()).add(vm_of(slot.worker))
    return {frozenset(vms) for vms in by_stage.values()}
