"""The link between two nodes, measured with the commands over loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from morph.contract.profile import load_profile
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
JOB = f"{ROOT}/configs/jobs/tiny_gpt.py:job"
COMMAND = (sys.executable, "-m", "morph.cli.main")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
BOUND_S = 240.0 * PATIENCE


@contextmanager
def listening(inside: Sequence[str], host: str, token: Path) -> Iterator[str]:
    """Run ``morph calibrate-peer`` until it ends by itself after one measurement; yield its address."""
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
    with listening([], "127.0.0.1", token) as address:
        options = ["--profile", str(output), "--samples", "5", "--peer", address, "--token-file", str(token)]
        run(*COMMAND, "calibrate", JOB, "--between-zones", *options)
    added = load_profile(output)
    assert added.between_zones is not None
    sizes = [[entry.size_bytes for entry in link.gradient] for link in (added.between_zones, profile.inter_node)]
    assert sizes[0] == [size for size in sizes[1] if size]
    assert added.sources["between_zones"].startswith("measured between ")
    unchanged = {"between_zones": None, "sources": profile.sources}
    assert added.model_copy(update=unchanged) == profile
