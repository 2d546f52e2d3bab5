"""Lines between two nodes that share a secret: each proves that it knows it, and every line is sealed with it.

The one who listens says first which protocol it speaks, with a challenge; the one who called answers it, with a
challenge of its own. The secret itself never travels. Lines are JSON, each with a keyed hash over its direction, its
number and its text, so that nobody on the way can add, change or repeat one. They are not encrypted: what travels is
what to measure, and time stamps.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from morph.contract.errors import ClusterError, ConfigError, WaitTimeout

PROTOCOL = 1
HANDSHAKE_TIMEOUT_S = 10.0
_MAX_HELLO_BYTES = 1 << 10
_MAX_LINE_BYTES = 32 << 20
_CHUNK_BYTES = 1 << 16
_CALLER, _LISTENER = "caller", "listener"


class Session:
    """One connection, after ``call`` or ``answer``. Closes with its ``with`` block."""

    def __init__(self, connection: socket.socket, key: bytes, mine: str, theirs: str, rest: bytes) -> None:
        self._connection = connection
        self._key = key
        self._mine, self._theirs = mine, theirs
        self._num_sent, self._num_received = 0, 0
        self._rest = rest

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._connection.close()

    @property
    def own_address(self) -> str:
        """This node's address on the way to the other."""
        return str(self._connection.getsockname()[0])

    @property
    def other_address(self) -> str:
        """The other node's address."""
        return str(self._connection.getpeername()[0])

    def send(self, message: Mapping[str, Any], timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
        """Send one message.

        Raises:
            ClusterError: the other node is gone, or takes nothing for ``timeout_s``.
        """
        body = json.dumps(message)
        line = {"body": body, "seal": _seal(self._key, self._mine, self._num_sent, body)}
        self._num_sent += 1
        _send(self._connection, line, timeout_s)

    def receive(self, what: str, timeout_s: float) -> dict[str, Any]:
        """Block for the next message.

        Raises:
            ClusterError: the other node is gone, or the line is not its own.
            WaitTimeout: none within ``timeout_s``; says ``what`` was waited for.
        """
        line, self._rest = _receive(self._connection, self._rest, what, timeout_s, _MAX_LINE_BYTES)
        body, seal = str(line.get("body")), str(line.get("seal"))
        if not _same(seal, _seal(self._key, self._theirs, self._num_received, body)):
            raise ClusterError("a line from the other node was changed on its way")
        self._num_received += 1
        return _parsed(body)


def call(host: str, port: int, token: str) -> Session:
    """Connect to the node that listens.

    Raises:
        ConfigError: it has another secret.
        ClusterError: it cannot be reached, or something else listens there.
        WaitTimeout: it does not answer.
    """
    what = f"the peer at {host}:{port}"
    try:
        connection = socket.create_connection((host, port), timeout=HANDSHAKE_TIMEOUT_S)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ClusterError(f"{what} cannot be reached: {reason}; is `morph calibrate-peer` running there?") from error
    try:
        greeting, rest = _receive(connection, b"", f"{what} to answer", HANDSHAKE_TIMEOUT_S, _MAX_HELLO_BYTES)
        _check_protocol(greeting, what)
        theirs, mine = str(greeting.get("challenge")), secrets.token_hex(16)
        _send(connection, {"challenge": mine, "proof": _proof(token, _CALLER, theirs, mine)}, HANDSHAKE_TIMEOUT_S)
        answer, rest = _receive(connection, rest, f"{what} to answer", HANDSHAKE_TIMEOUT_S, _MAX_HELLO_BYTES)
        if not _same(str(answer.get("proof")), _proof(token, _LISTENER, theirs, mine)):
            raise ConfigError(
                f"{what} has another secret", field="--token-file", allowed="the same secret on both nodes"
            )
        key = _proof(token, "lines", theirs, mine).encode()
        return Session(connection, key, _CALLER, _LISTENER, rest)
    except BaseException:
        connection.close()
        raise


def answer(connection: socket.socket, token: str) -> Session:
    """Let a node in that called, if it knows the secret; closes the connection if not.

    Raises:
        ClusterError: it does not know the secret, or is gone.
        WaitTimeout: it does not speak.
    """
    try:
        mine = secrets.token_hex(16)
        _send(connection, {"morph_peer": PROTOCOL, "challenge": mine}, HANDSHAKE_TIMEOUT_S)
        reply, rest = _receive(connection, b"", "the caller to speak", HANDSHAKE_TIMEOUT_S, _MAX_HELLO_BYTES)
        theirs = str(reply.get("challenge"))
        if not _same(str(reply.get("proof")), _proof(token, _CALLER, mine, theirs)):
            _send(connection, {"refused": True}, HANDSHAKE_TIMEOUT_S)
            raise ClusterError("the caller does not know the secret")
        _send(connection, {"proof": _proof(token, _LISTENER, mine, theirs)}, HANDSHAKE_TIMEOUT_S)
        key = _proof(token, "lines", mine, theirs).encode()
        return Session(connection, key, _LISTENER, _CALLER, rest)
    except BaseException:
        connection.close()
        raise


def _check_protocol(greeting: Mapping[str, Any], what: str) -> None:
    found = greeting.get("morph_peer")
    if found is None:
        raise ClusterError(f"{what} is no `morph calibrate-peer`")
    if found != PROTOCOL:
        raise ClusterError(f"{what} is of another version: it speaks protocol {found!r}, this one {PROTOCOL}")


def _proof(token: str, who: str, listeners: str, callers: str) -> str:
    return hmac.new(token.encode(), f"{who} {listeners} {callers}".encode(), hashlib.sha256).hexdigest()


def _seal(key: bytes, who: str, number: int, body: str) -> str:
    return hmac.new(key, f"{who} {number} {body}".encode(), hashlib.sha256).hexdigest()


def _same(given: str, right: str) -> bool:
    return hmac.compare_digest(given.encode(), right.encode())


def _send(connection: socket.socket, message: Mapping[str, Any], timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError as error:
        raise ClusterError(f"the other node is gone: {error.strerror or error}") from error


def _receive(
    connection: socket.socket, rest: bytes, what: str, timeout_s: float, most_bytes: int
) -> tuple[dict[str, Any], bytes]:
    """Read one line; the whole of it within ``timeout_s``, however slowly it comes."""
    end_s = time.monotonic() + timeout_s
    chunks = bytearray(rest)
    while b"\n" not in chunks:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise WaitTimeout(f"waited {timeout_s:g} s for {what}")
        connection.settimeout(left_s)
        try:
            chunk = connection.recv(_CHUNK_BYTES)
        except TimeoutError:
            continue
        except OSError as error:
            raise ClusterError(f"waiting for {what}: the other node is gone: {error.strerror or error}") from error
        if not chunk:
            raise ClusterError(f"waiting for {what}: the other node closed the connection")
        chunks += chunk
        if len(chunks) > most_bytes:
            raise ClusterError(f"waiting for {what}: more than {most_bytes} bytes came in one line")
    line, _, after = bytes(chunks).partition(b"\n")
    return _parsed(line), after


def _parsed(line: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ClusterError("what came from the other node is no message of `morph calibrate-peer`")
    return found
