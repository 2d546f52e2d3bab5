"""Process 1 of a virtual host: ``python -m tests.cloud.guest SPEC.json``; see ``GuestSpec``.

The host has its own processes, mounts, name and network. Its ``/etc`` is a copy of this machine's; ``/run``, ``/tmp``
and ``/dev/shm`` are its own, so that programs on it write nothing to this machine except to shared folders. Process 1
carries out the cloud-config as cloud-init does, and stands in for systemd. Everything in the host ends with process 1,
which ends with the thread that started it.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import yaml

from manager.engine.local_vms.namespaces import enter
from tests.cloud.units import Unit, UnitError, read_unit
from tests.waiting import BOUND_S

NEW_MOUNTS, NEW_NAME, NEW_IPC, NEW_PROCESSES = 0x20000, 0x4000000, 0x8000000, 0x20000000
PR_SET_PDEATHSIG = 1
BIN = "/etc/virtual-host/bin"
SYSTEMD = "\0virtual-host-systemd"  # an abstract name: each network namespace has its own
SYSTEMCTL = """#!{python} -IS
import socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    line.sendall("\\0".join(sys.argv[1:]).encode())
    line.shutdown(socket.SHUT_WR)
    answer = line.recv(4096)
sys.stderr.write(answer[1:].decode())
sys.exit(answer[0] if answer else 1)
"""


@dataclass(frozen=True)
class GuestSpec:
    """A host.

    ``directory``: its files, among them ``etc``, ``tmp`` and ``log``. ``shared``: folders that every host sees.
    ``cloud_config``: what the first boot carries out; if empty, commands are run in the host from outside.
    """

    name: str
    namespace: str
    directory: str
    shared: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    cloud_config: str = ""

    def write(self) -> Path:
        """Write the spec for process 1; only its owner may read it, because a cloud-config holds secrets."""
        path = Path(self.directory) / "spec.json"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump(asdict(self), out)
        return path


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when the thread that started it ends; end at once if it is gone already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Make the host's namespaces, start its process 1 as a child, report the child's id, and wait for it."""
    die_with_parent(int(sys.argv[2]))
    spec = GuestSpec(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[1]).unlink()
    enter(spec.namespace)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS | NEW_NAME | NEW_IPC | NEW_PROCESSES) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reader)
        die_with_parent()
        _live(spec, writer)
    os.close(writer)
    ready = os.read(reader, 1)  # nothing was written: process 1 could not make its mounts
    print(pid if ready else 0, flush=True)
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _live(spec: GuestSpec, ready: int) -> NoReturn:
    code = 1
    try:
        logs = os.open(Path(spec.directory) / "log", os.O_DIRECTORY)
        out = _log(logs, "host")
        os.dup2(out, 2)
        _mount(spec)
        os.dup2(out, 1)
        os.chdir("/")
        socket.sethostname(spec.name)
        environment = {**spec.environment, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": "/root"}
        systemd = Systemd(environment, logs)
        os.write(ready, b"1")
        os.close(ready)
        if spec.cloud_config and os.fork() == 0:
            systemd.close()
            _first_boot(spec.cloud_config, environment)
        systemd.run()
        code = 0
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _log(directory: int, name: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.open(f"{name}.log", flags, 0o600, dir_fd=directory)


def _mount(spec: GuestSpec) -> None:
    """Make the host's own view of files, of which nothing is seen outside."""
    root = Path(spec.directory)
    _run("mount", "--make-rprivate", "/")
    _open_to_others(spec.shared)
    for path in map(Path, spec.shared):
        if path.is_relative_to("/tmp"):  # the host has its own
            place = root / "tmp" / path.relative_to("/tmp")
            place.mkdir(parents=True, exist_ok=True)
            _run("mount", "--bind", str(path), str(place))
    tool = root / "etc" / Path(BIN).relative_to("/etc") / "systemctl"
    tool.parent.mkdir(parents=True)
    tool.write_text(SYSTEMCTL.format(python=sys.executable, address=SYSTEMD))
    tool.chmod(0o755)
    _run("mount", "--bind", str(root / "etc"), "/etc")
    _run("mount", "-t", "proc", "proc", "/proc")
    _run("mount", "-t", "tmpfs", "shm", "/dev/shm")
    _run("mount", "-t", "tmpfs", "-o", "mode=0755", "none", "/home")
    _run("mount", "--bind", str(root / "run"), "/run")
    _run("mount", "--rbind", str(root / "tmp"), "/tmp")


def _open_to_others(paths: Sequence[str]) -> None:
    """Let other users of the host read what an image contains, even if this machine keeps it in a user's folder."""
    closed: dict[Path, list[Path]] = {}
    for path in map(Path, paths):
        above = [parent for parent in path.parents if not parent.stat().st_mode & 0o001]
        if above and not path.is_relative_to("/tmp"):
            closed.setdefault(above[-1], []).append(path)
    for folder, inside in closed.items():
        held = [os.open(path, os.O_PATH) for path in inside]
        _run("mount", "-t", "tmpfs", "-o", "mode=0755", "none", str(folder))
        for path, handle in zip(inside, held, strict=True):
            path.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ["mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{handle}", str(path)],
                check=True,
                timeout=BOUND_S,
                pass_fds=[handle],
            )
            os.close(handle)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=BOUND_S)


def _first_boot(text: str, environment: dict[str, str]) -> NoReturn:
    """Act like cloud-init: write files first, then run each line, whatever the result of the previous one."""
    try:
        config = yaml.safe_load(text)
        if not text.startswith("#cloud-config\n") or set(config) - {"bootcmd", "write_files", "runcmd"}:
            raise UnitError(f"cloud-config with {sorted(config)}")
        for text in config.get("bootcmd", ()):  # cloud-init puts this into a file, because it contains secrets
            place = Path("/run/bootcmd")
            place.touch(0o600)
            place.write_text(text)
            subprocess.run(["sh", place], env=environment, stdin=subprocess.DEVNULL, check=False)
            place.unlink()
        for entry in config.get("write_files", ()):
            _write_file(**entry)
        for line in config.get("runcmd", ()):
            command = ["sh", "-c", line] if isinstance(line, str) else line
            done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
            if done.returncode:
                print(f"cloud-init: {command[0]} ended with {done.returncode}", file=sys.stderr, flush=True)
    except Exception as error:
        print(f"cloud-init: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def _write_file(
    path: str, content: str, permissions: str = "0644", owner: str = "root:root", encoding: str = "text/plain"
) -> None:
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(base64.b64decode(content) if encoding == "b64" else content.encode())
    shutil.chown(place, *owner.split(":"))
    place.chmod(int(permissions, 8))


@dataclass
class _Service:
    unit: Unit
    pid: int = 0
    starts_s: deque[float] = field(default_factory=deque)
    due_s: float | None = None


class Systemd:
    """Starts services, restarts them when they end, and takes the host down if one cannot run at all."""

    def __init__(self, environment: dict[str, str], logs: int) -> None:
        self._environment, self._logs = environment, logs
        self._services: dict[str, _Service] = {}
        self._over = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(SYSTEMD)
        self._listener.listen(16)
        self._ended, wake = socket.socketpair()
        wake.setblocking(False)
        self._ended.setblocking(False)
        self._wake = wake
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def close(self) -> None:
        """Release in a child process what only process 1 uses."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._listener, self._ended, self._wake):
            end.close()

    def run(self) -> None:
        """Block until the host is switched off."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._ended, selectors.EVENT_READ)
            while not self._over:
                due = [service.due_s for service in self._services.values() if service.due_s is not None]
                wait_s = max(0.0, min(due) - time.monotonic()) if due else None
                for key, _ in selector.select(wait_s):
                    if key.fileobj is self._listener:
                        self._serve()
                    else:
                        self._ended.recv(4096)
                self._reap()
                for name, service in self._services.items():
                    if service.due_s is not None and time.monotonic() >= service.due_s:
                        self._start(name, service)

    def _serve(self) -> None:
        line, _ = self._listener.accept()
        with line:
            line.settimeout(5)
            received = b""
            while chunk := line.recv(4096):
                received += chunk
            try:
                why = self._do(*received.decode().split("\0"))
            except (UnitError, OSError) as error:
                why = str(error)
            line.sendall(bytes([1 if why else 0]) + why.encode())

    def _do(self, *words: str) -> str:
        verb, *names = [word for word in words if not word.startswith("--")]
        if verb == "poweroff":
            self._over = True
        elif verb == "start" or (verb == "enable" and "--now" in words):
            for name in names:
                places = [Path(f"/{root}/systemd/system/{name}") for root in ("run", "etc")]
                unit = read_unit(next(place for place in places if place.exists()).read_text())
                service = self._services.setdefault(name, _Service(unit))
                if not service.pid:
                    self._start(name, service)
        elif verb != "daemon-reload":
            return f"systemctl {verb} is not known\n"
        return ""

    def _start(self, name: str, service: _Service) -> None:
        now_s, unit = time.monotonic(), service.unit
        service.due_s = None
        service.starts_s.append(now_s)
        while service.starts_s[0] < now_s - unit.limit_interval_s:
            service.starts_s.popleft()
        if len(service.starts_s) > unit.limit_burst:
            self._over = unit.limit_action == "poweroff-force"
            return
        out = _log(self._logs, name.removesuffix(".service"))
        files = [(os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, out, 2)]
        environment = {**self._environment, **unit.environment}
        before = os.umask(unit.umask)
        try:
            if unit.before and subprocess.run(unit.before, env=environment, stdout=out, stderr=out).returncode:
                raise OSError(f"{unit.before[0]} failed")
            service.pid = os.posix_spawn(
                unit.command[0], unit.command, environment, file_actions=files, setsid=True, setsigdef=[signal.SIGCHLD]
            )
        except OSError as error:
            os.write(out, f"{error}\n".encode())
            service.due_s = now_s + unit.restart_s if unit.always else None
        finally:
            os.umask(before)
            os.close(out)

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for service in self._services.values():
                if service.pid == pid:
                    service.pid = 0
                    service.due_s = time.monotonic() + service.unit.restart_s if service.unit.always else None


if __name__ == "__main__":
    main()
