"""A link server, and the events that it reports."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from manager.engine.joining.link_server import Entrance, LinkServer, listen
from manager.engine.loop.worker_pool import WorkerConnection
from morph.link import caller as link
from morph.link.home import Home
from morph.link.proof import new_secret
from tests.waiting import BOUND_S


class Told:
    """Records what a server reports, and each worker's newest connection."""

    def __init__(self) -> None:
        self.all: queue.Queue[tuple[str, ...] | tuple[str, str, bytes]] = queue.Queue()
        self.lines: dict[str, WorkerConnection] = {}

    def came(self, worker: str, line: WorkerConnection) -> None:
        self.lines[worker] = line
        self.all.put(("came", worker))

    def heard(self, worker: str, body: bytes) -> None:
        self.all.put(("heard", worker, body))

    def died(self, worker: str) -> None:
        self.all.put(("died", worker))

    def next(self) -> tuple[object, ...]:
        return self.all.get(timeout=BOUND_S)


class Callers:
    """Threads that call like workers; once the scene is ``over``, a thread that calls again ends."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._call = link.Call
        link.Call = self._called  # type: ignore[assignment,misc]

    def run(self, work: Callable[[], object]) -> None:
        def run() -> None:
            with suppress(SystemExit):
                work()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def over(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(BOUND_S)
        link.Call = self._call  # type: ignore[misc]

    def _called(self, home: Home, role: str) -> link.Call:
        if self._over.is_set():
            raise SystemExit
        return self._call(home, role)


class LinkScene:
    def __init__(self) -> None:
        self.told = Told()
        self.entrance = Entrance(listen("127.0.0.1"), new_secret())
        self.server = LinkServer(self.entrance, self.told)
        self.callers = Callers()

    @property
    def address(self) -> tuple[str, int]:
        home = self.entrance.home("any")
        return home.host, home.port

    def close(self) -> None:
        self.server.close()
        self.callers.over()

    def home(self, worker: str) -> Home:
        return self.entrance.home(worker)
