"""Faults of notices: the real agent runs between a metadata service and the manager's notice server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from time import time

from manager.controller.state.nodes import NodeState
from manager.engine.joining.notice_server import NoticeServer
from manager.notices.agent import Agent
from manager.notices.azure import AzureNotices
from manager.notices.source import NoticeSource
from morph.link.authority import authority_of
from tests.cloud.fault_world import BOUND_S, Cases, World, whole
from tests.notices.metadata_server import MetadataServer, Reply, json_reply, served
from tests.providers.azure_world import NODE_SECRET
from tests.providers.fake_arm import FakeArm

CASES = Cases()
EVENTS = "/metadata/scheduledevents"
TIMEOUT_S = 60.0
VM, OTHER = "tiny-1-0", "tiny-1-1"


def preempt(lead_s: float = 30.0, incarnation: int = 1, vm: str = VM) -> Reply:
    """Return Scheduled Events with one Preempt event."""
    event = {"EventId": "E-1", "EventType": "Preempt", "Resources": [vm], "EventStatus": "Scheduled"}
    event["NotBefore"] = formatdate(time() + lead_s, usegmt=True)
    return json_reply({"DocumentIncarnation": incarnation, "Events": [event]})


def nothing(incarnation: int = 0) -> Reply:
    return json_reply({"DocumentIncarnation": incarnation, "Events": []})


@contextmanager
def watched(arm: FakeArm, directory: Path, timeout_s: float = TIMEOUT_S) -> Iterator[tuple[World, MetadataServer]]:
    """Start a manager with its VMs, and the agent of one of them."""
    with served() as metadata, whole(arm, directory) as run:
        metadata.script("GET", "/metadata/instance/compute/name", Reply(body=VM))
        metadata.script("GET", EVENTS, nothing())
        metadata.script("POST", EVENTS, Reply())
        run.told.clear()
        with agent(run, metadata, timeout_s=timeout_s):
            yield run, metadata


@contextmanager
def agent(
    run: World,
    metadata: MetadataServer,
    node: str = VM,
    secret: str = NODE_SECRET,
    timeout_s: float = TIMEOUT_S,
    sources: Sequence[NoticeSource] = (),
) -> Iterator[None]:
    """Start the agent of a VM as it runs there, for Azure unless other sources are given."""
    sources = sources or [AzureNotices(metadata.url, first_timeout_s=timeout_s, timeout_s=timeout_s)]
    address = (run.server.host, run.server.port)
    shown = authority_of(secret).credential("node")
    it = Agent(address, node, shown, sources, lonely_s=600.0, end=lambda: None, every_s=0.05)
    thread = threading.Thread(target=it.run)
    thread.start()
    try:
        yield
    finally:
        it.close()
        thread.join(BOUND_S)
        assert not thread.is_alive()


def until_draining(run: World) -> None:
    """Continue until the notice was handled, and another VM is up."""
    run.until(lambda: run.state.workers[VM].node is NodeState.DRAINING, "the notice")
    run.until_whole(without=VM)


@CASES("a notice, and the VM is taken")
def taken(arm: FakeArm, directory: Path) -> list[str]:
    with watched(arm, directory) as (run, metadata):
        metadata.script("GET", EVENTS, preempt())
        until_draining(run)
        with arm.lock:
            del arm.machines[VM]
        run.lose(VM)
        assert run.ready() == [OTHER, "tiny-2-0"]
        return run.told


@CASES("a notice, and nobody comes")
def false_alarm(arm: FakeArm, directory: Path) -> list[str]:
    with watched(arm, directory) as (run, metadata):
        metadata.script("GET", EVENTS, preempt(lead_s=20.0))
        until_draining(run)
        run.skip(20.0 + run.state.config.policy.rules.requests.notice_grace_s)
        run.until(lambda: run.has("stays: it was not taken"), "the VM to be taken back")
        assert run.state.workers[VM].node is NodeState.READY
        return run.told


@CASES("the VM is taken without a notice")
def no_notice(arm: FakeArm, directory: Path) -> list[str]:
    with watched(arm, directory) as (run, _):
        with arm.lock:
            del arm.machines[VM]
        run.lose(VM)
        run.until_whole()
        assert run.ready() == [OTHER, "tiny-2-0"]
        return run.told


@CASES("a notice is withdrawn")
def withdrawn(arm: FakeArm, directory: Path) -> list[str]:
    with watched(arm, directory) as (run, metadata):
        metadata.script("GET", EVENTS, preempt())
        until_draining(run)
        metadata.script("GET", EVENTS, nothing(2))
        run.until(lambda: run.has("its notice was withdrawn"), "the withdrawal")
        return run.told


def _troubled(arm: FakeArm, directory: Path, *replies: Reply, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Check that the service's failure is reported, and that a later notice is still handled."""
    with watched(arm, directory, timeout_s) as (run, metadata):
        metadata.script("GET", EVENTS, *replies)
        run.until(lambda: run.has("notice trouble"), "the trouble to be told")
        metadata.script("GET", EVENTS, preempt())
        until_draining(run)
        return run.told


CASES |= {
    "the metadata service is silent, then back": lambda arm, directory: _troubled(
        arm, directory, Reply(wait=threading.Event()), timeout_s=0.5
    ),
    "the metadata service answers 500, then well": lambda arm, directory: _troubled(arm, directory, Reply(status=500)),
    "a document that is none, then a right one": lambda arm, directory: _troubled(
        arm, directory, Reply(body="<html>"), json_reply({"DocumentIncarnation": 7, "Events": "none"})
    ),
}


@CASES("the metadata service takes 0.3 s for each answer")
def slow(arm: FakeArm, directory: Path) -> list[str]:
    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return super().wait(0.3)

    with watched(arm, directory) as (run, metadata):
        late = preempt()
        late.wait = Late()
        metadata.script("GET", EVENTS, late)
        until_draining(run)
        assert not run.has("notice trouble")
        return run.told


@CASES("the notice of another VM of the set")
def of_another(arm: FakeArm, directory: Path) -> list[str]:
    with watched(arm, directory) as (run, metadata):
        metadata.script("GET", EVENTS, preempt(vm=OTHER), preempt(vm=OTHER), preempt(incarnation=2))
        until_draining(run)  # the agent's own report follows
        assert run.state.workers[OTHER].node is NodeState.READY
        return run.told


@CASES("the agent's connection is lost while a notice stands")
def reconnected(arm: FakeArm, directory: Path) -> list[str]:
    with watched(arm, directory) as (run, metadata):
        metadata.script("GET", EVENTS, preempt())
        until_draining(run)
        port = run.server.port
        run.server.close()
        run.server = NoticeServer(run.event_queue, NODE_SECRET, port=port)
        run.until(lambda: run.has("is known already"), "the notice to be told again")
        run.until(lambda: run.server.left(VM, "E-1"), "the agent")
        run.until(lambda: any(asked.method == "POST" for asked in metadata.asked), "the acknowledgement")
        return [*run.told, "what is said to the agent then reaches it: acknowledged (StartRequests)"]


@CASES("a forged notice: the wrong secret")
def forged(arm: FakeArm, directory: Path) -> list[str]:
    with watched(arm, directory) as (run, metadata), served() as liar:
        liar.script("GET", "/metadata/instance/compute/name", Reply(body=OTHER))
        liar.script("GET", EVENTS, preempt(vm=OTHER))
        with agent(run, liar, OTHER, "wrong"):
            run.until(lambda: liar.asked, "the forger to have something to tell")
            metadata.script("GET", EVENTS, preempt())
            until_draining(run)  # meanwhile, a valid one
        assert run.state.workers[OTHER].node is NodeState.READY
        return ["the forger is sent away unheard", *run.told]


@CASES("a notice for a VM that is gone")
def of_the_gone(arm: FakeArm, directory: Path) -> list[str]:
    with watched(arm, directory) as (run, metadata):
        run.lose(VM)
        run.until_whole()
        metadata.script("GET", EVENTS, preempt())
        run.until(lambda: run.has("is unknown, or was lost"), "the late notice")
        assert len(run.ready()) == 2
        return run.told
