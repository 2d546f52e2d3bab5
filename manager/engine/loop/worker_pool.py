"""Orders, watches and ends workers over the lines on which they called, however they were started.

Every answer and every loss becomes an event on the driver's queue. A worker is lost when its process is gone, which the
link server reports within milliseconds, or when its heartbeat has been silent for too long. A broken line is not a
loss: the worker calls again, and unanswered orders are sent again. A worker that gets an order twice gives the same
answer twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from manager.controller.state.events import WorkerAnswered, WorkerLost
from manager.engine.loop.event_queue import EventQueue, read_answer
from manager.engine.loop.silence import Signs, Silence
from manager.journal.records import Fact
from morph.contract.base import Value
from morph.contract.messages import Heartbeat, Probed, ProbeOrder, WorkerSetup
from morph.link.encoding import ANSWER, BEAT, CONTROLS, ORDERS, pack, parts

_NAMES = {kind: name for name, kind in {**ORDERS, **CONTROLS}.items()}
ATTACH_TIMEOUT_S = 15.0
CALL_TIMEOUT_S = 300.0
"""A worker that has not called by then cannot: an ended process is known earlier, and Ray may start many slowly."""
STUCK_TIMEOUT_S = 5.0


class WorkerConnection(Protocol):
    """A connection to one worker, made in a higher layer (``joining``). Methods may be called from any thread."""

    @property
    def stuck_s(self) -> float:
        """The time for which the other end has accepted nothing; 0: nothing waits."""

    def send(self, body: bytes) -> None:
        """Send a message, or keep it until the other end accepts it; it is lost if the connection is over."""

    def hang_up(self) -> None:
        """End the connection."""


class Launcher(Protocol):
    """Starts workers, which call the manager by themselves, and ends them."""

    def start_worker(self, worker: str, vm: str) -> None:
        """Start a worker on its VM; returns at once. It does nothing if a VM starts with its worker."""

    def kill(self, worker: str) -> None:
        """End a worker's process, if it exists."""

    def has_ended(self, worker: str) -> bool:
        """Return whether the process of a worker that has not called yet is known to be gone."""

    def adopt(self) -> Collection[str]:
        """Return the workers that another manager started and that may be alive."""


@dataclass(kw_only=True)
class _Handle(Signs):
    """A started worker. ``line`` is None until it calls."""

    line: WorkerConnection | None = None
    probe: int | None = None
    """The probe without an answer."""
    unanswered: dict[str, bytes] = field(default_factory=dict)
    """The order and the probe without an answer."""
    newest: dict[str, bytes] = field(default_factory=dict)
    """The last message of each other kind."""
    sending: threading.Lock = field(default_factory=threading.Lock)


class WorkerPool:
    """The workers of a run. Events go to ``event_queue``; a ``LinkServer`` calls it in its own thread.

    Time-outs: see ``Silence``. ``check_cluster``: called while workers are watched; raises the error that ends the
    session.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        make_setup: Callable[[str], WorkerSetup],
        launcher: Launcher,
        heartbeat_timeout_s: float,
        *,
        outage_timeout_s: float = 0.0,
        check_cluster: Callable[[], None] = lambda: None,
    ) -> None:
        self._event_queue = event_queue
        self._make_setup = make_setup
        self._launcher = launcher
        self._silence = Silence(heartbeat_timeout_s, outage_timeout_s, event_queue.put_unheard)
        self._check_cluster = check_cluster
        self._handles: dict[str, _Handle] = {}
        self._lines: dict[str, WorkerConnection] = {}
        self._died: set[str] = set()
        self._changed = threading.Condition()
        self._packed: tuple[object, bytes] = (None, b"")
        """The last order, encoded once for all workers. Only one thread gives orders."""

    def start(self, worker: str, vm: str) -> None:
        """Start a worker and set it up; ``WorkerReady`` follows as an answer. An attached worker is set up again."""
        if worker not in self._handles:
            handle = self._attend(worker)
            if worker in self._died:
                self._lose(worker, handle, "its process is gone: its connection closed")
                return
            self._launcher.start_worker(worker, vm)
        self.send(worker, self._make_setup(worker))

    def attach(self, set_up: Collection[str]) -> tuple[str, ...]:
        """Continue with the workers of a killed manager; returns those that exist.

        ``set_up``: those whose heartbeats begin now; they are killed if they do not call within ``ATTACH_TIMEOUT_S``.
        The others are still being set up, or their setup was not journalled: they answer the setup that follows.
        """
        there = set(self._launcher.adopt())
        awaited = there & set(set_up)
        with self._changed:
            self._changed.wait_for(lambda: awaited <= self._lines.keys() | self._died, ATTACH_TIMEOUT_S)
            there -= self._died
            absent = (awaited & there) - self._lines.keys()
        for worker in sorted(absent):
            self._launcher.kill(worker)
        for worker in there - absent:
            self._attend(worker).ready = worker in awaited
        return tuple(sorted(there - absent))

    def _attend(self, worker: str) -> _Handle:
        with self._changed:
            handle = self._handles[worker] = _Handle(line=self._lines.get(worker))
        return handle

    def send(self, worker: str, order: Value) -> None:
        """Send an order, which ends a probe that is under way; that of a pre-copy goes beside the running order."""
        name = _NAMES[type(order)]
        if name in CONTROLS:
            self._tell(worker, name, order)
            return
        handle = self._handles[worker]
        if handle.probe is not None:
            self._tell(worker, "leave_probe", handle.probe)
        if self._packed[0] is not order:
            self._packed = (order, pack(name, order))
        message = self._packed[1]
        with handle.sending:
            handle.unanswered["probe" if name == "probe" else "order"] = message
            self._write(handle, message)
        if isinstance(order, ProbeOrder):
            handle.probe = order.probe

    def abort(self, worker: str, generation: int) -> None:
        """Abort a generation on a worker, beside its running order."""
        self._tell(worker, "abort", generation)

    def end(self, worker: str) -> None:
        """Kill a worker's process; no event follows."""
        handle = self._handles.get(worker)
        if handle and not handle.gone:
            handle.gone = True
            self._launcher.kill(worker)

    def close(self) -> None:
        """Stop reporting."""
        for handle in list(self._handles.values()):
            handle.gone = True

    def watch(self) -> bool:
        """Report workers whose heartbeat is overdue, and end them: a worker that wakes up must not continue.

        Workers that accept no orders or never called are ended too. Returns whether some worker can be heard, or none
        is expected.
        """
        self._check_cluster()
        for worker, silent_s in self._silence.overdue(self._handles):
            self._give_up(worker, f"silent for {silent_s:.1f} s")
        for worker, handle in list(self._handles.items()):
            line = handle.line
            if line is not None and line.stuck_s > STUCK_TIMEOUT_S and not self._silence.outage:
                self._give_up(worker, "accepts no orders: its connection stayed full")
            elif line is None and not handle.gone and self._launcher.has_ended(worker):
                self._lose(worker, handle, "its process ended before it called the manager")
            elif line is None and time.monotonic() > handle.beat_sent_s + CALL_TIMEOUT_S:
                self._give_up(worker, f"did not call the manager within {CALL_TIMEOUT_S:g} s")
        return not self._silence.outage

    def failed(self, worker: str, cause: str) -> None:
        """Note that a worker could not be started, or that its process is gone; in any thread."""
        with self._changed:
            self._died.add(worker)
            self._lines.pop(worker, None)
            handle = self._handles.get(worker)
            self._changed.notify_all()
        if handle is not None:
            self._lose(worker, handle, cause)

    def came(self, worker: str, line: WorkerConnection) -> None:
        """Note that a worker called, for the first time or again; resend all that may be lost with its last line."""
        with self._changed:
            self._lines[worker] = line
            handle = self._handles.get(worker)
            self._changed.notify_all()
        if handle is None:
            return
        with handle.sending:
            is_reconnect, handle.line = handle.line not in (None, line), line
            for message in (*handle.newest.values(), *handle.unanswered.values()):
                line.send(message)
        if is_reconnect and not handle.gone:
            self._event_queue.put(Fact(name="connection_broken", worker=worker, detail="replaced by a new one"))

    def heard(self, worker: str, body: bytes) -> None:
        """Handle a worker's answer or heartbeat."""
        handle = self._handles.get(worker)
        if handle is None or handle.gone:
            return
        try:
            name, payload = parts(body)
            if name == ANSWER:
                self._answered(worker, handle, payload)
            elif name == BEAT:
                handle.beat_sent_s = time.monotonic()
                self._event_queue.put_beat(worker, Heartbeat.model_validate_json(payload))
            else:
                raise ValueError(f"it sends {name[:20]!r}")
        except ValueError as error:  # it is not a message of a worker
            self._give_up(worker, f"breaks the protocol: {error}")

    def died(self, worker: str) -> None:
        """Note that the process of a worker is gone."""
        self.failed(worker, "its process is gone: its connection closed")

    def _tell(self, worker: str, name: str, argument: object) -> None:
        handle = self._handles.get(worker)
        if handle is not None:
            with handle.sending:
                handle.newest[name] = message = pack(name, argument)
                self._write(handle, message)

    def _write(self, handle: _Handle, message: bytes) -> None:
        if handle.line is not None and not handle.gone:
            handle.line.send(message)

    def _answered(self, worker: str, handle: _Handle, payload: bytes) -> None:
        answer = read_answer(worker, payload)
        handle.unanswered.pop("probe" if isinstance(answer, Probed) else "order", None)
        if isinstance(answer, Probed):
            handle.probe = None
            self._event_queue.put_probed(answer)
            return
        if answer.kind == "ready":
            handle.beat_sent_s = time.monotonic()
            handle.ready = True
        self._event_queue.put(WorkerAnswered(worker=worker, answer=answer))

    def _give_up(self, worker: str, cause: str) -> None:
        handle = self._handles[worker]
        if handle.gone:
            return
        self._lose(worker, handle, cause)
        self._launcher.kill(worker)
        if handle.line is not None:
            handle.line.hang_up()

    def _lose(self, worker: str, handle: _Handle, cause: str) -> None:
        if not handle.gone:
            handle.gone = True
            self._event_queue.put(WorkerLost(worker=worker, cause=cause))
