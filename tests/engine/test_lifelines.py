from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from manager.engine.lifelines import Lifelines
from morph.contract.messages import Lifeline
from morph.contract.proof import proof
from morph.runtime.lifeline import NONCE_BYTES, KeptLifeline, hold_lifeline

LOOPBACK = "127.0.0.1"
BOUND_S = 30.0


@pytest.fixture
def closed() -> queue.Queue[str]:
    return queue.Queue()


@pytest.fixture
def lifelines(closed: queue.Queue[str]) -> Iterator[Lifelines]:
    listening = Lifelines(LOOPBACK, closed.put)
    yield listening
    listening.close()


def hold(lifelines: Lifelines, worker: str, secret: str | None = None) -> socket.socket:
    return hold_lifeline(Lifeline(host=lifelines.host, port=lifelines.port, secret=secret or lifelines.secret), worker)


def wait_until_refused(connection: socket.socket) -> None:
    connection.settimeout(BOUND_S)
    assert connection.recv(1) == b""


def test_a_closed_connection_tells_of_its_worker_and_no_other(lifelines: Lifelines, closed: queue.Queue[str]) -> None:
    with hold(lifelines, "vm0"), hold(lifelines, "vm2"):
        hold(lifelines, "vm1").close()
        assert closed.get(timeout=BOUND_S) == "vm1"
        assert closed.empty()


@pytest.mark.parametrize(
    "hello", [b"\n", b"SECRET vm0\n", b"wrong vm0\n", b"\xff\xfe\x00 vm0\n", "sécret vm0\n".encode()]
)
def test_a_stranger_is_turned_away_and_disturbs_nobody(
    lifelines: Lifelines, closed: queue.Queue[str], hello: bytes
) -> None:
    with socket.create_connection((lifelines.host, lifelines.port), timeout=BOUND_S) as stranger:
        assert len(stranger.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
        stranger.sendall(hello.replace(b"SECRET", lifelines.secret.encode()))
        wait_until_refused(stranger)
    hold(lifelines, "vm1").close()  # it listens still
    assert closed.get(timeout=BOUND_S) == "vm1"
    assert closed.empty()


@pytest.mark.parametrize("other", ["the wrong secret", "another worker", "a nonce of before"])
def test_a_hello_proves_the_secret_for_this_connection_and_this_worker(
    lifelines: Lifelines, closed: queue.Queue[str], other: str
) -> None:
    with socket.create_connection((lifelines.host, lifelines.port), timeout=BOUND_S) as before:
        old_nonce = before.recv(NONCE_BYTES, socket.MSG_WAITALL).decode()
    with socket.create_connection((lifelines.host, lifelines.port), timeout=BOUND_S) as stranger:
        nonce = stranger.recv(NONCE_BYTES, socket.MSG_WAITALL).decode()
        secret = "wrong" if other == "the wrong secret" else lifelines.secret
        signed = old_nonce if other == "a nonce of before" else nonce
        worker = "vm1" if other == "another worker" else "vm0"
        stranger.sendall(f"{proof(secret, 'lifeline', signed, worker)} vm0\n".encode())
        wait_until_refused(stranger)
    assert closed.empty()


def test_a_stranger_that_says_nothing_and_goes_is_not_reported(lifelines: Lifelines, closed: queue.Queue[str]) -> None:
    socket.create_connection((lifelines.host, lifelines.port), timeout=BOUND_S).close()
    hold(lifelines, "vm1").close()
    assert closed.get(timeout=BOUND_S) == "vm1"
    assert closed.empty()


def test_closing_reports_nobody_and_ends_the_thread(closed: queue.Queue[str]) -> None:
    before = set(threading.enumerate())
    listening = Lifelines(LOOPBACK, closed.put)
    with hold(listening, "vm0") as connection, hold(listening, "vm1"):
        hold(listening, "vm2").close()
        assert closed.get(timeout=BOUND_S) == "vm2"  # so the others were taken in, too
        listening.close()
        wait_until_refused(connection)
    assert closed.empty()
    assert set(threading.enumerate()) <= before
    with pytest.raises(OSError, match="refused"):
        hold(listening, "vm3")


def test_the_secret_is_not_shown(lifelines: Lifelines) -> None:
    lifeline = Lifeline(host=LOOPBACK, port=1, secret=lifelines.secret)
    assert lifelines.secret not in repr(lifeline)


def reset(connection: socket.socket) -> None:
    """Break it: the other end is told so, which is not what the kernel tells of a process that ended."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_a_connection_that_breaks_is_no_death_and_the_end_of_the_one_that_follows_it_is(
    lifelines: Lifelines, closed: queue.Queue[str]
) -> None:
    reset(hold(lifelines, "vm1"))
    hold(lifelines, "vm2").close()
    assert closed.get(timeout=BOUND_S) == "vm2"  # so the first one's end was seen, too
    with hold(lifelines, "vm1") as again:
        newer = hold(lifelines, "vm1")
        wait_until_refused(again)  # replaced, and nobody is told
    newer.close()
    assert closed.get(timeout=BOUND_S) == "vm1"
    assert closed.empty()


def test_a_worker_whose_lifeline_breaks_makes_a_new_one_until_it_lets_go(
    lifelines: Lifelines, closed: queue.Queue[str]
) -> None:
    kept = KeptLifeline(Lifeline(host=lifelines.host, port=lifelines.port, secret=lifelines.secret), "vm0")
    try:
        seen: list[socket.socket] = []
        while len(seen) < 3:  # of which two are broken from this end
            connection = wait_for_newest(lifelines, "vm0", but=seen)
            seen.append(connection)
            if len(seen) < 3:
                del lifelines._newest["vm0"]  # what is broken from here says nothing of the worker
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)
        assert closed.empty()
    finally:
        kept.close()
    assert closed.get(timeout=BOUND_S) == "vm0"


def wait_for_newest(lifelines: Lifelines, worker: str, but: list[socket.socket]) -> socket.socket:
    until_s = time.monotonic() + BOUND_S
    while (found := lifelines._newest.get(worker)) is None or found.connection in but:
        assert time.monotonic() < until_s, "it did not come again"
        time.sleep(0.01)
    return found.connection
