"""One connection between two ends that show certificates of the same authority.

The connection is opened elsewhere, by a socket or by a listener. The process at the other end of a manager's connection
may be an old Python with only the standard library (``manager.providers.boot``): this module must run on 3.8.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Any, Tuple  # noqa: UP035 (a booting VM may have Python 3.8)

from morph.link.wire import CHUNK_BYTES, Wire

WELCOME = b"welcome"


class LinkSession:
    """One end of a connection. One thread reads; any thread may write, also at the same time.

    Every error is an OSError: ``ConnectionError`` if the other end is gone or the data is not what it sent;
    ``ssl.SSLError`` if the other end does not show a valid certificate; ``TimeoutError`` if no whole message has
    arrived in time. A ``timeout_s`` of None waits without limit.
    """

    def __init__(self, connection: socket.socket, wire: Wire) -> None:
        self._connection, self._wire = connection, wire
        self._lock = threading.Lock()

    @property
    def own_address(self) -> str:
        """This end's IP address on the connection."""
        return str(self._connection.getsockname()[0])

    @property
    def other_address(self) -> str:
        """The other end's IP address."""
        return str(self._connection.getpeername()[0])

    @property
    def other_name(self) -> str:
        """The name in the other end's certificate."""
        with self._lock:
            return self._wire.other_name

    def send(self, body: bytes, timeout_s: float | None = None) -> None:
        """Send a message. Give no timeout if another thread reads: the reader's timeout applies."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            for part in self._wire.parts(body):
                if until_s is not None:
                    self._connection.settimeout(max(0.001, until_s - time.monotonic()))
                self._connection.sendall(part)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for the next message and return it; the timeout covers all of it, however slowly it arrives."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                message = self._wire.next()
            if message is not None:
                return message
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError(f"no whole message came within {timeout_s:g} s")
            self._connection.settimeout(left_s)
            self._take()

    def pour(self, data: memoryview) -> None:
        """Send bytes that are not a message, once the other end has said that it waits for them."""
        for first in range(0, len(data), CHUNK_BYTES):
            with self._lock:
                self._connection.sendall(self._wire.encrypt(data[first : first + CHUNK_BYTES]))

    def fill(self, data: memoryview) -> None:
        """Receive bytes that the other end pours, until ``data`` is full."""
        first = 0
        while True:
            with self._lock:
                first += self._wire.fill(data[first:])
            if first == len(data):
                return
            self._take()

    def _take(self) -> None:
        data = self._connection.recv(CHUNK_BYTES)
        if not data:
            raise ConnectionError("the other end closed the connection")
        with self._lock:
            try:
                reply = self._wire.take(data)
            except ssl.SSLError:
                with suppress(OSError):
                    self._connection.sendall(self._wire.alert())
                raise
            if reply:
                self._connection.sendall(reply)

    def tell(self, value: object) -> None:
        """Send a value as JSON."""
        self.send(json.dumps(value).encode())

    def hear(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the next JSON object and return it; raises ConnectionError also if the message is not one."""
        try:
            found = json.loads(self.receive(timeout_s))
        except (ValueError, RecursionError) as error:
            raise ConnectionError("a message is not JSON") from error
        if not isinstance(found, dict):
            raise ConnectionError("a message is not an object")
        return found

    def greet(self, *facts: str, timeout_s: float | None = None) -> None:
        """Greet as the caller: show a certificate, say who this end is, and wait until the listener lets it in."""
        with self._lock:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(self._wire.shake())
        self.tell(facts)
        self.receive(timeout_s)

    def welcome(self, num_facts: int, timeout_s: float | None = None) -> Tuple[str, ...]:  # noqa: UP006
        """Receive a caller's greeting: return the facts that it states; the caller then waits for ``let_in``."""
        return facts_of(self.receive(timeout_s), num_facts)

    def let_in(self) -> None:
        """Let the caller in: its ``greet`` returns."""
        self.send(WELCOME)

    def close(self) -> None:
        """Close the connection, and wake a thread that reads. May be called twice."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def facts_of(message: bytes, num_facts: int) -> Tuple[str, ...]:  # noqa: UP006
    """Return the facts that a caller states about itself.

    Raises ConnectionError if the message is not such a list of facts.
    """
    try:
        said = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("the caller does not say who it is") from error
    if not (isinstance(said, list) and len(said) == num_facts and all(isinstance(part, str) for part in said)):
        raise ConnectionError("the caller does not say who it is")
    return tuple(said)
