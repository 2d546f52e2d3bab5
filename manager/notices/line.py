"""What a node's agent and the manager say to one another: lines of JSON over TCP.

::

    manager   {"nonce": N}
    agent     {"node": NODE, "devices": D, "fresh": F, "proof": P("agent", N, F, NODE, D)}

N and F are 256 random bits each, the manager's and the agent's, for one connection; P is the HMAC-SHA256 under the
secret of both. From here on every line of either is sealed with a key made of the secret, N and F: with its sender, its
number and its text. The first is the manager's ``welcome``. So the secret never travels, a node cannot speak for
another job, and whoever has not the secret can neither stand in for the manager nor add, change or repeat a line. The
agent then sends ``Told`` values and beats, the manager ``left`` lines. Only numbers and names are sent: whoever listens
learns no secret.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from morph.contract.proof import is_proven, proof

MAX_LINE_BYTES = 65536
LABEL = "morph-notices"


@dataclass(frozen=True)
class Handshake:
    """One connection of a node's agent: what its hello proves, and with what the lines after it are sealed."""

    secret: str
    nonce: str
    fresh: str
    node: str
    num_devices: int

    def hello(self) -> dict[str, Any]:
        """Return the agent's first line."""
        return {"node": self.node, "devices": self.num_devices, "fresh": self.fresh, "proof": proof(*self._parts())}

    def is_proven(self, given: str) -> bool:
        """Whether a hello with this proof was made with the secret, in constant time."""
        return is_proven(given, *self._parts())

    @property
    def key(self) -> str:
        """Of the seals."""
        return proof(self.secret, LABEL, "lines", self.nonce, self.fresh, self.node)

    def _parts(self) -> tuple[str, ...]:
        return (self.secret, LABEL, "agent", self.nonce, self.fresh, self.node, str(self.num_devices))


class Lines:
    """Objects over a connected socket. One thread reads, any one at a time writes.

    ``read`` raises TimeoutError when nothing comes in time, and OSError when the other end is gone or does not speak
    like this.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        self._key, self._mine, self._theirs = "", "", ""
        self._num_written = self._num_read = 0
        self._writing = threading.Lock()

    def seal(self, key: str, mine: str, theirs: str) -> None:
        """From now on every line has a seal. ``mine``, ``theirs``: what the two ends call themselves."""
        self._key, self._mine, self._theirs = key, mine, theirs

    def write(self, **entries: Any) -> None:
        """Send one object; raises OSError when the other end is gone."""
        with self._writing:
            text = json.dumps(entries)
            if self._key:
                seal = proof(self._key, self._mine, str(self._num_written), text)
                self._num_written += 1
                text = json.dumps({"text": text, "seal": seal})
            self._connection.sendall(text.encode() + b"\n")

    def write_bytes(self, data: bytes, timeout_s: float) -> None:
        """Send what the other end reads with ``read_bytes``, without a seal; raises OSError when it is gone or slow."""
        with self._writing:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(data)

    def read_bytes(self, count: int, timeout_s: float) -> bytes:
        """Return the next so many bytes; ``timeout_s`` is for all of them."""
        until_s, found = time.monotonic() + timeout_s, bytearray(self._received)
        while len(found) < count:
            self._connection.settimeout(max(0.001, until_s - time.monotonic()))
            chunk = self._connection.recv(MAX_LINE_BYTES)
            if not chunk:
                raise ConnectionError("the other end closed the connection")
            found += chunk
        self._received = bytes(found[count:])
        return bytes(found[:count])

    def read(self, timeout_s: float) -> dict[str, Any]:
        """Return the next object; ``timeout_s`` is for all of it, however slowly it comes."""
        found = _object(self._line(timeout_s))
        if not self._key:
            return found
        text, seal = found.get("text"), found.get("seal")
        number, self._num_read = str(self._num_read), self._num_read + 1
        if not (isinstance(text, str) and isinstance(seal, str)):
            raise ConnectionError("a line has no seal")
        if not is_proven(seal, self._key, self._theirs, number, text):
            raise ConnectionError("a line was not written with the secret")
        return _object(text.encode())

    def _line(self, timeout_s: float) -> bytes:
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no whole line came within {timeout_s:g} s")
            self._connection.settimeout(left_s)
            chunk = self._connection.recv(MAX_LINE_BYTES)
            if not chunk:
                raise ConnectionError("the other end closed the connection")
            self._received += chunk
            if len(self._received) > MAX_LINE_BYTES:
                raise ConnectionError("a line is too long")
        line, _, self._received = self._received.partition(b"\n")
        return line

    def close(self) -> None:
        """Close the connection; a thread that reads is told so."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("a line is not JSON") from error
    if not isinstance(found, dict):
        raise ConnectionError("a line is not an object")
    return found
