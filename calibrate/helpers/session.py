"""A connection between two nodes that share a secret: each proves that it knows it, and every message is sealed.

The secret itself never travels (``morph/link``). Messages are JSON, and not encrypted: what is sent is what to measure,
and time stamps.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

from morph.contract.errors import ClusterError, ConfigError, WaitTimeout
from morph.link import session as link
from morph.link.greeting import Greeting
from morph.link.proof import new_secret
from morph.link.wire import Wire

PROTOCOL = 2
NAME = "morph calibrate-peer"
HANDSHAKE_TIMEOUT_S = 10.0
_REFUSED = b"refused"


class Session:
    """One connection, after ``call`` or ``answer``. Closes with its ``with`` block."""

    def __init__(self, link: link.Session) -> None:
        self._link = link

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._link.close()

    @property
    def own_address(self) -> str:
        """This node's address on the way to the other."""
        return self._link.own_address

    @property
    def other_address(self) -> str:
        """The other node's address."""
        return self._link.other_address

    def send(self, message: Mapping[str, Any], timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
        """Send one message.

        Raises:
            ClusterError: the other node is gone, or takes nothing for ``timeout_s``.
        """
        self.put(json.dumps(message).encode(), timeout_s)

    def receive(self, what: str, timeout_s: float) -> dict[str, Any]:
        """Block for the next message.

        Raises:
            ClusterError: the other node is gone, or the message is not its own.
            WaitTimeout: none within ``timeout_s``; says ``what`` was waited for.
        """
        message = json.loads(self.next(what, timeout_s))
        assert isinstance(message, dict), "sealed by this version's own code"
        return message

    def put(self, body: bytes, timeout_s: float) -> None:
        """Send the bytes of one message; raises as ``send``."""
        try:
            self._link.send(body, timeout_s)
        except OSError as error:
            raise ClusterError(f"the other node is gone: {error.strerror or error}") from error

    def next(self, what: str, timeout_s: float) -> bytes:
        """Block for the bytes of the next message, the whole of it within ``timeout_s``; raises as ``receive``."""
        try:
            return self._link.receive(timeout_s)
        except TimeoutError as error:
            raise WaitTimeout(f"waited {timeout_s:g} s for {what}") from error
        except OSError as error:
            raise ClusterError(f"waiting for {what}: {error.strerror or error}") from error

    def known(self, greeting: Greeting, token: str) -> Session:
        """Return this, sealed from now on."""
        self._link.seal(greeting, token)
        return self


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
        raise ClusterError(f"{what} cannot be reached: {reason}; is `{NAME}` running there?") from error

    def greet(session: Session) -> Session:
        nonce = session.next(f"{what} to answer as `{NAME}`", HANDSHAKE_TIMEOUT_S)
        _check_protocol(nonce, what)
        greeting = Greeting.to(nonce, NAME)
        session.put(greeting.hello(token), HANDSHAKE_TIMEOUT_S)
        if not greeting.is_of_listener(session.next(f"{what} to answer", HANDSHAKE_TIMEOUT_S), token):
            raise ConfigError(
                f"{what} has another secret", field="--token-file", allowed="the same secret on both nodes"
            )
        return session.known(greeting, token)

    return _greeted(Session(link.Session(connection, Wire(None, host))), greet)


def answer(connection: socket.socket, token: str) -> Session:
    """Let a node in that called, if it knows the secret; closes the connection if not.

    Raises:
        ClusterError: it does not know the secret, or is gone.
        WaitTimeout: it does not speak.
    """

    def greet(session: Session) -> Session:
        nonce = f"{NAME} {PROTOCOL} {new_secret()}"
        session.put(nonce.encode(), HANDSHAKE_TIMEOUT_S)
        hello = session.next("the caller to speak", HANDSHAKE_TIMEOUT_S)
        try:
            greeting, given = Greeting.heard(hello, nonce, NAME, 0)
        except ValueError as error:
            raise ClusterError(f"the caller is no `morph calibrate`: {error}") from error
        if not greeting.is_of_caller(given, token):
            session.put(_REFUSED, HANDSHAKE_TIMEOUT_S)
            raise ClusterError("the caller does not know the secret")
        session.put(greeting.welcome(token), HANDSHAKE_TIMEOUT_S)
        return session.known(greeting, token)

    return _greeted(Session(link.Session(connection, Wire(None))), greet)


def _greeted(session: Session, greet: Callable[[Session], Session]) -> Session:
    try:
        return greet(session)
    except BaseException:
        session.close()
        raise


def _check_protocol(nonce: bytes, what: str) -> None:
    name, _, rest = nonce.decode(errors="replace").rpartition(" ")[0].rpartition(" ")
    if name != NAME:
        raise ClusterError(f"{what} is no `{NAME}`")
    if rest != str(PROTOCOL):
        raise ClusterError(f"{what} is of another version: it speaks protocol {rest}, this one {PROTOCOL}")
