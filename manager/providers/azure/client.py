"""The connection to Azure: whoever is logged in, and a client that leaves repeating to us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from azure.core.pipeline.policies import SansIOHTTPPolicy
from azure.identity import DefaultAzureCredential
from azure.mgmt.compute import ComputeManagementClient

from manager.providers.azure.spec import PUBLIC_AZURE

CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60


def azure_client(
    subscription_id: str,
    *,
    credential: Any = None,
    base_url: str = PUBLIC_AZURE,
    authority: str | None = None,
    policies: Sequence[Any] = (),
    read_timeout_s: float = READ_TIMEOUT_S,
) -> Any:
    """Open a client. Nothing is asked yet.

    Args:
        subscription_id: Whose VMs.
        credential: Who asks; None: the environment, a managed identity or ``az login``, in this order.
        base_url: Of the resource manager. Without TLS it must be on this machine.
        authority: Where one logs in; None: the public cloud's.
        policies: Further pipeline policies.
        read_timeout_s: Bound of one answer.
    """
    base_url = base_url.rstrip("/")
    where = {"authority": authority} if authority else {}
    return ComputeManagementClient(
        credential or DefaultAzureCredential(exclude_interactive_browser_credential=True, **where),
        subscription_id,
        base_url=base_url,
        credential_scopes=[f"{base_url}/.default"],
        per_call_policies=[*policies, *([_WithoutTls()] if base_url.startswith("http://") else [])],
        retry_total=0,  # a throttled call must not be repeated behind our back, for as long as the cloud likes
        connection_timeout=CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
    )


class _WithoutTls(SansIOHTTPPolicy):  # type: ignore[misc,type-arg,unused-ignore]
    """Lets the credential's token pass without TLS: to this machine, which ``AzureSpec`` saw to."""

    def on_request(self, request: Any) -> None:
        """See the SDK."""
        request.context.options.setdefault("enforce_https", False)
