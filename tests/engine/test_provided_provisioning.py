"""Provisioning of VMs that outlive their manager: strays, VMs that vanish, and ending all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from manager.controller.state.actions import ReleaseNodes, RequestNodes
from manager.controller.state.events import NodesGranted, Paid, RequestRefused, WorkerLost
from manager.engine.loop.event_queue import EventQueue
from manager.engine.vms.budget import Before, Spending
from manager.engine.vms.provisioning import Provisioner
from manager.engine.vms.vm_registry import VmRegistry
from manager.journal.records import Fact
from manager.providers.interface.provider import (
    ENDED,
    PATIENCE_S,
    RETRIES,
    Capabilities,
    Granted,
    Misconfigured,
    Throttled,
    Transient,
    Vm,
    end_all,
    not_ended,
    vm_name,
)
from morph.contract.cluster import Limits
from tests.engine.fake_cloud import BOUND_S, FakeCloud, know


class Cloud(FakeCloud):
    """A cloud that others change too, which can be slow, lock VMs, or fail to remove its resources."""

    def __init__(self) -> None:
        super().__init__()
        self.dismantle_errors: list[Exception] = []
        self.dismantled = False
        self.locked: set[str] = set()
        self.asking, self.stopped = threading.Event(), threading.Event()
        self.slow = False

    def request(self, request: str, count: int, max_vms: int | None = None) -> tuple[Vm, ...]:
        vms = super().request(request, count, max_vms)
        if self.slow:
            self.asking.set()
            assert self.stopped.wait(BOUND_S)
            raise Transient("not waited for any more")
        return vms

    def delete(self, names: Sequence[str]) -> None:
        super().delete([name for name in names if name not in self.locked])
        if left := self.locked.intersection(names, self.there):
            raise not_ended({name: Misconfigured("ScopeLocked") for name in left})

    def stop(self) -> None:
        self.stopped.set()

    def dismantle(self) -> Sequence[str]:
        if self.dismantle_errors:
            raise self.dismantle_errors.pop(0)
        self.there, self.dismantled = {}, True
        return ["disk x, 0.0270 dollars an hour"]

    def capabilities(self) -> Capabilities:
        return Capabilities(spot=True, ending="morph cloud reconcile FILE --run tiny-1")


class World:
    def __init__(self, look_every_s: float | None = None) -> None:
        self.cloud, self.event_queue = Cloud(), EventQueue()
        self.now_s, self.pauses_s = 0.0, list[float]()
        ends = partial(end_all, pause=self.pause, clock=lambda: self.now_s)
        spending = Spending(Limits())
        self.shell = Provisioner(self.cloud, self.event_queue, spending, look_every_s=look_every_s, end_all=ends)

    def pause(self, wait_s: float) -> None:
        self.pauses_s.append(wait_s)
        self.now_s += wait_s

    def next(self, kind: type) -> object:
        while True:
            stamped = self.event_queue.get(BOUND_S)
            assert stamped is not None, f"no {kind.__name__} came"
            if isinstance(stamped.item, kind):
                return stamped.item

    def there(self) -> set[str]:
        """Return the remaining VMs once all ends are complete."""
        done = threading.Event()
        self.shell._asks.put(lambda: self.shell._looks.put(done.set))
        assert done.wait(BOUND_S)
        assert self.shell._ends.join(time.monotonic() + BOUND_S)
        return set(self.cloud.there)

    def facts(self) -> dict[str, str]:
        items = [self.event_queue.get(0.0) for _ in range(len(self.event_queue))]
        return {item.item.name: item.item.detail for item in items if item and isinstance(item.item, Fact)}


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.cloud.dismantle_errors.clear()
    world.shell.close()


def test_vms_of_a_manager_that_was_given_up_are_ended(world: World) -> None:
    world.cloud.add("job-1", 2)
    world.shell.begin((), ())
    world.shell.request(RequestNodes(request="job-2", count=1))
    assert world.next(NodesGranted) == NodesGranted(request="job-2", nodes=("job-2-0",))
    assert world.there() == {"job-2-0"}
    assert world.shell.request_of("job-1-0") is None


def test_vms_that_the_controller_knows_or_awaits_are_adopted(world: World) -> None:
    for request in ("job-1", "job-2", "job-3"):
        world.cloud.add(request, 2)
    world.shell.begin({"job-1-0"}, ["job-2"])
    world.shell.request(RequestNodes(request="job-4", count=1))
    world.next(NodesGranted)
    assert world.there() == {"job-1-0", "job-2-0", "job-2-1", "job-4-0"}
    assert world.shell.request_of("job-1-0") == "job-1"
    assert world.shell.request_of("job-2-1") == "job-2"


def test_a_vm_is_known_during_its_request_until_it_is_given_back(world: World) -> None:
    world.cloud.slow = True
    world.shell.request(RequestNodes(request="job-1", count=2))
    assert world.cloud.asking.wait(BOUND_S)
    assert world.shell.request_of("job-1-1") == "job-1"  # it may join before the other VMs of its request are made
    assert world.shell.request_of("job-1-2") is None
    world.cloud.slow = False
    world.cloud.stopped.set()
    world.shell.request(RequestNodes(request="job-2", count=1))
    while (answer := world.next(NodesGranted)) != NodesGranted(request="job-2", nodes=("job-2-0",)):
        assert answer == NodesGranted(request="job-1", nodes=("job-1-0", "job-1-1"))
    world.shell.release(ReleaseNodes(nodes=("job-2-0",)))
    world.shell.request(RequestNodes(request="job-3", count=1))
    world.next(NodesGranted)
    assert world.shell.request_of("job-2-0") is None


def test_a_vm_that_others_ended_is_reported_as_lost() -> None:
    world = World(look_every_s=0.02)
    world.shell.begin((), ())
    world.shell.request(RequestNodes(request="job-1", count=2))
    world.next(NodesGranted)
    world.cloud.delete(["job-1-1"])
    assert world.next(WorkerLost) == WorkerLost(worker="job-1-1", cause="the provider no longer has its VM")
    assert world.shell.request_of("job-1-1") is None
    assert world.shell.request_of("job-1-0") == "job-1"
    world.shell.close()
    assert not any(isinstance(item.item, WorkerLost) for item in iter(lambda: world.event_queue.get(0.0), None))


def test_a_vm_is_ended_once_none_of_its_workers_is_needed(world: World) -> None:
    world.cloud.num_devices = 2
    world.shell.request(RequestNodes(request="job-1", count=4))
    nodes = ("job-1-0.d0", "job-1-0.d1", "job-1-1.d0", "job-1-1.d1")
    assert world.next(NodesGranted) == NodesGranted(
        request="job-1", nodes=nodes, paid=dict.fromkeys(nodes, Paid(num_nodes=2))
    )
    assert world.shell.request_of("job-1-1.d1") == "job-1"
    know(world.shell, ["job-1-0.d0", "job-1-1.d0", "job-1-1.d1"])
    know(world.shell, ["job-1-1.d0", "job-1-1.d1"])  # the other worker of the first VM has not appeared yet
    world.shell.request(RequestNodes(request="job-2", count=2))
    world.next(NodesGranted)
    assert world.there() == {"job-1-0", "job-1-1", "job-2-0"}
    world.shell.release(ReleaseNodes(nodes=("job-1-0.d1",)))
    know(world.shell, ["job-1-1.d1"])
    world.shell.request(RequestNodes(request="job-3", count=2))
    world.next(NodesGranted)
    assert world.there() == {"job-1-1", "job-2-0", "job-3-0"}
    know(world.shell, [])
    world.shell.request(RequestNodes(request="job-4", count=2))
    world.next(NodesGranted)
    assert world.there() == {"job-2-0", "job-3-0", "job-4-0"}


def test_a_vm_that_could_not_be_ended_is_ended_later() -> None:
    world = World(look_every_s=0.02)
    world.shell.begin((), ())
    world.shell.request(RequestNodes(request="job-1", count=2))
    world.next(NodesGranted)
    works, calls = world.cloud.delete, list[Sequence[str]]()

    def fails_first(names: Sequence[str]) -> None:
        calls.append(names)
        if len(calls) == 1:
            raise Transient("no answer")
        works(names)

    world.cloud.delete = fails_first  # type: ignore[method-assign]
    world.shell.release(ReleaseNodes(nodes=("job-1-1",)))
    while (fact := world.next(Fact)) != Fact(name="vm_reconciled", detail="job-1-1: belongs to no run, ended"):
        assert isinstance(fact, Fact)
    assert set(world.cloud.there) == {"job-1-0"}
    world.shell.close()
    assert [list(names) for names in calls] == [["job-1-1"], ["job-1-1"]]


def test_one_locked_vm_of_an_earlier_manager_does_not_keep_others_alive() -> None:
    world = World(look_every_s=0.02)
    world.cloud.add("job-1", 1)
    world.cloud.locked = {"job-1-0"}
    world.shell.begin((), ())
    world.shell.request(RequestNodes(request="job-2", count=1))
    world.next(NodesGranted)
    del world.cloud.there["job-2-0"]
    assert world.next(WorkerLost) == WorkerLost(worker="job-2-0", cause="the provider no longer has its VM")
    world.cloud.locked = set()
    world.shell.close()


def test_vms_of_an_earlier_manager_are_not_ended_because_the_provider_was_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(look_every_s=0.02)
    works, begun, calls = world.cloud.list, threading.Event(), list[int]()

    def silent_at_first() -> tuple[Vm, ...]:
        if begun.is_set():
            calls.append(1)
        if len(calls) <= 3:
            raise Transient("no answer")
        return works()

    world.cloud.list = silent_at_first  # type: ignore[method-assign]
    world.cloud.add("job-1", 2)
    world.shell.begin({"job-1-0"}, ())
    begun.set()
    while (fact := world.next(Fact)) != Fact(
        name="vm_reconciled", detail="job-1-1 of job-1 was left by an earlier manager: ended"
    ):
        assert fact == Fact(name="provider_silent", detail="no answer")
    assert [record.getMessage() for record in caplog.records] == [
        "the provider gives no answer; no VM counts as lost, and training goes on: no answer",
        "the provider answers again",
    ], "once each, however many looks were in vain"
    assert world.shell.request_of("job-1-0") == "job-1"
    assert set(world.cloud.there) == {"job-1-0"}
    world.shell.close()


def test_a_manager_that_reaches_workers_late_ends_no_vm() -> None:
    """The manager may list VMs before it has said which of them it keeps."""
    world = World()
    world.cloud.add("job-1", 2)
    for _ in range(3):
        world.shell._looks.put(world.shell._look)
    assert world.there() == {"job-1-0", "job-1-1"}
    world.shell.begin({"job-1-0"}, ())
    world.next(Fact)
    assert world.there() == {"job-1-0"}
    world.shell.close()


def test_training_vms_stay_although_an_earlier_managers_request_is_refused() -> None:
    world = World()
    world.shell.close()
    world.cloud.add("job-1", 3)
    spent = Spending(Limits(budget_usd=1.0), before=Before(usd=2.0))
    world.shell = Provisioner(world.cloud, world.event_queue, spent, nodes=["job-1-0"])
    world.shell.begin(["job-1-0"], ["job-1"])
    world.shell.request(RequestNodes(request="job-1", count=2))  # of three VMs, because one has joined
    refused = world.next(RequestRefused)
    assert isinstance(refused, RequestRefused)
    assert refused.cause == "limit"
    assert world.there() == {"job-1-0"}
    assert world.shell.request_of("job-1-0") == "job-1"
    know(world.shell, [])
    assert world.there() == set()
    world.shell.close()


def test_a_vm_given_up_before_a_late_adoption_is_not_adopted() -> None:
    book, action = VmRegistry(), RequestNodes(request="job-1", count=2)
    vms = [Vm(name=vm_name("job-1", index), request="job-1") for index in range(2)]
    book.ask(action)
    assert book.give_up(["job-1-0"], []) is None  # the request could make it again
    assert book.adopt(vms, frozenset(["job-1-0"]), ["job-1"]) == []
    answer, end = book.answer(action, Granted(vms), [])
    assert answer == NodesGranted(request="job-1", nodes=("job-1-1",))
    assert end.vms == ("job-1-0",)
    assert book.adopt(vms, frozenset(["job-1-0"]), ["job-1"]) == []  # its end is under way
    book.ended(end)  # without success
    assert book.compare(vms) == ([vms[0]], [])
    assert book.adopt(vms, frozenset(["job-1-0"]), ["job-1"]) == [vms[0]]
    assert book.request_of("job-1-0") is None
    assert book.request_of("job-1-1") == "job-1"


def test_a_vm_that_is_made_anew_for_workers_that_were_lost_is_ended() -> None:
    book, action = VmRegistry(), RequestNodes(request="job-1", count=2)
    vms = [Vm(name=vm_name("job-1", index), request="job-1") for index in range(2)]
    assert book.adopt(vms[:1], frozenset(["job-1-0"]), ["job-1"]) == []
    lost = book.give_up(["job-1-0"], [])  # its request has not been sent again yet
    assert lost is not None
    book.ended(lost)
    book.ask(action)
    answer, end = book.answer(action, Granted(vms), [])
    assert answer == NodesGranted(request="job-1", nodes=("job-1-1",))
    assert end.vms == ("job-1-0",)


def test_an_unexpected_error_ends_neither_the_run_nor_its_requests(world: World) -> None:
    def broken() -> tuple[Vm, ...]:
        raise RuntimeError("the SDK has a bug")

    whole, world.cloud.list = world.cloud.list, broken  # type: ignore[method-assign]
    world.shell.begin((), ())
    assert world.next(Fact) == Fact(name="provider_failed", detail="RuntimeError: the SDK has a bug")
    world.cloud.list = whole  # type: ignore[method-assign]
    world.shell.request(RequestNodes(request="job-1", count=1))
    assert world.next(NodesGranted) == NodesGranted(request="job-1", nodes=("job-1-0",))


def test_the_user_learns_why_vms_wait_and_those_that_never_begin_are_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(look_every_s=0.01)
    down, never = {"waits": True, "waits_for": "PartitionDown"}, {"waits_for": "PartitionTimeLimit"}
    world.cloud.made_as = [down, {**down, **never, "never_begins": True}]
    world.shell.begin((), ())
    world.shell.request(RequestNodes(request="job-1", count=2))
    cause = "it waits in the queue: PartitionTimeLimit, so it never begins"
    for _ in range(3):  # until the controller gives it up
        assert world.next(WorkerLost) == WorkerLost(worker="job-1-1", cause=cause, unfit=True)
    world.shell.release(ReleaseNodes(nodes=("job-1-1",)))
    assert world.there() == {"job-1-0"}
    world.shell.close()
    assert caplog.messages.count("job-1-0: it waits in the queue: PartitionDown") == 1


def test_a_vm_that_ended_is_lost_with_the_providers_reason() -> None:
    world = World(look_every_s=0.01)
    world.cloud.boot_log = lambda name: f"{ENDED}{name} was preempted\nthe log"  # type: ignore[method-assign]
    world.shell.begin((), ())
    world.shell.request(RequestNodes(request="job-1", count=1))
    world.next(NodesGranted)
    world.cloud.there.clear()
    cause = "the provider no longer has its VM: job-1-0 was preempted"
    assert world.next(WorkerLost) == WorkerLost(worker="job-1-0", cause=cause)
    world.shell.close()


def test_the_end_does_not_wait_for_a_request_under_way_and_leaves_nothing(world: World) -> None:
    world.cloud.slow = True
    world.shell.request(RequestNodes(request="job-1", count=2))
    assert world.cloud.asking.wait(BOUND_S)
    world.shell.close()
    assert world.cloud.dismantled
    assert world.cloud.there == {}


def test_the_end_is_retried_after_the_pauses_that_a_failing_provider_requests(world: World) -> None:
    world.cloud.dismantle_errors = [
        Transient("no answer"),
        Throttled("too many calls", 600.0),
        Transient("a-0 is left: 401"),
    ]
    world.shell.close()
    assert world.cloud.dismantled
    assert world.pauses_s == [RETRIES.first_s, 600.0, 4 * RETRIES.first_s]
    assert "vms_left" not in world.facts()


def test_a_hurried_end_waits_for_one_more_try_only(world: World) -> None:
    world.cloud.dismantle_errors = [Transient("h1 cannot be reached")] * 9
    world.shell.hurry()
    world.shell.close()
    assert world.pauses_s == []
    assert world.facts()["vms_left"].startswith("h1 cannot be reached; what ends them: ")


def test_vms_that_cannot_be_ended_are_named_with_the_command_for_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.cloud.dismantle_errors = [Transient("a-0 is left: ResourceBusy", 600.0)] * 3
    world.shell.close()
    assert world.pauses_s == [600.0, PATIENCE_S - 600.0]  # the last try is at the end of the time
    told = "a-0 is left: ResourceBusy; what ends them: morph cloud reconcile FILE --run tiny-1"
    assert world.facts()["vms_left"] == told
    assert told in caplog.text


@pytest.mark.parametrize("error", [Misconfigured("the right to delete is missing"), RuntimeError("a bug")])
def test_a_vm_that_cannot_be_ended_is_reported_to_the_user(
    world: World, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    world.cloud.dismantle_errors = [error]
    world.shell.close()
    assert world.pauses_s == []
    assert world.facts()["vms_left"].startswith(str(error))
    assert "VMs of this run may be left" in caplog.text


def test_a_call_that_does_not_end_is_reported_and_not_awaited(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.shell._close_timeout_s = 0.05
    released = world.cloud.stopped = threading.Event()
    world.cloud.stop = lambda: None  # type: ignore[method-assign]
    world.cloud.slow = True
    world.shell.request(RequestNodes(request="job-1", count=1))
    assert world.cloud.asking.wait(BOUND_S)
    world.shell.close()
    assert world.cloud.dismantled  # existing VMs are ended nevertheless
    assert "did not end within 0.05 s" in world.facts()["provider_busy"]
    assert "VMs of this run may be left" in caplog.text
    released.set()
    assert isinstance(world.next(RequestRefused), RequestRefused)
