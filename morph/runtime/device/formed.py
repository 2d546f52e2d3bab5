"""What of a generation's groups stays on devices, formed beside the groups themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._distributed_c10d import Store

from morph.contract.messages import WorkerSetup
from morph.runtime.device.link_choice import mailboxes
from morph.runtime.device.links import Link
from morph.runtime.device.nccl import communicators
from morph.runtime.groups.channels import GroupSet
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.topology import Topology


def form_on_devices(
    setup: WorkerSetup, layout: Topology, groups: GroupSet, interrupt: Interrupt, open_store: Callable[[], Store]
) -> dict[str, Link]:
    """Give the groups a worker's rings that stay on devices, and return its links that do, by their groups' names.

    Raises:
        ConfigError: a setting asks for what these devices or this torch cannot do.
        GenerationAborted, PeerLost, WaitTimeout: as ``Interrupt.call``.
    """
    device = torch.device(setup.device)
    groups.device_rings = communicators(setup.rings, device, layout.rings, setup.worker, interrupt, open_store)
    return mailboxes(setup, layout.edges, groups, interrupt, open_store)
