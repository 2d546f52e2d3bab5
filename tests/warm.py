"""Runs pytest in several processes that begin with all tests imported: ``python -m tests.warm NUMBER ARGUMENTS``.

Torch, the product and 300 test modules take each process of pytest-xdist half a minute to import. Here one process
collects the tests while pytest-xdist starts, and then forks the processes that run them. For each of them pytest-xdist
starts this file as an interpreter, which hands its standard streams to a fork and ends with it.

``NUMBER`` of processes: ``auto`` is two more than usable cores, because many tests mostly wait; 0 is none but pytest's.
"""

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

PLACE = "MORPH_TEST_WARM"
"""The environment variable with the socket's name, which is not a file."""
MOST_BYTES = 1 << 18
MOST_PROCESSES = 4
QUIET = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins were imported before pytest looks for them


def main() -> None:
    """Run pytest in a process of its own, and collect for its processes meanwhile; end with its exit code."""
    number, *arguments = sys.argv[1:]
    by_file = ["--dist", "loadfile", "--no-loadscope-reorder"]
    if number == "0" or not hasattr(os, "pidfd_open"):
        several = [] if number == "0" else ["--numprocesses", number, *by_file]
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *several, *arguments])
    if number == "auto":
        number = str(min(len(os.sched_getaffinity(0)) + 2, MOST_PROCESSES))
    name, owner = f"morph-tests-{os.getpid()}", os.getpid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"\0{name}")
        listening.listen(64)
        python = shlex.join([sys.executable, "-I", "-S", __file__])
        options = [
            "--tx",
            f"{number}*popen//python={python}",
            f"--max-worker-restart={4 * int(number)}",
            *by_file,
            *QUIET,
        ]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        pytest = subprocess.Popen(command, env={**os.environ, PLACE: name})
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest ends the run at a Ctrl-C, which reaches it too
        try:
            _collect([one for one in arguments if not one.startswith("--junitxml")])
            code = _serve(listening, pytest)
        finally:
            if os.getpid() == owner:
                pytest.kill()
                pytest.wait()
    sys.exit(code)


def _collect(arguments: list[str]) -> None:
    """Import every test module, as the processes of pytest-xdist do."""
    import contextlib
    import gc

    import pytest

    os.environ["PYTEST_XDIST_WORKER"] = "warm"  # makes no folders
    os.environ.setdefault("MORPH_CACHE_DIR", "")
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main([*arguments, "--collect-only", "-p", "no:cacheprovider"])
    gc.collect()
    gc.freeze()


def _serve(listening: socket.socket, pytest: "subprocess.Popen[bytes]") -> int:
    """Fork a process for each that asks, until pytest has ended; return its exit code, or the fork's own."""
    ended = os.pidfd_open(pytest.pid)
    while ended not in select.select([listening, ended], [], [])[0]:
        line, _ = listening.accept()
        with line:
            message, streams, _, _ = socket.recv_fds(line, MOST_BYTES, 3)
            pid = os.fork()
            if pid == 0:
                listening.close()
                _begin(json.loads(message), streams)
                return 0
            line.send(str(pid).encode())
        for stream in streams:
            os.close(stream)
    return pytest.wait()


def _begin(asked: dict[str, object], streams: list[int]) -> None:
    """Act as an interpreter with these streams, environment, folder and code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(asked["environment"])  # type: ignore[call-overload]
    os.chdir(str(asked["folder"]))
    sys.argv, sys.modules["__main__"] = ["-c"], ModuleType("__main__")
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    exec(compile(str(asked["code"]), "<string>", "exec"), sys.modules["__main__"].__dict__)


def _ask() -> None:
    """Hand the streams of this process to a fork; end with it."""
    code = sys.argv[sys.argv.index("-c") + 1]
    asked = {"environment": dict(os.environ), "folder": str(Path.cwd()), "code": code}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(f"\0{os.environ[PLACE]}")
        socket.send_fds(line, [json.dumps(asked).encode()], [0, 1, 2])
        fork = os.pidfd_open(int(line.recv(MOST_BYTES)))
    for number in (0, 1):  # pytest-xdist learns from their end that the fork has ended
        os.close(number)
    select.select([fork], [], [])


if __name__ == "__main__":
    _ask() if "-c" in sys.argv and PLACE in os.environ else main()
