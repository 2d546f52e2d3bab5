"""The pool of plain processes, with the worker's end of its connections in the test's hands."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from manager.controller.events import (
    ComputeTimesSeen,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
    WorkerProbed,
    WorkerTimes,
)
from manager.engine import silence
from manager.engine.inbox import Inbox
from manager.engine.process_pool import Lanes, ProcessPool
from manager.journal.records import Fact
from morph.contract.errors import ClusterError
from morph.contract.messages import (
    Aborted,
    Heartbeat,
    MicroBatchTimes,
    Probed,
    ProbeOrder,
    StepOrder,
    UnitWritten,
    WorkerReady,
)
from morph.runtime.serving import unpack
from tests.worker_setup import SETUP

READY = WorkerReady(worker="vm0", pid=1, setup_s=0.0)
ANSWER_S = 20.0


class Scene:
    """A pool with one worker, whose process is the test."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.killed: list[str] = []
        sockets = [socket.socketpair() for _ in range(2)]
        for ours, _ in sockets:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 100_000))
        lanes = Lanes(*(Connection(ours.detach()) for ours, _ in sockets))
        self.orders, self.control = (Connection(theirs.detach()) for _, theirs in sockets)
        self.pool = ProcessPool(self.inbox, lambda _: SETUP, lambda _: lanes, self.killed.append, 5.0)
        self.pool.start("vm0", "vm0")

    def be_ready(self) -> None:
        assert unpack(self.orders.recv_bytes()) == ("setup", SETUP)
        self.orders.send_bytes(READY.model_dump_json().encode())
        assert self.next() == WorkerAnswered(worker="vm0", answer=READY)

    def next(self) -> object:
        stamped = self.inbox.get(ANSWER_S)
        assert stamped is not None, "nothing came"
        return stamped.item

    def close(self) -> None:
        self.pool.close()
        self.orders.close()
        self.control.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


@pytest.mark.parametrize(
    "message", [b"\x80\x04.", b'{"kind": "ready"}', READY.model_dump_json().encode().replace(b"vm0", b"vm9")]
)
def test_a_worker_that_answers_what_is_none_of_a_workers_is_lost_and_killed(scene: Scene, message: bytes) -> None:
    assert unpack(scene.orders.recv_bytes()) == ("setup", SETUP)
    scene.orders.send_bytes(message)
    lost = scene.next()
    assert isinstance(lost, WorkerLost)
    assert "does not speak as a worker does" in lost.cause


def test_orders_arrive_as_they_were_sent_and_answers_become_events(scene: Scene) -> None:
    scene.be_ready()
    order = StepOrder(generation=3, step=7, checkpoint_units=("s0",))
    scene.pool.step("vm0", order)
    assert unpack(scene.orders.recv_bytes()) == ("step", order)


def test_an_abort_goes_beside_the_orders(scene: Scene) -> None:
    scene.be_ready()
    scene.pool.abort("vm0", 9)
    assert scene.control.recv_bytes() == b"9"


def test_what_a_heartbeat_brings_becomes_an_event(scene: Scene) -> None:
    scene.be_ready()
    written = UnitWritten(worker="vm0", version=1, unit="s0", file="f", size_bytes=1, sha256="0")
    scene.control.send_bytes(Heartbeat(worker="vm0", written=(written,)).model_dump_json().encode())
    assert scene.next() == UnitsWritten(worker="vm0", written=(written,))


def test_compute_times_of_a_heartbeat_wait_beside_the_events(scene: Scene) -> None:
    scene.be_ready()
    times = MicroBatchTimes(generation=2, forward_s=(1.0,), recompute_s=(1.0,), backward_s=(2.0,))
    written = UnitWritten(worker="vm0", version=1, unit="s0", file="f", size_bytes=1, sha256="0")
    beat = Heartbeat(worker="vm0", times=times, written=(written,))
    scene.control.send_bytes(beat.model_dump_json().encode())
    assert scene.next() == UnitsWritten(worker="vm0", written=(written,))
    assert scene.inbox.paces.take() == ComputeTimesSeen(
        times=(WorkerTimes(worker="vm0", generation=2, compute_s=(3.0,)),)
    )


PROBE = ProbeOrder(probe=4, step=1, first_section=0, end_section=1, healthy_s=0.5)


def test_a_probe_is_answered_with_an_event_of_its_own(scene: Scene) -> None:
    scene.be_ready()
    scene.pool.probe("vm0", PROBE)
    assert unpack(scene.orders.recv_bytes()) == ("probe", PROBE)
    scene.orders.send_bytes(Probed(worker="vm0", probe=4, slowdown=1.25).model_dump_json().encode())
    assert scene.next() == WorkerProbed(worker="vm0", probe=4, slowdown=1.25)
    scene.pool.step("vm0", StepOrder(generation=1, step=0))  # nothing is left that could be in its way
    assert unpack(scene.orders.recv_bytes())[0] == "step"
    assert not scene.control.poll(0)


def test_an_order_ends_a_probe_that_is_under_way(scene: Scene) -> None:
    scene.be_ready()
    scene.pool.probe("vm0", PROBE)
    scene.pool.step("vm0", StepOrder(generation=1, step=0))
    assert scene.control.recv_bytes() == b"leave probe 4"


def test_a_probe_that_failed_is_written_down_and_reported_as_not_done(scene: Scene) -> None:
    scene.be_ready()
    scene.pool.probe("vm0", PROBE)
    scene.orders.send_bytes(Probed(worker="vm0", probe=4, error="no memory").model_dump_json().encode())
    assert scene.next() == Fact(name="probe_failed", worker="vm0", detail="no memory")
    assert scene.next() == WorkerProbed(worker="vm0", probe=4, slowdown=None)


def test_a_worker_whose_connection_closes_is_lost_once(scene: Scene) -> None:
    scene.be_ready()
    scene.orders.close()
    lost = scene.next()
    assert isinstance(lost, WorkerLost)
    assert "connection closed" in lost.cause
    scene.pool.step("vm0", StepOrder(generation=1, step=0))
    scene.pool.connection_closed("vm0")
    assert len(scene.inbox) == 0


def test_a_worker_that_is_ended_is_killed_and_not_reported(scene: Scene) -> None:
    scene.be_ready()
    scene.pool.end("vm0")
    scene.pool.connection_closed("vm0")
    assert scene.killed == ["vm0"]
    assert len(scene.inbox) == 0


def test_a_worker_that_takes_no_orders_is_lost_instead_of_waited_for(scene: Scene) -> None:
    scene.be_ready()
    order = StepOrder(generation=1, step=0, checkpoint_units=tuple("s" * 1000 for _ in range(4000)))
    scene.pool.step("vm0", order)  # more than the buffer of a connection that nobody reads
    lost = scene.next()
    assert isinstance(lost, WorkerLost)
    assert "takes no orders" in lost.cause


def test_a_silent_worker_is_lost(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.be_ready()
    clock = [silence.time.monotonic()]
    monkeypatch.setattr(silence.time, "monotonic", lambda: clock[0])
    for _ in range(11):
        clock[0] += 0.5
        scene.pool.watch()
    assert len(scene.inbox) == 0
    clock[0] += 1.0
    scene.pool.watch()
    lost = scene.next()
    assert isinstance(lost, WorkerLost)
    assert "silent for" in lost.cause
    assert scene.killed == ["vm0"]  # one that wakes must not go on
    with pytest.raises(EOFError):
        scene.orders.recv_bytes()


class Breaking:
    """A pool with one worker over TCP; the test has the worker's ends, and gives new ones when they broke."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.theirs: list[tuple[Connection, Connection]] = []
        self.is_gone = False
        lanes = self.connect("vm0")
        self.pool = ProcessPool(
            self.inbox, lambda _: SETUP, lambda _: lanes, lambda _: None, 5.0, reconnect=self.connect
        )
        self.pool.start("vm0", "vm0")

    def connect(self, _vm: str) -> Lanes:
        if self.is_gone:
            raise ClusterError("it is gone")
        ours, theirs = zip(*(tcp_pair() for _ in range(2)), strict=True)
        self.theirs.append((theirs[0], theirs[1]))
        return Lanes(*ours)

    def next(self) -> object:
        stamped = self.inbox.get(ANSWER_S)
        assert stamped is not None, "nothing came"
        return stamped.item

    def reset(self) -> None:
        for lane in self.theirs[-1]:
            with socket.socket(fileno=lane.fileno()) as ours:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            lane._handle = None  # type: ignore[attr-defined]  # it is closed


def tcp_pair() -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    return Connection(ours.detach()), Connection(theirs.detach())


def test_connections_that_break_are_made_anew_and_what_is_not_answered_comes_again() -> None:
    scene = Breaking()
    (orders, _) = scene.theirs[0]
    assert unpack(orders.recv_bytes())[0] == "setup"
    orders.send_bytes(READY.model_dump_json().encode())
    assert scene.next() == WorkerAnswered(worker="vm0", answer=READY)
    order = StepOrder(generation=3, step=7)
    scene.pool.step("vm0", order)
    scene.pool.abort("vm0", 3)
    scene.reset()
    assert scene.next() == Fact(name="connection_broken", worker="vm0", detail="it has a new one")
    orders, control = scene.theirs[1]
    assert unpack(orders.recv_bytes()) == ("step", order)
    assert control.recv_bytes() == b"3"
    orders.send_bytes(Aborted(worker="vm0", generation=3, peer_lost=False).model_dump_json().encode())
    answered = scene.next()
    assert isinstance(answered, WorkerAnswered)
    scene.reset()
    assert scene.next() == Fact(name="connection_broken", worker="vm0", detail="it has a new one")
    orders, control = scene.theirs[2]
    assert control.recv_bytes() == b"3"
    assert not orders.poll(0)  # it is answered
    scene.is_gone = True
    scene.reset()
    lost = scene.next()
    assert isinstance(lost, WorkerLost)
    scene.pool.close()
