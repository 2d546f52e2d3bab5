from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from calibrate.helpers import session as session_module
from calibrate.helpers.session import NAME, PROTOCOL, answer, call
from morph.contract.errors import ClusterError, ConfigError, MorphError, WaitTimeout
from morph.link.wire import SIZE

TOKEN = "a secret of both nodes"
BOUND_S = 100.0


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Let ``serve`` have the first connection, in a thread of its own; gives the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            listener.settimeout(BOUND_S)
            connection, _ = listener.accept()
            with connection:
                serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield int(listener.getsockname()[1])
        thread.join(BOUND_S)
        assert not thread.is_alive()


def saying(*lines: bytes) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        for line in lines:
            connection.sendall(line)

    return serve


def test_messages_go_both_ways_between_those_who_know_the_secret() -> None:
    def serve(connection: socket.socket) -> None:
        with answer(connection, TOKEN) as there:
            for _ in range(2):
                message = there.receive("a number", BOUND_S)
                there.send({"twice": 2 * message["number"]})

    with listening(serve) as port, call("127.0.0.1", port, TOKEN) as here:
        assert (here.own_address, here.other_address) == ("127.0.0.1", "127.0.0.1")
        for number in (21, 4):
            here.send({"number": number})
            assert here.receive("its double", BOUND_S) == {"twice": 2 * number}


def test_one_with_another_secret_is_refused_on_both_ends() -> None:
    errors: list[MorphError] = []

    def serve(connection: socket.socket) -> None:
        try:
            answer(connection, TOKEN)
        except MorphError as error:
            errors.append(error)

    with listening(serve) as port, pytest.raises(ConfigError, match="has another secret; allowed: the same secret"):
        call("127.0.0.1", port, TOKEN + "?")
    assert [str(error) for error in errors] == ["the caller does not know the secret"]


def framed(*bodies: bytes) -> bytes:
    return b"".join(SIZE.pack(len(body)) + body for body in bodies)


def test_a_listener_that_only_repeats_the_challenge_is_not_believed() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(framed(f"{NAME} {PROTOCOL} 0".encode()))
        head = connection.recv(SIZE.size, socket.MSG_WAITALL)
        hello = connection.recv(*SIZE.unpack(head), socket.MSG_WAITALL)
        connection.sendall(framed(json.loads(hello)[1].encode()))

    with listening(serve) as port, pytest.raises(ConfigError, match="has another secret"):
        call("127.0.0.1", port, TOKEN)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (framed(b"morph calibrate-peer 3 00"), r"is of another version: it speaks protocol 3, this one 2"),
        (b'{"morph_peer": 1, "challenge": "00"}\n', "to answer as `morph calibrate-peer`: a message claims"),
        (b"SSH-2.0-OpenSSH_9.9\n", "to answer as `morph calibrate-peer`: a message claims"),
        (framed(b"{}"), "is no `morph calibrate-peer`"),
        (b"", "closed the connection"),
    ],
)
def test_what_else_may_listen_there_is_named(said: bytes, error: str) -> None:
    with listening(saying(said)) as port, pytest.raises(ClusterError, match=error):
        call("127.0.0.1", port, TOKEN)


@pytest.mark.parametrize("said", [b"no hello", b"[]", b'["0", "0", "0"]'])
def test_a_stranger_is_told_apart_from_a_node_without_the_secret(said: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(framed(said))
        with pytest.raises(ClusterError, match="the caller is no `morph calibrate`"):
            answer(near, TOKEN)


def test_a_place_where_nobody_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ClusterError, match=rf"peer at 127.0.0.1:{port} cannot be reached: .*calibrate-peer"):
        call("127.0.0.1", port, TOKEN)


def test_a_silent_other_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HANDSHAKE_TIMEOUT_S", 0.05)
    over = threading.Event()
    with listening(lambda _: (over.wait(BOUND_S), None)[1]) as port:
        with pytest.raises(WaitTimeout, match=r"waited 0.05 s for the peer"):
            call("127.0.0.1", port, TOKEN)
        over.set()


def test_a_message_that_was_changed_on_its_way_is_refused() -> None:
    def serve(connection: socket.socket) -> None:
        with answer(connection, TOKEN) as there:
            there.send({"number": 1})

    with listening(serve) as port, socket.create_server(("127.0.0.1", 0)) as between:
        changed = threading.Thread(target=_hand_on, args=(between, port, b'"number": 1', b'"number": 2'))
        changed.start()
        here = call("127.0.0.1", between.getsockname()[1], TOKEN)
        with here, pytest.raises(ClusterError, match="is not what the other end sent next"):
            here.receive("a number", BOUND_S)
        changed.join(BOUND_S)
        assert not changed.is_alive()


def _hand_on(between: socket.socket, port: int, old: bytes, new: bytes) -> None:
    """A man in the middle, until the listener hangs up."""
    caller, _ = between.accept()
    with caller, socket.create_connection(("127.0.0.1", port)) as listener:
        listener.settimeout(BOUND_S)

        def back() -> None:
            while data := listener.recv(1 << 16):
                caller.sendall(data.replace(old, new))

        thread = threading.Thread(target=back)
        thread.start()
        listener.sendall(caller.recv(1 << 16))  # the hello
        thread.join(BOUND_S)
