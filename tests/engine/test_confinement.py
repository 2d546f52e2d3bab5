"""Everything that a confined process can open, connect to, signal or trace, with and without each part of confinement.

Each case is a process of its own. A filter of system calls takes parts away, as containers and administrators do.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from manager.engine.on_ray.confinement import Confined
from tests.waiting import BOUND_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is Linux's")

OTHER_USER = 65534
PROBE = """
import ctypes, errno, encodings.ascii, encodings.idna, json, os, socket, stat, struct, subprocess, sys
from pathlib import Path
from manager.engine.on_ray.confinement import confine

given = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)

def call(*arguments):
    if (result := libc.syscall(*arguments)) < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

def take_away(number, error):
    program = b"".join(struct.pack("HBBI", *line) for line in [
        (0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | error), (6, 0, 0, 0x7FFF0000)])
    buffer = ctypes.create_string_buffer(program)
    rule = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(buffer)))
    assert libc.prctl(22, 2, ctypes.byref(rule), 0, 0) == 0

if given["uid"] != os.getuid():
    os.setgroups([]), os.setgid(given["uid"]), os.setuid(given["uid"])
    libc.prctl(4, 1, 0, 0, 0)  # as a program of that user would be
libc.prctl(38, 1, 0, 0, 0)
if not given["namespaces"]:
    take_away({"x86_64": 272, "aarch64": 97}[os.uname().machine], errno.EPERM)
if not given["landlock"]:
    take_away(444, errno.ENOSYS)
confined = confine(reads=[given["given"]], writes=[given["own"]])

def tried(act):
    try:
        act()
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]

def opened(path, flags):
    os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))

def walked(top, skipped):
    yield top
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in skipped]
        yield from (os.path.join(folder, name) for name in (*folders, *names))

devices, written = set(), []
seen = walked("/", {"/proc", "/dev/shm", given["own"]}) if given["namespaces"] else ()
for path in (*given["devices"], *seen):
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        continue
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        if tried(lambda: opened(path, os.O_RDONLY)) == "done" or tried(lambda: opened(path, os.O_WRONLY)) == "done":
            devices.add(path)
    elif stat.S_ISREG(mode) and tried(lambda: opened(path, os.O_WRONLY)) == "done":
        written.append(path)
own_pids = {os.getpid(), os.getppid(), 1} if given["namespaces"] else {os.getpid()}
numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
signalled = [pid for pid in range(1, given["last_pid"] + 1) if pid not in own_pids
             and tried(lambda: os.kill(pid, 0)) == "done"]
kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)
made = [(family, protocol) for family in range(1, 46) for protocol in range(300)
        if any(tried(lambda: socket.socket(family, kind, protocol).close()) == "done" for kind in kinds)]

def command_line(pid):
    return b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()

forbidden = {"ptrace": {"x86_64": 101, "aarch64": 117}, "keyctl": {"x86_64": 250, "aarch64": 219},
             "io_uring_setup": {"x86_64": 425, "aarch64": 425}, "bpf": {"x86_64": 321, "aarch64": 280},
             "userfaultfd": {"x86_64": 323, "aarch64": 282}, "process_vm_readv": {"x86_64": 310, "aarch64": 270}}
sleeping = given["sleeping"]
low = ("127.0.0.1", 80)

def fast_open():
    with socket.socket() as made:
        made.sendto(b"GET", socket.MSG_FASTOPEN, low)

def connected(family, address):
    with socket.socket(family) as made:
        made.settimeout(5)
        made.connect(address)

def shared_memory():
    call({"x86_64": 29, "aarch64": 194}[os.uname().machine], given["segment"], 0, 0)

def read_command_line():
    if not command_line(sleeping):
        raise OSError(errno.ESRCH, "")

print(json.dumps({
    "confined": [confined.hides_files, confined.landlock > 0, confined.hides_processes, confined.filters],
    "devices": sorted(devices),
    "written": written[:10],
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
    "own processes": sorted(set(numbers) - own_pids) if given["namespaces"] else [],
    "signalled": signalled,
    "command line": tried(read_command_line),
    "environment": tried(lambda: Path(f"/proc/{sleeping}/environ").read_bytes()),
    "memory": tried(lambda: opened(f"/proc/{sleeping}/mem", os.O_RDONLY)),
    "kernel": [name for name in ("kcore", "kmsg", "kpageflags", "sysrq-trigger", "sys/kernel/core_pattern")
               if tried(lambda: opened("/proc/" + name, os.O_RDWR)) == "done"],
    "families": sorted({family for family, _ in made}),
    "protocols": sorted({protocol for family, protocol in made if family in (socket.AF_INET, socket.AF_INET6)}),
    "own": tried(lambda: Path(given["own"], "file").write_text("text")),
    "own shared memory": tried(lambda: Path(f"/dev/shm/morph-probe-{os.getpid()}").write_text("text")),
    "given": tried(lambda: Path(given["given"]).read_text()),
    "change what is given": tried(lambda: Path(given["given"]).write_text("given")),
    "other": tried(lambda: Path(given["other"]).read_text()),
    "shared memory of others": tried(lambda: Path(given["shared"]).read_text()),
    "segment of others": tried(shared_memory),
    "terminal": tried(lambda: opened(given["terminal"], os.O_RDWR)),
    "system": tried(lambda: Path("/etc/passwd").read_text()),
    "Unix socket": tried(lambda: connected(socket.AF_UNIX, given["socket"])),
    "abstract socket": tried(lambda: connected(socket.AF_UNIX, given["abstract"])),
    "high port": tried(lambda: connected(socket.AF_INET, ("127.0.0.1", given["port"]))),
    "port 80": tried(lambda: connected(socket.AF_INET, low)),
    "port 80, IPv6": tried(lambda: connected(socket.AF_INET6, ("::1", 80))),
    "port 80, fast open": tried(fast_open),
    **{name: tried(lambda: call(numbers[os.uname().machine], 0, 0, 0, 0, 0, 0)) for name, numbers in forbidden.items()},
    "a child reads another file": subprocess.run(["cat", given["other"]], capture_output=True, cwd="/").returncode,
    "a child runs": subprocess.run(["true"], cwd="/").returncode,
}))
if not given["namespaces"] and Path("/dev/shm", f"morph-probe-{os.getpid()}").exists():
    os.unlink(f"/dev/shm/morph-probe-{os.getpid()}")
"""

CONFINED: dict[str, Any] = {
    "devices": ["/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero"],
    "written": [],
    "descriptors": [0, 1, 2],
    "own processes": [],
    "signalled": [],
    "command line": "ENOENT",
    "environment": "ENOENT",
    "memory": "ENOENT",
    "kernel": [],
    "families": [socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK] if sys.platform == "linux" else [],
    "protocols": [0, socket.IPPROTO_TCP, socket.IPPROTO_UDP],
    "own": "done",
    "own shared memory": "done",
    "given": "done",
    "change what is given": "EACCES",
    "other": "ENOENT",
    "shared memory of others": "ENOENT",
    "segment of others": "ENOENT",
    "terminal": "ENOENT",
    "system": "done",
    "Unix socket": "ENOENT",
    "abstract socket": "EPERM",
    "high port": "done",
    "port 80": "EACCES",
    "port 80, IPv6": "EACCES",
    "port 80, fast open": "EPERM",
    **dict.fromkeys(("ptrace", "keyctl", "io_uring_setup", "bpf", "userfaultfd", "process_vm_readv"), "EPERM"),
    "a child reads another file": 1,
    "a child runs": 0,
}
"""All that a confined process reaches where the kernel gives every part."""

WITHOUT_NAMESPACES = {
    "own shared memory": "EACCES",  # there is none
    "command line": "done",
    "environment": "EACCES",
    "memory": "EACCES",
    "signalled": [],
    "other": "EACCES",
    "shared memory of others": "EACCES",
    "segment of others": "done",
    "terminal": "EACCES",
    "Unix socket": "done",
}
WITHOUT_LANDLOCK = {
    "change what is given": "done",
    "abstract socket": "done",
    "port 80": "ECONNREFUSED",
    "port 80, IPv6": "ECONNREFUSED",
}


WITHOUT_BOTH = {
    "other": "done",
    "own shared memory": "done",
    "shared memory of others": "done",
    "terminal": "done",
    "a child reads another file": 0,
}


@pytest.fixture(params=[0, OTHER_USER], ids=["root", "another user"])
def outside(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What other processes of the same user have, and a confined one must not reach."""
    uid = request.param if os.getuid() == 0 else os.getuid()
    if request.param and os.getuid():
        pytest.skip("only root can become another user")
    folder, libc, key = Path(tempfile.mkdtemp()), ctypes.CDLL(None), os.getpid()
    shared = Path(tempfile.mkstemp(dir="/dev/shm")[1])
    terminal, other_end = os.openpty()
    sleeping = subprocess.Popen(["sleep", "600"], user=uid, group=uid)
    segment = libc.shmget(key, 64, 0o1666)
    try:
        for name in ("given", "other"):
            (folder / name).write_text(name, encoding="utf-8")
        (folder / "own").mkdir()
        with ExitStack() as listeners:
            addresses = (str(folder / "socket"), f"\0morph-test-{os.getpid()}")
            for address in addresses:
                listener = listeners.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(address)
                listener.listen()
            port = listeners.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for path in (folder, *folder.iterdir(), shared, Path(os.ttyname(other_end))):
                os.chown(path, uid, uid)
            yield {
                "uid": uid,
                **{name: str(folder / name) for name in ("own", "given", "other")},
                **{"shared": str(shared), "terminal": os.ttyname(other_end), "segment": key},
                **{"socket": addresses[0], "abstract": addresses[1], "port": port},
                "devices": [str(path) for path in Path("/dev").rglob("*") if not (path.is_file() or path.is_dir())],
                **{"sleeping": sleeping.pid, "last_pid": max(psutil.pids())},
            }
    finally:
        sleeping.kill()
        sleeping.wait()
        libc.shmctl(segment, 0, None)
        for descriptor in (terminal, other_end):
            os.close(descriptor)
        shared.unlink()
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("landlock", [True, False], ids=["Landlock", "no Landlock"])
@pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "no namespaces"])
def test_a_confined_process_reaches_what_is_listed_and_nothing_else(
    outside: dict[str, Any], namespaces: bool, landlock: bool
) -> None:
    found = _reached(outside, namespaces=namespaces, landlock=landlock)
    hides_files, has_landlock, hides_processes, filters = found.pop("confined")
    assert (hides_files, has_landlock) <= (namespaces, landlock)
    if (hides_files, has_landlock, hides_processes, filters) != (namespaces, landlock, namespaces, True):
        pytest.skip("this kernel, or a container, gives less")
    wanted = {
        **CONFINED,
        **({} if namespaces else WITHOUT_NAMESPACES),
        **({} if landlock else WITHOUT_LANDLOCK),
        **({} if namespaces or landlock else WITHOUT_BOTH),
    }
    if not landlock:  # whatever this user may write; nothing hides devices without namespaces
        for name in ("written", "kernel", *([] if namespaces else ["devices"])):
            del found[name], wanted[name]
    if not (landlock or namespaces):
        assert outside["sleeping"] in found["signalled"]
        wanted |= {"signalled": found["signalled"]}
        if outside["uid"]:  # root's processes have capabilities that a confined one gave up
            wanted |= {"environment": "done", "memory": "done"}
    assert found == wanted


def _reached(outside: dict[str, Any], **parts: bool) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps({**outside, **parts})],
        capture_output=True, text=True, timeout=2 * BOUND_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("confined", "lacks"),
    [
        (Confined(hides_files=True, landlock=7), []),
        (Confined(hides_files=False, landlock=0), ["user namespaces, so", "Landlock, so", "metadata"]),
        (Confined(hides_files=True, landlock=1), ["rules for ports", "rules for signals"]),
        (Confined(hides_files=True, landlock=7, hides_processes=False), ["a /proc of its own, so"]),
        (Confined(hides_files=True, landlock=7, filters=False), ["filters of system calls, so"]),
    ],
)
def test_confinement_that_a_machine_forbids_is_reported_with_its_consequence(
    confined: Confined, lacks: list[str]
) -> None:
    assert all(part in confined.lacks for part in lacks)
    assert bool(confined.lacks) == bool(lacks)
