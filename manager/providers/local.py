"""Local VMs, behind the interface of a provider."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

from manager.providers.interface.provider import Capabilities, CapacityShort, Price, Vm, vm_name
from morph.contract.trace import UNKNOWN


class Fleet(Protocol):
    """Boots local VMs and ends them."""

    def request(self, node: str, *, answers: str | None = None, instance_type: str = UNKNOWN) -> str:
        """Request a VM, for the request ``answers`` if given; returns its id."""

    def release(self, *nodes: str) -> None:
        """End VMs; VMs that are already gone are ignored."""


class LocalProvider:
    """The ``Provider`` of local VMs: ``max_vms`` at a time; ``usd_per_h``: assumed, None: not known.

    ``inherited``: VMs that another manager requested and that the fleet has, or is about to boot.
    """

    def __init__(
        self, fleet: Fleet, max_vms: int, usd_per_h: float | None = None, inherited: Iterable[Vm] = ()
    ) -> None:
        self._fleet = fleet
        self._max_vms = max_vms
        self._usd_per_h = usd_per_h
        self._requests: dict[str, tuple[Vm, ...]] = {}
        self._living: dict[str, Vm] = {
            vm.name: vm.model_copy(update={"provider": "local", "usd_per_h": usd_per_h}) for vm in inherited
        }
        self._lock = threading.Lock()

    def request(self, request: str, count: int, max_vms: int | None = None, *, node_type: str = "") -> tuple[Vm, ...]:
        """See ``Provider``: a local VM has one device."""
        with self._lock:
            if request in self._requests:
                return self._requests[request]
            room = self._max_vms - sum(vm.request != request for vm in self._living.values())
            if room <= 0:
                raise CapacityShort(f"this machine has its {self._max_vms} VMs")
            most = min(count, room, count if max_vms is None else max_vms)
            names = [vm_name(request, index) for index in range(most)]
            vms = tuple(self._living.get(name) or self._new_vm(name, request, node_type) for name in names)
            self._requests[request] = vms
            self._living.update((vm.name, vm) for vm in vms)
            return vms

    def list(self) -> tuple[Vm, ...]:
        with self._lock:
            return tuple(self._living.values())

    def delete(self, names: Sequence[str]) -> None:
        with self._lock:
            ours = [name for name in names if self._living.pop(name, None) is not None]
        if ours:
            self._fleet.release(*ours)

    def evict(self, _name: str) -> bool:
        return False

    def boot_log(self, _name: str) -> str:
        """See ``Provider``: the log is in the run's directory."""
        return ""

    def stop(self) -> None:
        """See ``Provider``: requests return at once."""

    def dismantle(self) -> tuple[str, ...]:
        """See ``Provider``: there is nothing to end but the VMs."""
        self.delete([vm.name for vm in self.list()])
        return ()

    def price(self, node_type: str = "") -> Price | None:  # noqa: ARG002 (each costs the same)
        return None if self._usd_per_h is None else Price(usd_per_h=self._usd_per_h, source="the cluster file")

    def capabilities(self) -> Capabilities:
        return Capabilities(spot=False, max_vms=self._max_vms)

    def _new_vm(self, name: str, request: str, node_type: str) -> Vm:
        vm = self._fleet.request(name, answers=request, **({"instance_type": node_type} if node_type else {}))
        return Vm(name=vm, request=request, provider="local", usd_per_h=self._usd_per_h, node_type=node_type)
