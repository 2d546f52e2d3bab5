from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from manager.engine.lifelines import Lifelines
from morph.contract.messages import Lifeline
from morph.contract.proof import proof
from morph.runtime.lifeline import NONCE_BYTES, hold_lifeline

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
