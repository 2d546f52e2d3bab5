"""Workers in plain processes of this machine, without Ray: behind the same interface as ``worker_pool``.

A worker is lost when its connections end, which the kernel sees to when its process dies, or when its heartbeat has
been silent for too long. Connections that break are made anew, and what is not answered is sent again: the worker
answers an order that comes twice as it did before.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from manager.controller.events import WorkerAnswered, WorkerLost
from manager.engine.inbox import Inbox, read_answer
from manager.engine.silence import Signs, Silence
from manager.journal.records import Fact
from morph.contract.base import Value
from morph.contract.errors import ClusterError
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
    unanswered: dict[str, bytes] = field(default_factory=dict)
    """The order, and the probe, that are not."""
    told: dict[str, bytes] = field(default_factory=dict)
    """The last message of each kind on the control lane."""
    sending: threading.Lock = field(default_factory=threading.Lock)


class ProcessPool:
    """Starts, orders, watches and ends workers. Events go to ``inbox``; one thread listens to each worker.

    Args:
        inbox: Where answers and losses go.
        make_setup: What a worker of this name is set up with.
        connect: Gives the connections to the process of a VM.
        kill: Ends the process of a VM.
        heartbeat_timeout_s: A silent worker is given up after this.
        outage_timeout_s: Workers that are all silent together are given up after this.
        reconnect: Gives new connections to the process of a VM whose old ones broke, and raises ClusterError when it
            is gone. None: such a worker is lost.
        check_cluster: Called while workers are watched; raises what ends the session.
    """

    def __init__(
        self,
        inbox: Inbox,
        make_setup: Callable[[str], WorkerSetup],
        connect: Callable[[str], Lanes],
        kill: Callable[[str], None],
        heartbeat_timeout_s: float,
        *,
        outage_timeout_s: float = 0.0,
        reconnect: Callable[[str], Lanes] | None = None,
        check_cluster: Callable[[], None] = lambda: None,
    ) -> None:
        self._inbox = inbox
        self._make_setup = make_setup
        self._connect = connect
        self._kill = kill
        self._reconnect = reconnect
        self._silence = Silence(heartbeat_timeout_s, outage_timeout_s, inbox.put_unheard)
        self._check_cluster = check_cluster
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
        self._tell(worker, "abort", str(generation).encode())

    def ahead(self, worker: str, order: AheadOrder) -> None:
        """Tell a worker what to send ahead, or to expect, beside its running order."""
        self._tell(worker, "ahead", order.model_dump_json().encode())

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

    def watch(self) -> bool:
        """Report workers whose heartbeat is overdue, and end them: one that wakes must not go on.

        Returns whether somebody can be heard, or nobody is to be.
        """
        self._check_cluster()
        for worker, silent_s in self._silence.overdue(self._handles):
            handle = self._handles[worker]
            self._lose(worker, handle, f"silent for {silent_s:.1f} s")
            self._kill(worker)
            for lane in (handle.lanes.orders, handle.lanes.control):
                _hang_up(lane)
        return not self._silence.outage

    def _send(self, worker: str, name: str, order: Value) -> None:
        handle = self._handles[worker]
        if handle.probe is not None:
            self._tell(worker, "leave", LEAVE_PROBE + str(handle.probe).encode())
        with handle.sending:
            message = f"{name}\n{order.model_dump_json()}".encode()
            handle.unanswered["probe" if isinstance(order, ProbeOrder) else "order"] = message
            self._write(worker, handle, handle.lanes.orders, message)

    def _tell(self, worker: str, kind: str, message: bytes) -> None:
        handle = self._handles.get(worker)
        if handle is not None:
            with handle.sending:
                handle.told[kind] = message
                self._write(worker, handle, handle.lanes.control, message)

    def _write(self, worker: str, handle: _Handle, lane: Connection, message: bytes) -> None:
        if handle.gone:
            return
        try:
            lane.send_bytes(message)
        except BlockingIOError:  # its buffer stayed full for the socket's time-out
            self._lose(worker, handle, "takes no orders: its connection stayed full")
        except OSError:  # whoever listens to it sees whether it ended or broke
            pass

    def _listen(self, worker: str, handle: _Handle) -> None:
        while True:
            try:
                self._hear(worker, handle)
            except EOFError:
                break
            except OSError:
                if not self._connect_again(worker, handle):
                    break
            except ValueError as error:  # what it says is none of what a worker says
                self._lose(worker, handle, f"does not speak as a worker does: {error}")
                self._kill(worker)
                break
        self.connection_closed(worker)
        _close(handle)

    def _hear(self, worker: str, handle: _Handle) -> None:
        lanes = handle.lanes
        while True:
            for lane in wait([lanes.orders, lanes.control]):
                assert isinstance(lane, Connection)
                message = lane.recv_bytes()
                if lane is lanes.orders:
                    self._answered(worker, handle, read_answer(worker, message))
                else:
                    handle.beat_sent_s = time.monotonic()
                    self._inbox.put_beat(worker, Heartbeat.model_validate_json(message))

    def _connect_again(self, worker: str, handle: _Handle) -> bool:
        """New connections, and on them all that may have been lost with the old ones; False: the process is gone."""
        if handle.gone or self._reconnect is None:
            return False
        try:
            lanes = self._reconnect(worker)
        except ClusterError:
            return False
        self._inbox.put(Fact(name="connection_broken", worker=worker, detail="it has a new one"))
        with handle.sending:
            _close(handle)
            handle.lanes = lanes
            for message in handle.told.values():
                self._write(worker, handle, lanes.control, message)
            for message in handle.unanswered.values():
                self._write(worker, handle, lanes.orders, message)
        return True

    def _answered(self, worker: str, handle: _Handle, answer: Answer | Probed) -> None:
        handle.unanswered.pop("probe" if isinstance(answer, Probed) else "order", None)
        if isinstance(answer, Probed):
            handle.probe = None
            self._inbox.put_probed(answer)
            return
        if answer.kind == "ready":
            handle.beat_sent_s = time.monotonic()
            handle.ready = True
        self._inbox.put(WorkerAnswered(worker=worker, answer=answer))

    def _lose(self, worker: str, handle: _Handle, cause: str) -> None:
        if not handle.gone:
            handle.gone = True
            self._inbox.put(WorkerLost(worker=worker, cause=cause))


def _close(handle: _Handle) -> None:
    handle.lanes.orders.close()
    handle.lanes.control.close()


def _hang_up(lane: Connection) -> None:
    """End a connection whose other end may be unreachable, so that whoever listens to it here goes on."""
    with suppress(OSError), socket.socket(fileno=os.dup(lane.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)
