"""A process is killed at each file operation of a save: earlier checkpoints stay unchanged to the byte."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileOpener

from morph.checkpoint.manifest import complete_versions, version_url, write_atomically, write_manifest
from morph.checkpoint.newest import newest_whole
from morph.checkpoint.retention import delete_superfluous
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.rules import CheckpointRules

OPERATIONS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"})
"""The names of Python's audit events; writes and fsync have none: see ``killed_at``."""
UNITS = ("s0", "s1", "s2")


def payload(version: int, unit: str) -> bytes:
    return f"{unit} of version {version}".encode() * 1000


def save(url: str, version: int) -> None:
    """Write a version as workers and the manager do, then delete versions that are too old."""
    units = []
    for unit in UNITS:
        data = payload(version, unit)
        write_atomically(f"{version_url(url, version)}/{unit}.safetensors", data)
        digest = hashlib.sha256(data).hexdigest()
        units.append(UnitFile(unit=unit, file=f"{unit}.safetensors", size_bytes=len(data), sha256=digest))
    write_manifest(url, Manifest(fingerprint="f", version=version, units=tuple(units)))
    delete_superfluous(url, CheckpointRules(keep_newest=2))


def killed_at(number: int, work: Callable[[], None], folder: Path) -> bool:
    """Run ``work`` in a process that kills itself at its nth operation below a folder; return whether it was killed.

    Most operations are not begun then; a write is killed halfway.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def is_due() -> bool:
            nonlocal count
            count += 1
            return count == number + 1

        def look(event: str, arguments: tuple[object, ...]) -> None:
            if event in OPERATIONS and any(str(folder) in str(argument) for argument in arguments) and is_due():
                os.kill(os.getpid(), signal.SIGKILL)

        def write(file: LocalFileOpener, data: bytes) -> int:
            if is_due():
                file.f.write(data[: len(data) // 2])
                file.f.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            written: int = file.f.write(data)
            return written

        def sync(descriptor: int) -> None:
            if is_due():
                os.kill(os.getpid(), signal.SIGKILL)
            fsync(descriptor)

        fsync = os.fsync
        LocalFileOpener.write, os.fsync = write, sync
        sys.addaudithook(look)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.slow
def test_whenever_a_save_is_killed_the_newest_whole_version_is_unchanged(tmp_path: Path) -> None:
    found: list[int] = []
    for number in range(200):
        folder = tmp_path / str(number)
        url = str(folder)
        for version in (10, 20):
            save(url, version)
        was_killed = killed_at(number, lambda url=url: save(url, 30), folder)  # type: ignore[misc]
        manifest, passed_over = newest_whole(url, every_byte=True)
        assert manifest is not None
        assert not passed_over
        assert manifest.version in (20, 30)
        found.append(manifest.version)
        for unit in UNITS:
            assert (folder / f"v{manifest.version:08d}" / f"{unit}.safetensors").read_bytes() == payload(
                manifest.version, unit
            )
        save(url, 40)  # the run continues, and removes what was left
        assert complete_versions(url)[-1] == 40
        assert not list(folder.glob("v00000010/*"))
        if not was_killed:
            break
    assert found[0] == 20
    assert found == sorted(found), "a version that was complete was gone later"
    assert found[-1] == 30
    # each file is at least opened, written, flushed and renamed, in a folder that is made and flushed
    assert len(found) > 6 * len(UNITS)
