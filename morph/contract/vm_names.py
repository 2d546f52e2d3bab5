"""Names of workers: the VM's, or ``VM.d0``, ``VM.d1``, ... if it has several; a local VM that returns is ``VM.2``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

MAX_DEVICES = 64
_NAME = re.compile(r"[A-Za-z0-9._-]{1,300}")
_OF_SEVERAL = re.compile(r"(?P<vm>.+)\.d\d+")


def is_name(text: str) -> bool:
    """Return whether a VM may have this name; names that remote machines give themselves are checked with it."""
    return _NAME.fullmatch(text) is not None


def workers_of(vm: str, num_devices: int) -> tuple[str, ...]:
    """Name the workers of a VM with this many devices, by device."""
    return (vm,) if num_devices == 1 else tuple(f"{vm}.d{device}" for device in range(num_devices))


@lru_cache(maxsize=2**14)
def vm_of(worker: str) -> str:
    """Return the VM of a worker."""
    match = _OF_SEVERAL.fullmatch(worker) if ".d" in worker else None
    return match["vm"] if match else worker


def beside(worker: str, workers: Iterable[str]) -> tuple[str, ...]:
    """Return the workers, out of some, on the same VM as this one, in their order, without this one."""
    vm = vm_of(worker)
    if vm == worker:
        return ()
    return tuple(other for other in workers if other != worker and vm_of(other) == vm)
