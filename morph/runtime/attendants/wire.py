"""Frames from a sender to a receiver, over one plain TCP connection; each is acknowledged.

A frame holds a unit's state or one decided step. The connection is not a group: closing it ends blocked calls at once
on both sides, so a stream can be dropped at any moment.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from morph.checkpoint.unit_files import from_payload, layout
from morph.contract.decided import Decided
from morph.runtime.device.staging import Ready, on_host
from morph.runtime.state.accumulators import Reduced
from morph.runtime.state.unit_state import UnitState

HEADER = struct.Struct("<IQ")
ACKNOWLEDGED = b"+"
CONNECT_TIMEOUT_S = 30.0
GREETING_BYTES = 4096


@dataclass(frozen=True)
class Frame:
    """``facts`` is JSON; ``tensors`` of a device are copied while the frame is sent, once they are ``ready``."""

    facts: dict[str, Any]
    tensors: Mapping[str, Tensor]
    ready: Ready = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ready", Ready(self.tensors.values()))

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def send_frame(connection: socket.socket, frame: Frame) -> int:
    """Send a frame and wait until it has arrived; returns its size. Raises OSError."""
    facts, num_bytes, names = json.dumps(frame.facts).encode(), 0, list[str]()
    if frame.tensors:
        header, names = layout(frame.tensors)
        facts_and_header = facts + len(header).to_bytes(8, "little") + header
        num_bytes = 8 + len(header) + frame.num_bytes
    else:
        facts_and_header = facts
    connection.sendall(HEADER.pack(len(facts), num_bytes) + facts_and_header)
    for piece in on_host((frame.tensors[name] for name in names), frame.ready):
        connection.sendall(memoryview(piece.numpy()))  # type: ignore[arg-type] # torch ships no types for it
    if connection.recv(1) != ACKNOWLEDGED:
        raise ConnectionError("the receiver hung up")
    return num_bytes


def receive_frame(connection: socket.socket, most_bytes: int | None = None) -> tuple[Frame, int] | None:
    """Receive a frame and its size; None at the end. Raises OSError if it breaks off or has over ``most_bytes``."""
    header = _receive(connection, HEADER.size)
    if header is None:
        return None
    num_facts, num_bytes = HEADER.unpack(header)
    if most_bytes is not None and num_facts + num_bytes > most_bytes:
        raise ConnectionError(f"a frame of {num_facts + num_bytes} bytes")
    facts, payload = _receive(connection, num_facts), _receive(connection, num_bytes)
    if facts is None or payload is None:
        raise ConnectionError("the sender hung up within a frame")
    return Frame(json.loads(facts), from_payload(memoryview(payload)) if payload else {}), num_bytes


def level_of(error: Exception) -> int:
    """Return the log level for the end of a stream: lower for a broken connection or store, which is no news."""
    return logging.INFO if isinstance(error, OSError | RuntimeError) else logging.ERROR


def acknowledge(connection: socket.socket) -> None:
    """Acknowledge a frame, so that the sender continues."""
    connection.sendall(ACKNOWLEDGED)


def close(connection: socket.socket) -> None:
    """End a connection, and the calls that are blocked on it."""
    with suppress(OSError):  # the connection is closed already, or was never open
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _receive(connection: socket.socket, num_bytes: int) -> bytearray | None:
    """Receive this many bytes; None if the other end has hung up before the first."""
    buffer = bytearray(num_bytes)
    view, done = memoryview(buffer), 0
    while done < num_bytes:
        count = connection.recv_into(view[done:])
        if count == 0:
            if done:
                raise ConnectionError("the sender hung up within a frame")
            return None
        done += count
    return buffer


def copy_of_update(state: UnitState, decided: Decided | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Copy the update that the unit is about to apply, as facts and tensors by parameter, on their device."""
    facts = {**facts_of_update(state), "decided": None if decided is None else decided.model_dump()}
    if decided is not None and decided.skipped:
        return facts, {}  # nothing of the gradients is applied
    return facts, {name: value.clone() for name, value in gradients_of_update(state).items()}


def facts_of_update(state: UnitState) -> dict[str, Any]:
    """Return the facts about the gradients that a unit holds."""
    reduced = state.reduced
    assert reduced is not None, f"unit {state.unit.id} has nothing to apply"
    return {
        "version": state.version,
        "exponents": dict(state.exponents),
        "next_exponents": dict(reduced.exponents),
        "overflowed": reduced.overflowed,
        "non_finite": reduced.non_finite,
    }


def gradients_of_update(state: UnitState) -> dict[str, Tensor]:
    """Return the gradients that a unit holds, in the unit's own memory."""
    assert state.reduced is not None
    return {name: value.detach().contiguous() for name, value in state.reduced.gradients.items()}


def hold_update(state: UnitState, facts: dict[str, Any], gradients: dict[str, Tensor]) -> None:
    """Hold reduced gradients until they are decided. Raises ValueError if they are not of the unit's version."""
    if facts["version"] != state.version:
        raise ValueError(f"unit {state.unit.id}: version {state.version} cannot take step {facts['version']}")
    reduced = Reduced(
        gradients=gradients,
        exponents=facts["next_exponents"],
        overflowed=facts["overflowed"],
        non_finite=facts["non_finite"],
    )
    state.take_over(reduced, facts["exponents"])


def apply_update(state: UnitState, facts: dict[str, Any], gradients: dict[str, Tensor]) -> None:
    """Make a unit equal the sender's, bit for bit. Raises ValueError if the update is not of its version."""
    hold_update(state, facts, gradients)
    state.apply(None if facts["decided"] is None else Decided.model_validate(facts["decided"]))
