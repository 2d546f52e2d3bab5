"""What a confined process and its children can still do; each case has a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manager.host.confinement import Confined

CONFINED = """
import errno, json, os, socket, subprocess, sys
from pathlib import Path
from manager.host.confinement import confine

own, given, other, manager, sleeping = sys.argv[1:]
confined = confine(reads=[given], writes=[own])

def tried(act):
    try:
        return act() and "done"
    except OSError as error:
        return errno.errorcode[error.errno]

def started(*command):
    return subprocess.run(command, capture_output=True, cwd="/").returncode

print(json.dumps({
    "lacks": confined.lacks,
    "own": tried(lambda: Path(own, "file").write_text("text")),
    "given": tried(lambda: Path(given).read_text()),
    "change what is given": tried(lambda: Path(given).write_text("text")),
    "other": tried(lambda: Path(other).read_text()),
    "system": tried(lambda: Path("/etc/passwd").read_text()),
    "change the system": tried(lambda: Path("/usr/file").write_text("text")),
    "socket": tried(lambda: socket.socket(socket.AF_UNIX).connect(f"{other}.socket")),
    "look": tried(lambda: Path(f"/proc/{sleeping}/environ").read_bytes()),
    "signal": tried(lambda: os.kill(int(sleeping), 0)),
    "port 80": tried(lambda: socket.create_connection(("127.0.0.1", 80), 5)),
    "a child reads another file": started("cat", other),
    "a child runs": started("true"),
}))
"""


def test_a_confined_process_reaches_its_own_folder_and_programs_and_nothing_else(tmp_path: Path) -> None:
    own, given, other = tmp_path / "own", tmp_path / "given", tmp_path / "other"
    own.mkdir()
    given.write_text("given", encoding="utf-8")
    other.write_text("other", encoding="utf-8")
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        try:
            arguments = (own, given, other, os.getpid(), sleeping.pid)
            done = subprocess.run(
                [sys.executable, "-c", CONFINED, *map(str, arguments)],
                capture_output=True, text=True, timeout=100, check=True,
            )  # fmt: skip
        finally:
            sleeping.kill()
    found = json.loads(done.stdout)
    if lacks := found.pop("lacks"):
        pytest.skip(f"not to be had here: {lacks}")
    assert found.pop("a child reads another file") != 0
    assert found == {
        "own": "done",
        "given": "done",
        "change what is given": "EACCES",
        "other": "ENOENT",
        "system": "done",
        "change the system": "EACCES",
        "socket": "ENOENT",
        "look": "EACCES",
        "signal": "EPERM",
        "port 80": "EACCES",
        "a child runs": 0,
    }


@pytest.mark.parametrize(
    ("confined", "lacks"),
    [
        (Confined(hides_files=True, landlock=7), ""),
        (Confined(hides_files=False, landlock=0), "user namespaces and Landlock"),
        (Confined(hides_files=True, landlock=1), "Landlock's rules for the network and for signals"),
    ],
)
def test_confinement_that_a_machine_forbids_is_reported(confined: Confined, lacks: str) -> None:
    assert confined.lacks == lacks
