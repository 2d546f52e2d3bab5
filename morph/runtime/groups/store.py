"""The rendezvous store that lives beside the manager for the whole run.

``python -m morph.runtime.groups.store HOST PORT`` serves one, says its port on standard output, and ends with
standard input.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until all is imported, which stays: to look through it again and again takes a sixth of that time

import os
import socket
import sys
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

TIMEOUT_S = 30.0


class StoreHost:
    """Owns a TCPStore server in a process of its own, so that no worker's death takes it away.

    It listens on ``host`` alone: left to itself, a TCPStore listens on every interface, to anyone.
    """

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
    """Serve until whoever started this goes."""
    store = StoreHost(sys.argv[1], int(sys.argv[2]))
    print(store.port(), flush=True)
    sys.stdin.read()
    os._exit(0)  # a connection that is open would be waited for


if __name__ == "__main__":
    main()
