"""Runs on each provider's VM of ``morph spot-run``: starts the script there, and connects it with the launcher.

``python -m manager.spot.agent --manager HOST:PORT --node NAME --secret-file PATH [--uid N]``

Its messages are described in ``manager.spot.provider_vms``. If the launcher is away, the agent tries again while the
script trains on; ``manager.notices.agent`` ends the VM if the launcher stays away for long.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import pwd
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manager.notices.call import AGENT, arguments_of_node, called, secret_in
from manager.providers.boot.first_boot import Caller
from manager.spot.provider_vms import SUFFIX
from manager.spot.script_process import ScriptProcess, read_from
from morph.link.proof import new_secret

TIMEOUT_S = 10.0
EVERY_S = 0.25
RETRY_S = 2.0
MOST_BYTES = 16384
"""The largest number of bytes of the script's messages, and of its output, in one line."""
CANNOT_START = 127


class VmAgent:
    """The agent of one VM. ``manager``: HOST:PORT.

    ``folder``: an empty one, for the script's code and messages. ``uid``: the user as which the script runs; 0: this
    process's user.
    """

    def __init__(self, manager: str, node: str, secret: str, folder: Path, uid: int = 0) -> None:
        self._manager, self._node, self._secret = manager, node + SUFFIX, secret
        self._folder, self._uid = folder, uid
        self._life = new_secret()
        self._script: ScriptProcess | None = None
        self._code: int | None = None
        self._kept = [0, 0]
        self._save = 0

    def run(self) -> None:
        """Serve until this process is ended, which also ends the script."""
        try:
            self._talk()
        finally:
            if self._script is not None:
                self._script.end()

    def _talk(self) -> None:
        host, _, port = self._manager.rpartition(":")
        while True:
            try:
                with called((host, int(port)), self._secret, self._node, AGENT) as session:
                    while True:
                        session.tell(self._told())
                        start = self._hear(session.hear(TIMEOUT_S))
                        if start is not None:
                            break  # the code comes over a separate connection
                        time.sleep(EVERY_S)
                self._begin(start)
            except (OSError, ValueError, KeyError) as error:
                print(f"the launcher cannot be reached: {error}", file=sys.stderr, flush=True)
                time.sleep(RETRY_S)

    def _told(self) -> dict[str, Any]:
        code = self._code if self._script is None else self._script.code()
        said = b"" if self._script is None else self._script.said(self._kept[0], MOST_BYTES)
        output = read_from(self._folder / "output", self._kept[1], MOST_BYTES)
        is_all = max(len(said), len(output)) < MOST_BYTES
        parts = (base64.b64encode(one).decode() for one in (said, output))
        told = dict(zip(("said", "output"), zip(self._kept, parts, strict=True), strict=True))
        return {"kind": "script", "life": self._life, "code": code if is_all else None, **told}

    def _hear(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """Return the start order that applies now."""
        self._kept = [int(one) for one in answer["kept"]]
        if self._script is not None and answer["save"] > self._save:
            self._save = int(answer["save"])
            self._script.save(self._save)
        start: dict[str, Any] | None = answer["start"]
        if start is None and self._script is not None and self._script.code() is None:
            self._script.end()
        return start if self._script is None and self._code is None else None

    def _begin(self, start: dict[str, Any]) -> None:
        code, said = self._folder / "code", self._folder / "said"
        data = Caller(self._manager, self._node, 1, self._secret).file("code")
        if hashlib.sha256(data).hexdigest() != start["code"]:
            raise ConnectionError("the launcher did not send the script's code")
        for one in (code, said):
            one.mkdir()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(code)
        options: dict[str, Any] = {}
        own: dict[str, str] = {}
        if self._uid:
            user = pwd.getpwuid(self._uid)
            for path in (self._folder, *self._folder.rglob("*")):
                os.chown(path, user.pw_uid, user.pw_gid)
            options = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            own = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
        command, python = list(start["command"]), sys.executable
        command[:1] = [python] if command[0] in ("python", "python3") else command[:1]
        own["PATH"] = f"{Path(python).parent}:{os.environ.get('PATH', '')}"
        with (self._folder / "output").open("ab") as output:
            options |= {"stdout": output, "stderr": output}
            own |= start["environment"]
            try:
                self._script = ScriptProcess(said, command, start["storage"], code, own, **options)
            except OSError as error:
                output.write(f"{command[0]} cannot be started: {error}\n".encode())
                self._code = CANNOT_START


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until the VM ends."""
    parser = arguments_of_node("manager.spot.agent")
    parser.add_argument("--uid", default=0, type=int)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the script is a separate process group
    with tempfile.TemporaryDirectory(prefix="morph-spot-") as folder:
        VmAgent("{}:{}".format(*given.manager), given.node, secret_in(given), Path(folder), given.uid).run()


if __name__ == "__main__":
    main()
