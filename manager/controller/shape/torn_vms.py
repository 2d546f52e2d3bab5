"""VMs that lost a worker: the others on them may be about to follow, and no shape is formed until that is known."""

from __future__ import annotations

from collections.abc import Iterable

from manager.controller.state.draft import Draft
from manager.controller.state.state import ControllerState
from morph.contract.messages import WorkerId
from morph.contract.vm_names import beside, vm_of

GATHER_S = 1.0
"""Processes of one VM that are killed together end this far apart, or less: the kernel first frees their memory.

0.38 s were seen with 17 processes waiting for two cores.
"""


def note_torn_vms(draft: Draft, lost: Iterable[WorkerId]) -> None:
    """Note the VMs of workers that are being lost, and forget those of which it is known."""
    state, gone = draft.state, set(lost)
    torn = {vm: until_s for vm, until_s in state.waits.torn.items() if draft.now_s < until_s}
    for worker in gone:
        if not gone.issuperset(beside(worker, state.workers)):
            torn.setdefault(vm_of(worker), draft.now_s + GATHER_S)
    if torn != state.waits.torn:
        draft.change_waits(torn=torn)


def torn_until_s(state: ControllerState, now_s: float) -> float | None:
    """Return until when workers are awaited whose VM lost another one; None: nobody is."""
    if not state.waits.torn:
        return None
    living = {vm_of(worker) for worker in state.workers}
    return max((until_s for vm, until_s in state.waits.torn.items() if vm in living and now_s < until_s), default=None)
