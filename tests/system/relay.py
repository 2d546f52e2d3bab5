"""A relay in front of a listener, whose connections a test resets, or leaves half open: taken, and not passed on."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

LENGTH = 1 << 16


class Relay:
    """Passes connections to its own port on to an address, each in two threads, until ``close``."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._passes = threading.Event()
        self._passes.set()
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._thread(self._accept)

    def reset(self) -> int:
        """Reset every connection at both ends, as a device that forgot them would; return how many ends there were."""
        with self._lock:
            found, self._connections = self._connections, []
        for connection in found:
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RD)  # wakes the thread that reads
            connection.close()
        return len(found)

    def hold(self) -> None:
        """Leave all connections half open from now on: both ends stay connected, and nothing arrives any more."""
        self._passes.clear()

    def close(self) -> None:
        self._listening.close()
        self._passes.set()
        self.reset()

    def _thread(self, run: object, *arguments: object) -> None:
        threading.Thread(target=run, args=arguments, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                near, _ = self._listening.accept()
                try:
                    far = socket.create_connection(self._address)
                except OSError:  # nobody listens there any more
                    near.close()
                    continue
                with self._lock:
                    self._connections += [near, far]
                self._thread(self._pass_on, near, far)
                self._thread(self._pass_on, far, near)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(LENGTH):
                self._passes.wait()
                target.sendall(content)
        with self._lock, suppress(OSError):
            if source in self._connections:  # otherwise it was reset, which must not look like an orderly end
                target.shutdown(socket.SHUT_WR)
