"""The thread between the controller and a provider."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from manager.controller.state.actions import ReleaseNodes, RequestNodes
from manager.controller.state.events import NodeFacts, NodesGranted, Paid, RequestRefused
from manager.engine.loop.event_queue import EventQueue
from manager.engine.vms.provisioning import RETRY_AFTER_MAX_S, TRIES, Provisioning
from manager.engine.vms.spending import Before, Spending
from manager.journal.records import Fact
from manager.providers.interface.provider import (
    Capabilities,
    CapacityShort,
    Misconfigured,
    Price,
    QuotaExceeded,
    Throttled,
    Transient,
    Vm,
    vm_name,
)
from morph.contract.cluster import Limits
from tests.engine.controller_nodes import know

BOUND_S = 100.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeProvider:
    """VMs that are names. ``errors`` are raised by the next requests, in order, after one VM has come."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.there: list[Vm] = []
        self.requests: list[tuple[str, int]] = []
        self.deleted: list[str] = []
        self.usd_per_h: float | None = 0.5
        self.held: threading.Event | None = None
        self.made_as: list[dict[str, Any]] = []
        self.num_devices = 1

    def request(self, request: str, count: int, max_vms: int | None = None) -> tuple[Vm, ...]:
        if self.held is not None:
            assert self.held.wait(BOUND_S)
        self.requests.append((request, count))
        num_vms = min(-(-count // self.num_devices), count if max_vms is None else max_vms)
        made_as = self.made_as or [{}] * num_vms
        vms = [
            Vm(name=vm_name(request, index), request=request, num_devices=self.num_devices, **made_as[index])
            for index in range(num_vms)
        ]
        if self.errors:
            self.there += [vm for vm in vms[:1] if vm not in self.there]
            raise self.errors.pop(0)
        self.there += [vm for vm in vms if vm not in self.there]
        return tuple(vms)

    def list(self) -> tuple[Vm, ...]:
        return tuple(self.there)

    def stop(self) -> None:
        pass

    def dismantle(self) -> None:
        self.delete([vm.name for vm in self.there])

    def delete(self, names: Sequence[str]) -> None:
        self.deleted += [vm.name for vm in self.there if vm.name in names]
        self.there = [vm for vm in self.there if vm.name not in names]

    def price(self) -> Price | None:
        return None if self.usd_per_h is None else Price(usd_per_h=self.usd_per_h, source="test")

    def capabilities(self) -> Capabilities:
        return Capabilities(spot=False)


class World:
    def __init__(self, **limits: float) -> None:
        self.provider, self.event_queue, self.pauses_s = FakeProvider(), EventQueue(), list[float]()
        self.shell = Provisioning(self.provider, self.event_queue, Spending(Limits.model_validate(limits)), self.pause)
        self.facts: list[Fact] = []

    def pause(self, wait_s: float) -> bool:
        self.pauses_s.append(wait_s)
        return False

    def ask(self, request: str = "job-1", count: int = 2) -> NodesGranted | RequestRefused:
        self.shell.request(RequestNodes(request=request, count=count))
        return self.answer()

    def ended(self) -> list[str]:
        """What is ended, when all that was to be is."""
        done = threading.Event()
        self.shell._ends.put(done.set)
        assert done.wait(BOUND_S)
        return self.provider.deleted

    def answer(self) -> NodesGranted | RequestRefused:
        while True:
            stamped = self.event_queue.get(BOUND_S)
            assert stamped is not None
            if not isinstance(stamped.item, Fact):
                assert isinstance(stamped.item, NodesGranted | RequestRefused)
                return stamped.item
            self.facts.append(stamped.item)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.shell.close()


def test_a_request_is_granted_by_name(world: World) -> None:
    assert world.ask() == NodesGranted(request="job-1", nodes=("job-1-0", "job-1-1"))
    assert [fact.worker for fact in world.facts if fact.name == "vm_granted"] == ["job-1-0", "job-1-1"]


def test_a_grant_says_what_each_vm_costs_and_how_long_it_has_been_paid(world: World) -> None:
    asked_s = time.time()
    world.provider.made_as = [
        {"usd_per_h": 0.3, "paid_since_s": asked_s - 60.0},
        {"usd_per_h": 1.4, "paid_since_s": asked_s + 3600.0},  # a clock that is ahead: not paid in the future
        {"usd_per_h": 0.3},
        {},
    ]
    granted = world.ask(count=4)
    answered_s = time.time()
    assert isinstance(granted, NodesGranted)
    first = granted.paid.pop("job-1-0")
    assert first.usd_per_h == 0.3
    assert 60.0 <= first.before_s <= 60.0 + answered_s - asked_s
    assert granted.paid == {"job-1-1": Paid(usd_per_h=1.4), "job-1-2": Paid(usd_per_h=0.3)}


def test_a_grant_says_of_what_kind_each_vm_is_as_far_as_its_provider_says_it(world: World) -> None:
    world.provider.num_devices = 2
    kind = {"provider": "azure", "region": "westeurope", "size": "NC24"}
    world.provider.made_as = [{**kind, "zone": "2"}, kind, {}]
    granted = world.ask(count=6)
    assert isinstance(granted, NodesGranted)
    facts = NodeFacts(**kind)
    zoned = facts.model_copy(update={"zone": "2"})
    assert granted.facts == {
        **dict.fromkeys(("job-1-0.d0", "job-1-0.d1"), zoned),
        **dict.fromkeys(("job-1-1.d0", "job-1-1.d1"), facts),
    }


def test_a_request_that_comes_again_makes_no_further_call(world: World) -> None:
    world.provider.held = threading.Event()
    action = RequestNodes(request="job-1", count=2)
    for _ in range(3):
        world.shell.request(action)  # under way
    world.provider.held.set()
    first = world.answer()
    assert world.ask() == first  # answered
    assert world.provider.requests == [("job-1", 2)]
    assert world.event_queue.get(0.05) is None


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (QuotaExceeded("0 of 4 cores left"), "quota"),
        (CapacityShort("none in zone 1"), "capacity"),
        (Misconfigured("no such subnet"), "error"),
        (RuntimeError("a bug"), "error"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_refusal_says_why_and_what_had_come_is_ended(world: World, error: Exception, cause: str) -> None:
    world.provider.errors = [error]
    refused = world.ask()
    assert isinstance(refused, RequestRefused)
    assert refused.cause == cause
    assert str(error) in refused.detail
    assert world.ended() == ["job-1-0"]
    assert world.provider.there == []


def test_a_throttled_call_waits_as_it_is_told_and_goes_on_under_its_name(world: World) -> None:
    world.provider.errors = [Throttled("slow down", 17), Throttled("slow down", 10**6), Transient("502")]
    assert isinstance(world.ask(), NodesGranted)
    assert world.pauses_s == [17, RETRY_AFTER_MAX_S, 8]
    assert {request for request, _ in world.provider.requests} == {"job-1"}
    assert len(world.provider.there) == 2


def test_what_stays_in_vain_is_refused_after_some_tries_and_leaves_nothing(world: World) -> None:
    world.provider.errors = [Transient("502")] * TRIES
    refused = world.ask()
    assert isinstance(refused, RequestRefused)
    assert (refused.cause, refused.detail) == ("error", "502")
    assert len(world.provider.requests) == TRIES
    assert world.ended() == ["job-1-0"]


def test_a_vm_whose_worker_joined_goes_on_though_its_request_is_refused(world: World) -> None:
    world.provider.errors = [Throttled("slow down", 1)] * TRIES
    world.provider.there = [Vm(name="job-1-1", request="job-1")]  # booting still: nobody's once it is refused
    pause = world.shell._pause

    def joins(wait_s: float) -> bool:
        know(world.shell, ["job-1-0"])
        return pause(wait_s)

    world.shell._pause = joins
    assert isinstance(world.ask(), RequestRefused)
    assert world.ended() == ["job-1-1"]
    assert world.shell.request_of("job-1-0") == "job-1"
    assert world.shell.request_of("job-1-1") is None
    know(world.shell, [])
    assert world.ended() == ["job-1-1", "job-1-0"]  # once it is lost, as any


def test_a_worker_that_joins_after_its_request_was_refused_brings_its_price(world: World) -> None:
    world.provider.num_devices, world.provider.made_as = 2, [{"usd_per_h": 0.3, "provider": "azure"}]
    world.provider.errors = [Throttled("slow down", 1)] * TRIES
    pause = world.shell._pause

    def joins(wait_s: float) -> bool:
        know(world.shell, ["job-1-0.d0"])
        return pause(wait_s)

    world.shell._pause = joins
    assert isinstance(world.ask(), RequestRefused)
    assert world.shell.request_of("job-1-0.d1") == "job-1"
    paid, facts = world.shell.known_of(["job-1-0.d1"])
    assert paid["job-1-0.d1"] == Paid(usd_per_h=0.3, num_nodes=2)
    assert facts["job-1-0.d1"] == NodeFacts(provider="azure")
    know(world.shell, ["job-1-0.d0", "job-1-0.d1"])
    know(world.shell, ["job-1-0.d1"])
    assert world.ended() == []
    know(world.shell, [])
    assert world.ended() == ["job-1-0"]


def test_a_worker_that_was_lost_before_its_grant_is_not_granted(world: World) -> None:
    world.provider.num_devices, world.provider.held = 4, threading.Event()
    world.shell.request(RequestNodes(request="job-1", count=8))
    know(world.shell, ["job-1-0.d0"])
    know(world.shell, ["job-1-0.d0", "job-1-0.d1"])
    know(world.shell, ["job-1-0.d1"])  # its process died; its VM has another worker
    world.provider.held.set()
    granted = world.answer()
    assert isinstance(granted, NodesGranted)
    assert granted.nodes == tuple(f"job-1-{vm}.d{device}" for vm in (0, 1) for device in range(4))[1:]
    assert set(granted.paid) == set(granted.nodes)
    know(world.shell, [])
    assert world.ended() == []  # two workers of the first VM are still to appear
    world.shell.release(ReleaseNodes(nodes=("job-1-0.d2", "job-1-0.d3")))
    assert world.ended() == ["job-1-0"]


@pytest.mark.parametrize(
    ("limits", "granted"),
    [({"max_vms": 3}, [2, 1, 0]), ({"usd_per_h": 1.5}, [2, 1, 0]), ({"usd_per_h": 1.0, "max_vms": 9}, [2, 0, 0])],
    ids=str,
)
def test_the_users_limits_cut_requests_short_and_then_refuse_them(limits: dict[str, float], granted: list[int]) -> None:
    world = World(**limits)
    try:
        for number, count in enumerate(granted):
            answer = world.ask(f"job-{number}")
            if count:
                assert isinstance(answer, NodesGranted)
                assert len(answer.nodes) == count
            else:
                assert isinstance(answer, RequestRefused)
                assert answer.cause == "limit"
                assert "vms.limits" in answer.detail
        assert len(world.provider.there) == sum(granted)
    finally:
        world.shell.close()


def test_a_vm_with_several_devices_counts_once_to_the_limits_and_brings_a_node_for_each() -> None:
    world = World(max_vms=2, usd_per_h=1.0)
    world.provider.num_devices = 4
    try:
        answer = world.ask(count=8)
        assert isinstance(answer, NodesGranted)
        assert answer.nodes == tuple(f"job-1-{vm}.d{device}" for vm in (0, 1) for device in range(4))
        assert not [fact for fact in world.facts if fact.name == "request_reduced"]
        assert isinstance(world.ask("job-2", 1), RequestRefused)
    finally:
        world.shell.close()


def test_a_limit_that_leaves_workers_out_is_told() -> None:
    limited = World(max_vms=1)
    limited.provider.num_devices = 4
    try:
        limited.ask(count=6)
    finally:
        limited.shell.close()
    (fact,) = [fact for fact in limited.facts if fact.name == "request_reduced"]
    assert fact.detail == "job-1: 4 of 6 workers: vms.limits.max_vms is 1"


def test_the_vm_of_a_worker_that_is_lost_is_ended_and_room_is_made(world: World) -> None:
    world.ask()
    know(world.shell, {"job-1-0": 1, "job-1-1": 2, "of another kind": 3})
    know(world.shell, {"job-1-1": 2})
    world.ask("job-2", 1)
    assert world.ended() == ["job-1-0"]


def test_what_the_controller_gives_back_is_ended(world: World) -> None:
    world.ask()
    world.shell.release(ReleaseNodes(nodes=("job-1-1", "never-there")))
    world.ask("job-2", 1)
    assert world.ended() == ["job-1-1"]


def test_vms_of_another_manager_count_and_cost_and_are_ended_when_they_are_lost(world: World) -> None:
    there = [Vm(name=vm_name("job-1", index), request="job-1") for index in range(2)]
    world.shell.close()
    world.provider.there = list(there)
    clock = Clock()
    spending = Spending(Limits(max_vms=2, budget_usd=2.0), clock, before=Before(unpriced_h=1.0))
    nodes = [vm.name for vm in there]
    world.shell = Provisioning(world.provider, world.event_queue, spending, world.pause, nodes=nodes)
    assert isinstance(refused := world.ask("job-2", 1), RequestRefused)
    assert "max_vms" in refused.detail
    know(world.shell, nodes[1:])
    assert world.ask("job-3", 1) == NodesGranted(request="job-3", nodes=("job-3-0",))
    assert world.ended() == ["job-1-0"]
    clock.now_s += 3600  # two VMs for an hour, and the one of before: 1.50 dollars
    know(world.shell, ["job-1-1", "job-3-0"])
    know(world.shell, ["job-3-0"])
    assert isinstance(world.ask("job-4", 1), NodesGranted)
    assert world.ended() == ["job-1-0", "job-1-1"]
    clock.now_s += 1800
    know(world.shell, ["job-3-0", "job-4-0"])
    know(world.shell, ["job-4-0"])
    refused = world.ask("job-5", 1)
    assert isinstance(refused, RequestRefused)
    assert "2.00 dollars are spent" in refused.detail


def test_nothing_is_left_in_the_end(world: World) -> None:
    world.ask()
    world.shell.close()
    assert world.provider.there == []
    world.shell.request(RequestNodes(request="job-9", count=1))
    assert world.provider.requests == [("job-1", 2)]
