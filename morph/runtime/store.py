"""The rendezvous store that lives beside the manager for the whole run."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


class StoreHost:
    """Owns a TCPStore server in a process of its own, so that no worker's death takes it away."""

    def __init__(self, host: str) -> None:
        self._store = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30), use_libuv=True
        )

    def port(self) -> int:
        """The port on which the store listens."""
        return int(self._store.port)
