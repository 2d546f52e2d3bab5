"""What a node's agent and the manager say to one another: lines of JSON over TCP.

The manager sends a nonce; the agent answers with its node, the number of its devices, and an HMAC of all three, so that
the secret never travels, and a node cannot speak for another job. After that the agent sends ``Told`` values and beats,
the manager ``left`` lines. Nothing but numbers and names is sent: a listener learns no secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any

MAX_LINE_BYTES = 65536
NONCE_BYTES = 32


def new_nonce() -> str:
    """Return what a new connection must sign."""
    return secrets.token_hex(NONCE_BYTES)


def proof(secret: str, nonce: str, node: str, num_devices: int) -> str:
    """Return the HMAC with which a node answers a nonce."""
    told = f"morph-notices {nonce} {node} {num_devices}"
    return hmac.new(secret.encode(), told.encode(), hashlib.sha256).hexdigest()


def is_proven(secret: str, nonce: str, node: str, num_devices: int, answer: str) -> bool:
    """Whether the answer is right, in constant time."""
    known = proof(secret, nonce, node, num_devices)
    return hmac.compare_digest(known.encode(), answer.encode("utf-8", errors="replace"))


class Lines:
    """Objects over a connected socket. One thread reads, any one at a time writes.

    ``read`` raises TimeoutError when nothing comes in time, and OSError when the other end is gone or does not speak
    like this.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""

    def write(self, **entries: Any) -> None:
        """Send one object; raises OSError when the other end is gone."""
        self._connection.sendall(json.dumps(entries).encode() + b"\n")

    def read(self, timeout_s: float) -> dict[str, Any]:
        """Return the next object; ``timeout_s`` is for all of it, however slowly it comes."""
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
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConnectionError("a line is not JSON") from error
        if not isinstance(found, dict):
            raise ConnectionError("a line is no object")
        return found

    def close(self) -> None:
        """Close the connection; a thread that reads is told so."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
