"""The worker's end of the connection whose closing tells the manager that this process is gone.

The manager's going means nothing to the worker: another may come, with a lifeline of its own.
"""

from __future__ import annotations

import socket

from morph.contract.messages import Lifeline

CONNECT_TIMEOUT_S = 10.0


def hold_lifeline(lifeline: Lifeline, worker: str) -> socket.socket:
    """Open the connection and say who this is; the caller keeps the socket for life.

    Raises:
        OSError: when the manager cannot be reached within ``CONNECT_TIMEOUT_S``.
    """
    connection = socket.create_connection((lifeline.host, lifeline.port), timeout=CONNECT_TIMEOUT_S)
    connection.sendall(f"{lifeline.secret} {worker}\n".encode("ascii"))
    return connection
