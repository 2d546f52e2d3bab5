"""The thread between the controller and a provider."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from manager.controller.state.actions import ReleaseNodes, RequestNodes
from manager.controller.state.events import NodeFacts, NodesGranted, NodesStarted, Paid, RequestRefused
from manager.engine.vms.budget import Before, Spending
from manager.engine.vms.provisioning import RETRIES, RETRY_AFTER_MAX_S, TRIES, Provisioner
from manager.providers.interface.provider import (
    CapacityShort,
    Misconfigured,
    ProviderError,
    QuotaExceeded,
    Throttled,
    Transient,
    Vm,
    vm_name,
)
from morph.contract.cluster import Limits
from tests.engine.fake_cloud import ProvisioningWorld, know
from tests.waiting import BOUND_S, Clock


class World(ProvisioningWorld):
    def __init__(self, **limits: float) -> None:
        self.pauses_s: list[float] = []
        self.joined: list[str] = []  # VMs that join while the thread waits
        super().__init__(pause=self.pause, **limits)

    def pause(self, wait_s: float) -> bool:
        self.pauses_s.append(wait_s)
        if self.joined:
            know(self.shell, self.joined)
        return False

    def get(self, request: str = "job-1", count: int = 2) -> NodesGranted | RequestRefused:
        """Request VMs, and return the answer."""
        self.ask(request, count)
        return self.answer()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.shell.close()


def test_a_request_is_granted_by_name(world: World) -> None:
    assert world.get() == NodesGranted(request="job-1", nodes=("job-1-0", "job-1-1"))
    assert [fact.worker for fact in world.facts if fact.name == "vm_granted"] == ["job-1-0", "job-1-1"]


def test_a_grant_has_each_vms_price_and_paid_time(world: World) -> None:
    requested_s = time.time()
    world.cloud.made_as = [
        {"usd_per_h": 0.3, "paid_since_s": requested_s - 60.0},
        # the provider's clock is ahead: nothing is paid in the future
        {"usd_per_h": 1.4, "paid_since_s": requested_s + 3600.0},
        {"usd_per_h": 0.3},
        {},
    ]
    granted = world.get(count=4)
    answered_s = time.time()
    assert isinstance(granted, NodesGranted)
    first = granted.paid.pop("job-1-0")
    assert first.usd_per_h == 0.3
    assert 60.0 <= first.before_s <= 60.0 + answered_s - requested_s
    assert granted.paid == {"job-1-1": Paid(usd_per_h=1.4), "job-1-2": Paid(usd_per_h=0.3)}


def test_waiting_vms_are_granted_and_reported_when_they_begin(world: World) -> None:
    world.cloud.made_as = [{}, {"waits": True, "usd_per_h": 0.3}]
    granted = world.get()
    assert isinstance(granted, NodesGranted)
    assert (granted.nodes, granted.waiting) == (("job-1-0", "job-1-1"), ("job-1-1",))
    assert world.shell.known_of(["job-1-1"])[0] == {"job-1-1": Paid(usd_per_h=0.3)}, "it may join before it is seen"
    world.cloud.there["job-1-1"] = world.cloud.there["job-1-1"].model_copy(update={"waits": False})
    world.ask("job-2", 1)
    told = []
    while (stamped := world.event_queue.get(BOUND_S)) is not None and not isinstance(stamped.item, NodesGranted):
        told.append(stamped.item)
    assert NodesStarted(request="job-1", nodes=("job-1-1",), paid={"job-1-1": Paid(usd_per_h=0.3)}) in told
    assert world.shell.known_of(["job-1-1"])[0] == {}


def test_a_grant_has_the_facts_that_the_provider_gives_of_each_vm(world: World) -> None:
    world.cloud.num_devices = 2
    kind = {"provider": "azure", "region": "westeurope", "size": "NC24"}
    world.cloud.made_as = [{**kind, "zone": "2"}, kind, {}]
    granted = world.get(count=6)
    assert isinstance(granted, NodesGranted)
    facts = NodeFacts(**kind)
    zoned = facts.model_copy(update={"zone": "2"})
    assert granted.facts == {
        **dict.fromkeys(("job-1-0.d0", "job-1-0.d1"), zoned),
        **dict.fromkeys(("job-1-1.d0", "job-1-1.d1"), facts),
    }


def test_a_type_is_requested_and_reported_with_the_grant(world: World) -> None:
    world.cloud.made_as = [{"provider": "azure", "node_type": "t4"}]
    world.shell.request(RequestNodes(request="job-1", count=1, node_type="t4"))
    granted = world.answer()
    assert isinstance(granted, NodesGranted)
    assert granted.facts == {"job-1-0": NodeFacts(provider="azure", node_type="t4")}
    assert world.cloud.types == ["t4"]


def test_a_request_that_comes_again_makes_no_further_call(world: World) -> None:
    world.cloud.requests.shut()
    action = RequestNodes(request="job-1", count=2)
    for _ in range(3):
        world.shell.request(action)  # while it is under way
    world.cloud.requests.open.set()
    first = world.answer()
    assert world.get() == first  # after its answer
    assert world.cloud.requested == [("job-1", 2)]
    assert world.event_queue.get(0.05) is None


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (QuotaExceeded("0 of 4 cores left"), "quota"),
        (CapacityShort("none in zone 1"), "capacity"),
        (Misconfigured("no such subnet"), "input"),
        (RuntimeError("a bug"), "error"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_refusal_says_why_and_what_had_come_is_ended(world: World, error: Exception, cause: str) -> None:
    world.cloud.errors = [error]
    refused = world.get()
    assert isinstance(refused, RequestRefused)
    assert refused.cause == cause
    assert str(error) in refused.detail
    assert world.settle() == ["job-1-0"]
    assert world.cloud.there == {}


def test_a_throttled_call_waits_as_requested_and_continues_under_its_name(world: World) -> None:
    world.cloud.errors = [Throttled("slow down", 17), Throttled("slow down", 10**6), Transient("502")]
    assert isinstance(world.get(), NodesGranted)
    assert world.pauses_s == [17, RETRY_AFTER_MAX_S, RETRIES.first_s]  # waiting as told is not a failure
    assert {request for request, _ in world.cloud.requested} == {"job-1"}
    assert len(world.cloud.there) == 2


@pytest.mark.parametrize(
    ("error", "tries"), [(Transient("502"), TRIES), (Throttled("slow down", 600), RETRY_AFTER_MAX_S / 600 + 1)]
)
def test_after_some_failed_tries_what_came_is_granted_with_the_reason(
    world: World, error: ProviderError, tries: float
) -> None:
    world.cloud.errors = [error] * 9
    granted = world.get(count=3)
    assert isinstance(granted, NodesGranted)
    assert (granted.nodes, granted.short, granted.detail) == (("job-1-0",), "error", str(error))
    assert len(world.cloud.requested) == tries
    assert world.settle() == []


def test_a_vm_whose_worker_joined_stays_although_its_request_is_refused(world: World) -> None:
    world.cloud.errors = [Transient("502"), CapacityShort("no more")]
    world.cloud.there = {"job-1-1": Vm(name="job-1-1", request="job-1")}  # one boots; the refusal orphans the other
    world.joined = ["job-1-0"]
    assert isinstance(world.get(), RequestRefused)
    assert world.settle() == ["job-1-1"]
    assert world.shell.request_of("job-1-0") == "job-1"
    assert world.shell.request_of("job-1-1") is None
    know(world.shell, [])
    assert world.settle() == ["job-1-1", "job-1-0"]  # only once it is lost, like any VM


def test_a_worker_that_joins_after_its_request_was_refused_brings_its_price(world: World) -> None:
    world.cloud.num_devices, world.cloud.made_as = 2, [{"usd_per_h": 0.3, "provider": "azure"}]
    world.cloud.errors = [Transient("502"), CapacityShort("no more")]
    world.joined = ["job-1-0.d0"]
    assert isinstance(world.get(), RequestRefused)
    assert world.shell.request_of("job-1-0.d1") == "job-1"
    paid, facts = world.shell.known_of(["job-1-0.d1"])
    assert paid["job-1-0.d1"] == Paid(usd_per_h=0.3, num_nodes=2)
    assert facts["job-1-0.d1"] == NodeFacts(provider="azure")
    know(world.shell, ["job-1-0.d0", "job-1-0.d1"])
    know(world.shell, ["job-1-0.d1"])
    assert world.settle() == []
    know(world.shell, [])
    assert world.settle() == ["job-1-0"]


def test_a_worker_that_was_lost_before_its_grant_is_not_granted(world: World) -> None:
    world.cloud.num_devices = 4
    world.cloud.requests.shut()
    world.shell.request(RequestNodes(request="job-1", count=8))
    know(world.shell, ["job-1-0.d0"])
    know(world.shell, ["job-1-0.d0", "job-1-0.d1"])
    know(world.shell, ["job-1-0.d1"])  # its process died; its VM has another worker
    world.cloud.requests.open.set()
    granted = world.answer()
    assert isinstance(granted, NodesGranted)
    assert granted.nodes == tuple(f"job-1-{vm}.d{device}" for vm in (0, 1) for device in range(4))[1:]
    assert set(granted.paid) == set(granted.nodes)
    know(world.shell, [])
    assert world.settle() == []  # two workers of the first VM have not appeared yet
    world.shell.release(ReleaseNodes(nodes=("job-1-0.d2", "job-1-0.d3")))
    assert world.settle() == ["job-1-0"]


@pytest.mark.parametrize(
    ("limits", "granted"),
    [({"max_vms": 3}, [2, 1, 0]), ({"usd_per_h": 1.5}, [2, 1, 0]), ({"usd_per_h": 1.0, "max_vms": 9}, [2, 0, 0])],
    ids=str,
)
def test_the_users_limits_cut_requests_short_and_then_refuse_them(limits: dict[str, float], granted: list[int]) -> None:
    world = World(**limits)
    try:
        for number, count in enumerate(granted):
            answer = world.get(f"job-{number}")
            if count:
                assert isinstance(answer, NodesGranted)
                assert len(answer.nodes) == count
            else:
                assert isinstance(answer, RequestRefused)
                assert answer.cause == "limit"
                assert "vms.limits" in answer.detail
        assert len(world.cloud.there) == sum(granted)
    finally:
        world.shell.close()


def test_a_vm_with_several_devices_counts_once_and_brings_several_nodes() -> None:
    world = World(max_vms=2, usd_per_h=1.0)
    world.cloud.num_devices = 4
    try:
        answer = world.get(count=8)
        assert isinstance(answer, NodesGranted)
        assert answer.nodes == tuple(f"job-1-{vm}.d{device}" for vm in (0, 1) for device in range(4))
        assert not [fact for fact in world.facts if fact.name == "request_reduced"]
        assert isinstance(world.get("job-2", 1), RequestRefused)
    finally:
        world.shell.close()


def test_nodes_that_the_controller_gives_back_are_ended(world: World) -> None:
    world.get()
    world.shell.release(ReleaseNodes(nodes=("job-1-1", "never-there")))
    world.get("job-2", 1)
    assert world.settle() == ["job-1-1"]


def test_inherited_vms_count_cost_and_are_ended_when_lost(world: World) -> None:
    there = [Vm(name=vm_name("job-1", index), request="job-1") for index in range(2)]
    world.shell.close()
    world.cloud.there = {vm.name: vm for vm in there}
    clock = Clock()
    spending = Spending(Limits(max_vms=2, budget_usd=2.0), clock, before=Before(unpriced_h=1.0))
    nodes = [vm.name for vm in there]
    world.shell = Provisioner(world.cloud, world.event_queue, spending, world.pause, nodes=nodes)
    assert isinstance(refused := world.get("job-2", 1), RequestRefused)
    assert "max_vms" in refused.detail
    know(world.shell, nodes[1:])
    assert world.get("job-3", 1) == NodesGranted(request="job-3", nodes=("job-3-0",))
    assert world.settle() == ["job-1-0"]
    clock.now_s += 3600  # two VMs for an hour, and 1.50 dollars of the earlier one
    know(world.shell, ["job-1-1", "job-3-0"])
    know(world.shell, ["job-3-0"])
    assert isinstance(world.get("job-4", 1), NodesGranted)
    assert world.settle() == ["job-1-0", "job-1-1"]
    clock.now_s += 1800
    know(world.shell, ["job-3-0", "job-4-0"])
    know(world.shell, ["job-4-0"])
    refused = world.get("job-5", 1)
    assert isinstance(refused, RequestRefused)
    assert "2.00 dollars are spent" in refused.detail


def test_nothing_is_left_in_the_end(world: World) -> None:
    world.get()
    world.shell.close()
    assert world.cloud.there == {}
    world.shell.request(RequestNodes(request="job-9", count=1))
    assert world.cloud.requested == [("job-1", 2)]
