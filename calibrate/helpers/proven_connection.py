"""A connection over TLS for JSON between two nodes that share a secret, which itself never travels (``morph/link``)."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

from morph.contract.errors import ClusterError, ConfigError, WaitTimeout
from morph.link.authority import credential_of
from morph.link.session import LinkSession
from morph.link.wire import Wire

NAME = "morph calibrate-peer"
HANDSHAKE_TIMEOUT_S = 10.0


class ProvenConnection(LinkSession):
    """One connection, after ``call`` or ``answer``. Closes with its ``with`` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send_message(self, message: Mapping[str, Any], timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
        """Send one message; ClusterError: the other node is gone, or accepts nothing for ``timeout_s``."""
        try:
            self.send(json.dumps(message).encode(), timeout_s)
        except OSError as error:
            raise ClusterError(f"the other node is gone: {error.strerror or error}") from error

    def receive_message(self, what: str, timeout_s: float) -> dict[str, Any]:
        """Block for the next message. Raises ClusterError or WaitTimeout, which says ``what`` was awaited."""
        try:
            return self.hear(timeout_s)
        except TimeoutError as error:
            raise WaitTimeout(f"waited {timeout_s:g} s for {what}") from error
        except OSError as error:
            raise ClusterError(f"waiting for {what}: {error.strerror or error}") from error


def call(host: str, port: int, token: str) -> ProvenConnection:
    """Connect to the node that listens. Raises ConfigError if it has another secret, ClusterError, WaitTimeout."""
    what = f"the peer at {host}:{port}"
    try:
        connection = socket.create_connection((host, port), timeout=HANDSHAKE_TIMEOUT_S)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ClusterError(f"{what} cannot be reached: {reason}; is `{NAME}` running there?") from error
    proven = ProvenConnection(connection, Wire(credential_of(token), listens=False))
    try:
        with ExitStack() as failing:
            failing.callback(proven.close)
            proven.greet(timeout_s=HANDSHAKE_TIMEOUT_S)
            failing.pop_all()
    except TimeoutError as error:
        raise WaitTimeout(f"waited {HANDSHAKE_TIMEOUT_S:g} s for {what} to answer as `{NAME}`") from error
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"{what} has another secret", field="--token-file", allowed="the same secret on both nodes"
        ) from error
    except OSError as error:
        raise ClusterError(f"{what} does not answer as `{NAME}`: {error.strerror or error}") from error
    return proven


def answer(connection: socket.socket, token: str) -> ProvenConnection:
    """Let in a node that knows the secret. Raises ClusterError for another, and WaitTimeout if it sends nothing."""
    proven = ProvenConnection(connection, Wire(credential_of(token), listens=True))
    try:
        with ExitStack() as failing:
            failing.callback(proven.close)
            proven.welcome(0, HANDSHAKE_TIMEOUT_S)
            proven.let_in()
            failing.pop_all()
    except TimeoutError as error:
        raise WaitTimeout(f"waited {HANDSHAKE_TIMEOUT_S:g} s for the caller to speak") from error
    except OSError as error:
        raise ClusterError(f"the caller is not a `morph calibrate` with this secret: {error}") from error
    return proven
