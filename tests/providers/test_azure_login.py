"""Asking as a managed identity, at another resource manager than the public cloud's."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import ValidationError

from manager.providers.azure.client import azure_client
from manager.providers.azure.spec import AzureSpec
from tests.providers.azure_world import SPEC
from tests.providers.fake_arm import FakeArm


class Identity(ThreadingHTTPServer):
    """Gives tokens as an App Service's managed identity does, and notes for what they were asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.resources: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True  # a header and its body are two packets, and the second would wait 40 ms
    server: Identity

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        self.server.resources += query["resource"]
        token = {"access_token": "t0k", "expires_on": "4000000000", "resource": "r", "token_type": "Bearer"}
        body = json.dumps(token).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[Identity]:
    for name in ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with Identity() as server:
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"http://127.0.0.1:{server.server_port}/token")
        monkeypatch.setenv("IDENTITY_HEADER", "h3ader")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def test_a_resource_manager_of_this_machine_is_asked_with_a_token_for_it(arm: FakeArm, identity: Identity) -> None:
    spec = AzureSpec.model_validate({**SPEC.model_dump(), "resource_manager": arm.url})
    assert (SPEC.provider, spec.provider) == ("azure", "local"), "what a stand-in does says nothing of Azure's VMs"
    client = azure_client(spec.subscription_id, base_url=spec.resource_manager, authority=spec.authority)
    assert [*client.virtual_machines.list(spec.resource_group)] == []
    assert identity.resources == [arm.url]


@pytest.mark.parametrize(
    "url",
    ["http://management.example.org", "http://10.0.0.4:8080", "ftp://127.0.0.1", "127.0.0.1:80", "http://1270.0.0.1"],
)
def test_a_token_goes_nowhere_else_without_tls(url: str) -> None:
    with pytest.raises(ValidationError, match="resource_manager"):
        AzureSpec.model_validate({**SPEC.model_dump(), "resource_manager": url})


def test_a_sovereign_cloud_is_taken() -> None:
    names = {
        "resource_manager": "https://management.usgovcloudapi.net",
        "authority": "https://login.microsoftonline.us",
    }
    spec = AzureSpec.model_validate({**SPEC.model_dump(), **names})
    assert (spec.resource_manager, spec.authority) == tuple(names.values())
