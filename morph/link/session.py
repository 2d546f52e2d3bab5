"""One connection between two ends that prove to one another that they have a secret; later messages are sealed.

Each is opened elsewhere, by a socket or by a listener. A manager's other end may be an old Python that has nothing but
the standard library (``manager.providers.boot``): nothing here needs more than 3.8.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from morph.link.greeting import Greeting
from morph.link.proof import new_secret
from morph.link.wire import CHUNK_BYTES, Wire


class Session:
    """One end of a connection. One thread reads; any may write, also meanwhile.

    What it raises is an OSError: ``ConnectionError`` when the other end is gone, does not have the secret, or did not
    send what came; ``TimeoutError`` when a whole message is not there in time. A time of None is without end.
    """

    def __init__(self, connection: socket.socket, wire: Wire) -> None:
        self._connection, self._wire = connection, wire
        self._lock = threading.Lock()

    @property
    def own_address(self) -> str:
        """This end's address on the way to the other."""
        return str(self._connection.getsockname()[0])

    @property
    def other_address(self) -> str:
        """The other end's address."""
        return str(self._connection.getpeername()[0])

    def send(self, body: bytes, timeout_s: float | None = None) -> None:
        """Send a message. Where another thread reads, its own time counts, so none may be given."""
        with self._lock:
            if timeout_s is not None:
                self._connection.settimeout(timeout_s)
            self._connection.sendall(self._wire.put(body))

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for the next message; the time is for all of it, however slowly it comes."""
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
            data = self._connection.recv(CHUNK_BYTES)
            if not data:
                raise ConnectionError("the other end closed the connection")
            with self._lock:
                reply = self._wire.take(data)
                if reply:
                    self._connection.sendall(reply)

    def tell(self, value: object) -> None:
        """Send a value as JSON."""
        self.send(json.dumps(value).encode())

    def hear(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the next object; raises ConnectionError also where the message is none."""
        try:
            found = json.loads(self.receive(timeout_s))
        except (ValueError, RecursionError) as error:
            raise ConnectionError("a message is not JSON") from error
        if not isinstance(found, dict):
            raise ConnectionError("a message is not an object")
        return found

    def greet(self, secret: str, purpose: str, *facts: str, timeout_s: float | None = None) -> None:
        """Prove to the listener that this end has the secret, as whoever ``facts`` say, and let it prove the same."""
        with self._lock:
            shake = self._wire.shake()
            self._connection.settimeout(timeout_s)
            self._connection.sendall(shake)
        greeting = Greeting.to(self.receive(timeout_s), purpose, *facts)
        self.send(greeting.hello(secret))
        if not greeting.is_of_listener(self.receive(timeout_s), secret):
            raise ConnectionError("whoever is there does not have the secret")
        self.seal(greeting, secret)

    def welcome(self, secret: str, purpose: str, num_facts: int, timeout_s: float | None = None) -> Greeting:
        """Let the caller prove that it has the secret; what it then is told comes from ``let_in``.

        Raises:
            ValueError: what comes is no hello.
        """
        nonce = new_secret()
        self.send(nonce.encode(), timeout_s)
        greeting, given = Greeting.heard(self.receive(timeout_s), nonce, purpose, num_facts)
        if not greeting.is_of_caller(given, secret):
            raise ConnectionError("the caller does not have the secret")
        return greeting

    def let_in(self, greeting: Greeting, secret: str) -> None:
        """Prove the same to the caller."""
        self.send(greeting.welcome(secret))
        self.seal(greeting, secret)

    def seal(self, greeting: Greeting, secret: str) -> None:
        """Both ends are known: messages may be long from now on, and are sealed."""
        self._wire.seal(greeting.key(secret))

    def close(self) -> None:
        """Close the connection; a thread that reads is told so. May be called twice."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
