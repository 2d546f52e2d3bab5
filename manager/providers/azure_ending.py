"""Ending a run's VMs without knowing anything of the run but its tags."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from manager.providers.azure import AzureProvider, Identity
from manager.providers.azure_client import azure_client
from manager.providers.azure_operations import Operations
from manager.providers.azure_spec import AzureSpec
from manager.providers.provider import Vm
from manager.providers.reconcile import reconcile


def end_run(spec: AzureSpec, run: str, job: str, client: Any = None) -> tuple[Vm, ...]:
    """End every VM of a run, and its scale set; blocks until they are gone. Returns the VMs that were there.

    Args:
        spec: Where they are.
        run: The run's name, in the tags.
        job: The job's name, in the tags.
        client: Another client than that of whoever is logged in.

    Raises:
        ProviderError: Azure refused, or gave no answer; call again.
    """
    with tempfile.TemporaryDirectory(prefix="morph-") as directory:
        provider = AzureProvider(
            client or azure_client(spec.subscription_id, base_url=spec.resource_manager, authority=spec.authority),
            spec,
            Identity(run=run, job=job),
            Operations(Path(directory) / "operations.json"),
            _none_is_made,
        )
        ended = reconcile(provider)
        provider.dismantle()
    return ended


def _none_is_made(node: str, _num_devices: int) -> str:
    raise AssertionError(f"{node} is to be ended, not made")
