"""The metadata service of one virtual host, at 169.254.169.254 in its own network: identity and Scheduled Events."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from manager.engine.local_vms.namespaces import enter
from tests.http_service import Server, answer, body_of
from tests.waiting import BOUND_S

ADDRESS = "169.254.169.254"
Fault = Literal["", "silent", "error", "slow", "no document", "not JSON"]


@dataclass(frozen=True)
class Facts:
    """A host's metadata; ``start`` approves an event, and returns whether the event is known."""

    name: str
    resource_id: str
    tags: Callable[[], dict[str, str]]
    new_token: Callable[[], str]
    events: Callable[[], dict[str, Any]]
    start: Callable[[str], bool]


class MetadataService:
    """Serves one host until ``close``; ``fault`` says how it fails, ``slow_s`` how long a slow answer takes."""

    def __init__(self, namespace: str, facts: Facts) -> None:
        self.fault: Fault = ""
        self.slow_s = 2.0
        self.num_faulty = self.num_asked = 0
        self.approved: list[str] = []
        self._facts = facts
        self._over = threading.Event()
        self._up = threading.Event()
        self._http: Server | None = None
        self._thread = threading.Thread(target=self._run, args=(namespace,), name="metadata", daemon=True)
        self._thread.start()
        if not self._up.wait(BOUND_S) or self._http is None:
            raise RuntimeError(f"the metadata service of {facts.name} does not come up")

    def close(self) -> None:
        self._over.set()
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
        self._thread.join(BOUND_S)

    def _run(self, namespace: str) -> None:
        try:
            enter(namespace)
            self._http = Server(self.serve, (ADDRESS, 80))
        finally:
            self._up.set()
        self._http.serve_forever(poll_interval=0.05)

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        body, handler.close_connection = body_of(handler), True
        path, query = urlsplit(handler.path).path, parse_qs(urlsplit(handler.path).query)
        self.num_asked += 1
        status, kind, text = 400, "application/json", json.dumps({"error": "Metadata: true is missing"})
        if handler.headers.get("Metadata") == "true" and query.get("api-version"):
            status, kind, text = self._answer(handler.command, path, body)
        if self.fault and path.endswith("/scheduledevents"):
            self.num_faulty += 1
            if self.fault == "silent" and self._over.wait(4 * BOUND_S):
                return
            if self.fault == "slow" and self._over.wait(self.slow_s):
                return
            if self.fault == "error":
                status, text = 500, "{}"
            elif self.fault == "no document":
                text = json.dumps({"DocumentIncarnation": -1, "Events": "none"})
            elif self.fault == "not JSON":
                text = "<html>"
        answer(handler, status, text.encode(), {"Content-Type": kind})

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, str, str]:
        facts = self._facts
        if path == "/metadata/instance/compute/name":
            return 200, "text/plain", facts.name
        if path == "/metadata/instance/compute":
            tags = [{"name": name, "value": value} for name, value in facts.tags().items()]
            said = {"name": facts.name, "resourceId": facts.resource_id, "tagsList": tags}
            return 200, "application/json", json.dumps(said)
        if path == "/metadata/identity/oauth2/token":
            token = {"access_token": facts.new_token(), "expires_in": "86400", "expires_on": "2000000000"}
            return 200, "application/json", json.dumps({**token, "resource": "-", "token_type": "Bearer"})
        if path == "/metadata/scheduledevents" and method == "GET":
            return 200, "application/json", json.dumps(facts.events())
        if path == "/metadata/scheduledevents":
            wanted = [entry["EventId"] for entry in json.loads(body)["StartRequests"]]
            if not all(facts.start(event) for event in wanted):
                return 400, "application/json", json.dumps({"error": "no such event"})
            self.approved += wanted
            return 200, "application/json", "{}"
        return 404, "application/json", "{}"
