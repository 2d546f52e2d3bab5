"""A worker's connections to the current manager, which are made again as long as the worker lives."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from morph.link.home import Home
from morph.link.session import LinkSession
from morph.link.wire import Wire

CALL_TIMEOUT_S = 10.0
RETRY_S = 0.1
UNTAKEN_MS = 10_000
"""Milliseconds after which a connection ends if data sent on it is not acknowledged, even if neither side closed it."""
TALK, LIVENESS = ROLES = ("talk", "liveness")


def bounded(connection: socket.socket) -> None:
    """Make a connection send small messages at once, and end if nothing is acknowledged for ``UNTAKEN_MS``."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNTAKEN_MS)


class Call(LinkSession):
    """One connection to the manager; both ends have proven who they are.

    Raises OSError if no answer comes within ``CALL_TIMEOUT_S``, or the answering process is not the manager.
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
        """Reset the connection as if it broke: a regular close would tell the manager that this process is gone."""
        _reset(self._connection)


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)  # wakes a thread that waits on it
    connection.close()


def called(home: Home, role: str) -> Call:
    """Call until the manager or its successor answers; return the connection."""
    while True:
        try:
            return Call(home, role)
        except (OSError, ValueError):
            time.sleep(RETRY_S)


def keep_liveness(home: Home, held: Callable[[], object] = lambda: None) -> None:
    """Hold the connection whose end shows that this process has ended; never return.

    ``held``: called with each such connection.
    """
    while True:
        call = called(home, LIVENESS)
        held()
        with suppress(OSError):
            while True:  # the manager sends nothing: the call returns when the manager is gone
                call.receive()
        call.reset()


class Talk:
    """The connection over which orders arrive, made anew whenever it ends; ``send`` may be called from any thread.

    ``again``: called on each new connection, in the thread that runs ``hear``. ``heard``: called with each message, in
    that thread.
    """

    def __init__(self, home: Home, again: Callable[[], object], heard: Callable[[bytes], object]) -> None:
        self._home, self._again, self._heard = home, again, heard
        self._changed = threading.Condition()
        self._call: Call | None = None

    def hear(self) -> None:
        """Receive the orders of one manager after another; never returns."""
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
        """Send a message if there is a manager; whether it arrives stays unknown."""
        call = self._call
        if call is not None:
            with suppress(OSError):  # the receiving thread makes a new connection
                call.send(body)

    def wait(self) -> None:
        """Wait until a manager is connected."""
        with self._changed:
            self._changed.wait_for(lambda: self._call is not None)
