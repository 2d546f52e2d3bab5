"""The rendezvous store, a process beside the manager that lives for the whole run.

``python -m morph.runtime.groups.store HOST PORT`` serves one, prints its port on standard output, and ends when
standard input does.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # off during imports: their objects stay, and scanning them repeatedly takes a sixth of the time

import os
import socket
import sys
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

TIMEOUT_S = 30.0


class StoreHost:
    """Owns a TCPStore server in a separate process, which listens only on ``host`` and survives any worker."""

    def __init__(self, host: str, port: int = 0) -> None:
        listener = socket.create_server((host, port))
        self._store = TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=TIMEOUT_S),
            master_listen_fd=listener.detach(),
            use_libuv=True,
        )

    def port(self) -> int:
        """The port on which the store listens."""
        return int(self._store.port)


def main() -> None:
    """Serve until the parent process ends."""
    store = StoreHost(sys.argv[1], int(sys.argv[2]))
    print(store.port(), flush=True)
    sys.stdin.read()
    os._exit(0)  # the server would wait for open connections


if __name__ == "__main__":
    main()
