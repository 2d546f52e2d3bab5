"""Prepares what a VM installs at its first boot: a wheel of this machine's Morph, and packages in the same versions."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from morph.contract.errors import ClusterError
from morph.contract.files import PRIVATE, code_files, packed, write_whole

DISTRIBUTION = "morph-train"
PACKAGES = ("calibrate", "manager", "morph", "simulator")
GPU_BUILDS = ("cu", "rocm", "xpu")
TORCH_INDEX = "https://download.pytorch.org/whl/"
"""The index of torch's builds; each build has a folder below it."""
LOCK_TIMEOUT_S = 600.0


def make_wheel() -> bytes:
    """Pack the installed Morph into a wheel, the same files to the same bytes. ClusterError: it is not installed."""
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise ClusterError(
            "VMs get a copy of this machine's Morph, which is not installed: run pip install -e . in a clone"
        ) from error
    info = f"{DISTRIBUTION.replace('-', '_')}-{distribution.version}.dist-info"
    files = {name: path.read_bytes() for package in PACKAGES for name, path in _files(package)}
    described = distribution.read_text("METADATA") or distribution.read_text(
        "PKG-INFO"
    )  # the second is that of a clone, beside the code
    if not described:
        raise ClusterError(
            "VMs get a copy of this machine's Morph, whose installation lacks metadata: run pip install -e ."
        )
    files[f"{info}/METADATA"] = described.encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: morph\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = (distribution.read_text("entry_points.txt") or "").encode()
    record = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    return packed(dict(sorted(files.items())), mode=0o644)


def kept_wheel(path: Path, *, make: bool) -> bytes:
    """Return the run's wheel, which the first manager keeps. ClusterError: it is gone, or cannot be made."""
    if make:
        write_whole(path, make_wheel(), PRIVATE)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ClusterError("the run's wheel is gone") from error


def requirements(*, any_build: bool = False) -> tuple[str, ...]:
    """Return the wheel's requirements, with their own, in the versions found here: torch in its exact build.

    ``any_build``: the index's build for the VMs, because the one found here does not support their GPUs.
    """
    versions: dict[str, str] = {}
    todo = [DISTRIBUTION]
    while todo:
        for line in metadata.requires(todo.pop()) or ():
            requirement, _, marker = line.partition(";")
            read = re.match(r"[A-Za-z0-9._-]+", requirement)
            assert read is not None, line
            name = re.sub(r"[-_.]+", "-", read[0]).lower()
            if name in versions or "extra" in marker:
                continue
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:  # not needed on this system
                continue
            public, _, build = version.partition("+")
            versions[name] = public if build and any_build and not build.startswith(GPU_BUILDS) else version
            todo.append(name)
    return tuple(f"{name}=={version}" for name, version in sorted(versions.items()))


def make_lock(wanted: Sequence[str], timeout_s: float = LOCK_TIMEOUT_S) -> str:
    """Ask pip which files it would install for requirements on this kind of machine; installs and builds nothing.

    Returns the input of ``pip install --require-hashes -r``. ClusterError: pip cannot resolve them.
    """
    indexes = _indexes(wanted)
    with tempfile.TemporaryDirectory(prefix="morph-") as directory:
        report = Path(directory) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--only-binary=:all:", f"--report={report}", *indexes]
        quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--retries=1"]
        command = [sys.executable, "-m", "pip", "install", *quiet, *options, *wanted]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"pip cannot determine what VMs should install: {error}") from error
        if done.returncode:
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
            raise ClusterError(f"pip cannot determine what VMs should install: {said[-1]}")
        try:
            lines = sorted(_locked(item) for item in json.loads(report.read_bytes())["install"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"pip's report of what VMs are to install cannot be read: {error!r}") from error
    return "\n".join([*indexes, *lines, ""])


def _indexes(wanted: Sequence[str]) -> list[str]:
    """Return pip's options for the indexes of torch's builds, which no general index has."""
    builds = {build for requirement in wanted if (build := requirement.partition("==")[2].partition("+")[2])}
    return [f"--extra-index-url={TORCH_INDEX}{build}" for build in sorted(builds)]


def _locked(item: dict[str, Any]) -> str:
    known, digest = item["metadata"], item["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{known['name']}=={known['version']} --hash=sha256:{digest}"


class Lock:
    """The packages that a run's VMs install, determined when the first VM lacks one; ``path`` keeps them."""

    def __init__(self, path: Path, wanted: Sequence[str], say: Callable[[str], object]) -> None:
        self._path, self._wanted, self._say = path, tuple(wanted), say
        self._made: bytes | None = None
        self._mutex = threading.Lock()

    def __call__(self) -> bytes:
        """Return the lock file for pip; may block for ``LOCK_TIMEOUT_S``. Thread-safe."""
        with self._mutex:
            if self._made is None:
                self._made = self._kept() or self._new()
            return self._made

    @property
    def _mark(self) -> str:
        return f"# for {hashlib.sha256(repr(self._wanted).encode()).hexdigest()}\n"

    def _kept(self) -> bytes:
        content = self._path.read_bytes() if self._path.exists() else b""
        return content if content.startswith(self._mark.encode()) else b""

    def _new(self) -> bytes:
        try:
            made = (self._mark + make_lock(self._wanted)).encode()
            write_whole(self._path, made, PRIVATE)
        except (ClusterError, OSError) as error:  # the VMs may reach an index that this machine cannot
            self._say(f"{error}; VMs install the same versions, and their files' hashes are not checked")
            made = "\n".join([*_indexes(self._wanted), *self._wanted, ""]).encode()
        return made


def python_version() -> str:
    """Return this interpreter's exact version: Ray accepts no other."""
    return platform.python_version()


def _files(package: str) -> Iterator[tuple[str, Path]]:
    """Yield each file of a package, with its path in the wheel."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ClusterError(f"VMs get a copy of this machine's Morph, whose package {package} is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    yield from ((f"{package}/{inside}", path) for inside, path in code_files(root))


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
