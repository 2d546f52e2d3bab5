"""A run that keeps a number of VMs: when one is killed, the controller requests a replacement."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.controller.state.actions import RequestNodes
from manager.controller.state.events import NodesGranted
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Observed, Observer
from morph.contract.cluster import Limits, LocalVms
from morph.contract.trace import Trace
from tests.system.conftest import REFERENCE_STEPS
from tests.system.harness import TinyJob, managed

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

KEEP = 2


def test_a_killed_vm_is_replaced_by_request_with_equal_weights(
    tiny_job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    asked: list[tuple[str, int]] = []
    granted: list[str] = []
    joined: list[str] = []

    def attend(fleet: VmFleet) -> Observer:
        killed: list[str] = []

        def act(observed: Observed) -> None:
            state = observed.decision.state
            asked.extend((a.request, a.count) for a in observed.decision.actions if isinstance(a, RequestNodes))
            if isinstance(observed.event, NodesGranted):
                granted.extend(observed.event.nodes)
            if not killed and state.version == 3 and len(state.slots) == KEEP:
                killed.append(granted[0])
                fleet.revoke(granted[0])
            if killed and len(state.slots) == KEEP and killed[0] not in {slot.worker for slot in state.slots}:
                joined.extend(slot.worker for slot in state.slots if slot.worker not in joined)

        return act

    vms = LocalVms(keep=KEEP, usd_per_h=0.3, limits=Limits(max_vms=KEEP, usd_per_h=1.0))
    outcome = managed(
        tiny_job,
        tmp_path / "run",
        shapes={2: "1x2"},
        trace=Trace(events=()),
        num_steps=REFERENCE_STEPS,
        attend=attend,
        vms=vms,
    )
    assert outcome.outcome == "finished"
    assert asked[:2] == [("job-1", 2), ("job-2", 1)]
    assert granted == ["job-1-0", "job-1-1", "job-2-0"]
    assert set(joined) == {"job-1-1", "job-2-0"}
    assert outcome.digests() == reference
