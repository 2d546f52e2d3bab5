"""How a node calls its manager, over TLS with the nodes' credential (``morph.link``); messages are JSON objects.

A node's agent keeps its connection. It sends ``Told`` values and beats; the manager sends ``left`` messages, and
``heard`` for each message of the agent. A connection for an errand carries one request and its answer::

    {"kind": "wheel"}                            answered by the bytes of Morph's wheel, as one message
    {"kind": "lock"}                             answered by what pip is to install there, in the same way
    {"kind": "unfit", "why": SENTENCE}                       {"heard": true}
    {"kind": "certificate", "request": CSR}                  {"certificate": PEM} or {"refused": SENTENCE}

CSR is the node's signing request in PEM; its signature proves that the node has the key. A node cannot speak for
another job, and no node has the secret that it would need to act as the manager.
"""

from __future__ import annotations

import argparse
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Tuple  # noqa: UP035 (a VM that boots may have Python 3.8)

from morph.link.session import LinkSession
from morph.link.wire import Wire

AGENT, ERRAND = ROLES = ("agent", "errand")
CONNECT_TIMEOUT_S = 10.0


@contextmanager
def called(
    manager: Tuple[str, int],  # noqa: UP006
    secret: str,
    node: str,
    role: str,
    num_devices: int = 1,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    source: str = "",
) -> Iterator[LinkSession]:
    """Call the manager; the connection closes with the context.

    ``role``: ``AGENT`` or ``ERRAND``. ``timeout_s``: the bound for each of the manager's messages in the greeting.
    ``source``: the address to call from; empty: the kernel's choice. OSError: the manager cannot be reached, is slow,
    or another process answers.
    """
    with socket.create_connection(manager, CONNECT_TIMEOUT_S, (source, 0) if source else None) as connection:
        session = LinkSession(connection, Wire(secret, listens=False))
        session.greet(node, str(num_devices), role, timeout_s=timeout_s)
        yield session


def arguments_of_node(module: str) -> argparse.ArgumentParser:
    """Return a parser for a program of a node, with options for its name, its manager's address, and their secret."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--manager", required=True, type=_address, metavar="HOST:PORT")
    parser.add_argument("--node", required=True)
    parser.add_argument("--secret-file", required=True, type=Path)
    return parser


def secret_in(given: argparse.Namespace) -> str:
    """Return the secret that the program was given."""
    return str(given.secret_file.read_text(encoding="utf-8").strip())


def _address(text: str) -> Tuple[str, int]:  # noqa: UP006
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError("is not HOST:PORT")
    return host, int(port)
