"""Ray's agent for environments as it runs on the head node: it makes none.

Ray's own would install packages and run what they say, for whoever has Ray's token, on the manager's machine.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are the package's

import ray
from ray.core.generated import runtime_env_agent_pb2

FOLDER = Path(ray.__file__).parent / "_private" / "runtime_env" / "agent"
MAIN = FOLDER / "main.py"


async def _refuse(_agent: Any, _request: Any) -> Any:
    messages: Any = runtime_env_agent_pb2  # made without types
    return messages.GetOrCreateRuntimeEnvReply(
        status=messages.AGENT_RPC_STATUS_FAILED, error_message="the head node has no environments"
    )


def main() -> None:
    """Become Ray's agent, less the one thing."""
    sys.path[:0] = [str(FOLDER), str(FOLDER / "thirdparty_files")]
    agents: Any = import_module("runtime_env_agent")  # Ray's, below its folder
    agents.RuntimeEnvAgent.GetOrCreateRuntimeEnv = _refuse
    runpy.run_path(str(MAIN), run_name="__main__")


if __name__ == "__main__":
    main()
