"""Access to encrypted Ray clusters, and where their keys are, examined from outside on real processes."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

from manager.enrolment.files import Certificates
from tests.waiting import BOUND_S

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Every connection of HTTP/2, and so of gRPC, begins with this; a server answers with a frame of its own."""
PRIVATE = b"-----BEGIN PRIVATE KEY-----"
PLAIN = "without TLS"


def let_in(address: str, port: int, context: ssl.SSLContext | None) -> bool:
    """Return whether a process of Ray answers a client with these credentials; None: without TLS."""
    with socket.create_connection((address, port), timeout=BOUND_S) as plain:
        try:
            connection = context.wrap_socket(plain, server_hostname=address) if context else plain
            with connection:
                connection.sendall(HELLO)
                return connection.recv(9) != b""
        except (ssl.SSLError, ConnectionError):
            return False


def visitors(authority: Path, shown: Mapping[str, Certificates | None]) -> dict[str, ssl.SSLContext | None]:
    """Return clients with these certificates, without a certificate, and without TLS; all know this authority."""
    found: dict[str, ssl.SSLContext | None] = {PLAIN: None}
    for name, chain in shown.items():
        context = ssl.create_default_context(cafile=str(authority))
        context.set_alpn_protocols(["h2"])
        if chain is not None:
            context.load_cert_chain(chain.certificate, chain.key)
        found[name] = context
    return found


def answered(address: str, port: int, coming: Mapping[str, ssl.SSLContext | None]) -> set[str]:
    """Return the names of the clients that are accepted."""
    return {name for name, context in coming.items() if let_in(address, port, context)}


def keys_in(files: Mapping[Path, bytes]) -> dict[Path, str]:
    """Return the files that are private keys, each with the first line of its key."""
    return {path: data.splitlines()[1].decode() for path, data in files.items() if data.startswith(PRIVATE)}
