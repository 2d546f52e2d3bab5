"""Where the nodes' agents tell the manager of notices: the manager's end of ``manager.notices.line``.

VMs get their certificates at the same port, where the run's Ray is encrypted.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

from manager.controller.events import NoticeGiven, NoticeWithdrawn
from manager.engine.inbox import Inbox
from manager.journal.records import Fact
from manager.notices.line import Lines, is_proven, new_nonce
from manager.notices.watch import Given, Trouble, Withdrawn
from morph.contract.vm_names import MAX_DEVICES, vm_of, workers_of

if TYPE_CHECKING:
    from manager.engine.enrolment_desk import EnrolmentDesk

HELLO_TIMEOUT_S = 10.0
SILENT_S = 30.0
BACKLOG = 128
MAX_CONNECTIONS = 4096
JOIN_TIMEOUT_S = 5.0


class NoticeDoor:
    """Listens for agents; notices go to ``inbox`` as events, recommendations and troubles as facts.

    An agent speaks for its VM: a notice is told of each of the VM's workers.

    Args:
        inbox: Where they go.
        secret: Shared with the nodes; whoever does not prove it is sent away.
        host: Address to listen on.
        port: 0: any free one.
        desk: Signs for VMs that ask for a certificate; None: they are sent away.
    """

    def __init__(
        self,
        inbox: Inbox,
        secret: str,
        host: str = "127.0.0.1",
        port: int = 0,
        desk: EnrolmentDesk | None = None,
    ) -> None:
        self._inbox = inbox
        self._desk = desk
        self._secret = secret
        self._listener = socket.create_server((host, port), backlog=BACKLOG)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._lines: dict[str, Lines] = {}
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="morph-notice-door", daemon=True)
        self._thread.start()

    def left(self, worker: str, notice: str) -> bool:
        """Tell a worker's VM that nothing of value is left on it, so that it acknowledges; False: it is not there."""
        with self._lock:
            lines = self._lines.get(vm_of(worker))
        if lines is None:
            return False
        try:
            lines.write(left=notice)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Listen no more, and send everybody away."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(JOIN_TIMEOUT_S)

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                full = len(self._connections) >= MAX_CONNECTIONS or self._over.is_set()
                if not full:
                    self._connections.add(connection)
            if full:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="morph-notice-agent", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        lines, node = Lines(connection), ""
        try:
            nonce = new_nonce()
            lines.write(nonce=nonce)
            hello = lines.read(HELLO_TIMEOUT_S)
            if self._desk is not None and "request" in hello:
                self._desk.serve(lines, nonce, hello, str(connection.getpeername()[0]))
                return
            node, workers = self._greeted(nonce, hello)
            with self._lock:
                self._lines[node] = lines
            lines.write(welcome=True)
            while not self._over.is_set():
                self._take(node, workers, lines.read(SILENT_S))
                lines.write(heard=True)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a stranger, or an agent that is gone or silent: it comes again if it can
        finally:
            with self._lock:
                self._connections.discard(connection)
                if self._lines.get(node) is lines:
                    del self._lines[node]
            lines.close()

    def _greeted(self, nonce: str, hello: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
        """Return which VM speaks, and its workers."""
        node, number, answer = hello["node"], hello["devices"], hello["proof"]
        fit = isinstance(node, str) and isinstance(answer, str) and isinstance(number, int)
        if not (fit and 1 <= number <= MAX_DEVICES and is_proven(self._secret, nonce, node, number, answer)):
            raise ConnectionError("not one of ours")
        return node, workers_of(node, number)

    def _take(self, node: str, workers: tuple[str, ...], line: dict[str, Any]) -> None:
        kind = line.pop("kind")
        if kind == "given":
            given = Given.model_validate(line)
            if given.certain:
                for worker in workers:
                    self._inbox.put(NoticeGiven(worker=worker, lead_s=given.lead_s or 0.0, notice=given.notice))
            else:
                self._inbox.put(Fact(name="notice_recommended", worker=node, detail=given.notice))
        elif kind == "withdrawn":
            withdrawn = Withdrawn.model_validate(line)
            self._inbox.put(Fact(name="notice_withdrawn", worker=node, detail=withdrawn.notice))
            if withdrawn.certain:
                for worker in workers:
                    self._inbox.put(NoticeWithdrawn(worker=worker))
        elif kind == "trouble":
            trouble = Trouble.model_validate(line)
            self._inbox.put(Fact(name="notice_trouble", worker=node, detail=f"{trouble.source}: {trouble.sentence}"))
