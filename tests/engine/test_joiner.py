"""The controller learns of VMs that join the cluster and of those that leave it."""

from __future__ import annotations

from collections.abc import Collection

from manager.controller.state.events import NodeAppeared, NodeFacts, Paid, WorkerLost
from manager.engine.joining.joiner import Joiner
from manager.engine.loop.event_queue import EventQueue
from manager.journal.records import Fact
from morph.contract.errors import ClusterError


class World:
    """A cluster, and the VMs that a provider granted."""

    def __init__(self, appeared: tuple[str, ...] = ()) -> None:
        self.nodes: dict[str, str] | None = {}
        self.granted: dict[str, str] = {}
        self.event_queue = EventQueue()
        self.joiner = Joiner(self._nodes, self.granted.get, self.event_queue, appeared)

    def _nodes(self) -> dict[str, str]:
        if self.nodes is None:
            raise ClusterError("Ray does not answer")
        return self.nodes

    def seen(self) -> list[object]:
        self.joiner.look()
        return [self.event_queue.get(0.0).item for _ in range(len(self.event_queue))]  # type: ignore[union-attr]


def test_a_vm_is_announced_once_when_granted_and_in_the_cluster() -> None:
    world = World()
    world.granted["a"] = "job-1"
    assert world.seen() == []
    world.nodes = {"a": "10.0.0.5", "stranger": "10.0.0.6"}
    assert world.seen() == [
        NodeAppeared(node="a", request="job-1"),
        Fact(name="vm_up", worker="a", detail="10.0.0.5"),
    ]
    assert world.seen() == []
    world.granted["stranger"] = "job-2"  # its grant was reported later than its node
    assert world.seen()[0] == NodeAppeared(node="stranger", request="job-2")


def test_the_price_of_an_early_vm_is_asked_once_for_all_workers() -> None:
    world, asked = World(), list[list[str]]()
    paid, facts = Paid(usd_per_h=1.4, num_nodes=2, before_s=20.0), NodeFacts(provider="azure", zone="2")

    def known_of(workers: Collection[str]) -> tuple[dict[str, Paid], dict[str, NodeFacts]]:
        asked.append(list(workers))
        return {worker: paid for worker in workers if worker != "b"}, {"b": facts}

    world.joiner = Joiner(world._nodes, world.granted.get, world.event_queue, (), known_of)
    world.nodes = {"a.d0": "10.0.0.5", "a.d1": "10.0.0.5", "b": "10.0.0.6", "stranger": "10.0.0.7"}
    world.granted |= dict.fromkeys(("a.d0", "a.d1", "b"), "job-1")
    told = [item for item in world.seen() if isinstance(item, NodeAppeared)]
    assert told == [
        NodeAppeared(node="a.d0", request="job-1", paid=paid),
        NodeAppeared(node="a.d1", request="job-1", paid=paid),
        NodeAppeared(node="b", request="job-1", facts=facts),
    ]
    assert world.seen() == []
    assert asked == [["a.d0", "a.d1", "b"]]


def test_every_worker_of_a_vm_is_announced_and_lost_with_it() -> None:
    world = World()
    world.granted |= {"a.d0": "job-1", "a.d1": "job-1"}
    world.nodes = {"a.d1": "10.0.0.5", "a.d0": "10.0.0.5"}
    assert [item for item in world.seen() if isinstance(item, NodeAppeared)] == [
        NodeAppeared(node="a.d0", request="job-1"),
        NodeAppeared(node="a.d1", request="job-1"),
    ]
    world.nodes = {}
    cause = "its VM left the cluster"
    assert world.seen() == [WorkerLost(worker="a.d0", cause=cause), WorkerLost(worker="a.d1", cause=cause)]


def test_a_vm_that_left_the_cluster_does_not_return_under_its_name() -> None:
    world = World()
    world.granted["a"] = "job-1"
    world.nodes = {"a": "10.0.0.5"}
    world.seen()
    world.nodes = {}
    assert world.seen() == [WorkerLost(worker="a", cause="its VM left the cluster")]
    assert world.seen() == []
    world.nodes = {"a": "10.0.0.5"}  # its raylet was started again
    assert world.seen() == []


def test_known_vms_are_not_announced_again_but_their_loss_is() -> None:
    world = World(appeared=("a",))
    world.granted["a"] = "job-1"
    world.nodes = {"a": "10.0.0.5"}
    assert world.seen() == []
    world.nodes = {}
    assert world.seen() == [WorkerLost(worker="a", cause="its VM left the cluster")]


def test_a_silent_cluster_is_reported_once_and_loses_no_worker() -> None:
    world = World()
    world.granted["a"] = "job-1"
    world.nodes = {"a": "10.0.0.5"}
    world.seen()
    nodes, world.nodes = world.nodes, None
    assert world.seen() == [Fact(name="cluster_silent", detail="Ray does not answer")]
    assert world.seen() == []
    world.nodes = nodes
    assert world.seen() == []


def test_it_looks_by_itself_until_it_is_closed() -> None:
    world = World()
    world.granted["a"] = "job-1"
    world.nodes = {"a": "10.0.0.5"}
    world.joiner.start()
    found = world.event_queue.get(100.0)
    assert found.item == NodeAppeared(node="a", request="job-1")
    world.joiner.close()
