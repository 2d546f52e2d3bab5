"""Fixed ports: each has one use, and all of them are in the user's range."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from manager.engine.machines.provider_machines import check_free
from manager.engine.on_ray.node import with_agent_ports
from manager.host import ports as ports_module
from manager.host import processes
from manager.host.ports import AGENT_PORTS, RAY_PORTS, Ports, free_agent_ports
from morph.contract.cluster import NUM_PORTS
from morph.contract.errors import ClusterError

FIRST = 20000


def test_a_node_of_ray_names_free_ports_for_its_agents_unless_they_are_fixed() -> None:
    """Ray gives up a node whose agents take 15 s, as on a busy machine, unless their ports are named."""
    command = with_agent_ports(["start", "--block"])
    named = dict(option.split("=") for option in command[2:])
    assert named.keys() == {RAY_PORTS[name] for name in AGENT_PORTS}
    fixed = ["start", *Ports(FIRST).options()]
    assert with_agent_ports(fixed) == fixed


def test_agents_ports_are_free_and_given_to_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ephemeral = tmp_path / "range"
    ephemeral.write_text("32768\t60999\n")
    monkeypatch.setattr(ports_module, "EPHEMERAL", ephemeral)
    first = free_agent_ports()
    assert all(ports_module.LOWEST <= port < 32768 for port in first.values())
    assert len(set(first.values())) == len(AGENT_PORTS)
    with socket.create_server(("127.0.0.1", first["metrics_agent_port"])):
        taken = range(first["metrics_agent_port"], first["metrics_agent_port"] + 1001)
        monkeypatch.setattr(ports_module, "LOWEST", taken.start)
        ephemeral.write_text(f"{taken.stop}\t60999\n")
        monkeypatch.setattr("random.SystemRandom.shuffle", lambda _self, ports: ports.sort())
        assert taken.start not in free_agent_ports().values()


@pytest.mark.parametrize(("load", "expected_s"), [(0.5, 10.0), (2.0, 10.0), (40.0, 200.0)])
def test_a_busy_machine_gets_more_time(load: float, expected_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert processes.patience_s(10.0) == expected_s


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
