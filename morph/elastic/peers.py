"""Connections between members: each calls those that follow it in the ring; both ends show that they know the secret.

The end of a connection that a member made is how it learns of a loss, and silence on it for too long.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from morph.elastic.codec import Address
from morph.link.caller import Call, bounded
from morph.link.home import Home
from morph.link.listener import Caller
from morph.link.session import Session
from morph.link.wire import Wire

PING, PONG = b"ping", b"pong"
MEMBER, JOINER, FETCH = "member", "joiner", "fetch"
"""What a caller wants: to send messages as a member, to become one, or to get what this one holds ready."""


class Outgoing:
    """A connection to one member, made in the background. All may be called from any thread.

    Args:
        to: Whom it calls.
        home: Where, and with which credential.
        gone: Told once, in the connection's own thread, that it has ended or could not be made.
    """

    def __init__(self, to: int, home: Home, gone: Callable[[int], object]) -> None:
        self.to = to
        self.heard_s = time.monotonic()
        """When it last answered, or was called."""
        self._home, self._gone = home, gone
        self._call: Call | None = None
        self._waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._run, name=f"morph-elastic-to-{to}", daemon=True).start()

    def send(self, body: bytes) -> None:
        """Send a message now, or as soon as there is a connection; one that is lost is noticed by its reader."""
        with self._lock:
            if self._call is None:
                self._waiting.put(body)
                return
            call = self._call
        with suppress(OSError):
            call.send(body)

    def close(self) -> None:
        """End it; nobody is told."""
        with self._lock:
            self._is_closed, call = True, self._call
        if call is not None:
            call.reset()

    def _run(self) -> None:
        try:
            with suppress(OSError, ValueError):
                self._hear()
        finally:  # whatever it was
            if not self._is_closed:
                self._gone(self.to)
            self.close()

    def _hear(self) -> None:
        call = Call(self._home, MEMBER)
        with self._lock:
            self._call = call
            while not self._waiting.empty():
                call.send(self._waiting.get())
        self.heard_s = time.monotonic()
        while not self._is_closed:
            call.receive()
            self.heard_s = time.monotonic()


class Incoming(Session):
    """The called end of a connection, once the caller has shown that it knows the secret.

    Raises:
        OSError: it does not, or is gone.
    """

    def __init__(self, caller: Caller, credential: str) -> None:
        bounded(caller.connection)
        super().__init__(caller.connection, Wire(credential, listens=True))
        self.name, self.role = self.welcome(2)
        caller.known()
        self.let_in()


def home_at(address: Address, me: str, credential: str) -> Home:
    """Where and as whom to call a member."""
    return Home(worker=me, host=address.host, port=address.port, secret=credential)
