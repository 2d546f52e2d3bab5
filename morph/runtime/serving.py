"""Serves one worker to a manager in bytes alone: as an actor, or over two connections, of orders and of control.

An order is ``setup``, ``reshape``, ``step``, ``commit`` or ``probe``, a line break and the order as JSON; its answer
comes back as JSON. An actor is told everything else in the same way, and asked for heartbeats. On the control
connection the manager sends generations to abort, probes to leave and, as JSON, what to send ahead; heartbeats come
back.

Without Ray the worker outlives its manager like this: when both connections close it finishes its order and holds,
until connections to another manager arrive over a third one, from the process that forked it. When that one closes, the
process ends.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from pydantic import TypeAdapter

from morph.contract.base import Value
from morph.contract.messages import (
    LEAVE_PROBE,
    AheadOrder,
    CommitOrder,
    Lifeline,
    ProbeOrder,
    ReshapeOrder,
    StepOrder,
    WorkerReady,
    WorkerSetup,
)
from morph.runtime.worker import Worker

NUM_LANES = 2

ORDERS: dict[str, type[Value]] = {
    "setup": WorkerSetup,
    "reshape": ReshapeOrder,
    "step": StepOrder,
    "commit": CommitOrder,
    "probe": ProbeOrder,
}
CONTROLS: dict[str, type[Any]] = {
    "abort": int,
    "ahead": AheadOrder,
    "follow": Lifeline,
    "heartbeat": float,
    "leave_probe": int,
}
_READERS = {name: TypeAdapter(kind) for name, kind in {**ORDERS, **CONTROLS}.items()}


def pack(name: str, order: object) -> bytes:
    """An order, or what is said on the control lane, as it travels."""
    return name.encode() + b"\n" + _READERS[name].dump_json(order)


def unpack(message: bytes) -> tuple[str, Any]:
    """The inverse of ``pack``."""
    name, _, payload = message.partition(b"\n")
    return name.decode(), _READERS[name.decode()].validate_json(payload)


class WorkerActor:
    """A worker whose calls take and return bytes alone, so that neither side unpickles what the other one sends.

    An order is answered with the answer's JSON, a heartbeat with its own; everything else with nothing.
    """

    def __init__(self) -> None:
        self._worker = Worker()

    def order(self, message: bytes) -> bytes:
        """Carry out an order."""
        return self._done(message)

    def control(self, message: bytes) -> bytes:
        """Do what is said on the control lane."""
        return self._done(message)

    def _done(self, message: bytes) -> bytes:
        name, argument = unpack(message)
        result = getattr(self._worker, name)(argument)
        return result.model_dump_json().encode() if isinstance(result, Value) else b""


@dataclass(frozen=True)
class _Lanes:
    """The worker's ends of its connections to one manager."""

    number: int
    orders: Connection
    control: Connection


class _Manager:
    """Whichever manager there is. Blocks, without a bound, while there is none: whoever forked this process has one."""

    def __init__(self, orders: Connection, control: Connection) -> None:
        self._changed = threading.Condition()
        self._lanes = _Lanes(0, orders, control)
        self._broken = -1

    def join(self, orders: Connection, control: Connection) -> None:
        """Another manager is there."""
        with self._changed:
            self._lanes = _Lanes(self._lanes.number + 1, orders, control)
            self._changed.notify_all()

    def lanes(self) -> _Lanes:
        """The connections to the present manager; waits for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._lanes.number > self._broken)
            return self._lanes

    def lose(self, lanes: _Lanes) -> None:
        """A connection of these failed."""
        with self._changed:
            self._broken = max(self._broken, lanes.number)

    def receive(self, lane: str) -> bytes:
        """The next message of a lane."""
        while True:
            lanes = self.lanes()
            try:
                message: bytes = getattr(lanes, lane).recv_bytes()
            except (EOFError, OSError):
                self.lose(lanes)
                continue
            return message

    def send(self, lane: str, message: bytes) -> bool:
        """Send a message on a lane; returns whether there was a manager to take it."""
        with self._changed:
            lanes = self._lanes
        try:
            getattr(lanes, lane).send_bytes(message)
        except OSError:
            self.lose(lanes)
            return False
        return True


def serve(orders: Connection, control: Connection, rejoins: socket.socket) -> None:
    """Serve until the process that forked this one goes; then the process ends."""
    worker, manager = Worker(), _Manager(orders, control)
    beats = threading.Event()
    _in_background("morph-rejoin", lambda: _rejoin(worker, manager, rejoins))
    _in_background("morph-control", lambda: _obey(worker, manager))
    while True:
        name, order = unpack(manager.receive("orders"))
        carry_out: Callable[[Any], Value] = getattr(worker, name)
        answer = carry_out(order)
        manager.send("orders", answer.model_dump_json().encode())  # one that nobody hears is remembered
        if isinstance(order, WorkerSetup) and isinstance(answer, WorkerReady) and not beats.is_set():
            beats.set()
            _in_background("morph-heartbeat", partial(_beat, worker, manager, order.heartbeat_wait_s))


def _in_background(name: str, work: Callable[[], None]) -> None:
    """Run in a thread; when it returns, the process ends."""

    def run() -> None:
        with suppress(EOFError, OSError):
            work()
        os._exit(0)

    threading.Thread(target=run, name=name, daemon=True).start()


def _rejoin(worker: Worker, manager: _Manager, rejoins: socket.socket) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(rejoins, 64, NUM_LANES)
        if not message:
            return
        manager.join(*map(Connection, descriptors))
        worker.follow(None)


def _obey(worker: Worker, manager: _Manager) -> None:
    while True:
        message = manager.receive("control")
        if message.startswith(LEAVE_PROBE):
            worker.leave_probe(int(message.removeprefix(LEAVE_PROBE)))
        elif message.startswith(b"{"):
            worker.ahead(AheadOrder.model_validate_json(message))
        else:
            worker.abort(int(message))


def _beat(worker: Worker, manager: _Manager, wait_s: float) -> None:
    while True:
        beat = worker.heartbeat(wait_s).model_dump_json().encode()
        if not manager.send("control", beat):
            manager.lanes()  # what this one told of is told again to the next
