"""The connection to Azure: whoever is logged in, and a client that repeats only what a short pause mends."""

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
"""What the SDK warns of comes as an error too, in one sentence."""
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
SHORT_PAUSE_S = 10.0
"""A throttled call is repeated at once after a pause of at most so long; who called decides about longer ones."""
NUM_REPEATS = 3
POLL_PAUSE_S = 60.0
"""The longest pause between two looks at an operation, whatever Azure asks for: the operation itself goes on."""
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
    """Open a client. Nothing is asked yet.

    Args:
        subscription_id: Whose VMs.
        open_credential: Who asks, opened anew when a token is refused, because credentials keep tokens; None: the
            environment, a managed identity or ``az login``, in this order.
        base_url: Of the resource manager. Without TLS it must be on this machine.
        authority: Where one logs in; None: the public cloud's.
        policies: Further pipeline policies.
        read_timeout_s: Bound of one answer.
        pause: Waits some seconds.
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
        retry_total=0,  # a throttled call must not be repeated behind our back, for as long as the cloud likes
        connection_timeout=CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
    )


class _WithoutTls(SansIOHTTPPolicy):  # type: ignore[misc,type-arg,unused-ignore]
    """Lets the credential's token pass without TLS: to this machine, which ``AzureSpec`` saw to."""

    def on_request(self, request: Any) -> None:
        """See the SDK."""
        request.context.options.setdefault("enforce_https", False)


class _Renewed:
    """A credential that can be told to forget the tokens that it keeps. Thread-safe."""

    def __init__(self, open_credential: Callable[[], Any]) -> None:
        self._open, self._inner = open_credential, open_credential()
        self._lock = threading.Lock()

    def get_token(self, *scopes: str, **options: Any) -> Any:
        """See the SDK."""
        with self._lock:
            inner = self._inner
        return inner.get_token(*scopes, **options)

    def renew(self) -> None:
        """Keep no token any longer."""
        with self._lock:
            self._inner = self._open()


class _Repeats(HTTPPolicy):  # type: ignore[misc,type-arg,unused-ignore]
    """Repeats one call where nothing else helps to go on; all else is left to who called.

    A refused token is dropped, and the call made once more with a new one. A call that was throttled was not carried
    out: after a short pause it is made again, so that a sequence of calls goes on where it was. A look at an operation
    changes nothing: it is repeated after every error that may pass.
    """

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
                pause_s = DEFAULT_PAUSE_S
            else:
                status = response.http_response.status_code
                if status == 401 and not renewed:
                    renewed = True
                    self._credential.renew()
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
            self._pause(pause_s)
