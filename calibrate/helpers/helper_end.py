"""A helper's end of the line to the process that measures (``calibrate.helpers.crew``)."""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn


class Line:
    """Messages come in on standard input, answers go out on what was standard output.

    What the helper prints otherwise, the user's job included, goes to standard error. When the other end closes, this
    process ends at once, whatever its other threads wait for.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> dict[str, Any]:
        """Block for the next message; the process ends if there will be none."""
        return self._messages.get()

    @property
    def waiting(self) -> bool:
        """Whether a message has come that was not taken yet."""
        return not self._messages.empty()

    def answer(self, message: Mapping[str, Any]) -> None:
        """Send one answer."""
        self._answers.write(json.dumps(message).encode() + b"\n")
        self._answers.flush()

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(0, 1 << 16):  # not through sys.stdin, whose lock would spoil the end of the process
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._messages.put(json.loads(line))
        os._exit(1)


def serve(work: Callable[[Line], None]) -> NoReturn:
    """Run a helper: ``work`` until it returns, then wait for the other end to close. Ends the process.

    Garbage is looked for from now on, but not among what was imported.
    """
    gc.freeze()
    gc.enable()
    try:
        line = Line()
        work(line)
        line.next()
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # without waiting for gloo's threads
