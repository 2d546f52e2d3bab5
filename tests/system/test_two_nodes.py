"""The link between two nodes, with the commands over loopback, and with a known rate each way (Linux, root)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from manager.engine.local_vms.namespaces import HostNetwork, check_permitted
from morph.contract.errors import ClusterError, ConfigError
from morph.contract.profile import load_profile

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
JOB = f"{ROOT}/configs/jobs/tiny_gpt.py:job"
COMMAND = (sys.executable, "-m", "morph.cli.main")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
BOUND_S = 240.0
UP_BYTES_PER_S = 20e6
DOWN_BYTES_PER_S = 5e6
"""Into the host that listens: activations go there. Slow, so that a message takes far longer than a wait for a core."""
WITHIN = 0.3
"""Of the rate, by the quickest messages: headers take some per cent, and the cores here are shared."""
SMALL_BYTES, LARGE_BYTES = 500_000, 1_500_000
"""Far above the 64 KiB that a bucket lets through at once."""
MEASURE = f"""
import dataclasses, json, sys
from calibrate.links.network import NetworkSpec
from calibrate.links.two_nodes import OtherNode, PeerAddress, parse_address

spec = NetworkSpec(
    message_sizes=(1000, {SMALL_BYTES}, {LARGE_BYTES}), reduced_sizes=({LARGE_BYTES},),
    ring_sizes=(2, 4), in_flight=(1,), element="float32", most=10, budget_s=2.5,
)
with OtherNode(PeerAddress(*parse_address(sys.argv[1], "peer"), sys.argv[2])) as other:
    found = other.measure(spec)
def least_s(time):  # what the link takes, without what busy cores add
    return time.quantiles_s[0]

sends = {{
    way: {{entry.size_bytes: least_s(entry.time) for entry in getattr(found.link, way)}}
    for way in ("activation", "gradient")
}}
rings = {{entry.ring_size: least_s(entry.time) for entry in found.all_reduce}}
print(json.dumps({{"between": other.between, **sends, "rings": rings}}))
"""


@contextmanager
def listening(inside: Sequence[str], host: str, token: Path) -> Iterator[str]:
    """``morph calibrate-peer`` until it ends by itself, after one measurement; gives its address."""
    command = [*inside, *COMMAND, "calibrate-peer", "--listen", f"{host}:0", "--token-file", str(token)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    ) as peer:
        try:
            assert peer.stdout is not None
            first = peer.stdout.readline()
            assert first.startswith(f"listening on {host}:"), first
            yield first.split()[-1]
            said, _ = peer.communicate(timeout=BOUND_S)
            assert peer.returncode == 0, said
            assert said.splitlines()[-1].startswith("measured with "), said
        finally:
            peer.kill()


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def test_a_profile_says_between_which_nodes_its_links_were_measured(tmp_path: Path) -> None:
    token, output = tmp_path / "peer.token", tmp_path / "profile.json"
    with listening([], "127.0.0.1", token) as address:
        options = ["-m", "2", "--samples", "5", "--peer", address, "--token-file", str(token)]
        run(*COMMAND, "calibrate", JOB, "-o", str(output), *options)
    profile = load_profile(output)
    assert profile.inter_node != profile.intra_node
    assert {entry.ring_size for entry in profile.all_reduce} == {2, 3, 4}
    for field in ("inter_node", "all_reduce"):
        assert profile.sources[field].startswith("measured between ")
        assert profile.sources[field].count("(127.0.0.1)") == 2
    assert profile.sources["commit"].startswith("stand-in: a barrier between processes on ")


@pytest.fixture
def hosts() -> Iterator[HostNetwork]:
    """Two hosts; what goes to the second is slower than what comes from it."""
    try:
        check_permitted()
        network = HostNetwork(2, UP_BYTES_PER_S)
        network.open()
    except (ConfigError, ClusterError) as error:
        pytest.skip(str(error))
    try:
        slower = f"tbf rate {round(8 * DOWN_BYTES_PER_S)}bit burst 65536 latency 400ms"
        command = ["tc", "-n", network.hub, "qdisc", "replace", "dev", "h1", "root", *slower.split()]
        subprocess.run(command, check=True, timeout=BOUND_S)
        yield network
    finally:
        network.close()


def test_the_rate_of_each_direction_between_two_hosts_is_measured(hosts: HostNetwork, tmp_path: Path) -> None:
    here, there = (["ip", "netns", "exec", hosts.namespace(host)] for host in (0, 1))
    token = tmp_path / "peer.token"
    with listening(there, hosts.address(1), token) as address:
        secret = token.read_text(encoding="ascii").strip()
        found = json.loads(run(*here, sys.executable, "-c", MEASURE, address, secret))
    for way, bytes_per_s in (("activation", DOWN_BYTES_PER_S), ("gradient", UP_BYTES_PER_S)):
        growth_s = found[way][str(LARGE_BYTES)] - found[way][str(SMALL_BYTES)]
        assert (LARGE_BYTES - SMALL_BYTES) / growth_s == pytest.approx(bytes_per_s, rel=WITHIN), found
        assert 0 <= found[way]["1000"] < 0.02, found
    for ring in (2, 4):  # one crossing each way, the slower of which sets the pace
        crossing_s = 2 * (ring - 1) / ring * LARGE_BYTES / DOWN_BYTES_PER_S
        assert found["rings"][str(ring)] == pytest.approx(crossing_s, rel=0.5), found
    assert f"({hosts.address(0)}) and " in found["between"]
    assert f"({hosts.address(1)})" in found["between"]
