"""HTTP servers on loopback that stand in for services: one function answers every request."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer, TCPServer

from tests.waiting import BOUND_S


class Server(ThreadingHTTPServer):
    """Calls ``serve`` with the handler of each request; ``date``: returns the ``Date`` header of an answer."""

    daemon_threads = True

    def __init__(
        self,
        serve: Callable[[BaseHTTPRequestHandler], None],
        address: tuple[str, int] = ("127.0.0.1", 0),
        date: Callable[[], str] = lambda: formatdate(usegmt=True),
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            disable_nagle_algorithm = True  # header and body are two packets, of which the second would wait for 40 ms
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                serve(self)

            do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = do_CONNECT = do_GET  # noqa: N815

            def date_time_string(self, timestamp: float | None = None) -> str:
                return date()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        super().__init__(address, Handler)

    def server_bind(self) -> None:
        """Bind without looking up a host name: there may be no name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that gave up."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def body_of(handler: BaseHTTPRequestHandler) -> bytes:
    return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))


def answer(
    handler: BaseHTTPRequestHandler, status: int, data: bytes = b"", headers: Mapping[str, str] | None = None
) -> None:
    """Answer a request, without the data for HEAD."""
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data)


@contextmanager
def serving(server: BaseServer) -> Iterator[None]:
    """Serve until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(BOUND_S)
