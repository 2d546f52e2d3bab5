"""Two ends of a connection in one thread: what one puts goes to the other at once."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from manager.engine.joining.certificates import Tls, make_certificates
from manager.enrolment.files import Certificates
from morph.link.contexts import client_context, server_context
from morph.link.wire import Wire

LOOPBACK = "127.0.0.1"
KEY = "k" * 64


def certificates(folder: Path, address: str = LOOPBACK) -> Certificates:
    """Of a run of its own."""
    folder.mkdir()
    return make_certificates(folder, Tls(address))


def show(files: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a caller show these."""
    for name, value in files.ray_environment.items():
        monkeypatch.setenv(name, value)


def listening(files: Certificates) -> ssl.SSLContext:
    """What the end that is called shows and wants."""
    return server_context(files.certificate, files.key, files.authority)


class Pair:
    """A listener's wire and a caller's, which have shaken hands."""

    def __init__(self, server: ssl.SSLContext | None = None, *, name: str = LOOPBACK) -> None:
        self.listener = Wire(server)
        self.caller = Wire(client_context() if server else None, name)
        self.pass_on(self.caller.shake())

    def pass_on(self, data: bytes) -> None:
        """Bring bytes of the caller over, and the answers to them, until neither has any."""
        while data:
            answer = self.listener.take(data)
            data = self.caller.take(answer) if answer else b""

    def know(self) -> None:
        """Both have proven who they are."""
        self.listener.seal(KEY)
        self.caller.seal(KEY)
