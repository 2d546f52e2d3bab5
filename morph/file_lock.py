"""Locks of files, which name their holder to those who wait."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from morph.contract.errors import WaitTimeout

LOOK_S = 0.02


@contextmanager
def locked(path: Path, limit_s: float, tell: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Hold a file's lock; ``tell`` is called once, with a sentence that names another holder. Raises WaitTimeout."""
    until_s, holder = time.monotonic() + limit_s, ""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                if not holder:
                    holder = file.readline().strip() or "an unknown process"
                    tell(f"waits for at most {limit_s:g} s for {holder}, which holds {path}")
                if time.monotonic() >= until_s:
                    raise WaitTimeout(f"{holder} holds {path} for more than {limit_s:g} s") from None
                time.sleep(LOOK_S)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()
        yield
