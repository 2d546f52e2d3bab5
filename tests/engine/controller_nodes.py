"""What the controller tells a provider's side when the nodes that it knows change."""

from __future__ import annotations

from collections.abc import Collection

from manager.controller.state.actions import ReleaseNodes
from manager.engine.vms.provisioning import Provisioning


def know(shell: Provisioning, nodes: Collection[str]) -> None:
    """Let the controller know these nodes alone, so that those that it knew besides are given back."""
    gone = shell._nodes - set(nodes)
    shell.know(nodes)
    if gone:
        shell.release(ReleaseNodes(nodes=tuple(sorted(gone))))
