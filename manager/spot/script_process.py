"""The script on its VM: a process group, and the files by which script and launcher exchange messages."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from morph.spot.script import EVENTS, FOLDER, SAVE, STORAGE

END_TIMEOUT_S = 10.0
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
PORT = 29400
"""The port of the first VM of a group, where all of them meet."""


def variables(rank: int, size: int, host: str, port: int = PORT) -> dict[str, str]:
    """Return variables in which torch.distributed, accelerate and Lightning find a group of VMs; none for one VM."""
    if size == 1:
        return {}
    where = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return where | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(rank), "GROUP_RANK": str(rank)}


class ScriptProcess:
    """One script, from its start to its end; on Linux it ends with the thread that starts it, even if that is killed.

    ``folder``: that of the messages. ``storage``: the URL or path of backups. ``cwd``: None: that of this process.
    ``environment``: variables in addition to those of this process. ``options``: further ones of ``Popen``. OSError:
    the script cannot be started.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        storage: str,
        cwd: Path | None,
        environment: Mapping[str, str],
        **options: Any,
    ) -> None:
        self._folder = folder
        known = {**os.environ, **environment, FOLDER: str(folder), STORAGE: storage}
        self._process = subprocess.Popen(
            command, cwd=cwd, env=known, start_new_session=True, preexec_fn=_end_with_parent, **options
        )

    def save(self, number: int) -> None:
        """Order the script to save."""
        temporary = self._folder / f"{SAVE}.new"
        temporary.write_text(str(number))
        temporary.chmod(0o644)  # the script may run as another user
        temporary.replace(self._folder / SAVE)

    def code(self) -> int | None:
        """Return the script's exit code; None: it runs."""
        return self._process.poll()

    def said(self, offset: int, most_bytes: int = -1) -> bytes:
        """Return the script's messages from this byte on."""
        return read_from(self._folder / EVENTS, offset, most_bytes)

    def end(self) -> None:
        """End the script at once, with all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_TIMEOUT_S)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def read_from(path: Path, offset: int, most_bytes: int = -1) -> bytes:
    """Return a file's bytes from this position on; none if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(most_bytes)
    except FileNotFoundError:
        return b""
