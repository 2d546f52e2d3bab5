"""A temporary folder that does not outlive this process, however it ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_GUARD = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
_END_TIMEOUT_S = 30.0


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Give a folder and remove it afterwards; if this process is killed, a guard process removes it.

    The guard waits for its standard input to close, in a session of its own, so that Ctrl-C does not end it.
    """
    with tempfile.TemporaryDirectory(prefix="morph-calibrate-") as folder:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, folder], stdin=subprocess.PIPE, start_new_session=True
        )
        assert guard.stdin is not None
        try:
            yield Path(folder)
        finally:
            guard.stdin.close()
            guard.wait(timeout=_END_TIMEOUT_S)
