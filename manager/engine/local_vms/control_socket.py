"""The socket at which managers connect, one after another, to the process that owns a run's VMs.

A manager reports that it holds the run (``settle``) once a successor could find this socket. If such a manager
disconnects without requesting the end, it was killed: the VMs stay for ``patience_s``, during which another manager may
connect. A manager that disconnects before it settles does not extend that time.

While no manager is connected, the socket's file is touched: if the host is killed too, its time shows when the VMs
ended.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from contextlib import suppress
from typing import Any

PACKET_BYTES = 1 << 17
FIRST_S = 30.0
PAUSE_S = 0.1
SIGN_OF_LIFE_EVERY_S = 1.0


class ControlSocket:
    """A listening socket that accepts one manager at a time.

    ``listener``: a Unix socket of sequenced packets in a directory that only this user can enter. ``patience_s``: how
    long to wait for the successor of a manager that was killed; 0: not at all.
    """

    def __init__(self, listener: socket.socket, patience_s: float) -> None:
        self._listener = listener
        self._patience_s = patience_s
        self._until_s: float | None = None
        self._settled = False

    def settle(self) -> None:
        """Note that the connected manager holds the run from now on."""
        self._settled = True

    def next(self) -> socket.socket | None:
        """Return the next manager's connection; None: none came in time."""
        now_s = time.monotonic()
        if self._until_s is None:
            until_s, self._until_s = now_s + FIRST_S, now_s
        elif self._settled:
            until_s = self._until_s = now_s + self._patience_s
        else:
            until_s = self._until_s
        self._settled = False
        while True:
            with suppress(OSError):
                os.utime(self._listener.getsockname())
            left_s = until_s - time.monotonic()
            self._listener.settimeout(min(SIGN_OF_LIFE_EVERY_S, max(0.0, left_s)))
            try:
                connection, _ = self._listener.accept()
            except (TimeoutError, BlockingIOError):
                if left_s > SIGN_OF_LIFE_EVERY_S:
                    continue
                return None
            except OSError:  # usually no descriptor is left: a run must not end because of that
                time.sleep(PAUSE_S)
                continue
            if is_ours(connection):
                connection.setblocking(True)
                return connection
            connection.close()

    def close(self) -> None:
        """Stop accepting managers."""
        self._listener.close()


def tell(connection: socket.socket, *descriptors: int, **entries: object) -> None:
    """Send one packet, together with file descriptors; OSError if the other side is gone."""
    socket.send_fds(connection, [json.dumps(entries).encode()], descriptors)


def hear(connection: socket.socket, max_descriptors: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive one packet and its file descriptors; blocks. None: the other side is gone, or breaks the protocol."""
    try:
        message, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, max_descriptors)
        request = json.loads(message) if message else None
    except (ConnectionError, ValueError, RecursionError):
        return None, []
    return (request if isinstance(request, dict) else None), descriptors


def is_ours(connection: socket.socket) -> bool:
    """Return whether this user, or root, is at the other end of a Unix socket."""
    return _peer(connection)[1] in (os.geteuid(), 0)


def process_of(connection: socket.socket) -> int:
    """Return the process that is at the other end of a Unix socket, or began to listen there."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return pid, uid
