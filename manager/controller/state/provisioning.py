"""VMs that were asked for and are not up, and what is known of those that come, go, or never get ready."""

from __future__ import annotations

from pydantic import Field

from manager.controller.state.actions import RequestId
from manager.controller.state.events import NodeFacts
from morph.contract.base import Value
from morph.contract.messages import WorkerId


class NodeRequest(Value):
    """VMs that were asked for and are not up.

    ``count``: not granted yet; ``granted``: booting (name -> since when); ``facts``: what kind these are;
    ``appeared``: who was up before its grant was heard of.
    """

    count: int
    asked_s: float
    num_sent: int = 1
    granted: dict[WorkerId, float] = Field(default_factory=dict)
    facts: dict[WorkerId, NodeFacts] = Field(default_factory=dict)
    appeared: frozenset[WorkerId] = frozenset()


class KeptNotice(Value):
    """A notice of a VM that may be one of those that are asked for: its agent can be faster than the grant."""

    notice: str
    taken_s: float


class Flaps(Value):
    """How often a machine came back lately."""

    num: int
    last_s: float


class Provisioning(Value):
    """Requests for VMs, how they fared, and notices of VMs."""

    requests: dict[RequestId, NodeRequest] = Field(default_factory=dict)
    num_requests: int = 0
    num_refused: int = Field(default=0, description="refusals since the last grant")
    num_setups_lost: int = Field(default=0, description="VMs in a row that came to nothing before one got ready")
    setup_lost_s: float | None = Field(default=None, description="when the last of these was")
    num_absent: int = Field(default=0, description="times in a row that granted VMs did not appear at all")
    ask_at_s: float | None = Field(default=None, description="no further request before that")
    kept_notices: dict[WorkerId, KeptNotice] = Field(
        default_factory=dict, description="of nodes that are not known: of open requests, or of VMs that came"
    )
    leaving: frozenset[WorkerId] = Field(
        default=frozenset(), description="who drains by a notice that is to be acknowledged"
    )
    flaps: dict[str, Flaps] = Field(default_factory=dict, description="by machine")
    nodes_wake_s: float | None = Field(default=None, description="no wait for a node runs out before that")
