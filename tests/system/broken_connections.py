"""Breaks every TCP connection of a living process, like a network device that forgets them."""

from __future__ import annotations

import shutil
import socket
import subprocess
from contextlib import suppress

import psutil

from tests.waiting import BOUND_S


def permitted() -> bool:
    """Return whether this process may break a connection of another: as root, with CONFIG_INET_DIAG_DESTROY."""
    if shutil.which("ss") is None:
        return False
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as ours, server.accept()[0]:
            _break(ours.getsockname()[1], port)
            ours.settimeout(0.5)
            with suppress(TimeoutError):
                try:
                    ours.recv(1)
                except OSError:
                    return True
    return False


def break_connections(pid: int) -> int:
    """Reset each of a process's TCP connections; return their number."""
    found = [each for each in psutil.Process(pid).net_connections("tcp") if each.raddr]
    for each in found:
        _break(each.laddr.port, each.raddr.port)
    return len(found)


def _break(port: int, peer_port: int) -> None:
    which = ["sport", "=", f":{port}", "and", "dport", "=", f":{peer_port}"]
    subprocess.run(["ss", "--kill", "--tcp", *which], capture_output=True, timeout=BOUND_S, check=False)
