"""Chooses the links that use mailboxes; both ends of a link agree on it when a generation is formed.

Through the rendezvous store, the sender gives the handle of its mailbox, or why it has none, for each edge within a
machine; the receiver answers whether it could open it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch._C._distributed_c10d import PrefixStore, Store

from morph.contract.base import Value
from morph.contract.cluster import LinkSetting
from morph.contract.errors import ConfigError
from morph.contract.messages import WorkerSetup
from morph.runtime.device.devices import device_for
from morph.runtime.device.links import Link
from morph.runtime.device.mailboxes import LinkEnd, Mailbox, MailRoom, ReceivingEnd, SendingEnd
from morph.runtime.device.nccl import communicators
from morph.runtime.device.rings import told_facts
from morph.runtime.groups.channels import Channel, GroupSet, GroupSpec, first_clause
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.topology import Topology

log = logging.getLogger(__name__)


class WorkerMachine(Value):
    """The place of a worker; workers of one ``machine`` can share memory."""

    machine: str


class Offer(Value):
    """A sender's mailbox (its handle in hex, and its slots), or why there is none; the answer has no handle."""

    handle: str = ""
    num_slots: int = Field(default=0, ge=0)
    slot_bytes: int = Field(default=0, ge=0)
    refused: str = ""


def this_machine() -> str:
    """Return an identity of the machine since its boot and of the namespace in which processes share memory."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/ipc').readlink()}"


def edges_within(edges: Sequence[GroupSpec], places: Mapping[str, WorkerMachine]) -> tuple[GroupSpec, ...]:
    """Return the edges whose ends are on one machine, in their order. Pure; both ends get the same answer."""
    return tuple(edge for edge in edges if len({places[member].machine for member in edge.members}) == 1)


def room_for(setting: LinkSetting, device: torch.device) -> MailRoom | None:
    """Return the mailboxes of a device of this process; None if tensors go through the host."""
    return None if setting == "staged" or device.type == "cpu" else _room(device)


def mailboxes(
    setup: WorkerSetup,
    edges: Sequence[GroupSpec],
    groups: GroupSet,
    interrupt: Interrupt,
    open_store: Callable[[], Store],
) -> dict[str, Link]:
    """Form the links of a worker that use mailboxes, by the names of their groups; the others are staged.

    ``edges``: all edges of a generation, the sender before the receiver. Raises ConfigError if the setting is ``ipc``
    and an edge within a machine cannot use one; GenerationAborted, PeerLost, WaitTimeout.
    """
    worker = setup.worker
    mine = [edge for edge in edges if worker in edge.members]
    room = room_for(setup.links, torch.device(setup.device)) if mine else None
    if room is None:
        return {}
    forming = Forming(room, mine, worker, groups, interrupt)

    def formed() -> dict[str, Link]:
        try:
            return forming.links(open_store)
        except RuntimeError as error:  # the store's
            interrupt.lose(f"forming mailboxes: {first_clause(error)}")
            return {}

    links = interrupt.call(formed, "the mailboxes of neighbours")
    for refused in forming.refused:
        if setup.links == "ipc":
            raise ConfigError(f"cannot be used: {refused}", field="vms.links", value="ipc", allowed="auto or staged")
        _say_once(f"tensors go through host memory: {refused}")
    return links


@dataclass
class Forming:
    """The forming of one worker's links in one generation; ``refused``: why edges within the machine are staged."""

    room: MailRoom
    edges: Sequence[GroupSpec]
    worker: str
    groups: GroupSet
    interrupt: Interrupt
    refused: list[str] = field(default_factory=list)

    def links(self, open_store: Callable[[], Store]) -> dict[str, Link]:
        """Exchange offers; blocks until the neighbours have made theirs. Raises RuntimeError as the store does."""
        store = PrefixStore(f"g{self.interrupt.generation}/links", open_store())
        places = told_facts(store, self.edges, self.worker, WorkerMachine(machine=this_machine()))
        near = edges_within(self.edges, places)
        out = [edge for edge in near if edge.members[0] == self.worker]
        boxes = [self._offer(store, edge, index) for index, edge in enumerate(out)]
        opened = {edge.name: self._open(store, edge) for edge in near if edge.members[1] == self.worker}
        opened |= {edge.name: self._heard(store, edge, box) for edge, box in zip(out, boxes, strict=True)}
        ends = {name: end for name, end in opened.items() if end is not None}
        self.groups.at_clear += [end.close for end in ends.values()]
        return dict(ends)

    def _offer(self, store: Store, edge: GroupSpec, index: int) -> Mailbox | None:
        box = None
        try:
            box = self.room.box(index)
            offer = Offer(handle=box.handle.hex(), num_slots=box.num_slots, slot_bytes=box.slot_bytes)
        except RuntimeError as error:
            offer = Offer(refused=f"{self.worker} cannot share its device's memory: {first_clause(error)}")
        store.set(f"{edge.name}/offer", offer.model_dump_json())
        return box

    def _open(self, store: Store, edge: GroupSpec) -> LinkEnd[Any] | None:
        offer, end = Offer.model_validate_json(store.get(f"{edge.name}/offer")), None
        refused = offer.refused
        if not refused:
            try:
                with self.room.reading.computing():
                    memory = self.room.device.opened(bytes.fromhex(offer.handle))
                slots = memory.view(offer.num_slots, offer.slot_bytes)
                end = ReceivingEnd(slots, self.room, *self._carriers(edge), self.interrupt)
            except (RuntimeError, OSError, ValueError) as error:
                refused = f"{self.worker} cannot open {edge.members[0]}'s memory: {first_clause(error)}"
        self.refused += [refused] if refused else []
        store.set(f"{edge.name}/answer", Offer(refused=refused).model_dump_json())
        return end

    def _heard(self, store: Store, edge: GroupSpec, box: Mailbox | None) -> LinkEnd[Any] | None:
        refused = Offer.model_validate_json(store.get(f"{edge.name}/answer")).refused
        self.refused += [refused] if refused else []
        return None if box is None or refused else SendingEnd(box, *self._carriers(edge), self.interrupt)

    def _carriers(self, edge: GroupSpec) -> tuple[Channel, Channel]:
        """Return the keys of the offer from the sender to the receiver, and of the answer."""
        sender, receiver = edge.members
        return self.groups.channel(edge.name, sender), self.groups.channel(edge.name, receiver)


@cache
def _room(device: torch.device) -> MailRoom:
    return MailRoom(device_for(device))


@cache
def _say_once(text: str) -> None:
    log.warning(text)


# The parts of a generation's groups that stay on devices; they are formed beside the groups themselves.


def form_on_devices(
    setup: WorkerSetup, layout: Topology, groups: GroupSet, interrupt: Interrupt, open_store: Callable[[], Store]
) -> dict[str, Link]:
    """Give the groups a worker's device rings, and return its device links by group. Raises as ``Interrupt.call``."""
    device = torch.device(setup.device)
    groups.device_rings = communicators(setup.rings, device, layout.rings, setup.worker, interrupt, open_store)
    return mailboxes(setup, layout.edges, groups, interrupt, open_store)
