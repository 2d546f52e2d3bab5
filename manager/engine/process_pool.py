"""Workers in plain processes of this machine, without Ray: behind the same interface as ``worker_pool``.

A worker is lost when its connections close, which the kernel sees to when its process dies, or when its heartbeat has
been silent for too long.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from pydantic import TypeAdapter

from manager.controller.events import AheadReported, CheckpointFailed, UnitsWritten, WorkerAnswered, WorkerLost
from manager.engine.inbox import Inbox
from manager.engine.silence import Signs, Silence
from morph.contract.base import Value
from morph.contract.messages import (
    LEAVE_PROBE,
    AheadOrder,
    Answer,
    CommitOrder,
    Heartbeat,
    Probed,
    ProbeOrder,
    ReshapeOrder,
    StepOrder,
    WorkerSetup,
)

_ANSWER: TypeAdapter[Answer | Probed] = TypeAdapter(Answer | Probed)


@dataclass(frozen=True)
class Lanes:
    """The manager's ends of a worker's two connections."""

    orders: Connection
    control: Connection


@dataclass(kw_only=True)
class _Handle(Signs):
    """A started worker."""

    lanes: Lanes
    probe: int | None = None
    """That is not answered yet."""


class ProcessPool:
    """Starts, orders, watches and ends workers. Events go to ``inbox``; one thread listens to each worker.

    Args:
        inbox: Where answers and losses go.
        make_setup: What a worker of this name is set up with.
        connect: Gives the connections to the process of a VM.
        kill: Ends the process of a VM.
        heartbeat_timeout_s: A silent worker is given up after this.
    """

    def __init__(
        self,
        inbox: Inbox,
        make_setup: Callable[[str], WorkerSetup],
        connect: Callable[[str], Lanes],
        kill: Callable[[str], None],
        heartbeat_timeout_s: float,
    ) -> None:
        self._inbox = inbox
        self._make_setup = make_setup
        self._connect = connect
        self._kill = kill
        self._silence = Silence(heartbeat_timeout_s)
        self._handles: dict[str, _Handle] = {}

    def start(self, worker: str, vm: str) -> None:
        """Set up the worker of a VM; ``WorkerReady`` follows as an answer. One that was attached is set up again."""
        if worker not in self._handles:
            self._attend(worker, self._connect(vm))
        self._send(worker, "setup", self._make_setup(worker))

    def attach(self, rejoined: Mapping[str, Lanes], set_up: Collection[str]) -> None:
        """Go on with the workers of a manager that was killed. ``set_up``: those of which heartbeats are due."""
        for worker, lanes in rejoined.items():
            self._attend(worker, lanes).ready = worker in set_up

    def _attend(self, worker: str, lanes: Lanes) -> _Handle:
        handle = self._handles[worker] = _Handle(lanes=lanes)
        threading.Thread(target=self._listen, args=(worker, handle), name=f"morph-{worker}", daemon=True).start()
        return handle

    def reshape(self, worker: str, order: ReshapeOrder) -> None:
        """Send a reshape order."""
        self._send(worker, "reshape", order)

    def step(self, worker: str, order: StepOrder) -> None:
        """Send a step order."""
        self._send(worker, "step", order)

    def commit(self, worker: str, order: CommitOrder) -> None:
        """Send a commit order."""
        self._send(worker, "commit", order)

    def probe(self, worker: str, order: ProbeOrder) -> None:
        """Have a worker time some work, until it gets another order; ``WorkerProbed`` follows."""
        self._send(worker, "probe", order)
        self._handles[worker].probe = order.probe

    def abort(self, worker: str, generation: int) -> None:
        """Abort a generation on a worker, beside its running order."""
        handle = self._handles.get(worker)
        if handle and not handle.gone:
            self._write(worker, handle, handle.lanes.control, str(generation).encode())

    def ahead(self, worker: str, order: AheadOrder) -> None:
        """Tell a worker what to send ahead, or to expect, beside its running order."""
        handle = self._handles.get(worker)
        if handle and not handle.gone:
            self._write(worker, handle, handle.lanes.control, order.model_dump_json().encode())

    def end(self, worker: str) -> None:
        """Kill a worker's process; no event follows."""
        handle = self._handles.get(worker)
        if handle and not handle.gone:
            handle.gone = True
            self._kill(worker)

    def connection_closed(self, worker: str) -> None:
        """Take note that a worker's process is gone."""
        handle = self._handles.get(worker)
        if handle is not None:
            self._lose(worker, handle, "its process is gone: its connection closed")

    def close(self) -> None:
        """Report nothing any more."""
        for handle in self._handles.values():
            handle.gone = True

    def watch(self) -> None:
        """Report workers whose heartbeat is overdue, and end them: one that wakes must not go on."""
        for worker, silent_s in self._silence.overdue(self._handles):
            self._lose(worker, self._handles[worker], f"silent for {silent_s:.1f} s")
            self._kill(worker)
            for lane in (self._handles[worker].lanes.orders, self._handles[worker].lanes.control):
                _hang_up(lane)

    def _send(self, worker: str, name: str, order: Value) -> None:
        handle = self._handles[worker]
        if handle.probe is not None and not handle.gone:
            self._write(worker, handle, handle.lanes.control, LEAVE_PROBE + str(handle.probe).encode())
        if not handle.gone:
            self._write(worker, handle, handle.lanes.orders, f"{name}\n{order.model_dump_json()}".encode())

    def _write(self, worker: str, handle: _Handle, lane: Connection, message: bytes) -> None:
        try:
            lane.send_bytes(message)
        except OSError as error:  # closed, or its buffer stayed full for the socket's time-out
            self._lose(worker, handle, f"takes no orders: {type(error).__name__}")

    def _listen(self, worker: str, handle: _Handle) -> None:
        lanes = handle.lanes
        try:
            while True:
                for lane in wait([lanes.orders, lanes.control]):
                    assert isinstance(lane, Connection)
                    message = lane.recv_bytes()
                    if lane is lanes.orders:
                        self._answered(worker, handle, _ANSWER.validate_json(message))
                    else:
                        self._beaten(worker, handle, Heartbeat.model_validate_json(message))
        except (EOFError, OSError):
            self.connection_closed(worker)
        finally:
            lanes.orders.close()
            lanes.control.close()

    def _answered(self, worker: str, handle: _Handle, answer: Answer | Probed) -> None:
        if isinstance(answer, Probed):
            handle.probe = None
            self._inbox.put_probed(answer)
            return
        if answer.kind == "ready":
            handle.beat_sent_s = time.monotonic()
            handle.ready = True
        self._inbox.put(WorkerAnswered(worker=worker, answer=answer))

    def _beaten(self, worker: str, handle: _Handle, beat: Heartbeat) -> None:
        handle.beat_sent_s = time.monotonic()
        if beat.times is not None:
            self._inbox.paces.add(worker, beat.times)
        if beat.written:
            self._inbox.put(UnitsWritten(worker=worker, written=beat.written))
        if beat.checkpoint_error:
            self._inbox.put(CheckpointFailed(worker=worker, error=beat.checkpoint_error))
        if beat.ahead is not None:
            self._inbox.put(AheadReported(worker=worker, report=beat.ahead))

    def _lose(self, worker: str, handle: _Handle, cause: str) -> None:
        if not handle.gone:
            handle.gone = True
            self._inbox.put(WorkerLost(worker=worker, cause=cause))


def _hang_up(lane: Connection) -> None:
    """End a connection whose other end may be unreachable, so that whoever listens to it here goes on."""
    with suppress(OSError), socket.socket(fileno=os.dup(lane.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)
