"""A worker's life: its states, and the table of transitions between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from morph.contract.errors import MorphError


class NodeState(StrEnum):
    """States of one VM and its worker, each with what always holds in it.

    ``REQUESTED``: requested, not granted yet; it has no name. Kept in ``Provisioning.requests``.
    ``BOOTING``: granted by name, not up yet. Kept in ``Provisioning.requests``.
    ``WARMING``: up; its worker was started and has not answered its setup. It has no order and holds nothing.
    ``READY``: set up; may be a member, or a spare that stands by.
    ``SUSPECT``: set up, but too slow; a member only while leaving it out would be slower still, else probed.
    ``DRAINING``: has a notice; never given a new place, and left out at a boundary in time.
    ``GONE``: forgotten; a machine that comes back has a new name.
    """

    REQUESTED = "requested"
    BOOTING = "booting"
    WARMING = "warming"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


class NodeEvent(StrEnum):
    """What changes a worker's state."""

    GRANTED = "granted"
    REFUSED = "refused"
    APPEARED = "appeared"
    SET_UP = "set_up"
    SLOW = "slow"
    WELL = "well"
    NOTICED = "noticed"
    SPARED = "spared"
    SPARED_UNREADY = "spared_unready"
    LOST = "lost"


class ImpossibleNodeChange(MorphError):
    """A worker's state cannot change like this: a defect of the controller."""


_S, _E = NodeState, NodeEvent
NODE_TRANSITIONS: Mapping[tuple[NodeState, NodeEvent], NodeState] = MappingProxyType(
    {
        (_S.REQUESTED, _E.GRANTED): _S.BOOTING,
        (_S.REQUESTED, _E.REFUSED): _S.GONE,
        (_S.REQUESTED, _E.APPEARED): _S.WARMING,  # its grant is reported late, or never
        (_S.BOOTING, _E.APPEARED): _S.WARMING,
        (_S.WARMING, _E.SET_UP): _S.READY,
        (_S.WARMING, _E.NOTICED): _S.DRAINING,
        (_S.READY, _E.SLOW): _S.SUSPECT,
        (_S.READY, _E.NOTICED): _S.DRAINING,
        (_S.SUSPECT, _E.WELL): _S.READY,
        (_S.SUSPECT, _E.NOTICED): _S.DRAINING,
        (_S.DRAINING, _E.SET_UP): _S.DRAINING,
        (_S.DRAINING, _E.NOTICED): _S.DRAINING,
        (_S.DRAINING, _E.SPARED): _S.READY,  # the notice was withdrawn, or the VM was not taken
        (_S.DRAINING, _E.SPARED_UNREADY): _S.WARMING,
        **{(state, _E.LOST): _S.GONE for state in _S if state is not _S.GONE},
    }
)
"""The state of a worker after an event. Missing pairs are impossible."""


def after(state: NodeState, event: NodeEvent) -> NodeState:
    """Return the state of a worker after an event; ImpossibleNodeChange if the pair is not in the table."""
    following = NODE_TRANSITIONS.get((state, event))
    if following is None:
        raise ImpossibleNodeChange(f"a node that is {state} cannot be {event}")
    return following
