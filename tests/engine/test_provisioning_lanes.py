"""VMs are requested and ended at the same time: neither waits for the other, and nothing is mixed up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from manager.controller.state.actions import ReleaseNodes, RequestNodes
from manager.controller.state.events import NodesGranted, Paid, RequestRefused
from manager.engine.loop.event_queue import EventQueue
from manager.engine.vms.budget import Spending
from manager.engine.vms.provisioning import Provisioner
from manager.journal.records import Fact
from manager.providers.interface.provider import CapacityShort, QuotaExceeded, Transient, Vm
from morph.contract.cluster import Limits
from tests.engine.fake_cloud import BOUND_S, FakeCloud, ProvisioningWorld, know


class World(ProvisioningWorld):
    """A cloud where a VM costs a dollar a second."""

    def __init__(self, **limits: float) -> None:
        super().__init__(FakeCloud(3600.0), **limits)

    def until_told(self, detail: str) -> None:
        """Wait for a fact, and check that no answer comes before it."""
        while detail not in [fact.detail for fact in self.facts]:
            stamped = self.event_queue.get(BOUND_S)
            assert stamped is not None, self.facts
            assert isinstance(stamped.item, Fact), stamped.item
            self.facts.append(stamped.item)

    def have(self, request: str, count: int = 1) -> list[str]:
        """Get VMs that the controller knows."""
        self.ask(request, count)
        granted = self.answer()
        assert isinstance(granted, NodesGranted)
        know(self.shell, granted.nodes)
        return list(granted.nodes)


@pytest.fixture
def world() -> Iterator[World]:
    yield from opened()


def opened(**limits: float) -> Iterator[World]:
    world = World(**limits)
    yield world
    for gate in (world.cloud.requests, world.cloud.ends):
        gate.open.set()
    world.shell.close()


@pytest.mark.parametrize("limits", [{}, {"max_vms": 2}, {"usd_per_h": 7200.0}], ids=str)
def test_a_replacement_does_not_wait_for_the_lost_vms_end(limits: dict[str, float]) -> None:
    for world in opened(**limits):
        lost, other = world.have("job-1", 2)
        world.cloud.ends.shut()
        know(world.shell, [other])
        world.ask("job-2", 1)
        assert world.answer() == NodesGranted(request="job-2", nodes=("job-2-0",))
        assert world.cloud.ends.reached.wait(BOUND_S)
        assert lost in world.cloud.there
        world.ask("job-3", 1)
        refused = world.answer()
        assert isinstance(refused, RequestRefused) == bool(limits), "one more than are kept"
        world.cloud.ends.open.set()
        world.settle()
        assert lost not in world.cloud.there


def test_a_vm_is_ended_while_a_request_is_under_way(world: World) -> None:
    lost, other = world.have("job-1", 2)
    world.cloud.requests.shut()
    world.ask("job-2", 1)
    assert world.cloud.requests.reached.wait(BOUND_S)
    know(world.shell, [other])
    world.settle()
    assert lost not in world.cloud.there
    world.cloud.requests.open.set()
    assert world.answer() == NodesGranted(request="job-2", nodes=("job-2-0",))
    assert world.cloud.calls == ["grant job-1", f"end {lost}", "grant job-2"]


def test_a_vm_that_is_being_ended_is_paid_until_it_is_gone() -> None:
    for world in opened(budget_usd=1000.0):
        _, other = world.have("job-1", 2)
        world.cloud.ends.shut()
        know(world.shell, [other])
        assert world.cloud.ends.reached.wait(BOUND_S)
        world.now_s += 300  # two VMs, 600 dollars
        world.cloud.ends.open.set()
        world.settle()
        world.now_s += 399
        world.ask("job-2", 1)
        assert isinstance(world.answer(), NodesGranted)
        world.now_s += 1  # and one VM of two for another second
        world.ask("job-3", 1)
        refused = world.answer()
        assert isinstance(refused, RequestRefused)
        assert refused.detail == "1001.00 dollars are spent, vms.limits.budget_usd is 1000"


@pytest.mark.parametrize("full", [CapacityShort("no host is free"), QuotaExceeded("0 cores left")])
def test_where_there_is_no_room_beside_it_a_replacement_waits_for_the_end(world: World, full: Exception) -> None:
    world.cloud.room, world.cloud.full = 2, full
    lost, other = world.have("job-1", 2)
    world.cloud.ends.shut()
    know(world.shell, [other])
    assert world.cloud.ends.reached.wait(BOUND_S)
    world.ask("job-2", 1)
    world.until_told(f"job-2: {full}; again when one of {lost} is ended")
    world.cloud.ends.open.set()
    assert world.answer() == NodesGranted(request="job-2", nodes=("job-2-0",))
    assert world.cloud.calls == ["grant job-1", "refuse job-2", f"end {lost}", "grant job-2"]


def test_a_vm_that_does_not_end_delays_no_other_end_and_no_request() -> None:
    world, stuck = World(), threading.Event()
    works = world.cloud.delete

    def delete(names: Sequence[str]) -> None:
        if "job-1-0" in names:
            assert stuck.wait(BOUND_S)
        works(names)

    world.cloud.delete = delete  # type: ignore[method-assign]
    world.cloud.room = 3
    world.have("job-1", 3)
    know(world.shell, ["job-1-1", "job-1-2"])
    world.ask("job-2", 1)
    world.until_told("job-2: no room; again when one of job-1-0 is ended")
    know(world.shell, ["job-1-2"])
    assert world.answer() == NodesGranted(request="job-2", nodes=("job-2-0",))
    assert set(world.cloud.there) == {"job-1-0", "job-1-2", "job-2-0"}
    stuck.set()
    world.settle()
    world.shell.close()


def test_the_boot_log_of_a_vm_that_never_joined_is_kept(world: World) -> None:
    world.have("job-1", 2)  # the second VM is given up below
    world.ask("job-2", 1)
    world.answer()
    world.shell.release(ReleaseNodes(nodes=("job-1-0", "job-2-0")))
    world.settle()
    while stamped := world.event_queue.get(0.0):
        assert isinstance(stamped.item, Fact)
        world.facts.append(stamped.item)
    logs = [(fact.worker, fact.detail) for fact in world.facts if fact.name == "vm_boot_log"]
    assert logs == [("job-2-0", "job-2-0: no space left on device")]


def test_a_boot_log_that_cannot_be_had_keeps_no_vm_alive(world: World) -> None:
    world.have("job-1", 1)
    world.ask("job-2", 1)
    world.answer()
    world.cloud.log_error = AssertionError("no host in None")
    world.shell.release(ReleaseNodes(nodes=("job-2-0",)))
    world.settle()
    assert world.cloud.ended == ["job-2-0"]


def test_a_refusal_without_a_successful_end_is_an_answer(world: World) -> None:
    world.cloud.room = 1
    (lost,) = world.have("job-1")
    world.ask("job-2", 1)
    assert isinstance(world.answer(), RequestRefused)
    world.cloud.ends.shut()
    world.cloud.end_errors = [Transient("no answer")]
    know(world.shell, ())
    world.ask("job-3", 1)
    assert world.cloud.ends.reached.wait(BOUND_S)
    world.cloud.ends.open.set()
    refused = world.answer()
    assert isinstance(refused, RequestRefused)
    assert refused.cause == "capacity"
    assert lost in world.cloud.there


def test_a_vm_given_up_before_its_grant_is_ended_after_the_grant(world: World) -> None:
    world.cloud.requests.shut()
    world.ask("job-1", 3)
    assert world.cloud.requests.reached.wait(BOUND_S)
    know(world.shell, ["job-1-0", "job-1-1"])
    know(world.shell, ["job-1-1"])  # it was lost while others of its request were being made
    world.settle()
    assert "job-1-0" in world.cloud.there, "a request that is tried again would make it anew"
    world.cloud.requests.open.set()
    assert world.answer() == NodesGranted(request="job-1", nodes=("job-1-1", "job-1-2"))
    world.settle()
    assert set(world.cloud.there) == {"job-1-1", "job-1-2"}
    assert world.cloud.calls == ["grant job-1", "end job-1-0"]
    assert world.shell.request_of("job-1-0") is None


def test_what_a_vm_costs_is_known_before_its_grant(world: World) -> None:
    paid = Paid(usd_per_h=1.4)
    world.cloud.made_as = [{"usd_per_h": 1.4}] * 2
    world.cloud.requests.shut()
    world.ask("job-1", 2)
    assert world.cloud.requests.reached.wait(BOUND_S)
    assert world.shell.known_of(["job-1-0", "never-there"]) == ({"job-1-0": paid}, {})
    world.cloud.requests.open.set()
    assert world.answer() == NodesGranted(
        request="job-1", nodes=("job-1-0", "job-1-1"), paid={"job-1-0": paid, "job-1-1": paid}
    )
    assert world.shell.known_of(["job-1-0"]) == ({}, {}), "its grant says it"


def test_a_request_without_remaining_vms_is_not_granted_and_leaves_nothing(world: World) -> None:
    world.cloud.requests.shut()
    world.ask("job-1", 2)
    assert world.cloud.requests.reached.wait(BOUND_S)
    world.shell.release(ReleaseNodes(nodes=("job-1-0", "job-1-1")))
    world.cloud.requests.open.set()
    refused = world.answer()
    assert isinstance(refused, RequestRefused)
    assert refused.detail == "its VMs were lost before it was granted"
    world.settle()
    assert world.cloud.there == {}


def test_the_end_of_the_run_ends_everything_though_one_end_hangs() -> None:
    world = World()
    _, other = world.have("job-1", 2)
    world.shell._close_timeout_s = 0.05
    world.cloud.ends.shut()
    know(world.shell, [other])
    assert world.cloud.ends.reached.wait(BOUND_S)
    world.shell.close()
    assert world.cloud.calls[-1] == "dismantle"
    assert world.cloud.there == {}
    world.cloud.ends.open.set()


def test_a_request_that_waits_for_room_does_not_delay_the_end() -> None:
    world = World()
    world.cloud.room = 1
    world.have("job-1")
    world.cloud.ends.shut()
    know(world.shell, ())
    world.ask("job-2", 1)
    assert world.cloud.ends.reached.wait(BOUND_S)
    world.until_told("job-2: no room; again when one of job-1-0 is ended")
    world.shell._close_timeout_s = 0.5
    world.shell.close()
    assert isinstance(world.answer(), RequestRefused)
    assert world.cloud.calls[-1] == "dismantle"
    world.cloud.ends.open.set()


def test_new_vms_are_not_ended_as_an_earlier_managers() -> None:
    cloud, event_queue = FakeCloud(), EventQueue()
    cloud.there = {"job-1-0": Vm(name="job-1-0", request="job-1")}
    works, silent = cloud.list, [True]

    def silent_at_first() -> tuple[Vm, ...]:
        if silent:
            silent.pop()
            raise Transient("no answer")
        return works()

    cloud.list = silent_at_first  # type: ignore[method-assign]
    shell = Provisioner(cloud, event_queue, Spending(Limits()))
    told: list[object] = []

    def until_told(item: object) -> None:
        while item not in told:
            stamped = event_queue.get(BOUND_S)
            assert stamped is not None, told
            told.append(stamped.item)

    shell.begin((), ())
    shell.request(RequestNodes(request="job-2", count=1))
    until_told(NodesGranted(request="job-2", nodes=("job-2-0",)))
    shell._looks.put(shell._look)  # the first look after the provider answers again
    until_told(Fact(name="vm_reconciled", detail="job-1-0 of job-1 was left by an earlier manager: ended"))
    shell.close()
    assert cloud.calls == ["grant job-2", "end job-1-0", "dismantle"]
