"""An Azure Blob Storage on loopback for the real SDK: one container and block blobs, as far as checkpoints need them.

https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api. A blob appears whole: with the request that
puts it, or with the list of its blocks. Requests must be signed with the account's key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.http_service import answer, body_of, serving

ACCOUNT, CONTAINER = "morphtest", "checkpoints"
SIGNED_HEADERS = (
    "content-encoding", "content-language", "content-length", "content-md5", "content-type", "date",
    "if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range",
)  # fmt: skip


@dataclass
class BlobService:
    """What is stored, who requested what, and faults; the first fault answers the next request."""

    key: str = field(default_factory=lambda: base64.b64encode(secrets.token_bytes(32)).decode())
    blobs: dict[str, bytes] = field(default_factory=dict)
    blocks: dict[tuple[str, str], bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    port: int = 0

    @property
    def connection_string(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={self.key};"
            f"BlobEndpoint=http://127.0.0.1:{self.port}/{ACCOUNT};"
        )


@contextmanager
def blob_service() -> Iterator[BlobService]:
    service = BlobService()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"service": service}))
    server.daemon_threads = True
    service.port = server.server_port
    with serving(server):
        yield service


class _Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True  # header and body are two packets, of which the second would wait for 40 ms
    service: BlobService
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""

    def _do(self) -> None:
        body = body_of(self)
        place = urlsplit(self.path)
        query = dict(parse_qsl(place.query, keep_blank_values=True))
        name = unquote(place.path.removeprefix(f"/{ACCOUNT}/").removeprefix(CONTAINER)).lstrip("/")
        service = self.service
        with service.lock:
            service.asked.append(f"{self.command} {name or CONTAINER} {query.get('comp', '')}".strip())
            if not self._is_signed():
                self._refuse(403, "AuthenticationFailed")
            elif service.faults:
                self._refuse(*service.faults.pop(0))
            elif not place.path.startswith(f"/{ACCOUNT}/{CONTAINER}"):
                self._refuse(404, "ContainerNotFound")
            elif query.get("restype") == "container":
                self._container(query)
            else:
                self._blob(name, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815 - names that http.server asks for

    def _container(self, query: dict[str, str]) -> None:
        if self.command == "PUT":
            self._refuse(409, "ContainerAlreadyExists")
        elif query.get("comp") == "list":
            self._answer(200, self._listed(query).encode(), {"Content-Type": "application/xml"})
        else:
            self._answer(200, b"", {"Last-Modified": formatdate(usegmt=True), "ETag": '"c"'})

    def _blob(self, name: str, query: dict[str, str], body: bytes) -> None:
        service, blobs = self.service, self.service.blobs
        match self.command, query.get("comp"):
            case "PUT", "block":
                service.blocks[name, query["blockid"]] = body
                self._answer(201)
            case "PUT", "blocklist":
                ids = [entry.text or "" for entry in ET.fromstring(body)]
                blobs[name] = b"".join(service.blocks.pop((name, one)) for one in ids)
                self._answer(201, headers=self._facts(name))
            case "PUT", None if self.headers.get("x-ms-copy-source"):
                source = unquote(urlsplit(self.headers["x-ms-copy-source"]).path).split(f"/{CONTAINER}/", 1)[1]
                if source not in blobs:
                    self._refuse(404, "BlobNotFound")
                    return
                blobs[name] = blobs[source]
                self._answer(202, headers=self._facts(name) | {"x-ms-copy-status": "success", "x-ms-copy-id": "c"})
            case "PUT", None:
                blobs[name] = body
                self._answer(201, headers=self._facts(name))
            case (("GET" | "HEAD" | "DELETE"), _) if name not in blobs:
                self._refuse(404, "BlobNotFound")
            case "DELETE", _:
                del blobs[name]
                self._answer(202)
            case "HEAD", _:
                self._answer(200, blobs[name], self._facts(name))
            case "GET", _:
                self._read(name)
            case _:
                self._refuse(400, "UnsupportedHeader")

    def _read(self, name: str) -> None:
        data = self.service.blobs[name]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("x-ms-range") or self.headers.get("Range") or "")
        if wanted is None:
            self._answer(200, data, self._facts(name))
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
        if first > last:
            self._refuse(416, "InvalidRange")
            return
        part = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self._answer(206, data[first : last + 1], self._facts(name) | part)

    def _facts(self, name: str) -> dict[str, str]:
        data = self.service.blobs[name]
        digest = hashlib.md5(data, usedforsecurity=False)
        return {
            "ETag": f'"{digest.hexdigest()}"',
            "Last-Modified": formatdate(usegmt=True),
            "x-ms-blob-type": "BlockBlob",
            "x-ms-creation-time": formatdate(usegmt=True),
            "Content-Type": "application/octet-stream",
        }

    def _listed(self, query: dict[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found: dict[str, str] = {}
        for name in sorted(self.service.blobs):
            if not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folder = prefix + rest.split(delimiter, 1)[0] + delimiter
                found[folder] = f"<BlobPrefix><Name>{escape(folder)}</Name></BlobPrefix>"
                continue
            found[name] = (
                f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{formatdate(usegmt=True)}</Last-Modified>"
                f"<Content-Length>{len(self.service.blobs[name])}</Content-Length><BlobType>BlockBlob</BlobType>"
                "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            )
        entries = "".join(found.values())
        return (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{CONTAINER}">'
            f"<Prefix>{escape(prefix)}</Prefix><Blobs>{entries}</Blobs><NextMarker /></EnumerationResults>"
        )

    def _is_signed(self) -> bool:
        """Return whether the request is signed with the key, in the service's format "Authorize with Shared Key"."""
        given = {name.lower(): value for name, value in self.headers.items()}
        lines = [given.get(name, "") for name in SIGNED_HEADERS]
        lines[SIGNED_HEADERS.index("date")] = ""  # x-ms-date replaces the date
        if lines[SIGNED_HEADERS.index("content-length")] == "0":
            lines[SIGNED_HEADERS.index("content-length")] = ""
        special = "".join(f"{name}:{given[name]}\n" for name in sorted(given) if name.startswith("x-ms-"))
        place = urlsplit(self.path)
        resource = f"/{ACCOUNT}{place.path}"
        for name, value in sorted(parse_qsl(place.query, keep_blank_values=True)):
            resource += f"\n{name.lower()}:{value}"
        text = "\n".join([self.command, *lines]) + "\n" + special + resource
        digest = hmac.new(base64.b64decode(self.service.key), text.encode(), hashlib.sha256).digest()
        expected = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        return hmac.compare_digest(expected, given.get("authorization", ""))

    def _refuse(self, status: int, code: str) -> None:
        text = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
        self._answer(status, text.encode(), {"x-ms-error-code": code, "Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        answer(self, status, body, {"x-ms-version": "2021-12-02", "x-ms-request-id": "r"} | (headers or {}))
