"""Confines a process: limits its use of files, the network and other processes. Linux only.

A holder of Ray's token can make Ray's head node run code on the manager's machine, and pickles from VMs are read in the
process that is Ray's driver. So both processes confine themselves before they communicate. In a mount namespace they
see the programs of the system and of Python, and their own folder, but no files of the user and no Unix sockets of
services. Landlock lets them write only in that folder, keeps them from inspecting or signalling outside processes, and
closes ports below 1024, where the metadata services of clouds answer. All processes that they start are confined too,
irrevocably.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_ASKED = 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_OF_PATH, _OF_PORT = 1, 2
_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE, _DETACHED = 1 << 12, 1 << 14, 1 << 18, 2
_SET_NO_NEW_PRIVILEGES, _DROP_FROM_BOUND = 38, 24
_CAPABILITY_VERSION_3, _MOST_CAPABILITIES = 0x20080522, 64
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
"""The rights that a rule for a file that is not a folder may have."""
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_MOST_FILE_RIGHTS = 16
_CONNECT_TCP, _ABSTRACT_SOCKETS_AND_SIGNALS = 1 << 1, 3
_SINCE_NETWORK, _SINCE_SCOPES = 4, 6
FIRST_FREE_PORT, END_OF_PORTS = 1024, 1 << 16

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/proc", "/sys"),
    *("/etc/ld.so.cache", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/resolv.conf", "/etc/gai.conf"),
    *(
        "/etc/localtime",
        "/etc/passwd",
        "/etc/group",
        "/etc/os-release",
        "/etc/ssl",
        "/etc/alternatives",
        "/etc/mime.types",
        "/dev",
    ),
)
"""Paths that every program may read."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
"""Devices that every program may also write."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _PortRule(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Confined:
    """The parts of confinement that this kernel, or its administrator, allows. ``landlock``: its version; 0: none."""

    hides_files: bool
    landlock: int

    @property
    def lacks(self) -> str:
        """The missing parts, in words for a user; empty if none is missing."""
        missing = [
            *([] if self.hides_files else ["user namespaces"]),
            *([] if self.landlock else ["Landlock"]),
            *(["Landlock's rules for the network and for signals"] if 0 < self.landlock < _SINCE_SCOPES else []),
        ]
        return " and ".join(missing)


def confine(*, reads: Iterable[str | Path], writes: Sequence[str | Path]) -> Confined:
    """Confine this single-threaded process, and all that it starts from now on, as far as this machine allows.

    Args:
        reads: Files and folders that may be read and executed, in addition to ``SYSTEM`` and ``of_python``.
        writes: Folders in which everything is allowed. Missing paths are left out of both arguments.

    Raises:
        OSError: a step that the machine allows failed.
    """
    version = max(0, _libc.syscall(_CREATE_RULESET, None, 0, _VERSION_ASKED)) if sys.platform == "linux" else 0
    readable = [path for path in map(Path, (*SYSTEM, *of_python(), *reads)) if path.exists()]
    writable = [path for path in map(Path, writes) if path.exists()]
    hides = sys.platform == "linux" and _own_mounts()
    if hides:
        _see_only([*readable, *writable], writable[0])
    if version:
        _restrict(version, readable, [*map(Path, DEVICES), *writable])
    if hides or version:
        _drop_capabilities()
    return Confined(hides, version)


def of_python() -> list[Path]:
    """Return the folders of this interpreter and its installed packages."""
    packages = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    whole = {"/", str(Path.home())}
    own = dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix))
    return [*packages, *(Path(prefix) for prefix in own if prefix not in whole)]


def _own_mounts() -> bool:
    """Move to a new mount namespace; returns whether that is allowed."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_NEW_MOUNTS) == 0:
        return True
    if _libc.unshare(_NEW_MOUNTS | _NEW_USER) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path("/proc/self", name).write_text(text, encoding="ascii")
    return True


def _see_only(paths: Iterable[Path], place: Path) -> None:
    """Hide all files except these, which keep their names. ``place``: a folder in which the new root is made."""
    here, root = Path.cwd(), Path(tempfile.mkdtemp(dir=place))
    _mount(None, Path("/"), None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", 0)
    for path in sorted(set(paths)):
        new = root / path.relative_to("/")
        if os.path.lexists(new):
            continue  # it is below another one
        new.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            new.symlink_to(path.readlink())
        elif path.is_dir():
            new.mkdir()
            _mount(str(path), new, None, _BIND | _RECURSIVE)
        else:
            new.touch()
            _mount(str(path), new, None, _BIND)
    os.chdir(root)
    _checked(_libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."))
    _checked(_libc.umount2(b".", _DETACHED))
    os.chdir(here if here.is_dir() else "/")


def _restrict(version: int, readable: Iterable[Path], writable: Iterable[Path]) -> None:
    every = (1 << _NUM_FILE_RIGHTS.get(version, _MOST_FILE_RIGHTS)) - 1
    has_network, has_scopes = version >= _SINCE_NETWORK, version >= _SINCE_SCOPES
    wanted = _Ruleset(every, _CONNECT_TCP if has_network else 0, _ABSTRACT_SOCKETS_AND_SIGNALS if has_scopes else 0)
    size = 24 if has_scopes else 16 if has_network else 8
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, ctypes.byref(wanted), size, 0))
    try:
        for paths, rights in ((readable, _READING), (writable, every)):
            for path in paths:
                _allow(ruleset, path, rights & every)
        for port in range(FIRST_FREE_PORT, END_OF_PORTS) if has_network else ():
            rule = _PortRule(_CONNECT_TCP, port)
            _checked(_libc.syscall(_ADD_RULE, ruleset, _OF_PORT, ctypes.byref(rule), 0))
        _checked(_libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    with suppress(FileNotFoundError):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = _PathRule(rights if path.is_dir() else rights & _OF_FILES, opened)
            _checked(_libc.syscall(_ADD_RULE, ruleset, _OF_PATH, ctypes.byref(rule), 0))
        finally:
            os.close(opened)


def _drop_capabilities() -> None:
    """Drop root's capabilities: one of them suffices to read the memory of every other process."""
    for capability in range(_MOST_CAPABILITIES):
        _libc.prctl(_DROP_FROM_BOUND, capability, 0, 0, 0)  # it fails for capabilities that are unknown or not held
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(header, none))


def _mount(source: str | None, target: Path, kind: str | None, flags: int) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _checked(_libc.mount(*encoded, ctypes.c_ulong(flags), None), str(target))


def _checked(result: int, what: str = "") -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"a process cannot confine itself: {os.strerror(error)}", what or None)
    return result
