"""What the manager and a worker say to one another, as it travels: what it is, a line break, and the rest as JSON.

An order is ``setup``, ``reshape``, ``step``, ``commit`` or ``probe``; it is answered with ``answer``. Beside the orders
go generations to abort, probes to leave and what to pre-copy, which nobody answers; and ``beat``, the worker's
heartbeats.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from morph.contract.base import Value
from morph.contract.messages import CommitOrder, PreCopyOrder, ProbeOrder, ReshapeOrder, StepOrder, WorkerSetup

ORDERS: dict[str, type[Value]] = {
    "setup": WorkerSetup,
    "reshape": ReshapeOrder,
    "step": StepOrder,
    "commit": CommitOrder,
    "probe": ProbeOrder,
}
CONTROLS: dict[str, type[Any]] = {"abort": int, "ahead": PreCopyOrder, "leave_probe": int}
ANSWER, BEAT = "answer", "beat"
_READERS = {name: TypeAdapter(kind) for name, kind in {**ORDERS, **CONTROLS}.items()}


def pack(name: str, order: object) -> bytes:
    """An order, or what is said beside them, as it travels."""
    return name.encode() + b"\n" + _READERS[name].dump_json(order)


def packed(name: str, said: Value) -> bytes:
    """An answer, or a heartbeat."""
    return name.encode() + b"\n" + said.model_dump_json().encode()


def parts(message: bytes) -> tuple[str, bytes]:
    """What a message is, and the rest of it."""
    name, _, payload = message.partition(b"\n")
    return name.decode("ascii", errors="replace"), payload


def unpack(message: bytes) -> tuple[str, Any]:
    """The inverse of ``pack``.

    Raises:
        ValueError: it is nothing that a manager says.
    """
    name, payload = parts(message)
    if name not in _READERS:
        raise ValueError(f"no order is called {name[:20]!r}")
    return name, _READERS[name].validate_json(payload)
