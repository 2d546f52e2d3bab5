"""The VMs that a manager which takes over answers for: what a run that asks for its VMs goes on with. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from manager.controller.requests.node_requests import request_name
from manager.controller.state.state import ControllerState
from manager.providers.interface.provider import Vm, request_part


@dataclass(frozen=True)
class Inherited:
    """``vms``: asked of a provider, up or still to boot. ``nodes``: those that the controller knows, lost ones too."""

    vms: tuple[Vm, ...] = ()
    nodes: frozenset[str] = frozenset()


def inherited(state: ControllerState, up: Collection[str]) -> Inherited:
    """Return what was asked for under which request, and is still wanted.

    A VM is named after its request, so it is known whether or not its grant was written down before the manager died.
    Wanted are the nodes that the controller knows and that are up, what was granted and is awaited, and what is up of a
    request without an answer. Whatever else is up was given up.

    Args:
        state: As the journal has it.
        up: VMs that are up.
    """
    if not state.config.target_nodes:
        return Inherited()
    names = [request_name(state.config, number + 1) for number in range(state.provisioning.num_requests)]
    request_of = {request_part(name): name for name in names}
    awaited = [node for request in state.provisioning.requests.values() for node in request.granted]
    unanswered = {name for name, request in state.provisioning.requests.items() if request.count}
    coming = [node for node in up if _request(node, request_of) in unanswered]
    wanted = dict.fromkeys([*(node for node in state.workers if node in up), *awaited, *coming])
    vms = tuple(Vm(name=node, request=request) for node in wanted if (request := _request(node, request_of)))
    return Inherited(vms, frozenset(state.workers))


def _request(node: str, request_of: dict[str, str]) -> str | None:
    return request_of.get(node.rpartition("-")[0])
