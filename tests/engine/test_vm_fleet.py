"""Local VMs: booted concurrently, and taken over from another manager."""

from __future__ import annotations

import threading

from manager.controller.state.events import NodeAppeared, NodeFacts, WorkerLost
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.event_queue import EventQueue
from morph.contract.errors import ClusterError
from tests.engine.driver_scene import FakeHost
from tests.waiting import BOUND_S


def test_requested_vms_continue_boot_or_end_as_the_controller_needs_them() -> None:
    """job-1-0 trains, job-1-1 came up but was not reported, job-1-2 still has to boot, and job-0-0 was given up."""
    host, event_queue = FakeHost(), EventQueue()
    fleet = VmFleet(host, event_queue)
    try:
        asked = dict.fromkeys(("job-1-0", "job-1-1", "job-1-2"), "job-1")
        fleet.adopt((), up=["job-0-0", "job-1-0", "job-1-1"], appeared=["job-0-0", "job-1-0"], requested=asked)
        told: list[object] = []
        while len(told) < 2:
            stamped = event_queue.get(BOUND_S)
            assert stamped is not None, told
            if isinstance(stamped.item, NodeAppeared):
                told.append(stamped.item)
        assert told[0] == NodeAppeared(node="job-1-1", request="job-1", facts=NodeFacts(provider="local"))
        assert told[1] == NodeAppeared(node="job-1-2", request="job-1", facts=NodeFacts(provider="local"))
        assert (host.up, host.ended) == (["job-1-2"], ["job-0-0"])
        fleet.release("job-1-0", "job-1-2")
        assert host.ended == ["job-0-0", "job-1-0", "job-1-2"]
    finally:
        fleet.close()


def test_a_vms_type_of_gpu_is_its_instance_type_if_profiled() -> None:
    event_queue = EventQueue()
    fleet = VmFleet(FakeHost(), event_queue, node_types=["t4"])
    try:
        for node, kind in (("a", "t4"), ("b", "p3")):
            fleet.request(node, instance_type=kind)
        told: dict[str, NodeFacts | None] = {}
        while len(told) < 2:
            stamped = event_queue.get(BOUND_S)
            assert stamped is not None, told
            if isinstance(stamped.item, NodeAppeared):
                told[stamped.item.node] = stamped.item.facts
        assert told["a"] == NodeFacts(provider="local", size="t4", node_type="t4")
        assert told["b"] == NodeFacts(provider="local", size="p3")
    finally:
        fleet.close()


class DyingHost(FakeHost):
    """Boots three VMs at a time, and none before the last one boots too; vm1 dies."""

    boots_at_once = 3

    def __init__(self) -> None:
        super().__init__()
        self.together = threading.Barrier(self.boots_at_once)

    def add_vm(self, name: str) -> None:
        self.together.wait(BOUND_S)
        if name == "vm1":
            raise ClusterError("VM vm1 did not come up: its raylet ended")
        super().add_vm(name)


def test_vms_boot_concurrently_and_a_death_is_reported_at_once() -> None:
    host, event_queue = DyingHost(), EventQueue()
    fleet = VmFleet(host, event_queue)
    try:
        for name in ("vm0", "vm1", "vm2"):
            fleet.request(name)
        told: list[object] = []
        while len(told) < 3:
            stamped = event_queue.get(BOUND_S)
            assert stamped is not None, told
            if isinstance(stamped.item, NodeAppeared | WorkerLost):
                told.append(stamped.item)
        assert WorkerLost(worker="vm1", cause="VM vm1 did not come up: its raylet ended") in told
        assert sorted(host.up) == ["vm0", "vm2"]
        assert not fleet.booting
    finally:
        fleet.close()
