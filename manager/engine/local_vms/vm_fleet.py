"""Requests the local VMs of a run, boots several at a time, and revokes them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from manager.controller.state.events import NodeAppeared, NodeFacts, NoticeGiven, Paid, WorkerLost
from manager.engine.loop.event_queue import EventQueue
from manager.journal.records import VM_KILLED, VM_UP, Fact
from morph.contract.errors import ClusterError
from morph.contract.trace import UNKNOWN, TraceEvent


class VmHost(Protocol):
    """Where VMs run. ``boots_at_once``: the number of threads that boot VMs."""

    boots_at_once: int

    def add_vm(self, name: str) -> None:
        """Bring up a VM; blocks until it is up. ClusterError if it died, or is not up in time."""

    def prepare_kill(self, names: Sequence[str]) -> Callable[[], None]:
        """Prepare to kill VMs without warning, all at once; calling the result kills them."""

    def settle(self) -> None:
        """Record that another manager could find the VMs from now on."""


class VmFleet:
    """Boots VMs from its own threads; ``request`` and ``revoke`` return at once, from any thread.

    A node that is requested again after its revocation is another machine, so it gets a new VM id (``name.2``). A
    notice for a VM that is not up yet is given once the VM is up. ``node_types``: the instance types that plans know as
    GPU types.
    """

    def __init__(self, host: VmHost, event_queue: EventQueue, node_types: Collection[str] = ()) -> None:
        self._host = host
        self._node_types = frozenset(node_types)
        self._event_queue = event_queue
        self._boots: queue.Queue[str | None] = queue.Queue()
        self._wanted: dict[str, str] = {}
        self._seen: dict[str, int] = {}
        self._up: set[str] = set()
        self._failed: set[str] = set()
        self._told: set[str] = set()
        self._taken_s: dict[str, float] = {}
        self._said: dict[str, tuple[NodeFacts, Paid | None]] = {}
        self._requests: dict[str, str] = {}
        self._lock = threading.Lock()
        for _ in range(host.boots_at_once):
            threading.Thread(target=self._boot_loop, name="morph-vm-boot", daemon=True).start()

    def adopt(
        self,
        played: Iterable[tuple[TraceEvent, float | None]],
        up: Collection[str],
        appeared: Collection[str],
        requested: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Continue after another manager, which requested and revoked these VMs.

        ``played``: the played events in order, each with the price of such a VM at that time, in dollars an hour. VMs
        in ``up`` that were already revoked are killed. VMs that had not ``appeared`` to the controller are reported now
        if they are up, and requested again if not. ``requested``: VMs that are not in ``played``, each with the request
        that it answers.
        """
        with self._lock:
            for event, usd_per_h in played:
                if event.event == "add":
                    self._want(event.node_id, event.zone, event.instance_type, usd_per_h)
                else:
                    self._wanted.pop(event.node_id, None)
            for node, request in requested.items():
                self._requests[self._want(node)] = request
            wanted = set(self._wanted.values())
            self._up |= wanted & set(up)
            self._told |= wanted & set(appeared)
            self._failed |= wanted & set(appeared) - set(up)  # it died, so there is no boot to wait for
        self._host.prepare_kill(sorted(set(up) - wanted))()
        for vm in sorted(wanted - set(appeared)):
            if vm in up:
                self._appear(vm)
            else:
                self._boots.put(vm)

    def request(
        self,
        node: str,
        zone: str = UNKNOWN,
        instance_type: str = UNKNOWN,
        usd_per_h: float | None = None,
        *,
        answers: str | None = None,
    ) -> str:
        """Request a VM; returns its id. ``NodeAppeared`` follows when it is up, with the request that it answers."""
        with self._lock:
            vm = self._want(node, zone, instance_type, usd_per_h)
            if answers is not None:
                self._requests[vm] = answers
        self._event_queue.put(Fact(name="vm_requested", worker=vm, detail=zone))
        self._boots.put(vm)
        return vm

    def give_notice(self, node: str, lead_s: float) -> None:
        """Announce that a node's VM will be revoked after this time; the caller then calls ``revoke``."""
        with self._lock:
            vm = self._wanted.get(node)
            if vm is not None:
                self._taken_s[vm] = time.monotonic() + lead_s
                if vm in self._told:
                    self._tell_notice(vm)

    def revoke(self, *nodes: str) -> None:
        """Kill the nodes' VMs, all at once; a VM that is still booting never appears."""
        doomed = self._unwanted(nodes)
        kill = self._host.prepare_kill(doomed)
        for vm in doomed:
            self._event_queue.put(Fact(name=VM_KILLED, worker=vm))
        kill()

    def may_take(self, vm: str) -> bool:
        """Return whether a VM is up."""
        with self._lock:
            return vm in self._up

    def evict(self, _vm: str) -> bool:
        """Return False: local VMs are revoked by ``take`` alone."""
        return False

    def take(self, vms: Collection[str]) -> None:
        """Revoke VMs by their ids."""
        with self._lock:
            nodes = [node for node, vm in self._wanted.items() if vm in vms]
        self.revoke(*nodes)

    def release(self, *nodes: str) -> None:
        """End the nodes' VMs because they are not needed; this is not a revocation. VMs that are gone are skipped."""
        doomed = self._unwanted(nodes)
        self._host.prepare_kill(doomed)()
        for vm in doomed:
            self._event_queue.put(Fact(name="vm_released", worker=vm))

    def _unwanted(self, nodes: Sequence[str]) -> list[str]:
        with self._lock:
            vms = [self._wanted.pop(node) for node in nodes if node in self._wanted]
            doomed = [vm for vm in vms if vm in self._up]
            self._up.difference_update(doomed)
            return doomed

    @property
    def booting(self) -> bool:
        """Whether a requested VM is not up yet."""
        with self._lock:
            return bool(set(self._wanted.values()) - self._up - self._failed)

    def close(self) -> None:
        """Stop booting VMs."""
        with self._lock:
            self._wanted.clear()
        for _ in range(self._host.boots_at_once):
            self._boots.put(None)

    def _want(
        self, node: str, zone: str = UNKNOWN, instance_type: str = UNKNOWN, usd_per_h: float | None = None
    ) -> str:
        count = self._seen[node] = self._seen.get(node, 0) + 1
        vm = self._wanted[node] = node if count == 1 else f"{node}.{count}"
        size, zone = ("" if value == UNKNOWN else value for value in (instance_type, zone))
        facts = NodeFacts(provider="local", size=size, zone=zone, node_type=size if size in self._node_types else "")
        self._said[vm] = facts, None if usd_per_h is None else Paid(usd_per_h=usd_per_h)
        return vm

    def _appear(self, vm: str) -> None:
        with self._lock:  # so that no notice comes before this event
            facts, paid = self._said[vm]
            self._event_queue.put(NodeAppeared(node=vm, request=self._requests.get(vm), facts=facts, paid=paid))
            self._event_queue.put(Fact(name=VM_UP, worker=vm))
            self._told.add(vm)
            if vm in self._taken_s:
                self._tell_notice(vm)

    def _tell_notice(self, vm: str) -> None:
        lead_s = max(0.0, self._taken_s[vm] - time.monotonic())
        self._event_queue.put(NoticeGiven(worker=vm, lead_s=lead_s, notice=f"trace-{vm}"))

    def _boot_loop(self) -> None:
        while (vm := self._boots.get()) is not None:
            if not self._is_wanted(vm):
                continue  # revoked before it was up
            try:
                self._host.add_vm(vm)
            except ClusterError as error:
                with self._lock:
                    self._failed.add(vm)
                if self._is_wanted(vm):
                    self._event_queue.put(Fact(name="vm_failed", worker=vm, detail=str(error)))
                    self._event_queue.put(WorkerLost(worker=vm, cause=str(error)))
                continue
            with self._lock:
                wanted = vm in self._wanted.values()
                if wanted:
                    self._up.add(vm)
            if wanted:
                self._appear(vm)
            else:
                self._host.prepare_kill([vm])()  # revoked while it booted

    def _is_wanted(self, vm: str) -> bool:
        with self._lock:
            return vm in self._wanted.values()
