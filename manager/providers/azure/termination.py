"""Ending a run's VMs from its tags alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from manager.providers.azure.client import azure_client
from manager.providers.azure.prices import disk_price
from manager.providers.azure.provider import AzureProvider
from manager.providers.azure.spec import AzureSpec
from manager.providers.interface.cloud import Bounds, Identity
from manager.providers.interface.operations import Operations
from manager.providers.interface.provider import Misconfigured, ProviderError, Vm, end_all


def end_run(
    spec: AzureSpec,
    run: str,
    job: str,
    client: Any = None,
    told: Callable[[str], None] = lambda _sentence: None,
    bounds: Bounds | None = None,
) -> tuple[Vm, ...]:
    """End every VM of a run, and its scale set; blocks until they are gone. Returns the VMs that existed.

    Resources without the tags of this run and job are left alone, whatever their names.

    ``client``: used in place of one with the user's login. ``told``: called with a sentence for what is left alone, and
    for what is tried again. ``bounds``: limits on waits in each attempt.

    ProviderError: nothing of this run exists, Azure did not answer, or something is left; the error names it.
    """
    with tempfile.TemporaryDirectory(prefix="morph-") as directory:
        provider = AzureProvider(
            client or azure_client(spec.subscription_id, base_url=spec.resource_manager, authority=spec.authority),
            spec,
            Identity(run=run, job=job),
            Operations(Path(directory) / "operations.json"),
            _none_is_made,
            find_disk_price=partial(disk_price, spec.location),
            bounds=bounds,
        )
        look, owns_set = provider.group.look(), provider.group.owns_set()
        is_left = False
        with suppress(ProviderError):  # an account that may not list them: reported after the VMs are ended
            is_left = any(provider.group.owns(part) for part in provider.group.parts())
        if owns_set is False:
            name = provider.group.set_name
            told(f"scale set {name} does not have the tags of this run: it is left alone, with what it holds")
        if not look.vms and not owns_set and not is_left:
            runs = f"runs whose VMs are there: {', '.join(look.runs)}" if look.runs else "no run of Morph has VMs there"
            raise Misconfigured(
                f"nothing in resource group {spec.resource_group} has the tags of run {run} of job {job}: it was ended "
                f"before, or a name is misspelt; {runs}"
            )
        for left in end_all(provider, told=told):
            told(f"ended what a VM had left behind: {left}")
    return tuple(vm for vm, _ in look.vms)


def _none_is_made(node: str, _num_devices: int) -> str:
    raise AssertionError(f"{node} is to be ended, not made")
