"""The agents that Ray starts beside each raylet, and what Morph has it start in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray._private import services
from ray._private.ray_constants import PROCESS_TYPE_RAYLET

from morph.contract.errors import ClusterError

FOLDER = Path(ray.__file__).parent
OF_DASHBOARD, FOR_ENVIRONMENTS = "--dashboard_agent_command=", "--runtime_env_agent_command="
PROGRAMS = {
    OF_DASHBOARD: str(FOLDER / "dashboard" / "agent.py"),
    FOR_ENVIRONMENTS: str(FOLDER / "_private" / "runtime_env" / "agent" / "main.py"),
}
"""Those of Ray, by the beginning of the part of a raylet's command that holds theirs."""
HEAD_AGENT = str(Path(__file__).with_name("head_agent.py"))
IDLE_AGENT = str(Path(__file__).with_name("idle_agent.py"))


def with_agents_of_ours(command: list[str]) -> list[str]:
    """Return a raylet's command with agents that do no more than Morph needs.

    That of Ray's dashboard is asked for nothing, and where ``ray[default]`` is installed it would run commands and look
    into processes: it is an idle one. So is that for environments, for workers have none of Ray's; on the head node,
    where somebody may ask for one, it answers that there are none.

    Raises:
        ClusterError: this version of Ray starts them in another way.
    """
    is_head, ours, found = "--head" in command, list[str](), set[str]()
    for part in command:
        kind = next((kind for kind, program in PROGRAMS.items() if part.startswith(kind) and program in part), None)
        if kind is None:
            ours.append(part)
            continue
        found.add(kind)
        if is_head and kind == FOR_ENVIRONMENTS:
            ours.append(part.replace(PROGRAMS[kind], HEAD_AGENT))
        else:
            ours.append(part.replace(PROGRAMS[kind], IDLE_AGENT).replace(" -u ", " -I -S ", 1))
    if found != PROGRAMS.keys():
        raise ClusterError("Ray of this version starts its agents in a way that Morph does not know")
    return ours


def start_agents_of_ours() -> None:
    """Have the nodes that this process starts from now on start them."""
    start: Any = services.start_ray_process

    def start_process(command: list[str], process_type: str, *args: Any, **settings: Any) -> Any:
        ours = with_agents_of_ours(command) if process_type == PROCESS_TYPE_RAYLET else command
        return start(ours, process_type, *args, **settings)

    vars(services)["start_ray_process"] = start_process
