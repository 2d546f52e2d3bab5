"""The server that workers call. One thread receives from all workers; any thread may send to a worker.

A worker has two connections. Orders, answers and reports go over ``talk``; when it ends for any reason, the worker
opens it again. Nothing is sent over ``liveness``: when a process dies, the kernel closes this connection in good order,
within milliseconds. A reset connection does not mean a death. The connections of a VM that vanishes stay open:
heartbeats detect this.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from manager.engine.loop.worker_pool import WorkerConnection
from morph.link.authority import authority_of, credential_of
from morph.link.caller import LIVENESS, ROLES, TALK, bounded
from morph.link.home import Home
from morph.link.listener import BACKLOG, HELLO_TIMEOUT_S, LOOK_EVERY_S, MOST_KNOWN, PAUSE_S, PendingCallers
from morph.link.session import WELCOME, facts_of
from morph.link.wire import CHUNK_BYTES, Wire

log = logging.getLogger(__name__)

MOST_AT_ONCE = 16
"""The number of connections accepted before others are served again."""
JOIN_TIMEOUT_S = 5.0


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen for workers; OSError if listening on this address or port failed."""
    return socket.create_server((host, port), backlog=BACKLOG)


@dataclass(frozen=True)
class Entrance:
    """The entrance for workers' calls: a listening socket, and the secret of the authority that certifies both ends."""

    listening: socket.socket
    secret: str = field(repr=False)

    def home(self, worker: str) -> Home:
        """Return the values with which a worker calls; the credential is valid only for that worker's name."""
        host, port = self.listening.getsockname()[:2]
        return Home(worker=worker, host=host, port=port, secret=authority_of(self.secret).credential(worker))


class LinkEvents(Protocol):
    """Receives calls in the server's thread; each must return at once."""

    def came(self, worker: str, line: WorkerConnection) -> None:
        """Handle a call of a worker, the first or a later one: from now on this line reaches the worker."""

    def heard(self, worker: str, body: bytes) -> None:
        """Handle a worker's message. A ValueError means that it breaks the protocol, and ends the line."""

    def died(self, worker: str) -> None:
        """Handle that a worker's process is gone."""


@dataclass(eq=False)
class _Caller:
    """One connection. ``role`` is empty until the caller is known."""

    connection: socket.socket
    wire: Wire
    server: LinkServer
    lock: threading.Lock = field(default_factory=threading.Lock)
    unsent: deque[memoryview] = field(default_factory=deque)
    moved_s: float = 0.0
    worker: str = ""
    role: str = ""

    @property
    def stuck_s(self) -> float:
        return time.monotonic() - self.moved_s if self.unsent else 0.0

    def send(self, body: bytes) -> None:
        with suppress(OSError), self.lock:  # the server's thread detects an ended connection
            self.write(self.wire.put(body))

    def hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def write(self, data: bytes = b"") -> None:
        """Send what can be sent at once, and the rest when there is room; call it with the lock held."""
        was_blocked = bool(self.unsent)
        if data:
            self.unsent.append(memoryview(data))
            self.moved_s = self.moved_s if was_blocked else time.monotonic()
        with suppress(BlockingIOError):
            while self.unsent:
                sent = self.connection.send(self.unsent[0])
                self.moved_s = time.monotonic()
                if sent < len(self.unsent[0]):
                    self.unsent[0] = self.unsent[0][sent:]
                else:
                    self.unsent.popleft()
        if self.unsent and not was_blocked:
            self.server.want_room(self)


class LinkServer:
    """Accepts workers until ``close``; another process may hold the listening socket, but does not accept."""

    def __init__(self, entrance: Entrance, events: LinkEvents) -> None:
        self._entrance, self._events = entrance, events
        self._credential = credential_of(entrance.secret)
        self._pending = PendingCallers()
        self._known: dict[tuple[str, str], _Caller] = {}
        self._callers: set[_Caller] = set()
        self._blocked: deque[_Caller] = deque()
        self._over = threading.Event()
        self._wake_read, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for own in (entrance.listening, self._wake_read, self._wake):
            own.setblocking(False)
        for own in (entrance.listening, self._wake_read):
            self._selector.register(own, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="morph-workers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, close all connections, and report nothing more."""
        self._over.set()
        self._wake_up()
        self._thread.join(JOIN_TIMEOUT_S)
        self._entrance.listening.close()
        for caller in list(self._callers):
            self._end(caller)
        self._selector.close()
        self._wake_read.close()
        self._wake.close()

    def want_room(self, caller: _Caller) -> None:
        """Arrange that the rest is sent to a caller when it accepts more."""
        self._blocked.append(caller)
        self._wake_up()

    def _wake_up(self) -> None:
        with suppress(OSError):  # the pipe is full: the thread wakes anyway
            self._wake.send(b"w")

    def _run(self) -> None:
        while not self._over.is_set():
            ready = self._selector.select(LOOK_EVERY_S)
            self._pending.expire(HELLO_TIMEOUT_S)
            for key, events in ready:
                if self._over.is_set():
                    return
                if key.fileobj is self._entrance.listening:
                    self._accept()
                elif key.fileobj is self._wake_read:
                    self._look_after_blocked()
                elif key.data in self._callers:  # otherwise it ended just now, because a new one replaced it
                    self._serve(key.data, events)

    def _look_after_blocked(self) -> None:
        with suppress(BlockingIOError):
            self._wake_read.recv(CHUNK_BYTES)
        while self._blocked:
            caller = self._blocked.popleft()
            if caller in self._callers:
                self._selector.modify(caller.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, caller)

    def _accept(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                connection, address = self._entrance.listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # usually no descriptor is left: drop a pending caller
                log.warning("no worker can be accepted: %s", error)
                self._pending.send_oldest_away()
                time.sleep(PAUSE_S)
                return
            caller = _Caller(connection, Wire(self._credential, listens=True), self)
            self._callers.add(caller)
            self._pending.add(caller, str(address[0]), caller.hang_up)
            try:
                bounded(connection)
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ, caller)
            except OSError:
                self._end(caller)

    def _serve(self, caller: _Caller, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                with caller.lock:
                    caller.write()
                    if not caller.unsent:
                        self._selector.modify(caller.connection, selectors.EVENT_READ, caller)
            if events & selectors.EVENT_READ:
                self._hear(caller)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:  # the caller is gone, or breaks the protocol
            log.debug("%s: %s: %s", caller.worker or "a stranger", type(error).__name__, error)
            self._end(caller)
        except Exception:
            log.exception("%s", caller.worker or "a stranger")
            self._end(caller)

    def _hear(self, caller: _Caller) -> None:
        data = caller.connection.recv(CHUNK_BYTES)
        if not data:
            is_death = caller.role == LIVENESS and self._known.get((caller.worker, LIVENESS)) is caller
            self._end(caller)
            if is_death:
                self._events.died(caller.worker)
            return
        with caller.lock:
            caller.write(caller.wire.take(data))
        while caller in self._callers:
            with caller.lock:
                message = caller.wire.next()
            if message is None:
                return
            if not caller.role:
                self._greet(caller, message)
            elif caller.role == TALK:
                self._events.heard(caller.worker, message)

    def _greet(self, caller: _Caller, message: bytes) -> None:
        worker, role = facts_of(message, 2)
        if role not in ROLES or not worker or worker != caller.wire.other_name:
            raise ConnectionError("it is not the worker that it claims to be")
        if not self._pending.remove(caller) or len(self._known) >= len(ROLES) * MOST_KNOWN:
            raise ConnectionError("the worker took too long, or there are too many connections")
        with caller.lock:
            caller.write(caller.wire.put(WELCOME))
        caller.worker, caller.role = worker, role
        before = self._known.get((worker, role))
        self._known[worker, role] = caller
        if before is not None:
            self._end(before)
        if role == TALK:
            self._events.came(worker, caller)

    def _end(self, caller: _Caller) -> None:
        self._callers.discard(caller)
        self._pending.remove(caller)
        if self._known.get((caller.worker, caller.role)) is caller:
            del self._known[caller.worker, caller.role]
        with suppress(KeyError, ValueError):
            self._selector.unregister(caller.connection)
        caller.hang_up()
        with caller.lock:
            caller.connection.close()
            caller.unsent.clear()
