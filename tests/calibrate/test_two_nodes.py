from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

import psutil
import pytest

from calibrate.helpers.proven_connection import call
from calibrate.links import peer_node, two_nodes
from calibrate.links.network import NetworkSpec
from calibrate.links.peer_node import PeerNode
from calibrate.links.two_nodes import Hello, OtherNode, PeerAddress, own_hello, parse_address
from morph.contract.errors import ClusterError, ConfigError, MorphError, WaitTimeout
from tests.waiting import BOUND_S

pytestmark = pytest.mark.timeout(300)
TOKEN = "a secret of both nodes"
SPEC = NetworkSpec(
    message_sizes=(1000, 200_000),
    reduced_sizes=(4096,),
    ring_sizes=(2, 3),
    in_flight=(1, 2),
    element="int64",
    budget_s=60.0,
    most=7,
)


def _children() -> set[psutil.Process]:
    return set(psutil.Process(os.getpid()).children(recursive=True))


class Lent:
    """A node that serves in a thread of this process."""

    def __init__(self, node: PeerNode, said: SimpleQueue[str]) -> None:
        self.address = PeerAddress("127.0.0.1", node.port, TOKEN)
        self._said = said
        self.errors: list[MorphError] = []

    def hear(self) -> str:
        """Wait for the next line that the node prints."""
        return self._said.get(timeout=BOUND_S)


@contextmanager
def lent_node(*, once: bool = False) -> Iterator[Lent]:
    """Start such a node; with ``once`` it ends when it reports that a node did not finish."""
    said, passed_s = SimpleQueue[str](), [0.0]

    def say(line: str) -> None:
        said.put(line)
        if once and ": " in line:
            passed_s[0] = BOUND_S

    with PeerNode("127.0.0.1", 0, TOKEN, say) as node, pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_node, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0]))
        lent = Lent(node, said)

        def serve() -> None:
            try:
                node.serve(BOUND_S)
            except MorphError as error:
                lent.errors.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        yield lent
        thread.join(BOUND_S)
        assert not thread.is_alive()


@pytest.mark.slow
def test_links_and_rings_to_another_node_are_measured_though_strangers_call() -> None:
    children = _children()
    with lent_node() as lent:
        with socket.create_connection(("127.0.0.1", lent.address.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\n")
        assert "the caller is not a `morph calibrate` with this secret" in lent.hear()
        with pytest.raises(ConfigError, match="has another secret"):
            OtherNode(replace(lent.address, token="a secret of somebody else"))
        assert lent.hear().startswith("127.0.0.1: the caller is not a `morph calibrate` with this secret: ")
        with OtherNode(lent.address) as other:
            assert other.between == f"{socket.gethostname()} (127.0.0.1) and {socket.gethostname()} (127.0.0.1)"
            found = other.measure(SPEC)
    assert lent.errors == []
    assert [lent.hear(), lent.hear()] == ["127.0.0.1 is here", "measured with 127.0.0.1"]
    for direction in (found.link.activation, found.link.gradient):
        assert [entry.size_bytes for entry in direction] == [1000, 200_000]
        assert all(entry.time.median_s > 0 and entry.time.num_samples == 7 for entry in direction)
    keys = {(entry.ring_size, entry.size_bytes, entry.in_flight) for entry in found.all_reduce}
    assert keys == {(ring, 4096, count) for ring in (2, 3) for count in (1, 2)}
    assert all(entry.time.median_s > 0 and entry.time.num_samples == 7 for entry in found.all_reduce)
    assert found.barrier.median_s > 0
    assert _children() <= children


def test_a_node_of_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    old = own_hello().model_copy(update={"torch": "1.0"})
    monkeypatch.setattr(peer_node, "own_hello", lambda: old)
    with lent_node(once=True) as lent, pytest.raises(ClusterError, match=r"of another version: torch 1\.0 there, "):
        OtherNode(lent.address)
    assert f"waited {BOUND_S:g} s for another node to measure with" in str(lent.errors[0])


@pytest.mark.slow
def test_a_failure_on_the_other_node_is_reported_here(monkeypatch: pytest.MonkeyPatch) -> None:
    children = _children()

    def gone(*_: object) -> None:
        raise ClusterError("no room for more processes")

    monkeypatch.setattr(peer_node, "Crew", gone)
    monkeypatch.setattr(two_nodes, "WAIT_S", 1.0)
    with (
        lent_node(once=True) as lent,
        OtherNode(lent.address) as other,
        pytest.raises(ClusterError, match=r"the peer at 127\.0\.0\.1:\d+: no room for more processes"),
    ):
        other.measure(SPEC)
    assert [lent.hear(), lent.hear()] == ["127.0.0.1 is here", "127.0.0.1: no room for more processes"]
    assert _children() <= children


def test_sizes_out_of_bounds_are_not_measured() -> None:
    with lent_node(once=True) as lent, call("127.0.0.1", lent.address.port, TOKEN) as session:
        session.send_message({"hello": own_hello().model_dump()})
        assert Hello.model_validate(session.receive_message("hello", BOUND_S)["hello"]) == own_hello()
        session.send_message({"measure": {"message_sizes": [1 << 40]}, "store_port": 1})
        answer = session.receive_message("an answer", BOUND_S)
    assert "message_sizes.0: must be at most 1073741824" in answer["failed"]


def test_a_node_without_callers_gives_up() -> None:
    with PeerNode("127.0.0.1", 0, TOKEN, print) as node, pytest.raises(WaitTimeout, match=r"waited 0\.05 s for"):
        node.serve(0.05)


def test_an_address_that_cannot_be_listened_on_is_named() -> None:
    with (
        PeerNode("127.0.0.1", 0, TOKEN, print) as node,
        pytest.raises(ConfigError, match=rf"--listen: cannot be listened on: .*127\.0\.0\.1:{node.port}"),
    ):
        PeerNode("127.0.0.1", node.port, TOKEN, print)


@pytest.mark.parametrize(
    ("text", "address"),
    [("10.0.0.2:7420", ("10.0.0.2", 7420)), ("[fe80::1]:80", ("fe80::1", 80)), ("a.b:0", ("a.b", 0))],
)
def test_addresses_are_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "--peer") == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:port", "host:70000", "host:-1"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--peer: is not an address .*; allowed: HOST:PORT"):
        parse_address(text, "--peer")
