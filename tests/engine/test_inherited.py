"""VMs that a new manager inherits in a run that requests its VMs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from manager.controller.decide import decide
from manager.controller.state.events import Event, NodeAppeared, NodesGranted, Tick, WorkerLost
from manager.controller.state.state import ControllerState, initial_state
from manager.engine.vms.vm_registry import inherited
from manager.providers.interface.provider import Vm, vm_name
from tests.engine.driver_scene import config_of


def state_after(events: Sequence[Event], job: str = "job", target_nodes: int = 2) -> ControllerState:
    state = initial_state(config_of(2, job=job, target_nodes=target_nodes))
    for event in (Tick(), *events):
        state = decide(state, event, 1.0).state
    return state


GRANTED = NodesGranted(request="job-1", nodes=("job-1-0", "job-1-1"))
APPEARED = (NodeAppeared(node="job-1-0"), NodeAppeared(node="job-1-1"))


def test_vms_of_an_unanswered_request_are_known_by_its_name() -> None:
    found = inherited(state_after([]), ["job-1-1"])
    assert found.vms == (Vm(name="job-1-1", request="job-1"),)
    assert found.nodes == frozenset()


def test_granted_vms_are_awaited_whether_up_or_not() -> None:
    found = inherited(state_after([GRANTED]), ["job-1-1"])
    assert {vm.name for vm in found.vms} == {"job-1-0", "job-1-1"}


def test_a_node_that_is_lost_meanwhile_is_known_and_has_no_vm() -> None:
    found = inherited(state_after([GRANTED, *APPEARED]), ["job-1-0"])
    assert found.vms == (Vm(name="job-1-0", request="job-1"),)
    assert found.nodes == {"job-1-0", "job-1-1"}


def test_a_vm_that_was_given_up_is_not_inherited() -> None:
    state = state_after([GRANTED, *APPEARED, WorkerLost(worker="job-1-0", cause="silent")])
    found = inherited(state, ["job-1-0", "job-1-1", "something-else-0"])
    assert [vm.name for vm in found.vms] == ["job-1-1"]
    coming = inherited(state, ["job-1-1", "job-2-0"])  # requested later, in place of the lost one
    assert [(vm.name, vm.request) for vm in coming.vms] == [("job-1-1", "job-1"), ("job-2-0", "job-2")]


@pytest.mark.parametrize("job", ["job", "Tiny GPT!", "x" * 100, "a-1"])
def test_requests_are_distinguished_whatever_the_jobs_name(job: str) -> None:
    name = vm_name(f"{job}-1", 1)
    assert inherited(state_after([], job), [name]).vms == (Vm(name=name, request=f"{job}-1"),)


def test_where_vms_come_by_themselves_nothing_was_asked_for() -> None:
    assert inherited(state_after(APPEARED, target_nodes=0), ["job-1-0"]).vms == ()
