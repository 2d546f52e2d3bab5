"""Confines a process: limits its use of files, the network and other processes. Linux only.

A holder of Ray's token can make Ray's head node run code on the manager's machine, and pickles from VMs are read in the
process of Ray's driver. So the processes of the head node and the driver confine themselves before they communicate:

- namespaces of their own show them the programs of the system and of Python, their own folder, six devices, and their
  own processes, but no files of the user, no Unix sockets of services, and no process or shared memory of others;
- Landlock lets them write only in that folder, keeps them from inspecting or signalling outside processes, and closes
  ports below 1024, where the metadata services of clouds answer;
- a seccomp filter closes what Landlock's rules for ports do not cover (multipath TCP, TCP fast open, io_uring, other
  families of sockets), and the kernel's keyrings of the user.

All processes that they start are confined too, irrevocably.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import select
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_ASKED = 1
_OF_PATH, _OF_PORT = 1, 2
_NEW_MOUNTS_IPC_AND_PROCESSES, _NEW_USER = 0x20000 | 0x8000000 | 0x20000000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE, _DETACHED = 1 << 12, 1 << 14, 1 << 18, 2
_SET_NO_NEW_PRIVILEGES, _DROP_FROM_BOUND, _SET_SIGNAL_OF_PARENTS_END, _SET_FILTER = 38, 24, 1, 22
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
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"),
    *("/sys/devices/system/cpu", "/sys/devices/system/node", "/sys/fs/cgroup"),
    *(f"/etc/{name}" for name in ("ld.so.cache", "hosts", "host.conf", "nsswitch.conf", "resolv.conf", "gai.conf")),
    *(f"/etc/{name}" for name in ("localtime", "passwd", "group", "os-release", "ssl", "alternatives", "mime.types")),
)
"""Paths that every confined process may read, besides ``/proc``."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""Devices that every confined process may read and write."""
_FAMILIES, _INTERNET_FAMILIES, _PROTOCOLS = (1, 16), (2, 10), (0, 6, 17)
"""Sockets that may be made: AF_UNIX, AF_NETLINK; AF_INET and AF_INET6 with these protocols (default, TCP, UDP)."""
_FAST_OPEN = 0x20000000
_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000


@dataclass(frozen=True)
class _Machine:
    """System call numbers. ``sends``: calls that may connect a socket, and which of their arguments holds flags."""

    architecture: int
    pivot_root: int
    socket: int
    sends: tuple[tuple[int, int], ...]
    forbidden: tuple[int, ...]
    """ptrace, process_vm_readv and process_vm_writev, add_key, request_key, keyctl, io_uring_setup, bpf,
    perf_event_open, userfaultfd."""


_MACHINES = {
    "x86_64": _Machine(
        0xC000003E, 155, 41, ((44, 3), (46, 2), (307, 3)), (101, 310, 311, 248, 249, 250, 425, 321, 298, 323)
    ),
    "aarch64": _Machine(
        0xC00000B7, 41, 198, ((206, 3), (211, 2), (269, 3)), (117, 270, 271, 217, 218, 219, 425, 280, 241, 282)
    ),
}


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _PortRule(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Confined:
    """The parts of confinement that this kernel, or its administrator, allows. ``landlock``: its version; 0: none."""

    hides_files: bool
    landlock: int
    hides_processes: bool = True
    filters: bool = True

    @property
    def lacks(self) -> str:
        """The missing parts and what confined code can do without them, in words for a user; empty: none is missing."""
        files, ports = "writes wherever this user may", "reaches every TCP port, and so a cloud's metadata service"
        missing = [
            (
                not self.hides_files,
                "user namespaces",
                "sees other processes' command lines and connects to Unix sockets",
            ),
            (
                self.hides_files and not self.hides_processes,
                "a /proc of its own",
                "sees other processes' command lines",
            ),
            (not self.landlock, "Landlock", f"{files} among what it sees, and {ports}"),
            (0 < self.landlock < _SINCE_NETWORK, "Landlock's rules for ports (Linux 6.7)", ports),
            (
                0 < self.landlock < _SINCE_SCOPES,
                "Landlock's rules for signals and abstract sockets (Linux 6.12)",
                "connects to abstract Unix sockets" + ("" if self.hides_files else " and ends processes of this user"),
            ),
            (not self.filters, "filters of system calls", "reaches every port by multipath TCP, and this user's keys"),
        ]
        return "; ".join(f"{part}, so code from a VM {can}" for is_missing, part, can in missing if is_missing)


def confine(*, reads: Iterable[str | Path], writes: Sequence[str | Path]) -> Confined:
    """Confine this single-threaded process, and all that it starts from now on, as far as this machine allows.

    Where namespaces are allowed, a child process returns from this call, as process 2 of its own namespace. This
    process waits for it and exits as it does; the end of either ends all processes of the namespace. ``reads``: files
    and folders that may be read and executed, in addition to ``SYSTEM`` and ``of_python``; ``writes``: folders in which
    everything is allowed. Missing paths are left out. OSError if a step that the machine allows failed.
    """
    machine = _MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if machine is None:
        return Confined(hides_files=False, landlock=0, hides_processes=False, filters=False)
    version = max(0, _libc.syscall(_CREATE_RULESET, None, 0, _VERSION_ASKED))
    readable = [Path(path) for path in (*SYSTEM, *of_python(), *reads) if os.path.exists(path)]  # noqa: PTH110
    writable = [Path(path) for path in writes if os.path.exists(path)]  # noqa: PTH110 (True only if it may be reached)
    hides = _own_namespaces()
    has_own_processes = hides and _see_only(machine, [*readable, *writable], writable[0])
    if version:
        shared_memory = [Path("/dev/shm")] if hides else []
        _restrict(version, [*readable, Path("/proc")], [*map(Path, DEVICES), *shared_memory, *writable])
    _give_up_privileges()
    return Confined(hides, version, has_own_processes, _filter(machine))


def of_python() -> list[Path]:
    """Return the folders of this interpreter and its installed packages."""
    packages = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    whole = {"/", str(Path.home())}
    own = dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix))
    return [*packages, *(Path(prefix) for prefix in own if prefix not in whole)]


def _own_namespaces() -> bool:
    """Move to new mount, IPC and PID namespaces, in a child that returns; False: the machine does not allow it."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_NEW_MOUNTS_IPC_AND_PROCESSES) != 0:
        if _libc.unshare(_NEW_MOUNTS_IPC_AND_PROCESSES | _NEW_USER) != 0:
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text, encoding="ascii")
    of_this, kept_open = os.pipe()
    if (first := os.fork()) != 0:
        os.close(of_this)
        _exit_as(first)
    os.close(kept_open)
    _checked(_libc.prctl(_SET_SIGNAL_OF_PARENTS_END, signal.SIGKILL, 0, 0, 0))
    if select.select([of_this], [], [], 0)[0]:
        os._exit(1)  # the parent, outside, has ended already
    os.close(of_this)
    if (second := os.fork()) != 0:
        _exit_as(second)
    return True


def _exit_as(child: int) -> NoReturn:
    """Wait for a child, reaping orphans meanwhile, and exit with its status."""
    _give_up_privileges()
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _see_only(machine: _Machine, paths: Iterable[Path], place: Path) -> bool:
    """Hide all files except these, which keep their names, ``DEVICES`` and processes of this namespace.

    The new root is made in ``place``. Returns whether other processes are hidden too: a container's own limits on
    ``/proc`` can prevent it.
    """
    here, root = Path.cwd(), Path(tempfile.mkdtemp(dir=place))
    _mount(None, Path("/"), None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", 0)
    for path in sorted({*paths, *map(Path, DEVICES)}):
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
    for name in ("proc", "dev/shm"):
        (root / name).mkdir()
    _mount("tmpfs", root / "dev/shm", "tmpfs", 0)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (root / "dev" / name).symlink_to(f"/proc/self/fd{target}")
    hides_processes = True
    try:
        _mount("proc", root / "proc", "proc", 0)
    except PermissionError:
        hides_processes = False
        _mount("/proc", root / "proc", None, _BIND | _RECURSIVE)
    os.chdir(root)
    _checked(_libc.syscall(machine.pivot_root, b".", b"."))
    _checked(_libc.umount2(b".", _DETACHED))
    os.chdir(here if here.is_dir() else "/")
    return hides_processes


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


def _give_up_privileges() -> None:
    """Drop root's capabilities, one of which suffices to read the memory of every other process, and gain no others."""
    _checked(_libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    for capability in range(_MOST_CAPABILITIES):
        _libc.prctl(_DROP_FROM_BOUND, capability, 0, 0, 0)  # it fails for capabilities that are unknown or not held
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(header, none))


def _filter(machine: _Machine) -> bool:
    """Install a seccomp filter of system calls that Landlock does not check; returns whether this kernel can."""

    def unless(code: int, value: int, skipped: int) -> tuple[int, int, int, int]:
        return (code, 0, skipped, value)

    def returned(value: int) -> tuple[int, int, int, int]:
        return (_RETURN, 0, 0, value)

    def argument(number: int) -> tuple[int, int, int, int]:
        return (_LOAD, 0, 0, 16 + 8 * number)  # its low 32 bits: these machines are little-endian

    allow, refuse = returned(_ALLOW), returned(_REFUSE | errno.EPERM)
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine.architecture), refuse]
    program += [(_LOAD, 0, 0, 0), unless(_AT_LEAST, 0x40000000, 1), refuse]  # the x32 ABI of x86_64
    for number in machine.forbidden:
        program += [unless(_EQUAL, number, 1), refuse]
    for number, flags in machine.sends:
        program += [unless(_EQUAL, number, 4), argument(flags), unless(_HAS_BIT, _FAST_OPEN, 1), refuse, allow]
    made = [argument(0)]
    for family in _FAMILIES:
        made += [unless(_EQUAL, family, 1), allow]
    made += [(_EQUAL, 2, 0, _INTERNET_FAMILIES[0]), (_EQUAL, 1, 0, _INTERNET_FAMILIES[1])]
    made += [returned(_REFUSE | errno.EAFNOSUPPORT), argument(2)]
    for protocol in _PROTOCOLS:
        made += [unless(_EQUAL, protocol, 1), allow]
    made.append(returned(_REFUSE | errno.EPROTONOSUPPORT))
    program += [unless(_EQUAL, machine.socket, len(made)), *made, allow]
    instructions = (_Instruction * len(program))(*(_Instruction(*fields) for fields in program))
    return bool(_libc.prctl(_SET_FILTER, 2, ctypes.byref(_Program(len(program), instructions)), 0, 0) == 0)


def _mount(source: str | None, target: Path, kind: str | None, flags: int) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _checked(_libc.mount(*encoded, ctypes.c_ulong(flags), None), str(target))


def _checked(result: int, what: str = "") -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"a process cannot confine itself: {os.strerror(error)}", what or None)
    return result
