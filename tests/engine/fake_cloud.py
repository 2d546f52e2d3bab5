"""A provider whose VMs are only names, the thread between it and the controller, and the controller's messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from manager.controller.state.actions import ReleaseNodes, RequestNodes
from manager.controller.state.events import NodesGranted, RequestRefused
from manager.engine.loop.event_queue import EventQueue
from manager.engine.vms.budget import Spending
from manager.engine.vms.provisioning import Provisioner
from manager.journal.records import Fact
from manager.providers.interface.provider import Capabilities, CapacityShort, Price, Vm, vm_name
from morph.contract.cluster import Limits
from tests.waiting import BOUND_S


def know(shell: Provisioner, nodes: Collection[str]) -> None:
    """Let the controller know only these nodes, so that its other ones are given back."""
    gone = shell._nodes - set(nodes)
    shell.know(nodes)
    if gone:
        shell.release(ReleaseNodes(nodes=tuple(sorted(gone))))


class Gate:
    """Holds up calls while it is shut; ``reached`` is set once a call has come."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.open.set()

    def shut(self) -> None:
        self.reached.clear()
        self.open.clear()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.open.wait(BOUND_S)


class FakeCloud:
    """A cloud with room for a number of VMs, whose requests and ends can be held up.

    ``calls`` are in the order of their ends. ``errors`` are raised by the next requests, in order, after one VM has
    come; ``end_errors`` by the next ends. ``made_as``: fields of a request's VMs.
    """

    def __init__(self, usd_per_h: float | None = 0.5) -> None:
        self.there: dict[str, Vm] = {}
        self.room, self.full = 100, CapacityShort("no room")
        self.usd_per_h, self.num_devices = usd_per_h, 1
        self.made_as: list[dict[str, Any]] = []
        self.errors: list[Exception] = []
        self.end_errors: list[Exception] = []
        self.requests, self.ends = Gate(), Gate()
        self.types: list[str] = []
        self.requested: list[tuple[str, int]] = []
        self.ended: list[str] = []
        self.log_error: Exception | None = None
        self.calls: list[str] = []
        self.orphans: list[str] = []
        self.lock = threading.Lock()

    def add(self, request: str, count: int) -> tuple[Vm, ...]:
        """Add VMs, unless they exist already."""
        made_as = self.made_as or [{}] * count
        vms = [
            Vm(name=vm_name(request, index), request=request, num_devices=self.num_devices, **made_as[index])
            for index in range(count)
        ]
        self.there |= {vm.name: self.there.get(vm.name, vm) for vm in vms}
        return tuple(vms)

    def request(self, request: str, count: int, max_vms: int | None = None, *, node_type: str = "") -> tuple[Vm, ...]:
        self.types.append(node_type)
        num_vms = min(-(-count // self.num_devices), count if max_vms is None else max_vms)
        with self.lock:
            self.requested.append((request, count))
            num_vms = min(num_vms, self.room - sum(vm.request != request for vm in self.there.values()))
            if num_vms <= 0:
                self.calls.append(f"refuse {request}")
                raise self.full
            vms = self.add(request, 1 if self.errors else num_vms)
        self.requests.pass_through()  # they exist before they are granted
        if self.errors:
            raise self.errors.pop(0)
        with self.lock:
            self.calls.append(f"grant {request}")
            return vms

    def list(self) -> tuple[Vm, ...]:
        with self.lock:
            return tuple(self.there.values())

    def delete(self, names: Sequence[str]) -> None:
        with self.lock:
            found = [name for name in self.there if name in names]
        if not found:
            return
        self.ends.pass_through()
        if self.end_errors:
            raise self.end_errors.pop(0)
        with self.lock:
            for name in found:
                self.there.pop(name, None)
            self.ended += found
            self.calls.append(f"end {', '.join(found)}")

    def boot_log(self, name: str) -> str:
        if self.log_error is not None:
            raise self.log_error
        return f"{name}: no space left on device"

    def stop(self) -> None:
        self.requests.open.set()

    def dismantle(self) -> Sequence[str]:
        with self.lock:
            self.there = {}
            self.calls.append("dismantle")
        return self.orphans

    def price(self, node_type: str = "") -> Price | None:
        return None if self.usd_per_h is None else Price(usd_per_h=self.usd_per_h, source="test")

    def capabilities(self) -> Capabilities:
        return Capabilities(spot=True)


class ProvisioningWorld:
    """The thread between a controller and a cloud; costs are counted by the clock ``now_s``."""

    def __init__(self, cloud: FakeCloud | None = None, pause: Callable[[float], bool] | None = None, **limits: float):
        self.cloud, self.event_queue, self.now_s = cloud or FakeCloud(), EventQueue(), 0.0
        spending = Spending(Limits.model_validate(limits), lambda: self.now_s)
        self.shell = Provisioner(self.cloud, self.event_queue, spending, **({"pause": pause} if pause else {}))
        self.facts: list[Fact] = []

    def answer(self) -> NodesGranted | RequestRefused:
        """Return the thread's next event; collect facts on the way."""
        while True:
            stamped = self.event_queue.get(BOUND_S)
            assert stamped is not None, "no answer"
            if isinstance(stamped.item, NodesGranted | RequestRefused):
                return stamped.item
            assert isinstance(stamped.item, Fact)
            self.facts.append(stamped.item)

    def ask(self, request: str = "job-1", count: int = 2) -> None:
        self.shell.request(RequestNodes(request=request, count=count))

    def settle(self) -> list[str]:
        """Wait until every VM that is to be ended has ended; return all that have ended so far."""
        done = threading.Event()
        self.shell._looks.put(done.set)
        assert done.wait(BOUND_S)
        assert self.shell._ends.join(time.monotonic() + BOUND_S)
        return self.cloud.ended
