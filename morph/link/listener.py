"""Accepts callers that are not yet authenticated, so that none of them can keep the others out.

Every socket on which Morph itself listens to more than its own user is behind a ``Listener`` or, where a library
accepts connections, a ``PendingCallers``. A caller is pending until it is authenticated. Their time and their number
are limited, per address and in all: one caller too many drops the one that has been pending for longest. Morph's own
processes authenticate at once, before they can be dropped.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
MOST_PENDING = 128
MOST_OF_SOURCE = 64
"""Most pending callers per address: a job's start may bring all workers of one machine from the same address."""
MOST_KNOWN = 4096
BACKLOG = 1024
"""Connections that the kernel queues: a thousand may call at once, and a refused one retries after a second."""
LOOK_EVERY_S = 0.5
PAUSE_S = 0.05
JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class _PendingCaller:
    source: str
    since_s: float
    send_away: Callable[[], object]


class PendingCallers:
    """Callers that are not yet authenticated. All methods may be called from any thread."""

    def __init__(self, most: int = MOST_PENDING, most_of_source: int = MOST_OF_SOURCE) -> None:
        self._most, self._most_of_source = most, most_of_source
        self._waiting: dict[Hashable, _PendingCaller] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, caller: Hashable, source: str, send_away: Callable[[], object]) -> None:
        """Add a caller, and drop the oldest one if there are too many. ``send_away`` ends this caller's connection."""
        with self._lock:
            of_source = [key for key, caller in self._waiting.items() if caller.source == source]
            gone = of_source[:1] if len(of_source) >= self._most_of_source else list(self._waiting)[:1]
            full = len(of_source) >= self._most_of_source or len(self._waiting) >= self._most
            left = [self._waiting.pop(key) for key in gone if full]
            self._waiting[caller] = _PendingCaller(source, time.monotonic(), send_away)
        _end(left)

    def remove(self, caller: Hashable) -> bool:
        """Remove a caller that is authenticated or gone; return whether it was still pending."""
        with self._lock:
            return self._waiting.pop(caller, None) is not None

    def expire(self, timeout_s: float) -> None:
        """Drop the callers that have been pending for longer than ``timeout_s``."""
        before_s = time.monotonic() - timeout_s
        with self._lock:
            late = [key for key, caller in self._waiting.items() if caller.since_s < before_s]
            left = [self._waiting.pop(key) for key in late]
        _end(left)

    def send_oldest_away(self) -> None:
        """Drop the oldest caller, if there is one."""
        with self._lock:
            left = [self._waiting.pop(key) for key in list(self._waiting)[:1]]
        _end(left)


def _end(pending: list[_PendingCaller]) -> None:
    for caller in pending:
        with suppress(OSError):
            caller.send_away()


class Caller:
    """One connection and its source address. ``number``: counts the connections of a listener from 1 on."""

    def __init__(self, connection: socket.socket, source: str, number: int, become_known: Callable[[], None]) -> None:
        self.connection, self.source, self.number = connection, source, number
        self._become_known = become_known

    def known(self) -> None:
        """Mark the caller as authenticated, so that it may stay.

        Raises ConnectionError if the caller took too long and was dropped, or there are too many connections.
        """
        self._become_known()


class Listener:
    """Accepts connections in its own thread and serves each in another; continues after any error.

    The ``listening`` socket is closed with this object, and a connection when ``serve`` returns; an exception that it
    raises ends this connection only. It calls ``Caller.known`` once the caller is authenticated; a caller that is not
    within ``hello_timeout_s`` is dropped.
    """

    def __init__(
        self,
        listening: socket.socket,
        serve: Callable[[Caller], None],
        name: str,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self._listening, self._serve, self._name = listening, serve, name
        self._hello_timeout_s = hello_timeout_s
        self.pending = PendingCallers()
        self._connections: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._is_closed = False
        self._num_callers = 0
        listening.settimeout(LOOK_EVERY_S)
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    @classmethod
    def at(cls, host: str, port: int, serve: Callable[[Caller], None], name: str) -> Listener:
        """Return a listener on an address; port 0 means any free port."""
        return cls(socket.create_server((host, port), backlog=BACKLOG), serve, name)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port on which it listens."""
        host, port = self._listening.getsockname()[:2]
        return str(host), int(port)

    def stop(self) -> None:
        """Accept no more callers; authenticated connections stay open."""
        self._over.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.pending.expire(-1.0)

    def close(self, join_timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Accept no more callers, and end all connections; waits at most ``join_timeout_s`` for the threads to end."""
        self.stop()
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for connection in connections:
            _hang_up(connection)
        until_s = time.monotonic() + join_timeout_s
        self._thread.join(join_timeout_s)  # it accepts no caller after that
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _accept(self) -> None:
        while not self._over.is_set():
            self.pending.expire(self._hello_timeout_s)
            try:
                connection, address = self._listening.accept()
            except TimeoutError:
                continue
            except OSError as error:  # usually out of descriptors: drop pending callers first
                if not self._over.is_set():
                    log.warning("%s: cannot accept a connection: %s", self._name, error)
                    self.pending.send_oldest_away()
                    self._over.wait(PAUSE_S)
                continue
            self._num_callers += 1
            source = str(address[0]) if address else ""
            caller = Caller(connection, source, self._num_callers, partial(self._know, connection))
            self.pending.add(connection, source, partial(_hang_up, connection))
            if self._over.is_set():
                self.pending.expire(-1.0)
            thread = threading.Thread(target=self._run, args=(caller,), name=f"{self._name}-caller", daemon=True)
            try:
                with self._lock:  # ``close`` can join only a thread that has started
                    thread.start()
                    self._threads.add(thread)
            except RuntimeError as error:  # out of threads
                log.warning("%s: cannot serve a connection: %s", self._name, error)
                self._end(connection)

    def _know(self, connection: socket.socket) -> None:
        if not self.pending.remove(connection):
            raise ConnectionError("closed before it was authenticated")
        with self._lock:
            if self._is_closed or len(self._connections) >= MOST_KNOWN:
                raise ConnectionError(
                    "too many connections" if not self._is_closed else "no longer accepting connections"
                )
            self._connections.add(connection)

    def _run(self, caller: Caller) -> None:
        try:
            self._serve(caller)
        except (OSError, ValueError, KeyError, TypeError) as error:  # the caller is gone, or breaks the protocol
            log.debug("%s: %s: %s", self._name, caller.source, error)
        except Exception:
            log.exception("%s: %s", self._name, caller.source)
        finally:
            self._end(caller.connection)
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _end(self, connection: socket.socket) -> None:
        self.pending.remove(connection)
        with self._lock:
            self._connections.discard(connection)
        _hang_up(connection)
        connection.close()


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
