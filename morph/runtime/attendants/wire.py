"""How a sender finds its receiver, and the frames between them, over one plain TCP connection; each is acknowledged.

Both prove that they belong to the run. A frame holds a unit's state or one decided step. The connection is not a group:
closing it ends blocked calls at once on both sides, so a stream can be dropped at any moment.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store

from morph.checkpoint.unit_files import from_payload, layout
from morph.contract.decided import Decided
from morph.contract.messages import DEFAULT_LIMIT_S
from morph.link.proof import is_proven, new_secret, proof
from morph.runtime.device.staging import Ready, on_host
from morph.runtime.groups.faults import FaultPlan
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


class Rendezvous:
    """The rendezvous of one receiver and its senders, for one order or generation: ``occasion``, unique in this run.

    The receiver writes its address and a nonce into the rendezvous store with a proof by the run's secret, because
    anyone could write there; a sender's hello proves its name for that nonce.
    """

    def __init__(self, occasion: str, receiver: str, secret: str) -> None:
        self.key = f"ahead/{occasion}/{receiver}"
        self._secret = secret

    def told(self, host: str, port: int) -> str:
        """Return the text that the receiver writes under ``key``, with a new nonce each time."""
        nonce = new_secret()
        return f"{host} {port} {nonce} {proof(self._secret, 'receiver', self.key, host, str(port), nonce)}"

    def address(self, invitation: str) -> tuple[str, int]:
        """Return the receiver's address. Raises ConnectionError if the text is not from the receiver."""
        host, port, nonce, given = _parts(invitation)
        if not is_proven(given, self._secret, "receiver", self.key, host, port, nonce):
            raise ConnectionError("the receiver's address was written by someone else")
        return host, int(port)

    def hello(self, invitation: str, sender: str) -> dict[str, str]:
        """Return the facts of a sender's first frame."""
        _, _, nonce, _ = _parts(invitation)
        return {"kind": "hello", "worker": sender, "proof": proof(self._secret, "sender", self.key, nonce, sender)}

    def greeted(self, invitation: str, facts: Mapping[str, Any]) -> str | None:
        """Return the sender of a hello; None if it is not from a sender."""
        _, _, nonce, _ = _parts(invitation)
        sender, given = str(facts.get("worker")), str(facts.get("proof"))
        return sender if is_proven(given, self._secret, "sender", self.key, nonce, sender) else None


@dataclass(frozen=True, kw_only=True)
class StreamContext:
    """The context of all streams from and to one worker, for one order or generation: see ``for_order``.

    ``open_store``: lends a connection to the store. ``limit_s``: how long the other end may be absent; a sender may be
    silent for twice as long.
    """

    worker: str
    secret: str
    listen_host: str
    open_store: Callable[[], AbstractContextManager[Store]]
    faults: FaultPlan
    occasion: str = ""
    limit_s: float = DEFAULT_LIMIT_S

    def for_order(self, occasion: str, limit_s: float) -> StreamContext:
        """Return the context for one order or generation."""
        return replace(self, occasion=occasion, limit_s=limit_s)

    def rendezvous(self, receiver: str) -> Rendezvous:
        """Return the rendezvous at which these streams' senders find a receiver."""
        return Rendezvous(self.occasion, receiver, self.secret)


def _parts(invitation: str) -> tuple[str, str, str, str]:
    parts = invitation.rsplit(" ", 3)
    if len(parts) < 4:
        raise ConnectionError("the receiver's address is not valid")
    host, port, nonce, given = parts
    return host, port, nonce, given
