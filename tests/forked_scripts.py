"""Scripts that run in forks of a process which has loaded torch: a process of their own would load it for seconds.

What a script's process is to whoever starts it stays: a group of its own, an exit code, signals.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.runtime.worker_crew import FORKS
from tests.waiting import ANSWER_S, poll_until

LOOK_EVERY_S = 0.01


class ForkedScript:
    """What is needed of the ``Popen`` of ``python SCRIPT``, of which this process is the parent.

    Only from a process without threads.

    Args:
        command: The interpreter, and the script with its arguments.
        environment: All of it.
        fds: What it inherits.
        cwd: In which it runs; None: that of this process.
        preexec_fn: Called before the script.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        fds: Sequence[int] = (),
        cwd: Path | None = None,
        preexec_fn: Callable[[], object] = bool,
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
                preexec_fn()
                code = _run(command[1:], environment)
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
                raise subprocess.TimeoutExpired("a script", timeout)
            time.sleep(LOOK_EVERY_S)
        return code


def _run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Be an interpreter that runs a script, from its start to its end; returns its exit code."""
    atexit._clear()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    code = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.last_value = error  # who asks at the interpreter's end knows by it that the script failed
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


class Nursery:
    """Forks scripts for a process that has threads, from one that has also loaded what these scripts import."""

    def __init__(self, *modules: str) -> None:
        self._orders, orders = FORKS.Pipe()
        self._lock = threading.Lock()
        self._process = FORKS.Process(target=_fork, args=(orders, modules), daemon=True)
        self._process.start()
        orders.close()

    def popen(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None,
        env: Mapping[str, str],
        preexec_fn: Callable[[], object],
        start_new_session: bool,
    ) -> NurseryScript:
        """Start a script, as ``subprocess.Popen`` does; it always has a session of its own."""
        assert start_new_session
        return NurseryScript(self, int(self.ask(list(command), dict(env), cwd or Path.cwd(), preexec_fn)))

    def ask(self, *order: Any) -> Any:
        with self._lock:
            self._orders.send(order)
            assert self._orders.poll(ANSWER_S), order
            return self._orders.recv()

    def close(self) -> None:
        """End what is left."""
        self._orders.close()
        self._process.join()


class NurseryScript:
    """What is needed of the ``Popen`` of a script that a nursery started."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid

    def poll(self) -> int | None:
        code: int | None = self._nursery.ask(self.pid)
        return code

    def wait(self, timeout: float) -> int:
        poll_until(lambda: self.poll() is not None, "a script's end", timeout)
        code = self.poll()
        assert code is not None
        return code


def _fork(orders: Connection, modules: Sequence[str]) -> None:
    """Body of a nursery, until nobody is there to give it orders."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    scripts: dict[int, ForkedScript] = {}
    try:
        with suppress(EOFError):
            while True:
                match orders.recv():
                    case (int(pid),):
                        orders.send(scripts[pid].poll())
                    case command, environment, cwd, preexec_fn:
                        script = ForkedScript(command, environment, cwd=cwd, preexec_fn=preexec_fn)
                        scripts[script.pid] = script
                        orders.send(script.pid)
    finally:
        for script in scripts.values():
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
                script.wait(ANSWER_S)
