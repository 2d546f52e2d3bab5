"""The connection to Azure: the user's login, and a client that retries only where a short pause helps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from azure.core.exceptions import ServiceRequestError, ServiceResponseError
from azure.core.pipeline.policies import HTTPPolicy, SansIOHTTPPolicy
from azure.identity import DefaultAzureCredential
from azure.mgmt.compute import ComputeManagementClient

from manager.providers.azure.errors import retry_after_s
from manager.providers.azure.spec import PUBLIC_AZURE

logging.getLogger("azure").addHandler(logging.NullHandler())
"""The SDK's warnings are silenced, because each also comes as an error in one sentence."""
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
SHORT_PAUSE_S = 60.0
"""Seconds: the client repeats a throttled call if the pause is at most this; longer ones are left to the caller, which
begins its sequence of calls anew."""
NUM_REPEATS = 3
POLL_PAUSE_S = 60.0
"""Seconds: the longest pause between two polls of an operation, whatever pause Azure asks for."""
NUM_POLL_REPEATS = 20
DEFAULT_PAUSE_S = 1.0


def azure_client(
    subscription_id: str,
    *,
    open_credential: Callable[[], Any] | None = None,
    base_url: str = PUBLIC_AZURE,
    authority: str | None = None,
    policies: Sequence[Any] = (),
    read_timeout_s: float = READ_TIMEOUT_S,
    pause: Callable[[float], object] = time.sleep,
) -> Any:
    """Open a client; makes no call yet.

    ``open_credential``: called again when a token is refused; None: the environment, a managed identity or ``az
    login``. ``base_url``: without TLS it must be on this machine. ``pause``: waits some seconds; true: do not repeat
    the call.
    """
    base_url = base_url.rstrip("/")
    where = {"authority": authority} if authority else {}
    credential = _Renewed(
        open_credential or (lambda: DefaultAzureCredential(exclude_interactive_browser_credential=True, **where))
    )
    return ComputeManagementClient(
        credential,
        subscription_id,
        base_url=base_url,
        credential_scopes=[f"{base_url}/.default"],
        per_call_policies=[
            _Repeats(credential, pause),
            *policies,
            *([_WithoutTls()] if base_url.startswith("http://") else []),
        ],
        retry_total=0,  # the SDK must not repeat throttled calls for as long as the cloud asks
        connection_timeout=CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
    )


def until_stopped(stopped: threading.Event) -> Callable[[float], object]:
    """Return a pause that ends once ``stopped`` is set; later pauses, of calls that end VMs, last their time."""
    return lambda pause_s: time.sleep(pause_s) if stopped.is_set() else stopped.wait(pause_s)


class _WithoutTls(SansIOHTTPPolicy):  # type: ignore[misc,type-arg,unused-ignore]
    """Allows the credential's token without TLS: ``AzureSpec`` ensures that it stays on this machine."""

    def on_request(self, request: Any) -> None:
        """See the SDK."""
        request.context.options.setdefault("enforce_https", False)


class _Renewed:
    """A credential that can drop its cached tokens. Thread-safe."""

    def __init__(self, open_credential: Callable[[], Any]) -> None:
        self._open, self._inner = open_credential, open_credential()
        self._lock = threading.Lock()

    def get_token(self, *scopes: str, **options: Any) -> Any:
        """See the SDK."""
        with self._lock:
            inner = self._inner
        return inner.get_token(*scopes, **options)

    def renew(self) -> None:
        """Drop the cached tokens."""
        with self._lock:
            self._inner = self._open()


class _Repeats(HTTPPolicy):  # type: ignore[misc,type-arg,unused-ignore]
    """Repeats a call after a refused token, a throttled one, and polling after every transient error."""

    def __init__(self, credential: _Renewed, pause: Callable[[float], object]) -> None:
        super().__init__()
        self._credential, self._pause = credential, pause

    def send(self, request: Any) -> Any:
        """See the SDK."""
        is_poll = "/operations/" in urlsplit(request.http_request.url).path
        left, renewed = NUM_POLL_REPEATS if is_poll else NUM_REPEATS, False
        while True:
            try:
                response = self.next.send(request)
            except (ServiceRequestError, ServiceResponseError):
                if not is_poll or not left:
                    raise
                pause_s, is_answered = DEFAULT_PAUSE_S, False
            else:
                is_answered = True
                status = response.http_response.status_code
                if status == 401 and not renewed:
                    renewed = True
                    self._credential.renew()
                    response.http_response.close()  # it is not read, and would keep its connection
                    continue
                if not left or not (status == 429 or (is_poll and status >= 500)):
                    return response
                asked_s = retry_after_s(response.http_response.headers)
                pause_s = DEFAULT_PAUSE_S if asked_s is None else asked_s
                if is_poll:
                    pause_s = min(pause_s, POLL_PAUSE_S)
                elif pause_s > SHORT_PAUSE_S:
                    return response
            left -= 1
            if self._pause(pause_s) and is_answered:
                return response
            if is_answered:
                response.http_response.close()
