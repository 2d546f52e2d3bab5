"""Ending what a manager left behind."""

from __future__ import annotations

from collections.abc import Collection

from manager.providers.provider import Provider, Vm


def reconcile(provider: Provider, keep: Collection[str] = ()) -> tuple[Vm, ...]:
    """End every VM of this run that is not to be kept; returns those that were found and ended.

    Whatever point a manager was killed at, each VM that it had asked for is found by its tags. Calling it twice
    changes nothing.

    Raises:
        ProviderError: when the provider does not answer; call again.
    """
    stray = tuple(vm for vm in provider.list() if vm.name not in keep)
    if stray:
        provider.delete([vm.name for vm in stray])
    return stray
