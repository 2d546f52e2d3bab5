"""Fixed ports: each has one use, and all of them are in the user's range."""

from __future__ import annotations

import socket

import pytest

from manager.engine.machines.provider_machines import check_free
from manager.host.ports import RAY_PORTS, Ports
from morph.contract.cluster import NUM_PORTS
from morph.contract.errors import ClusterError

FIRST = 20000


def test_every_port_has_one_use_and_lies_in_the_block() -> None:
    ports = Ports(FIRST)
    node = ports.of_node()
    workers = range(node.pop("min_worker_port"), node.pop("max_worker_port") + 1)
    single = [ports.head, ports.notices, ports.store, ports.workers, *node.values()]
    assert node.keys() == RAY_PORTS.keys()
    assert len({*single, *workers}) == len(single) + len(workers)
    assert set(single) | set(workers) <= set(range(FIRST, FIRST + NUM_PORTS))
    assert len(workers) >= 64


def test_the_options_of_a_node_name_the_same_ports() -> None:
    ports = Ports(FIRST)
    given = dict(option.split("=") for option in ports.options())
    assert sorted(map(int, given.values())) == sorted(ports.of_node().values())
    assert given["--node-manager-port"] == str(ports.of_node()["node_manager_port"])


def test_without_a_first_port_nothing_is_fixed() -> None:
    ports = Ports()
    assert (ports.head, ports.notices, ports.store, ports.workers) == (0, 0, 0, 0)
    assert (ports.of_node(), ports.options()) == ({}, [])


def test_a_port_of_the_block_that_is_taken_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=rf"vms\.first_port: cannot listen on 127\.0\.0\.1:{port}: .*in use"):
            check_free("127.0.0.1", [port])
    check_free("127.0.0.1", [port])
