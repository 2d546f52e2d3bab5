"""A helper's end of the line to the measuring process (``calibrate.helpers.crew``), which forks it."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn


class HelperPipe:
    """Messages from standard input, answers to what was standard output; other output goes to standard error.

    When the other end closes, this process ends at once, whatever its other threads wait for.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> dict[str, Any]:
        """Block for the next message; the process ends if no message will come."""
        return self._messages.get()

    @property
    def waiting(self) -> bool:
        """Whether a message that was not taken yet has come."""
        return not self._messages.empty()

    def answer(self, message: Mapping[str, Any]) -> None:
        """Send one answer."""
        self._answers.write(json.dumps(message).encode() + b"\n")
        self._answers.flush()

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(0, 1 << 16):  # not through sys.stdin, whose lock would block the end of the process
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._messages.put(json.loads(line))
        os._exit(1)


def serve(work: Callable[[HelperPipe], None]) -> NoReturn:
    """Fork the helpers, each of which runs ``work`` and waits for its messages; ends the process with them."""
    gc.freeze()
    gc.enable()
    orders = json.loads(sys.argv[1])
    helpers: list[int] = []
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the helpers to end are known
    try:
        for pipe in orders["pipes"]:
            if not (pid := os.fork()):
                _help(work, pipe, orders)
            helpers.append(pid)
        _close(orders["pipes"])
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.read(0, 1)
    except Exception:
        traceback.print_exc()
    finally:
        for pid in helpers:
            os.kill(pid, signal.SIGKILL)
        for pid in helpers:
            os.waitpid(pid, 0)
        sys.stderr.flush()
        os._exit(1)


def _help(work: Callable[[HelperPipe], None], own: list[int], orders: Mapping[str, Any]) -> NoReturn:
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for number, descriptor in enumerate(own):
            os.dup2(descriptor, number)
        _close(orders["pipes"])
        for name, value in orders["environment"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        line = HelperPipe()
        work(line)
        line.next()
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # this does not wait for gloo's threads


def _close(pipes: list[list[int]]) -> None:
    """Close inherited pipes: while another process holds a pipe open, nobody sees its end."""
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)
