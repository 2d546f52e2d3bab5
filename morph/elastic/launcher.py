"""Starts workers on this machine as child processes, and ends them when the launcher ends. Loads no torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

from morph.elastic.invitation import FOUNDERS, JOIN, LISTEN, LISTEN_FD, NAMES, SECRET, SILENCE

END_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """The workers to start. ``join``: addresses of workers of the job; the workers join or found its ring.

    ``num_founders``: how many workers begin together, on all machines; more may join later. ``is_open``: other machines
    know the secret, and their workers can join.
    """

    command: tuple[str, ...]
    num_workers: int
    num_founders: int
    listen: tuple[str, int]
    join: tuple[tuple[str, int], ...]
    secret: str
    is_open: bool
    silence_s: float


@dataclass
class ExitCodes:
    """Exit codes of the workers that have ended, by process id."""

    codes: dict[int, int] = field(default_factory=dict)

    @property
    def code(self) -> int:
        """0 if at least one worker finished: the workers that finish make up for the loss of others."""
        return 0 if 0 in self.codes.values() else 1


def launch(plan: LaunchSpec) -> ExitCodes:
    """Run the workers until the last has ended.

    Raises OSError if the launcher cannot listen on the address or start the command, and KeyboardInterrupt after
    Ctrl-C, SIGTERM or SIGHUP; the workers have been ended then.
    """
    outcome = ExitCodes()
    workers: list[subprocess.Popen[bytes]] = []
    with interrupted_once() as interrupted:
        try:
            _start(plan, workers)
            while len(outcome.codes) < len(workers):
                for worker in workers:
                    if worker.pid not in outcome.codes and worker.poll() is not None:
                        outcome.codes[worker.pid] = worker.returncode
                        print(f"worker process {worker.pid} {_ended(worker.returncode)}", file=sys.stderr)
                time.sleep(LOOK_EVERY_S)
        finally:
            interrupted.is_deaf = True
            _end(workers, interrupted)
    return outcome


def _start(plan: LaunchSpec, workers: list[subprocess.Popen[bytes]]) -> None:
    """Start the workers; the first one inherits the listening socket, so that the others can find it.

    Where the job begins, the first worker founds it.
    """
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment |= {SECRET: plan.secret, LISTEN: plan.listen[0], SILENCE: f"{plan.silence_s:g}"}
    environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; sums within an operation depend on it
    join = plan.join
    if join:
        environment[JOIN] = _listed(join)
    while len(workers) < plan.num_workers:
        if not workers and (not join or plan.listen[1]):
            with socket.create_server(plan.listen, backlog=128) as listening:
                here, fd = listening.getsockname()[:2], listening.fileno()
                of_first = {LISTEN_FD: str(fd)} | ({} if join else {FOUNDERS: str(plan.num_founders)})
                workers.append(_process(plan.command, environment | of_first, (fd,)))
            if plan.is_open:
                missing = 0 if join else plan.num_founders - plan.num_workers
                others = f"; waiting for {missing} more" if missing > 0 else ""
                print(f"workers can join at {_listed((here,))}{others}", file=sys.stderr)
            environment[JOIN] = _listed(join or (here,))
        else:
            workers.append(_process(plan.command, environment, ()))
        print(f"worker process {workers[-1].pid} started", file=sys.stderr)


def _listed(addresses: Sequence[tuple[str, int]]) -> str:
    return ",".join(f"{host}:{port}" for host, port in addresses)


def _process(command: Sequence[str], environment: Mapping[str, str], fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, pass_fds=fds, start_new_session=True)


def _ended(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _end(workers: Sequence[subprocess.Popen[bytes]], interrupted: Interrupted) -> None:
    """End the remaining workers and all their processes; a signal during their grace period ends them at once."""
    num_signals = interrupted.num_signals
    left = [worker for worker in workers if worker.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for worker in left:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, number)
        until_s = time.monotonic() + END_TIMEOUT_S
        while left and time.monotonic() < until_s:
            if number == signal.SIGTERM and interrupted.num_signals > num_signals:
                break
            time.sleep(LOOK_EVERY_S)
            left = [worker for worker in left if worker.poll() is None]


@dataclass
class Interrupted:
    """Counts SIGINT (Ctrl-C), SIGTERM and SIGHUP (the terminal was closed). ``is_deaf``: signals are only counted."""

    num_signals: int = 0
    is_deaf: bool = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        """Count a signal; the first one raises KeyboardInterrupt."""
        self.num_signals += 1
        if self.num_signals == 1 and not self.is_deaf:
            raise KeyboardInterrupt


@contextmanager
def interrupted_once() -> Iterator[Interrupted]:
    """Let the first SIGINT, SIGTERM or SIGHUP end the block with KeyboardInterrupt; the cleanup is not interrupted.

    A signal that was ignored before stays ignored, as nohup expects.
    """
    interrupted = Interrupted()
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {
        number: signal.signal(number, interrupted)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
