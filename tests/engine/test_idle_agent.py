"""Agents of Ray that nobody needs, and what stands for them: it says so, and ends with its raylet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manager.engine.on_ray import idle_agent

BOUND_S = 60.0
COMMANDS = """
import json
from manager.engine.on_ray.agents import OF_DASHBOARD, FOR_ENVIRONMENTS, PROGRAMS, with_agents_of_ours
from morph.contract.errors import ClusterError

given = [
    f"{OF_DASHBOARD}python -u {PROGRAMS[OF_DASHBOARD]} -x",
    f"{FOR_ENVIRONMENTS}python -u {PROGRAMS[FOR_ENVIRONMENTS]} -y",
]
told = {"VM": with_agents_of_ours(given), "head": with_agents_of_ours([*given, "--head"])}
try:
    with_agents_of_ours([given[0], f"{FOR_ENVIRONMENTS}elsewhere"])
except ClusterError as error:
    told["other"] = str(error)
print(json.dumps(told))
"""
"""In a process of its own, for it imports Ray."""


@pytest.mark.parametrize(
    ("given", "ports"),
    [("--listen-port=0", idle_agent.OF_DASHBOARD), ("--runtime-env-dir=/x=y", idle_agent.FOR_ENVIRONMENTS)],
)
def test_an_idle_agent_says_that_it_serves_none_of_its_ports_and_ends_with_its_raylet(
    given: str, ports: tuple[str, ...], tmp_path: Path
) -> None:
    raylet = subprocess.Popen(["sleep", "1000"])
    command = [sys.executable, "-I", "-S", idle_agent.__file__, f"--session-dir={tmp_path}", "--node-id=a1", given]
    agent = subprocess.Popen(command, env={**os.environ, "RAY_RAYLET_PID": str(raylet.pid)})
    try:
        until_s = time.monotonic() + BOUND_S
        while {path.name for path in tmp_path.iterdir()} != {f"{port}_a1" for port in ports}:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert {path.read_text() for path in tmp_path.iterdir()} == {"-1"}
        assert agent.poll() is None
        raylet.kill()
        raylet.wait()
        assert agent.wait(BOUND_S) == 0
    finally:
        raylet.kill()
        agent.kill()
        raylet.wait()
        agent.wait()


def test_a_raylet_is_told_of_no_agent_of_rays_own_and_another_way_to_start_them_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", COMMANDS], capture_output=True, text=True, timeout=BOUND_S, check=True)
    found = json.loads(done.stdout)
    idle, head = idle_agent.__file__, idle_agent.__file__.replace("idle_agent", "head_agent")
    assert found["VM"] == [
        f"--dashboard_agent_command=python -I -S {idle} -x",
        f"--runtime_env_agent_command=python -I -S {idle} -y",
    ]
    assert found["head"][:2] == [
        f"--dashboard_agent_command=python -I -S {idle} -x",
        f"--runtime_env_agent_command=python -u {head} -y",
    ]
    assert "does not know" in found["other"]
