"""What a node of Ray runs where it would start an agent that Morph has no use for: it waits for its raylet to end.

It is given the agent's arguments, and says of each of its ports what an agent says of one that it does not serve. It
imports nothing that is slow to import: an agent of Ray's takes half a second of processor time to start, and 85 MB.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

OF_DASHBOARD = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
FOR_ENVIRONMENTS = ("runtime_env_agent_port",)
NOT_SERVED = "-1"
LOOK_EVERY_S = 1.0


def main() -> None:
    """Write down the ports, for which the raylet waits, and wait for its end."""
    given = dict(part[2:].split("=", 1) for part in sys.argv[1:] if "=" in part)
    for port in FOR_ENVIRONMENTS if "runtime-env-dir" in given else OF_DASHBOARD:
        path = Path(given["session-dir"], f"{port}_{given['node-id']}")
        partial = path.with_suffix(".part")
        partial.write_text(NOT_SERVED, encoding="ascii")
        partial.replace(path)
    wait_for_end(int(os.environ["RAY_RAYLET_PID"]))


def wait_for_end(parent: int) -> None:
    """Block until the process that started this one has ended."""
    if hasattr(os, "pidfd_open"):
        try:
            select.select([os.pidfd_open(parent)], [], [])
        except ProcessLookupError:
            return
    while os.getppid() == parent:  # there is no such thing there
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    main()
