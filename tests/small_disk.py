"""Real disks that are full or read-only: small tmpfs mounts, where this user may make them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as out:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while out.write(b"\0" * size):
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path, size: str = "4m") -> Iterator[SmallDisk]:
    """Mount a small disk; skip the test if this is not permitted."""
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", path)
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Make a directory read-only, even for root; skip the test if this is not permitted."""
    path.mkdir(parents=True, exist_ok=True)
    _mount("--bind", path, path)
    try:
        _mount("-o", "remount,ro,bind", path)
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def may_mount() -> bool:
    """Return whether this user may mount, tried in a separate namespace."""
    tried = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return shutil.which("unshare") is not None and subprocess.run(tried, capture_output=True).returncode == 0


def _mount(*arguments: object) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")
