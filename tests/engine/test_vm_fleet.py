"""Local VMs that another manager had asked for by name."""

from __future__ import annotations

from manager.controller.events import NodeAppeared
from manager.engine.inbox import Inbox
from manager.engine.vm_fleet import VmFleet
from tests.engine.driver_scene import FakeHost

BOUND_S = 20.0


def test_vms_of_requests_go_on_boot_or_end_as_somebody_waits_for_them() -> None:
    """job-1-0 trains, job-1-1 came up unheard of, job-1-2 was still to boot, job-0-0 was given up."""
    host, inbox = FakeHost(), Inbox()
    fleet = VmFleet(host, inbox)
    try:
        asked = dict.fromkeys(("job-1-0", "job-1-1", "job-1-2"), "job-1")
        fleet.adopt((), up=["job-0-0", "job-1-0", "job-1-1"], appeared=["job-0-0", "job-1-0"], asked=asked)
        told: list[object] = []
        while len(told) < 2:
            stamped = inbox.get(BOUND_S)
            assert stamped is not None, told
            if isinstance(stamped.item, NodeAppeared):
                told.append(stamped.item)
        assert told[0] == NodeAppeared(node="job-1-1", request="job-1")
        assert told[1] == NodeAppeared(node="job-1-2")
        assert (host.up, host.ended) == (["job-1-2"], ["job-0-0"])
        fleet.release("job-1-0", "job-1-2")
        assert host.ended == ["job-0-0", "job-1-0", "job-1-2"]
    finally:
        fleet.close()
