from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from manager.engine.joining.link_server import LinkServer
from morph.link.caller import LIVENESS, TALK, Call, Talk, keep_liveness
from morph.link.home import Home
from morph.link.session import LinkSession
from morph.link.wire import Wire
from tests.engine.link_scene import LinkScene
from tests.link.pair import of_caller, own
from tests.waiting import BOUND_S, PATIENCE, poll_until

KILLED_WITHIN_S = 20.0 * PATIENCE
"""Seconds, for a machine under load; a kill is detected within milliseconds."""


@pytest.fixture
def scene() -> Iterator[LinkScene]:
    made = LinkScene()
    yield made
    made.close()


def test_messages_go_both_ways_in_their_order_also_long_ones(scene: LinkScene) -> None:
    call = Call(scene.home("vm0"), TALK)
    assert scene.told.next() == ("came", "vm0")
    long = bytes(range(256)) * 20_000
    for body in (b"one", long, b"two"):
        scene.told.lines["vm0"].send(body)
    assert [call.receive() for _ in range(3)] == [b"one", long, b"two"]
    call.send(long)
    call.send(b"")
    assert scene.told.next() == ("heard", "vm0", long)
    assert scene.told.next() == ("heard", "vm0", b"")
    call.reset()


def test_a_slow_reader_delays_no_other_and_is_detected(scene: LinkScene) -> None:
    slow, quick = Call(scene.home("vm0"), TALK), Call(scene.home("vm1"), TALK)
    assert {scene.told.next(), scene.told.next()} == {("came", "vm0"), ("came", "vm1")}
    line = scene.told.lines["vm0"]
    begin_s = time.monotonic()
    for _ in range(20):
        line.send(b"x" * 1_000_000)
    scene.told.lines["vm1"].send(b"at once")
    assert quick.receive() == b"at once"
    assert time.monotonic() - begin_s < BOUND_S / 2
    poll_until(lambda: line.stuck_s > 0.3, "the line to be stuck")
    assert scene.told.lines["vm1"].stuck_s == 0
    assert [len(slow.receive()) for _ in range(20)] == [1_000_000] * 20
    poll_until(lambda: line.stuck_s == 0, "the line to move")
    slow.reset()
    quick.reset()


HELLOS = {
    "another worker": ["vm1", TALK],
    "no name": ["", TALK],
    "no role": ["vm0", "x"],
    "too little": ["vm0"],
    "no list": {"vm0": TALK},
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
def test_a_worker_is_let_in_as_itself_alone(scene: LinkScene, hello: object) -> None:
    with socket.create_connection(scene.address, timeout=BOUND_S) as connection:
        session = LinkSession(connection, Wire(scene.home("vm0").secret, listens=False))
        with session._lock:
            connection.sendall(session._wire.shake())
        session.tell(hello)
        with pytest.raises(OSError):
            session.receive(BOUND_S)
    check_undisturbed(scene)


@pytest.mark.parametrize("said", [b"\0\1\0\0", b'["vm0", "talk"]' * 1000, b"\x16\x03\x01\x40\x00"])
def test_a_stranger_is_rejected_and_disturbs_no_worker(scene: LinkScene, said: bytes) -> None:
    with socket.create_connection(scene.address, timeout=BOUND_S) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    check_undisturbed(scene)


def check_undisturbed(scene: LinkScene) -> None:
    call = Call(scene.home("vm0"), TALK)
    assert scene.told.next() == ("came", "vm0")
    call.reset()
    assert scene.told.all.empty()


def test_credentials_of_another_run_or_worker_are_rejected(scene: LinkScene) -> None:
    for secret in (of_caller("vm0"), own(), scene.home("vm1").secret):
        with pytest.raises(OSError):
            Call(scene.home("vm0").model_copy(update={"secret": secret}), TALK)
    assert scene.told.all.empty()


@pytest.mark.parametrize("tampered", [b"\0\0\0\0\0", b"\x17\x03\x03\0\41" + b"x" * 33])
def test_injected_bytes_end_the_connection_without_losing_the_worker(scene: LinkScene, tampered: bytes) -> None:
    call = Call(scene.home("vm0"), TALK)
    assert scene.told.next() == ("came", "vm0")
    call._connection.sendall(tampered)
    with pytest.raises(OSError):
        call.receive()
    call.reset()
    check_undisturbed(scene)


WORKER = """
import sys, threading, time
from morph.link.home import Home
from morph.link.caller import Talk, keep_liveness, called, TALK
home = Home.model_validate_json(sys.argv[1])
held = threading.Event()
threading.Thread(target=keep_liveness, args=(home, held.set), daemon=True).start()
held.wait()
called(home, TALK)  # and reads nothing of it
time.sleep(1000)
"""


def started(home: Home) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WORKER, home.model_dump_json()])


def test_a_death_with_an_unread_order_is_reported_once_and_at_once(scene: LinkScene) -> None:
    with started(scene.home("vm0")) as process:
        assert scene.told.next() == ("came", "vm0")
        scene.told.lines["vm0"].send(b"never read")
        killed_s = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        assert scene.told.next() == ("died", "vm0")
        assert time.monotonic() - killed_s < KILLED_WITHIN_S
    call = Call(scene.home("vm1"), TALK)
    assert scene.told.next() == ("came", "vm1")  # and nothing else before
    call.reset()


def test_broken_connections_are_not_deaths_and_are_made_anew(scene: LinkScene) -> None:
    home, held = scene.home("vm0"), threading.Semaphore(0)
    talk = Talk(home, lambda: None, lambda _: None)
    scene.callers.run(lambda: keep_liveness(home, held.release))
    assert held.acquire(timeout=BOUND_S)
    scene.callers.run(talk.hear)
    assert scene.told.next() == ("came", "vm0")
    for _ in range(3):
        reset(scene.server, "vm0", LIVENESS)
        assert held.acquire(timeout=BOUND_S)
        reset(scene.server, "vm0", TALK)
        assert scene.told.next() == ("came", "vm0")
        scene.told.lines["vm0"].hang_up()
        assert scene.told.next() == ("came", "vm0")
    talk.wait()
    talk.send(b"still here")
    assert scene.told.next() == ("heard", "vm0", b"still here")
    assert scene.told.all.empty()


def reset(server: LinkServer, worker: str, role: str) -> None:
    """Act like a firewall or a switch that has forgotten a connection: reset both ends."""
    poll_until(lambda: (worker, role) in server._known, f"{role} of {worker}")
    caller = server._known.pop((worker, role))
    with caller.lock:
        caller.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        server._selector.unregister(caller.connection)
        caller.connection.close()


@pytest.mark.slow
def test_many_workers_of_one_address_come_at_once(scene: LinkScene) -> None:
    homes = [scene.home(f"vm{number}") for number in range(150)]
    talks = [Talk(home, lambda: None, lambda _: None) for home in homes]
    for talk in talks:
        scene.callers.run(talk.hear)
    came = {scene.told.next()[1] for _ in homes}
    assert came == {home.worker for home in homes}


def test_the_next_server_at_a_closed_ones_port_keeps_its_workers(scene: LinkScene) -> None:
    kept = scene.entrance.listening.dup()  # as the process that owns the VMs keeps it
    talk = Talk(scene.home("vm0"), lambda: None, lambda _: None)
    scene.callers.run(talk.hear)
    assert scene.told.next() == ("came", "vm0")
    scene.server.close()
    address = kept.getsockname()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(address)
    assert scene.told.all.empty()
    entrance = type(scene.entrance)(kept, scene.entrance.secret)
    server = LinkServer(entrance, scene.told)
    assert scene.told.next() == ("came", "vm0")
    assert entrance.home("vm0").port == address[1]
    server.close()
