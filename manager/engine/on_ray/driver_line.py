"""The manager's connection to the process that is Ray's driver, which is restarted when it ends."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from manager.engine.on_ray.driver_messages import MAX_LINE_BYTES, Hello, Kill, Nodes, Start, Told, read_told, write
from morph.contract.errors import ClusterError

log = logging.getLogger(__name__)

SHORT_LIFE_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


class DriverLine:
    """A line to the current driver. Its messages are checked: a malformed line ends that driver.

    ``launch``: starts a driver's process, connected by this file descriptor; raises ClusterError if it cannot.
    ``lacks``: the parts of the drivers' confinement that this machine does not support.
    """

    def __init__(self, launch: Callable[[int], None]) -> None:
        self._launch = launch
        self.lacks = ""
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._nodes: dict[str, str] | None = None
        self._handle: Callable[[Told], object] = bool
        self._connected: Callable[[], object] = bool
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="morph-ray-driver", daemon=True)

    def start(self) -> None:
        """Start the driver; ``wait_for_nodes`` returns whether it came up."""
        self._thread.start()

    def attend(self, handle: Callable[[Told], object], connected: Callable[[], object]) -> None:
        """Set the callbacks: ``handle`` gets each report, ``connected`` is called once each new driver is connected."""
        self._handle, self._connected = handle, connected

    @property
    def nodes(self) -> dict[str, str]:
        """The workers that have nodes, with their addresses; ClusterError if no driver is connected."""
        with self._changed:
            if self._nodes is None:
                raise ClusterError("Ray's nodes are not known: its driver is not connected")
            return dict(self._nodes)

    def wait_for_nodes(self, reached: Callable[[dict[str, str] | None], bool], timeout_s: float) -> bool:
        """Wait until the known nodes meet a condition; returns whether they do within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: reached(self._nodes), timeout_s)

    def notify(self) -> None:
        """Wake the threads that wait for nodes."""
        with self._changed:
            self._changed.notify_all()

    def send(self, order: Start | Kill) -> bool:
        """Send an order; returns False if no driver accepts it."""
        with self._changed:
            connection = self._connection if self._nodes is not None else None
            if connection is None or self._closed.is_set():
                return False
            try:
                connection.sendall(write(order))
            except OSError:  # also if it accepted nothing for too long: half a line may have been sent
                connection.close()
                return False
        return True

    def close(self) -> None:
        """Let the driver end, without waiting: its host ends it."""
        self._closed.set()
        with self._changed:
            if self._connection is not None:
                self._connection.close()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed.is_set():
            begin_s = time.monotonic()
            try:
                self._hear_one()
            except ClusterError:  # the host is gone, and everything else with it
                return
            lived_s = time.monotonic() - begin_s
            pause_s = FIRST_PAUSE_S if lived_s > SHORT_LIFE_S else min(2 * pause_s, LONGEST_PAUSE_S)
            if not self._closed.wait(pause_s):
                log.warning("the process that is Ray's driver ended after %.0f s: another one is started", lived_s)

    def _hear_one(self) -> None:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._launch(theirs.fileno())
            ours.settimeout(None)
            with self._changed:
                self._connection = ours
            try:
                with ours.makefile("rb") as lines:
                    while line := lines.readline(MAX_LINE_BYTES):
                        self._take(read_told(line))
            except OSError:
                pass
            except ValueError as error:
                log.warning("Ray's driver sent a line that cannot be read, and is ended: %s", error)
            finally:
                with self._changed:
                    self._connection = self._nodes = None
                    self._changed.notify_all()

    def _take(self, message: Hello | Told | Nodes) -> None:
        if isinstance(message, Hello):
            if message.lacks and not self.lacks:
                log.warning(
                    "Ray's processes are not fully confined (docs/how-it-works/safety.md): this machine lacks %s",
                    message.lacks,
                )
            self.lacks = message.lacks
            return
        if isinstance(message, Told):
            self._handle(message)
            return
        with self._changed:
            is_first = self._nodes is None
            self._nodes = message.workers
            self._changed.notify_all()
        if is_first:
            self._connected()
