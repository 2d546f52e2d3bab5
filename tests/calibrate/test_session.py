from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from calibrate import session as session_module
from calibrate.session import Session, answer, call
from morph.contract.errors import ClusterError, ConfigError, MorphError, WaitTimeout

TOKEN = "a secret of both nodes"
BOUND_S = 30.0


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


def test_a_listener_that_only_repeats_the_challenge_is_not_believed() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(json.dumps({"morph_peer": 1, "challenge": "0" * 32}).encode() + b"\n")
        reply = json.loads(connection.makefile().readline())
        connection.sendall(json.dumps({"proof": reply["proof"]}).encode() + b"\n")

    with listening(serve) as port, pytest.raises(ConfigError, match="has another secret"):
        call("127.0.0.1", port, TOKEN)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b'{"morph_peer": 2, "challenge": ""}\n', r"is of another version: it speaks protocol 2, this one 1"),
        (b"SSH-2.0-OpenSSH_9.9\n", "is no message of `morph calibrate-peer`"),
        (b"{}\n", "is no `morph calibrate-peer`"),
        (b"", "closed the connection"),
        (b"x" * 2000, "more than 1024 bytes came in one line"),
    ],
)
def test_what_else_may_listen_there_is_named(said: bytes, error: str) -> None:
    with listening(saying(said)) as port, pytest.raises(ClusterError, match=error):
        call("127.0.0.1", port, TOKEN)


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


@pytest.mark.parametrize("change", ["text", "order", "direction"])
def test_a_line_that_was_changed_on_its_way_is_refused(change: str) -> None:
    near, far = socket.socketpair()
    with near, far:
        key = b"of this session"
        here = Session(near, key, "caller", "listener", b"")
        there = Session(far, key, "caller" if change == "direction" else "listener", "caller", b"")
        there.send({"number": 1})
        there.send({"number": 2})
        lines: list[dict[str, Any]] = [json.loads(line) for line in near.recv(1 << 16).splitlines()]
        if change == "text":
            lines[0]["body"] = '{"number": 3}'
        elif change == "order":
            lines.reverse()
        far.sendall(json.dumps(lines[0]).encode() + b"\n")
        with pytest.raises(ClusterError, match="was changed on its way"):
            here.receive("a number", BOUND_S)
