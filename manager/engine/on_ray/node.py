"""Runs ``ray`` tied to its parent and confined: ``python -m manager.engine.on_ray.node [OPTIONS] start ...``.

``--parent=PID``: the process, with all processes that it starts, ends when the thread that started it ends.
``--confined=FOLDER``: these processes can read Ray's token and certificates in that folder, and write only Ray's own
folder below it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from importlib.metadata import entry_points
from pathlib import Path

from manager.engine.on_ray.ray_environment import confine_to
from manager.host.ports import RAY_PORTS, free_agent_ports

_SET_SIGNAL_OF_PARENTS_END = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_SIGNAL_OF_PARENTS_END, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")


def with_agent_ports(command: list[str]) -> list[str]:
    """Return the arguments of ``ray``, where ``start`` names the ports of its agents; see ``free_agent_ports``."""
    options = {RAY_PORTS[name]: port for name, port in free_agent_ports().items()}
    named = {argument.partition("=")[0] for argument in command}
    return [*command, *(f"{option}={port}" for option, port in options.items() if option not in named)]


def main() -> None:
    """Become ``ray``, whose command line the package names."""
    parser = argparse.ArgumentParser(prog="python -m manager.engine.on_ray.node", allow_abbrev=False)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--confined", type=Path)
    given, command = parser.parse_known_args()
    if given.parent is not None:
        end_with_parent(given.parent)
    if given.confined is not None:
        confine_to(given.confined)
    (ray,) = entry_points(group="console_scripts", name="ray")
    sys.argv = ["ray", *with_agent_ports(command)]
    ray.load()()


if __name__ == "__main__":
    main()
