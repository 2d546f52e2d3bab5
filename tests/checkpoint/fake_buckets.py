"""An S3 on loopback for the real SDK: moto's server with one bucket, one key, and faults.

Requests with another key are refused; moto does not check the signatures themselves.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.http_service import serving

REGION = "us-east-1"


@dataclass
class BucketService:
    """Who requested what, and faults; the next request is answered with the first fault, if there is one."""

    bucket: str = field(default_factory=lambda: f"checkpoints-{secrets.token_hex(4)}")
    key_id: str = field(default_factory=lambda: f"AKIA{secrets.token_hex(8).upper()}")
    key: str = field(default_factory=lambda: secrets.token_hex(20))
    asked: list[str] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    port: int = 0

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": self.key_id,
            "AWS_SECRET_ACCESS_KEY": self.key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextmanager
def bucket_service() -> Iterator[BucketService]:
    """Serve until the end of the block; skip the test where moto's server or s3fs is not installed."""
    wanted = "pip install -e '.[dev]'"
    pytest.importorskip("s3fs", reason=wanted)
    application = pytest.importorskip("moto.moto_server.werkzeug_app", reason=wanted)
    werkzeug, models = pytest.importorskip("werkzeug.serving"), pytest.importorskip("moto.s3.models")
    service = BucketService()
    backend = models.s3_backends["123456789012"]["aws"]
    backend.create_bucket(service.bucket, REGION)
    moto = application.DomainDispatcherApplication(application.create_backend_app)

    def answer(environ: dict[str, Any], start: Any) -> Any:
        with service.lock:
            service.asked.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            fault = service.faults.pop(0) if service.faults else None
        if f"Credential={service.key_id}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            fault = (403, "InvalidAccessKeyId")
        if fault is None:
            return moto(environ, start)
        status, code = fault
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(f"{status} {code}", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()]

    quiet = type("Quiet", (werkzeug.WSGIRequestHandler,), {"log": lambda *_: None})
    server = werkzeug.make_server("127.0.0.1", 0, answer, threaded=True, request_handler=quiet)
    service.port = server.port
    with serving(server):
        yield service
