"""Runs a command as another user, to whom it first gives each PATH: ``as_user UID PATH... -- COMMAND...``."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> None:
    """Change the owner of the paths, become the user, and execute the command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    separator = given.index("--")
    (uid, *paths), command = given[:separator], given[separator + 1 :]
    user = pwd.getpwuid(int(uid))
    for path in map(Path, paths):
        for entry in (path, *(path.iterdir() if path.is_dir() else ())):
            os.chown(entry, user.pw_uid, user.pw_gid, follow_symlinks=False)
    os.initgroups(user.pw_name, user.pw_gid)
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    home = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
    os.execve(command[0], command, {**os.environ, **home})


if __name__ == "__main__":
    main()
