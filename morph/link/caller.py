"""A worker's connections to the manager, whichever there is: it calls, and calls again for as long as it lives."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from morph.link.home import Home
from morph.link.session import Session
from morph.link.wire import Wire

CALL_TIMEOUT_S = 10.0
RETRY_S = 0.1
UNTAKEN_MS = 10_000
"""After this a connection is over on which nothing of what was sent arrives, whether anybody said so or not."""
TALK, LIVENESS = ROLES = ("talk", "liveness")


def bounded(connection: socket.socket) -> None:
    """Send small messages at once, and give a connection up that takes nothing."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNTAKEN_MS)


class Call(Session):
    """One connection to the manager, both ends of which have shown who they are.

    Raises:
        OSError: nobody is there within ``CALL_TIMEOUT_S``, or somebody else is.
    """

    def __init__(self, home: Home, role: str) -> None:
        connection = socket.create_connection((home.host, home.port), timeout=CALL_TIMEOUT_S)
        try:
            bounded(connection)
            super().__init__(connection, Wire(home.secret, listens=False))
            self.greet(home.worker, role, timeout_s=CALL_TIMEOUT_S)
            connection.settimeout(None)
        except BaseException:
            _reset(connection)
            raise

    def reset(self) -> None:
        """End it as one that broke, for its end in good order would say that this process is gone."""
        _reset(self._connection)


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)  # wakes whoever waits on it
    connection.close()


def called(home: Home, role: str) -> Call:
    """Call until the manager, or its successor, answers."""
    while True:
        try:
            return Call(home, role)
        except (OSError, ValueError):
            time.sleep(RETRY_S)


def keep_liveness(home: Home, held: Callable[[], object] = lambda: None) -> None:
    """Hold the connection whose end tells that this process is gone; does not return. ``held``: told of each."""
    while True:
        call = called(home, LIVENESS)
        held()
        with suppress(OSError):
            while True:  # nothing ever comes: it returns when the connection is gone
                call.receive()
        call.reset()


class Talk:
    """The connection over which orders come, made anew whenever it ends; ``send`` may be called from any thread.

    Args:
        home: Where to call.
        again: Called on each new connection, in the thread that hears.
        heard: Called with each message, in that thread.
    """

    def __init__(self, home: Home, again: Callable[[], object], heard: Callable[[bytes], object]) -> None:
        self._home, self._again, self._heard = home, again, heard
        self._changed = threading.Condition()
        self._call: Call | None = None

    def hear(self) -> None:
        """Hear managers, one after the other; does not return."""
        while True:
            call = called(self._home, TALK)
            with self._changed:
                self._call = call
                self._changed.notify_all()
            with suppress(OSError, ValueError):
                self._again()
                while True:
                    self._heard(call.receive())
            with self._changed:
                self._call = None
            call.reset()

    def send(self, body: bytes) -> None:
        """Send a message if there is a manager; whether it arrives is not said."""
        call = self._call
        if call is not None:
            with suppress(OSError):  # the thread that hears makes another one
                call.send(body)

    def wait(self) -> None:
        """Wait until there is a manager."""
        with self._changed:
            self._changed.wait_for(lambda: self._call is not None)
