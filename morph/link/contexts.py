"""TLS of a run's own connections: version 1.3, and both ends show a certificate of the run's authority."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

CERTIFICATE, KEY, AUTHORITY = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"
"""Where the paths are, on every machine of a run that has certificates; Ray reads them too."""


def server_context(certificate: Path, key: Path, authority: Path) -> ssl.SSLContext:
    """For the end that is called.

    Raises:
        OSError: a file is gone, or is no certificate or key.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, str(certificate), str(key), str(authority))
    context.num_tickets = 0  # they would lie unread on connections on which nothing else comes
    return context


def client_context() -> ssl.SSLContext:
    """For the end that calls; it also checks that the other one's certificate is of the address that was called.

    Raises:
        OSError: a file is gone, or is no certificate or key.
        KeyError: the environment does not say where they are.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, os.environ[CERTIFICATE], os.environ[KEY], os.environ[AUTHORITY])


def _context(protocol: int, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority)
    context.load_cert_chain(certificate, key)
    return context
