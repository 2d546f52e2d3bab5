"""Morph's own wheel, made of what runs here and given to each VM at its first boot: no package index is asked."""

from __future__ import annotations

import base64
import hashlib
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from morph.contract.errors import ClusterError
from morph.contract.files import PRIVATE, code_files, packed, write_whole

DISTRIBUTION = "morph-train"
PACKAGES = ("calibrate", "manager", "morph", "simulator")
EXACT = ("ray", "torch")
"""What workers must have of the manager's very version: Ray refuses any other, and weights depend on the other."""


def make_wheel() -> bytes:
    """Pack Morph as it is installed here, in place or not, into a wheel; the same files give the same bytes.

    Raises:
        ClusterError: it is not installed, but found in some folder.
    """
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise ClusterError(
            "VMs get Morph from here, and it is not installed here: pip install -e . in a clone"
        ) from error
    info = f"{DISTRIBUTION.replace('-', '_')}-{found.version}.dist-info"
    files = {name: path.read_bytes() for package in PACKAGES for name, path in _files(package)}
    described = found.read_text("METADATA") or found.read_text("PKG-INFO")  # the second: a clone's own, beside the code
    if not described:
        raise ClusterError("VMs get Morph from here, and how it is installed here says nothing of it: pip install -e .")
    files[f"{info}/METADATA"] = described.encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: morph\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = (found.read_text("entry_points.txt") or "").encode()
    record = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in sorted(files.items())]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    return packed(dict(sorted(files.items())), mode=0o644)


def kept_wheel(path: Path, *, make: bool) -> bytes:
    """Return the run's wheel, which a manager that takes over finds where the first one put it.

    Raises:
        ClusterError: it is gone, or cannot be made.
    """
    if make:
        write_whole(path, make_wheel(), PRIVATE)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ClusterError("the run's wheel is gone") from error


def requirements() -> tuple[str, ...]:
    """Return what the wheel requires of other packages, as pip reads it: Ray and torch in the versions found here."""
    found = []
    for line in metadata.requires(DISTRIBUTION) or ():
        requirement, _, marker = line.partition(";")
        read = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert read is not None, line
        if not marker:
            name = read[0].lower()
            version = metadata.version(name).partition("+")[0] if name in EXACT else ""
            found.append(f"{name}=={version}" if version else requirement.strip())
    return tuple(found)


def python_version() -> str:
    """Return this interpreter's version, to the patch: Ray takes no other."""
    return platform.python_version()


def _files(package: str) -> Iterator[tuple[str, Path]]:
    """Each file of a package, by its path in the wheel."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ClusterError(f"VMs get Morph from here, and its package {package} is not installed here")
    root = Path(next(iter(spec.submodule_search_locations)))
    yield from ((f"{package}/{inside}", path) for inside, path in code_files(root))


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
