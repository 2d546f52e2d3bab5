"""One TCP connection from every worker to the manager, that tells of the worker's death at once.

The kernel closes a dead process's sockets, so a kill is seen within milliseconds, of the right worker,
whatever became of its VM's raylet (Ray itself takes over a second when the raylet died too). A VM that
vanishes without a word keeps its connection open: that is what the heartbeats are for. A connection that is reset is no
death: the kernel ends those of a dead process in good order, and a living one comes again.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from morph.contract.proof import is_proven, new_secret

HELLO_BYTES = 512
BACKLOG = 128
POLL_S = 0.5


class Lifelines:
    """Accepts lifelines; ``closed(worker)`` is called, in this object's thread, when a worker's last one is ended.

    Not when it breaks. Each is sent a nonce, for which its hello must prove the secret: a stranger's connection is
    closed and forgotten.
    """

    def __init__(self, host: str, closed: Callable[[str], None], port: int = 0) -> None:
        self.secret = new_secret()
        self._closed = closed
        self._listener = socket.create_server((host, port), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._workers: dict[socket.socket, str] = {}
        self._newest: dict[str, socket.socket] = {}
        self._nonces: dict[socket.socket, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="morph-lifelines", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; closes every connection, and reports none of them."""
        self._over.set()
        self._thread.join(timeout=2 * POLL_S)
        for connection in [*self._workers, self._listener]:
            connection.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._over.is_set():
            for key, _ in self._selector.select(POLL_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._workers:  # else another one read just now replaced it
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._workers[connection], self._nonces[connection] = "", new_secret()
        self._selector.register(connection, selectors.EVENT_READ)
        with suppress(OSError):  # it is gone already, which is read next
            connection.send(self._nonces[connection].encode())

    def _read(self, connection: socket.socket) -> None:
        broken = False
        try:
            data = connection.recv(HELLO_BYTES)
        except OSError:
            data, broken = b"", True
        worker = self._workers[connection]
        if data and not worker:
            given, _, name = data.decode("ascii", errors="replace").strip().partition(" ")
            if is_proven(given, self.secret, "lifeline", self._nonces.pop(connection), name) and name:
                self._workers[connection] = name
                before, self._newest[name] = self._newest.get(name), connection
                if before is not None:
                    self._forget(before)
                return
            data = b""  # a stranger
        if not data:
            self._forget(connection)
            if worker and self._newest.get(worker) is connection:
                del self._newest[worker]
                if not broken and not self._over.is_set():
                    self._closed(worker)

    def _forget(self, connection: socket.socket) -> None:
        if connection in self._workers:
            self._selector.unregister(connection)
            del self._workers[connection]
            self._nonces.pop(connection, None)
            connection.close()
