"""One TCP connection from every worker to the manager, that tells of the worker's death at once.

The kernel closes a dead process's sockets, so a kill is seen within milliseconds, of the right worker,
whatever became of its VM's raylet (Ray itself takes over a second when the raylet died too). A VM that
vanishes without a word keeps its connection open: that is what the heartbeats are for. A connection that is reset is no
death: the kernel ends those of a dead process in good order, and a living one comes again.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from morph.contract.proof import is_proven, new_secret
from morph.runtime.listener import Caller, Listener

HELLO_BYTES = 512


class Lifelines:
    """Accepts lifelines; ``closed(worker)`` is called, in the connection's thread, when a worker's last one is ended.

    Not when it breaks. Each is sent a nonce, for which its hello must prove the secret: a stranger's connection is
    closed and forgotten.
    """

    def __init__(self, host: str, closed: Callable[[str], None], port: int = 0) -> None:
        self.secret = new_secret()
        self._closed = closed
        self._newest: dict[str, Caller] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._listener = Listener.at(host, port, self._serve, "morph-lifelines")
        self.host, self.port = self._listener.address

    def close(self) -> None:
        """Stop listening; closes every connection, and reports none of them."""
        self._over.set()
        self._listener.close()

    def _serve(self, caller: Caller) -> None:
        connection, nonce = caller.connection, new_secret()
        connection.sendall(nonce.encode())
        given, _, worker = connection.recv(HELLO_BYTES).decode("ascii", errors="replace").strip().partition(" ")
        if not (is_proven(given, self.secret, "lifeline", nonce, worker) and worker):
            return
        caller.known()
        with self._lock:
            before = self._newest.get(worker)
            if before is not None and before.number > caller.number:
                return
            self._newest[worker] = caller
        if before is not None:
            with suppress(OSError):
                before.connection.shutdown(socket.SHUT_RDWR)
        try:
            while connection.recv(HELLO_BYTES):
                pass
            ended = True
        except OSError:
            ended = False
        with self._lock:
            is_last = self._newest.get(worker) is caller
            if is_last:
                del self._newest[worker]
        if is_last and ended and not self._over.is_set():
            self._closed(worker)
