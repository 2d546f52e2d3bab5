"""A worker's share of a device of this machine: the first that no living process has."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from morph.contract.errors import ClusterError

_WAIT_S = 30.0
_LOOK_S = 0.1


def take_slot(slots: Sequence[str], wait_s: float = _WAIT_S) -> FileIO | None:
    """Lock one of these files and let this process see that device alone; the lock ends with the process.

    It must not have used CUDA before. Who died a moment ago may still hold a lock: waits up to ``wait_s``.

    Args:
        slots: Files, tried in this order; each is named after its device. None: nothing is taken.
        wait_s: For one to be free.

    Raises:
        ClusterError: none was.
    """
    deadline_s = time.monotonic() + wait_s
    while slots:
        for slot in map(Path, slots):
            slot.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(slot, "a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            os.environ["CUDA_VISIBLE_DEVICES"] = slot.name
            return file
        if time.monotonic() >= deadline_s:
            raise ClusterError(f"waited {wait_s:g} s for a share of a device: all {len(slots)} are taken")
        time.sleep(_LOOK_S)
    return None
