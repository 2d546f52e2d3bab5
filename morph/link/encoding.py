"""Encodes messages between the manager and a worker as bytes: the message's name, a line break, and the rest as JSON.

An order is ``setup``, ``reshape``, ``step``, ``commit`` or ``probe``; the worker replies with ``answer``. Messages that
abort a generation, end a probe or ask for a pre-copy get no reply. Workers send their heartbeats as ``beat``.
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
    """Return an order, or a message that gets no reply, as bytes."""
    return name.encode() + b"\n" + _READERS[name].dump_json(order)


def packed(name: str, said: Value) -> bytes:
    """Return an answer, or a heartbeat, as bytes."""
    return name.encode() + b"\n" + said.model_dump_json().encode()


def parts(message: bytes) -> tuple[str, bytes]:
    """Return the name of a message, and the rest of it."""
    name, _, payload = message.partition(b"\n")
    return name.decode("ascii", errors="replace"), payload


def unpack(message: bytes) -> tuple[str, Any]:
    """Return the name of a message and its content: the inverse of ``pack``.

    Raises ValueError if no manager sends such a message.
    """
    name, payload = parts(message)
    if name not in _READERS:
        raise ValueError(f"unknown order {name[:20]!r}")
    return name, _READERS[name].validate_json(payload)
