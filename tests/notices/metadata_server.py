"""A metadata service on loopback: real HTTP, scripted replies, and a record of every request."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_service import Server, body_of, serving

HANG_BOUND_S = 30.0


@dataclass
class Reply:
    """One reply.

    ``wait``: it is held back until this event is set. ``drop``: the connection is closed instead. ``short``: the body
    ends before its length. ``drip``: it comes one byte each tenth of a second, for ever.
    """

    status: int = 200
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    wait: threading.Event | None = None
    drop: bool = False
    short: bool = False
    drip: bool = False


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def json_reply(document: object, **fields: Any) -> Reply:
    return Reply(body=json.dumps(document), **fields)


class MetadataServer:
    """Replies by (method, path without query); the last reply of a script is repeated."""

    def __init__(self) -> None:
        self.scripts: dict[tuple[str, str], list[Reply]] = {}
        self.asked: list[Asked] = []
        self.over = threading.Event()
        self.date = ""  # the time of the Date header, if it is not this machine's
        self.lock = threading.Lock()
        self.http = Server(self.serve, date=lambda: self.date or formatdate(usegmt=True))
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def script(self, method: str, path: str, *replies: Reply) -> None:
        with self.lock:
            self.scripts[method, path.split("?")[0]] = list(replies)

    def next_reply(self, method: str, path: str) -> Reply:
        with self.lock:
            return self.scripts.get((method, path), [Reply(status=404)])[0]

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = body_of(handler)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        with self.lock:
            self.asked.append(Asked(handler.command, handler.path, headers, body))
            replies = self.scripts.get((handler.command, handler.path.split("?")[0]), [Reply(status=404)])
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if reply.wait is not None:
            reply.wait.wait(HANG_BOUND_S)
        if reply.drop:
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return
        handler.send_response(reply.status)
        data = reply.body.encode()
        extra = 100 if reply.short or reply.drip else 0
        for name, value in {"Content-Length": str(len(data) + extra), **reply.headers}.items():
            handler.send_header(name, value)
        try:
            handler.end_headers()
            handler.wfile.write(data)
        except OSError:
            return  # the client no longer waits
        handler.close_connection = reply.short or reply.drip
        while reply.drip and not self.over.wait(0.1):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return


@contextmanager
def served() -> Iterator[MetadataServer]:
    server = MetadataServer()
    with serving(server.http):
        try:
            yield server
        finally:
            server.over.set()
            with server.lock:
                for replies in server.scripts.values():
                    for reply in replies:
                        if reply.wait is not None:
                            reply.wait.set()
