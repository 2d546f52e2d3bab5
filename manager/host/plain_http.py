"""Makes one HTTP exchange with the standard library, without redirects, and with a bound on its whole time.

A cloud's metadata service must be asked without a proxy, and a redirect from it is not an answer. Requests to other
places may use the environment's proxies.
"""

from __future__ import annotations

import http.client
import socket
import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import SplitResult, unquote, urlsplit

from morph.contract.errors import MorphError

MAX_BODY_BYTES = 4 * 1024 * 1024
CHUNK_BYTES = 65536
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class HttpFailed(MorphError):
    """No complete answer came: the request was refused or dropped, or the answer was too slow or too long."""


@dataclass(frozen=True)
class HttpAnswer:
    """An answer: status, headers with lower-case names, and the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as text; bytes that are not UTF-8 are replaced."""
        return self.body.decode("utf-8", errors="replace")

    @property
    def date_s(self) -> float | None:
        """The server's time of the answer, in seconds since 1970; None if it gives none."""
        return http_date_s(self.headers.get("date", ""))

    @property
    def retry_after_s(self) -> float | None:
        """The wait for which the server asks; None if it asks for none."""
        text = self.headers.get("retry-after", "").strip()
        if text.isdigit():
            return float(text)
        at_s = http_date_s(text)
        return None if at_s is None else max(0.0, at_s - (self.date_s or time.time()))


def http_date_s(text: str) -> float | None:
    """Read a date such as ``Mon, 19 Sep 2016 18:29:47 GMT``; None if it is not a date."""
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except ValueError:
        return None


def fetch(
    url: str,
    *,
    timeout_s: float,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    by_proxy: bool = False,
) -> HttpAnswer:
    """Make one request; blocks for at most about ``timeout_s``. HttpFailed: no complete answer came; any status is one.

    ``by_proxy``: through the proxy that the environment names for this URL (``HTTPS_PROXY``, ``HTTP_PROXY``,
    ``ALL_PROXY``, less ``NO_PROXY``), if it names one.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.scheme in _CONNECTIONS, url
    until_s = time.monotonic() + timeout_s
    proxy = _proxy_of(parts) if by_proxy else None
    target, given = (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), dict(headers or {})
    place = parts if proxy is None else proxy
    connection = _CONNECTIONS[parts.scheme](str(place.hostname), place.port, timeout=timeout_s)
    if proxy is not None:
        login = f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}"
        credential = {"Proxy-Authorization": f"Basic {b64encode(login.encode()).decode()}"} if login != ":" else {}
        if parts.scheme == "https":
            connection.set_tunnel(parts.hostname, parts.port, credential)
        else:
            target, given = f"http://{parts.netloc.rpartition('@')[2]}{target}", given | credential
    try:
        connection.request(method, target, body=body, headers=given)
        sock = connection.sock  # the connection drops the socket if the answer announces its end
        _bound(sock, until_s)
        response = connection.getresponse()
        received = bytearray()
        while True:
            _bound(sock, until_s)
            chunk = response.read1(CHUNK_BYTES)
            if not chunk:
                break
            received += chunk
            if len(received) > MAX_BODY_BYTES:
                raise HttpFailed(f"{_where(url)}: the answer is longer than {MAX_BODY_BYTES} bytes")
        if response.length:
            raise HttpFailed(f"{_where(url)}: the answer ends {response.length} bytes early")
        received_headers = {key.lower(): value for key, value in response.getheaders()}
        return HttpAnswer(response.status, received_headers, bytes(received))
    except TimeoutError as error:
        raise HttpFailed(f"{_where(url)}: no answer within {timeout_s:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise HttpFailed(f"{_where(url)}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _proxy_of(parts: SplitResult) -> SplitResult | None:
    """Return the proxy that the environment names for a URL, as curl and requests read it."""
    from urllib.request import getproxies, proxy_bypass

    known = getproxies()
    proxy_url = known.get(parts.scheme) or known.get("all")
    if not proxy_url or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = urlsplit(proxy_url if "://" in proxy_url else f"http://{proxy_url}")
    try:
        usable = proxy.scheme == "http" and proxy.hostname and (proxy.port or True)
    except ValueError:
        usable = False
    if not usable:
        raise HttpFailed("the environment's proxy is not of the form http://HOST:PORT")
    return proxy


def _bound(sock: socket.socket, until_s: float) -> None:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    if sock.fileno() >= 0:  # otherwise the whole answer has come
        sock.settimeout(left_s)


def _where(url: str) -> str:
    return url.split("?", 1)[0]
