"""A network of namespaces: what crosses it, and what no longer does after a link was cut."""

from __future__ import annotations

import socket

import pytest

from manager.engine.local_vms.namespaces import HostNetwork, check_permitted, opened_in
from morph.contract.errors import ConfigError

ARRIVE_S, NEVER_S = 10.0, 0.5


def permitted() -> bool:
    try:
        check_permitted()
    except ConfigError:
        return False
    return True


@pytest.mark.skipif(not permitted(), reason="network namespaces need Linux, root, ip and tc")
def test_a_connection_between_namespaces_carries_both_ways_until_its_link_is_cut() -> None:
    network = HostNetwork(2, 1e9)
    network.open()
    try:
        listening = opened_in(network.hub, lambda: socket.create_server((network.hub_address, 0)))
        address = listening.getsockname()
        theirs = opened_in(network.namespace(1), lambda: socket.create_connection(address, ARRIVE_S))
        ours, _ = listening.accept()
        with listening, ours, theirs:
            assert theirs.getsockname()[0] == network.address(1)
            ours.settimeout(ARRIVE_S)
            theirs.settimeout(ARRIVE_S)
            ours.sendall(b"a")
            assert theirs.recv(1) == b"a"
            theirs.sendall(b"b")
            assert ours.recv(1) == b"b"
            network.cut(1)
            theirs.sendall(b"c")  # the other side does not learn of it
            ours.settimeout(NEVER_S)
            with pytest.raises(TimeoutError):
                ours.recv(1)
    finally:
        network.close()
