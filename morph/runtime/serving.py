"""Serves one worker to a manager over two local connections, without Ray: orders on one, control on the other.

An order is ``setup``, ``reshape``, ``step``, ``commit`` or ``probe``, a line break and the order as JSON; its answer
comes back as JSON. On the control connection the manager sends generations to abort, probes to leave
and, as JSON, what to send ahead, and gets heartbeats. When the manager goes, which closes both, the process ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from morph.contract.base import Value
from morph.contract.messages import (
    LEAVE_PROBE,
    AheadOrder,
    CommitOrder,
    ProbeOrder,
    ReshapeOrder,
    StepOrder,
    WorkerReady,
    WorkerSetup,
)
from morph.runtime.worker import Worker

ORDERS: dict[str, type[Value]] = {
    "setup": WorkerSetup,
    "reshape": ReshapeOrder,
    "step": StepOrder,
    "commit": CommitOrder,
    "probe": ProbeOrder,
}


def pack(name: str, order: Value) -> bytes:
    """An order as it travels."""
    return f"{name}\n{order.model_dump_json()}".encode()


def unpack(message: bytes) -> tuple[str, Value]:
    """The inverse of ``pack``."""
    name, _, payload = message.partition(b"\n")
    return name.decode(), ORDERS[name.decode()].model_validate_json(payload)


def serve(orders: Connection, control: Connection) -> None:
    """Serve until the manager goes; then the process ends."""
    worker = Worker()
    _in_background("morph-control", lambda: _obey(worker, control))
    with suppress(EOFError, OSError):
        while True:
            name, order = unpack(orders.recv_bytes())
            carry_out: Callable[[Any], Value] = getattr(worker, name)
            answer = carry_out(order)
            orders.send_bytes(answer.model_dump_json().encode())
            if isinstance(order, WorkerSetup) and isinstance(answer, WorkerReady):
                _in_background("morph-heartbeat", partial(_beat, worker, control, order.heartbeat_wait_s))
    os._exit(0)


def _in_background(name: str, work: Callable[[], None]) -> None:
    """Run in a thread; when it returns, the process ends."""

    def run() -> None:
        with suppress(EOFError, OSError):
            work()
        os._exit(0)

    threading.Thread(target=run, name=name, daemon=True).start()


def _obey(worker: Worker, control: Connection) -> None:
    while True:
        message = control.recv_bytes()
        if message.startswith(LEAVE_PROBE):
            worker.leave_probe(int(message.removeprefix(LEAVE_PROBE)))
        elif message.startswith(b"{"):
            worker.ahead(AheadOrder.model_validate_json(message))
        else:
            worker.abort(int(message))


def _beat(worker: Worker, control: Connection, wait_s: float) -> None:
    while True:
        control.send_bytes(worker.heartbeat(wait_s).model_dump_json().encode())
