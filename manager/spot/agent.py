"""Runs on each VM of ``morph spot-run``: starts the script there, and connects it with the launcher.

``python -m manager.spot.agent --manager HOST:PORT --node NAME --secret-file PATH [--uid N]``

A local VM's agent is a thread of the launcher. The messages are described in ``manager.spot.script_server``. If the
launcher is away, the agent tries again while the script trains on; on a provider's VM, ``manager.notices.agent`` ends
the VM if the launcher stays away for long.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import io
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manager.notices.call import AGENT, arguments_of_node, called, secret_in
from manager.providers.boot.first_boot import Caller
from morph.link.proof import new_secret
from morph.spot.script import EVENTS, FOLDER, SAVE, STORAGE

SUFFIX = "/script"
"""The agent of VM NAME calls itself NAME/script: the agent of notices has the VM's own name."""
TIMEOUT_S = 10.0
EVERY_S = 0.25
RETRY_S = 2.0
END_TIMEOUT_S = 10.0
MOST_BYTES = 16384
"""The largest number of bytes of the script's messages, and of its output, in one line."""
CANNOT_START = 127
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


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

    def end(self) -> None:
        """End the script at once, with all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_TIMEOUT_S)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class VmAgent:
    """The agent of one VM. ``manager``: host and port.

    ``folder``: for the script's messages, and for its code if the launcher sends it. ``uid``: the user as which the
    script runs; 0: this process's user. ``where``: the script's folder if the launcher does not send its code; None:
    this process's. Code that is sent runs with this interpreter, and its output goes to the launcher.
    """

    def __init__(
        self, manager: tuple[str, int], node: str, secret: str, folder: Path, uid: int = 0, where: Path | None = None
    ) -> None:
        self._manager, self._node, self._secret = manager, node + SUFFIX, secret
        self._folder, self._uid, self._where = folder, uid, where
        self._life = new_secret()
        self._script: ScriptProcess | None = None
        self._code: int | None = None
        self._kept = [0, 0]
        self._save = 0
        self._over = threading.Event()

    def close(self) -> None:
        """Let ``run`` return."""
        self._over.set()

    def run(self) -> None:
        """Serve until ``close``, or until this process is ended; the script ends with it."""
        try:
            while not self._over.is_set():
                try:
                    self._talk()
                except (OSError, ValueError, KeyError) as error:
                    if not self._over.wait(RETRY_S):
                        print(f"the launcher cannot be reached: {error}", file=sys.stderr, flush=True)
        finally:
            if self._script is not None:
                self._script.end()

    def _talk(self) -> None:
        start = None
        with called(self._manager, self._secret, self._node, AGENT) as session:
            while start is None and not self._over.is_set():
                message, is_all = self._told()
                session.tell(message)
                start = self._hear(session.hear(TIMEOUT_S))
                if start is None and is_all:
                    self._over.wait(EVERY_S)
        if start is not None:
            self._begin(start)  # the code comes over a separate connection

    def _told(self) -> tuple[dict[str, Any], bool]:
        """Return the next message, and whether it holds all that there is to tell."""
        code = self._code if self._script is None else self._script.code()
        files = (self._folder / "said" / EVENTS, self._folder / "output")
        parts = [_read_from(path, kept) for path, kept in zip(files, self._kept, strict=True)]
        is_all = max(map(len, parts)) < MOST_BYTES
        encoded = [[kept, base64.b64encode(part).decode()] for kept, part in zip(self._kept, parts, strict=True)]
        message = {"life": self._life, "code": code if is_all else None, "said": encoded[0], "output": encoded[1]}
        return {"kind": "script", **message}, is_all

    def _hear(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """Return the start order that applies now."""
        self._kept = [int(number) for number in answer["kept"]]
        if self._script is not None and answer["save"] > self._save:
            self._save = int(answer["save"])
            self._script.save(self._save)
        start: dict[str, Any] | None = answer["start"]
        if start is None and self._script is not None and self._script.code() is None:
            self._script.end()
        return start if self._script is None and self._code is None else None

    def _begin(self, start: dict[str, Any]) -> None:
        where, command, own = self._where, list(start["command"]), dict(start["environment"])
        options: dict[str, Any] = {}
        with contextlib.ExitStack() as ending:
            errors: Any = sys.stderr.buffer
            if start["code"]:
                where = self._folder / "code"
                self._fetch(start["code"], where)
                command[:1] = [sys.executable] if command[0] in ("python", "python3") else command[:1]
                own = {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"} | own
                errors = ending.enter_context((self._folder / "output").open("ab"))
                options = {"stdout": errors, "stderr": errors}
            said = self._folder / "said"
            said.mkdir()
            if self._uid:
                user = pwd.getpwuid(self._uid)
                for path in (self._folder, *self._folder.rglob("*")):
                    os.chown(path, user.pw_uid, user.pw_gid)
                options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
                own = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name} | own
            try:
                self._script = ScriptProcess(said, command, start["storage"], where, own, **options)
            except OSError as error:
                errors.write(f"{command[0]} cannot be started: {error}\n".encode())
                self._code = CANNOT_START

    def _fetch(self, digest: str, where: Path) -> None:
        """Get the script's code; ConnectionError: other code came."""
        data = Caller("{}:{}".format(*self._manager), self._node, 1, self._secret).file("code")
        if hashlib.sha256(data).hexdigest() != digest:
            raise ConnectionError("the launcher did not send the script's code")
        where.mkdir()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(where)


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(MOST_BYTES)
    except FileNotFoundError:
        return b""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until the VM ends."""
    parser = arguments_of_node("manager.spot.agent")
    parser.add_argument("--uid", default=0, type=int)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the script is a separate process group
    with tempfile.TemporaryDirectory(prefix="morph-spot-") as folder:
        VmAgent(given.manager, given.node, secret_in(given), Path(folder), given.uid).run()


if __name__ == "__main__":
    main()
