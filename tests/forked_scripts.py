"""Programs that run in forks of a process that has loaded torch, which takes each new process seconds.

To its parent, such a process looks like the program's own: it has its own group, exit code, signals, open files and
command line.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from manager.engine.local_vms import host_line
from tests.members import FORKS
from tests.waiting import BOUND_S

HOST = "manager.engine.on_processes.process_host"
LOOK_EVERY_S = 0.01
FROM_DESCRIPTOR = 700
"""Numbers for a fork's descriptors until it has closed all others; below the usual limit."""


class ForkedScript:
    """The part of ``Popen`` that tests need for a Python program that is a child of this process.

    Use it only in a process without threads.

    Args:
        command: The interpreter, then a script, ``-m`` and a module, or ``-c`` and code, and its arguments.
        fds: Descriptors that the program inherits, under the same numbers.
        cwd: The program's folder; None: this process's.
        files: The program's open files by number; it then has no others except standard streams.
        parent: The process that the program takes for its parent; None: this one.
        forks_hosts: Hosts of processes that the program starts are forked as well.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        fds: Sequence[int] = (),
        cwd: Path | None = None,
        preexec_fn: Callable[[], object] = bool,
        files: Mapping[int, int] | None = None,
        parent: int | None = None,
        forks_hosts: bool = False,
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                if cwd is not None:
                    os.chdir(cwd)
                for fd in fds:
                    os.set_inheritable(fd, True)
                if files:
                    _open_alone(files)
                if parent is not None:
                    os.getppid = lambda: parent
                if forks_hosts:
                    host_line.subprocess = ForkedHosts(Nursery.of_this_process())  # type: ignore[assignment]
                preexec_fn()
                code = _run(command, environment)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("a program", timeout)
            time.sleep(LOOK_EVERY_S)
        return code


def _open_alone(files: Mapping[int, int]) -> None:
    """Give open files the numbers under which a program knows them, and close all others."""
    kept = {number: fcntl.fcntl(file, fcntl.F_DUPFD, FROM_DESCRIPTOR) for number, file in files.items()}
    os.closerange(3, FROM_DESCRIPTOR)
    for number, file in kept.items():
        os.dup2(file, number)
        os.close(file)
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding="utf-8", line_buffering=os.isatty(1))  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), encoding="utf-8", line_buffering=True)  # noqa: SIM115
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def _name_as(words: Sequence[str]) -> None:
    """Show other processes this command line, as far as there is room for it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    shown = b"\0".join(word.encode() for word in words)[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Act as an interpreter that runs a program from its start to its end; return its exit code."""
    _name_as(command)
    atexit._clear()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("PYTHONWARNINGS") == "default":
        warnings.simplefilter("default")
    code = 0
    try:
        begin(command[1:])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.last_value = error  # exit handlers learn from this that the script failed
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def begin(arguments: Sequence[str]) -> None:
    """Run as main module what an interpreter with these arguments would run."""
    if arguments[0] == "-m":
        sys.modules.pop(arguments[1], None)  # the module must be run again under another name
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


class Nursery:
    """Forks programs for a process with threads; it has none itself, and has loaded what the programs import."""

    def __init__(self, orders: Connection, end: Callable[[], object]) -> None:
        self._orders, self._end = orders, end
        self._lock = threading.Lock()

    @classmethod
    def with_modules(cls, *modules: str) -> Nursery:
        """Return a nursery that has imported these modules; the programs that it forked end with it."""
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=_fork, args=(theirs, modules), daemon=True)
        process.start()
        theirs.close()
        return cls(ours, process.join)

    @classmethod
    def of_this_process(cls) -> Nursery:
        """Return a nursery with this process's modules and no threads, whose programs may outlive it."""
        ours, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with suppress(EOFError):
                _serve(theirs, {})
            os._exit(0)
        theirs.close()
        return cls(ours, lambda: os.waitpid(pid, 0))

    def popen(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        preexec_fn: Callable[[], object] = bool,
        start_new_session: bool = True,
        files: Mapping[int, int] | None = None,
        forks_hosts: bool = False,
    ) -> NurseryScript:
        """Start a program in a session of its own as ``subprocess.Popen`` does; arguments as of ``ForkedScript``."""
        assert start_new_session
        order = (list(command), dict(env), cwd or Path.cwd(), preexec_fn, os.getpid(), forks_hosts)
        return NurseryScript(self, int(self._ask(order, files or {})))

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        timeout: float,
        forks_hosts: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, as ``subprocess.run`` does with captured output."""
        with (
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as errors,
            Path(os.devnull).open("rb") as nothing,
        ):
            files = {0: nothing.fileno(), 1: out.fileno(), 2: errors.fileno()}
            script = self.popen(command, env=env, cwd=cwd, files=files, forks_hosts=forks_hosts)
            try:
                code = script.wait(timeout)
            finally:
                script.kill()
            out.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, code, out.read().decode(), errors.read().decode())

    def code(self, pid: int) -> int | None:
        """Return a program's exit code; None while it runs."""
        found: int | None = self._ask((pid,), {})
        return found

    def close(self) -> None:
        self._orders.close()
        self._end()

    def _ask(self, order: tuple[Any, ...], files: Mapping[int, int]) -> Any:
        with self._lock:
            self._orders.send((order, list(files)))
            for file in files.values():
                reduction.send_handle(self._orders, file, None)
            assert self._orders.poll(BOUND_S), order
            return self._orders.recv()


class NurseryScript(ForkedScript):
    """The same for a program that a nursery started."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.code(self.pid)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkedHosts:
    """Replaces ``subprocess`` where hosts of processes are started: a nursery that has their imports forks them."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery

    def Popen(  # noqa: N802
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> NurseryScript | subprocess.Popen[bytes]:
        """Start the command, from the nursery if it is such a host."""
        if command[2] != HOST:
            options = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "pass_fds": pass_fds, "env": env}
            return subprocess.Popen(command, **options, start_new_session=start_new_session)
        with Path(os.devnull).open("rb") as nothing:
            streams = {0: nothing.fileno() if stdin == self.DEVNULL else stdin, 1: stdout.fileno(), 2: stderr.fileno()}
            return self._nursery.popen(command, env=env, files={**streams, **{fd: fd for fd in pass_fds}})


def _fork(orders: Connection, modules: Sequence[str]) -> None:
    """Run a nursery until its parent has ended."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    scripts: dict[int, ForkedScript] = {}
    try:
        with suppress(EOFError):
            _serve(orders, scripts)
    finally:
        for script in scripts.values():
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
                script.wait(BOUND_S)


def _serve(orders: Connection, scripts: dict[int, ForkedScript]) -> None:
    while True:
        order, numbers = orders.recv()
        files = {number: reduction.recv_handle(orders) for number in numbers}
        match order:
            case (int(pid),):
                orders.send(scripts[pid].poll())
            case command, environment, cwd, preexec_fn, parent, forks_hosts:
                script = ForkedScript(
                    command,
                    environment,
                    cwd=cwd,
                    preexec_fn=preexec_fn,
                    files=files,
                    parent=parent,
                    forks_hosts=forks_hosts,
                )
                scripts[script.pid] = script
                orders.send(script.pid)
        for file in files.values():
            os.close(file)
