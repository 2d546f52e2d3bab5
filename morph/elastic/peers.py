"""Connections between members: each calls its successors in the ring, and both ends prove that they know the secret.

A member learns of a loss when a connection that it made ends, or is silent for too long.
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
from morph.link.session import LinkSession
from morph.link.wire import Wire

PING, PONG = b"ping", b"pong"
MEMBER, JOINER, FETCH = "member", "joiner", "fetch"
"""A caller's purpose: to send messages as a member, to become a member, or to get what this member offers."""


class Outgoing:
    """A connection to one member, made in the background. All methods may be called from any thread.

    ``home``: the called member's address, and the calling member's credential. ``gone``: called once, in the
    connection's own thread, when the connection has ended or could not be made.
    """

    def __init__(self, to: int, home: Home, gone: Callable[[int], object]) -> None:
        self.to = to
        self.heard_s = time.monotonic()
        """The time at which the other member last answered, or was called."""
        self._home, self._gone = home, gone
        self._call: Call | None = None
        self._waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._run, name=f"morph-elastic-to-{to}", daemon=True).start()

    def send(self, body: bytes) -> None:
        """Send a message now, or as soon as there is a connection; the reader notices a connection that is lost."""
        with self._lock:
            if self._call is None:
                self._waiting.put(body)
                return
            call = self._call
        with suppress(OSError):
            call.send(body)

    def close(self) -> None:
        """End the connection without calling ``gone``."""
        with self._lock:
            self._is_closed, call = True, self._call
        if call is not None:
            call.reset()

    def _run(self) -> None:
        try:
            with suppress(OSError, ValueError):
                self._hear()
        finally:  # whatever ended the connection
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


class Incoming(LinkSession):
    """The called end of a connection, once the caller has proven that it knows the secret.

    Raises OSError if the caller does not know the secret, or is gone.
    """

    def __init__(self, caller: Caller, credential: str) -> None:
        bounded(caller.connection)
        super().__init__(caller.connection, Wire(credential, listens=True))
        self.name, self.role = self.welcome(2)
        caller.known()
        self.let_in()


def home_at(address: Address, me: str, credential: str) -> Home:
    """Return the address and the credential for a call to a member, under the name ``me``."""
    return Home(worker=me, host=address.host, port=address.port, secret=credential)
