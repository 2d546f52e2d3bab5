"""Serves a run's page on loopback to clients that have the token.

``/`` is the empty page: it has no data of the run, and reads the token from the address after the ``#``, which browsers
do not send. ``/api/run`` and ``/metrics`` require the token as a bearer token, and refuse other hosts and origins, so
that no other site can send requests through the user's browser. The page is read-only.
``/metrics`` has the run's figures in Prometheus' text format.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import Field
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from manager.accounting.account import TimeUse
from manager.dashboard.snapshot import snapshot
from manager.journal.journal import patiently
from manager.report.live import LiveRun
from manager.report.picture import PARTS
from manager.run_dir import PAGE, write_in_run_dir
from morph.contract.base import Value, read_json
from morph.contract.errors import ClusterError, RunDirError
from morph.link.listener import BACKLOG, HELLO_TIMEOUT_S, PendingCallers
from morph.pictures import SOFT

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 10.0
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; base-uri 'none'"


class PageAddress(Value):
    """The address of a run's page; only its owner can read the file that holds it."""

    url: str
    token: str = Field(repr=False)

    @property
    def with_token(self) -> str:
        """The address to open in a browser."""
        return f"{self.url}#{self.token}"


def read_address(run_dir: Path) -> PageAddress:
    """Return the address of the page that a run serves; RunDirError if it serves none."""
    path = run_dir / PAGE
    if not path.is_file():
        why = "serves no page: it is just starting, or was started with --no-page"
        raise RunDirError(why, source=str(run_dir))
    return read_json(path, PageAddress, RunDirError)


@contextmanager
def serving(run: LiveRun, run_dir: Path) -> Iterator[PageAddress]:
    """Serve a run's page from its own thread while the context is open; nothing remains afterwards. ClusterError if
    that fails within ``START_TIMEOUT_S``, RunDirError if its address cannot be written; a full disk makes it wait.
    """
    server = _Server(run)
    server.start()
    path = run_dir / PAGE
    try:
        patiently(lambda: write_in_run_dir(path, server.address.model_dump_json()))
        yield server.address
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
        server.close()


class _Server:
    def __init__(self, run: LiveRun) -> None:
        self._token = secrets.token_urlsafe(32)
        self._run = run
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._sockets = bind_sockets(0, LOOPBACK, backlog=BACKLOG)
        port = self._sockets[0].getsockname()[1]
        self.address = PageAddress(url=f"http://{LOOPBACK}:{port}/", token=self._token)
        self._hosts = frozenset(f"{name}:{port}" for name in (LOOPBACK, "localhost"))
        self._thread = threading.Thread(target=self._serve, name="morph-page", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            raise ClusterError(f"waited {START_TIMEOUT_S:g} s for the run's page to be served")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        known = {"run": self._run, "token": self._token, "hosts": self._hosts}
        application = Application(
            [
                (r"/", _Page, known),
                (r"/page.js", _Script, known),
                (r"/api/run", _Snapshot, known),
                (r"/metrics", _Metrics, known),
            ],
            default_handler_class=_Nothing,
            default_handler_args=known,
            log_function=lambda _handler: None,
        )
        server = _Bounded(application, max_header_size=16_384, max_body_size=0, idle_connection_timeout=HELLO_TIMEOUT_S)
        server.add_sockets(self._sockets)
        self._loop.call_soon(self._ready.set)
        try:
            self._loop.run_forever()
        finally:
            server.stop()
            self._loop.run_until_complete(server.close_all_connections())
            self._loop.close()


class _Bounded(HTTPServer):
    """A server whose connections all stay pending, because requests have tokens: any may be closed between requests."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        super().initialize(*args, **kwargs)
        self._pending = PendingCallers()

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        self._pending.add(stream, str(address[0]), stream.close)
        super().handle_stream(stream, address)

    def on_close(self, server_conn: Any) -> None:
        self._pending.remove(server_conn.stream)
        super().on_close(server_conn)


class _Guarded(RequestHandler):
    """Refuses hosts and origins that are not this page's own."""

    needs_token = True

    def initialize(self, run: LiveRun, token: str, hosts: frozenset[str]) -> None:
        self.run, self.token, self.hosts = run, token, hosts

    def prepare(self) -> Awaitable[None] | None:
        origin = self.request.headers.get("Origin")
        if self.request.headers.get("Host") not in self.hosts:
            self._refuse(403, "this host is not served")
        elif origin is not None and origin.removeprefix("http://") not in self.hosts:
            self._refuse(403, "another origin may not ask")
        elif self.needs_token and not self._has_token():
            self.set_header("WWW-Authenticate", "Bearer")
            self._refuse(401, "the token is missing or wrong; `morph page RUN_DIR` gives the address with it")
        return None

    def set_default_headers(self) -> None:
        self.clear_header("Server")
        self.set_header("Cache-Control", "no-store")
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("X-Frame-Options", "DENY")

    def _has_token(self) -> bool:
        kind, _, given = self.request.headers.get("Authorization", "").partition(" ")
        return secrets.compare_digest(given.encode(), self.token.encode()) and kind == "Bearer"

    def _refuse(self, status: int, why: str) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps({"error": why}))


class _Page(_Guarded):
    needs_token = False

    def get(self) -> None:
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(_asset("page.html"))


class _Script(_Guarded):
    needs_token = False

    def get(self) -> None:
        self.set_header("Content-Type", "text/javascript; charset=utf-8")
        colours = {part.value: colour for part, (colour, _) in PARTS.items()}
        words = {part.value: part.words for part in TimeUse}
        palette = (
            f"const COLOURS = {json.dumps(colours)}, SHAPE_COLOURS = {json.dumps(SOFT)}, "
            f"PART_WORDS = {json.dumps(words)};"
        )
        self.finish(b'"use strict";\n' + palette.encode() + b"\n" + _asset("page.js"))


class _Snapshot(_Guarded):
    def get(self) -> None:
        self.finish(snapshot(self.run))


class _Metrics(_Guarded):
    def get(self) -> None:
        self.set_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.finish(metrics_text(snapshot(self.run)))


class _Nothing(_Guarded):
    needs_token = False

    def get(self) -> None:
        self._refuse(404, "there is no such page")


def _asset(name: str) -> bytes:
    return files("manager.dashboard").joinpath("assets", name).read_bytes()


class _Figures(Collector):
    def __init__(self, known: dict[str, Any]) -> None:
        self._known = known

    def collect(self) -> Iterator[Metric]:
        known = self._known
        for name, text, value in (
            ("morph_version", "Decided steps; falls when a step was lost.", known["version"]),
            ("morph_generation", "Memberships formed so far.", known["generation"]),
            ("morph_saved_version", "Version of the newest complete checkpoint.", known["saved_version"]),
            ("morph_loss", "Loss of the last decided step.", known["loss"]),
            (
                "morph_learning_rate",
                "Highest learning rate of the last decided step.",
                (known["learning_rates"] or (0, None))[1],
            ),
            ("morph_examples_per_second", "Speed over the last decided steps.", known["examples_per_s"]),
            ("morph_workers", "Workers with a place in the present shape.", sum(len(row) for row in known["grid"])),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)
        metrics = GaugeMetricFamily("morph_metric", "The job's own metrics of the last decided step.", labels=["name"])
        evaluated = GaugeMetricFamily("morph_evaluation", "Loss and metrics of the newest evaluation.", labels=["name"])
        newest = known["evaluations"][-1] if known["evaluations"] else {"metrics": {}, "loss": None}
        for family, values in ((metrics, known["metrics"]), (evaluated, {"loss": newest["loss"], **newest["metrics"]})):
            for name, value in values.items():
                if value is not None:
                    family.add_metric([name], value)
            yield family
        others = GaugeMetricFamily("morph_other_nodes", "Nodes without a place.", labels=["state"])
        for state in sorted({node["state"] for node in known["others"]}):
            others.add_metric([state], sum(node["state"] == state for node in known["others"]))
        yield others
        phase = GaugeMetricFamily("morph_phase", "1 for the present phase and shape.", labels=["phase", "shape"])
        phase.add_metric([known["phase"], known["shape"] or ""], 1)
        yield phase
        seconds = CounterMetricFamily("morph_node_seconds", "Node-seconds by use.", labels=["part"])
        for part, spent_s in known["node_seconds"].items():
            seconds.add_metric([part], spent_s)
        yield seconds
        if known["dollars"] is not None:
            yield CounterMetricFamily("morph_dollars", "Spent so far.", value=known["dollars"])
            dollars = CounterMetricFamily("morph_part_dollars", "Dollars by use.", labels=["part"])
            for part, spent_usd in known["part_dollars"].items():
                dollars.add_metric([part], spent_usd)
            yield dollars


def metrics_text(known: dict[str, Any]) -> bytes:
    """Return a snapshot in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(known))
    return generate_latest(registry)
