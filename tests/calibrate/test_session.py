from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from calibrate.helpers import proven_connection as session_module
from calibrate.helpers.proven_connection import answer, call
from morph.contract.errors import ClusterError, ConfigError, MorphError, WaitTimeout
from tests.link.pair import Tamper, man_in_the_middle
from tests.waiting import BOUND_S

TOKEN = "a secret of both nodes"


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve the first connection in a thread; yield the port."""
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


def test_messages_go_both_ways_with_equal_secrets() -> None:
    def serve(connection: socket.socket) -> None:
        with answer(connection, TOKEN) as there:
            for _ in range(2):
                message = there.receive_message("a number", BOUND_S)
                there.send_message({"twice": 2 * message["number"]})

    with listening(serve) as port, call("127.0.0.1", port, TOKEN) as here:
        assert (here.own_address, here.other_address) == ("127.0.0.1", "127.0.0.1")
        for number in (21, 4):
            here.send_message({"number": number})
            assert here.receive_message("its double", BOUND_S) == {"twice": 2 * number}


def test_a_peer_with_another_secret_is_refused_on_both_ends() -> None:
    errors: list[MorphError] = []

    def serve(connection: socket.socket) -> None:
        try:
            answer(connection, TOKEN)
        except MorphError as error:
            errors.append(error)

    with listening(serve) as port, pytest.raises(ConfigError, match="has another secret; allowed: the same secret"):
        call("127.0.0.1", port, TOKEN + "?")
    (error,) = errors
    assert str(error).startswith("the caller is not a `morph calibrate` with this secret: ")


@pytest.mark.parametrize("said", [b'{"morph_peer": 1, "challenge": "00"}\n', b"SSH-2.0-OpenSSH_9.9\n", b""])
def test_other_listeners_at_the_address_are_not_peers(said: bytes) -> None:
    with (
        listening(lambda connection: connection.sendall(said)) as port,
        pytest.raises(ClusterError, match="does not answer as `morph calibrate-peer`: "),
    ):
        call("127.0.0.1", port, TOKEN)


@pytest.mark.parametrize("said", [b"no hello", b"[]", b'["0", "0", "0"]'])
def test_a_caller_that_is_not_a_node_is_refused(said: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(said)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(ClusterError, match="the caller is not a `morph calibrate` with this secret"):
            answer(near, TOKEN)


def test_an_address_without_a_listener_is_named() -> None:
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


def test_whatever_is_changed_on_the_way_is_refused() -> None:
    def serve(connection: socket.socket) -> None:
        with suppress(MorphError), answer(connection, TOKEN) as there:
            there.send_message({"number": 1})

    def received(tamper: Tamper) -> dict[str, int]:
        with (
            listening(serve) as port,
            man_in_the_middle(port, "127.0.0.1", of_listener=tamper) as between,
            call("127.0.0.1", between, TOKEN) as here,
        ):
            return here.receive_message("a number", BOUND_S)

    counted = Tamper()
    assert received(counted) == {"number": 1}
    for place in range(len(counted.records)):
        with pytest.raises((ClusterError, ConfigError)):
            received(Tamper(place))
