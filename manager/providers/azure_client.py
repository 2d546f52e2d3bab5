"""The connection to Azure: whoever is logged in, and a client that leaves repeating to us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from azure.identity import DefaultAzureCredential
from azure.mgmt.compute import ComputeManagementClient

CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60


def azure_client(
    subscription_id: str,
    *,
    credential: Any = None,
    base_url: str | None = None,
    policies: Sequence[Any] = (),
    read_timeout_s: float = READ_TIMEOUT_S,
) -> Any:
    """Open a client. Nothing is asked yet.

    Args:
        subscription_id: Whose VMs.
        credential: Who asks; None: the environment, a managed identity or ``az login``, in this order.
        base_url: Another address of the resource manager.
        policies: Further pipeline policies.
        read_timeout_s: Bound of one answer.
    """
    return ComputeManagementClient(
        credential or DefaultAzureCredential(exclude_interactive_browser_credential=True),
        subscription_id,
        **({"base_url": base_url} if base_url else {}),
        per_call_policies=list(policies),
        retry_total=0,  # a throttled call must not be repeated behind our back, for as long as the cloud likes
        connection_timeout=CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
    )
