"""Processes that help to measure: started, spoken to in JSON lines, and ended whatever happens.

A helper's standard input shows that this process lives: when it closes, because this process is done or was killed,
the helper ends itself (``calibrate.helpers.helper_end``). Nothing is written to disk.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import IO, Any

from morph.contract.errors import ClusterError, WaitTimeout

Message = Mapping[str, Any]
_END_TIMEOUT_S = 10.0
_KEPT_LINES = 50


class Crew:
    """Some helpers, numbered from 0; to be used as a context manager.

    Args:
        module: What each of them runs, ``python -m module``.
        size: How many.
        purpose: What they are for, for errors: ``measuring the network``.
    """

    def __init__(self, module: str, size: int, purpose: str) -> None:
        self._purpose = purpose
        self._answers: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._said: list[deque[str]] = []
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        try:
            for number in range(size):
                self._start(module, number)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self._helpers)

    def send(self, number: int, message: Message) -> None:
        """Give a helper something to do; returns at once. If it is gone, ``gather`` will say so."""
        stream = self._helpers[number].stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()

    def gather(self, numbers: Iterable[int], what: str, timeout_s: float) -> dict[int, dict[str, Any]]:
        """Block until each of these helpers has answered once.

        Raises:
            ClusterError: a helper failed; gives the end of what it said.
            WaitTimeout: not all within ``timeout_s``; says ``what`` was waited for.
        """
        missing, found = set(numbers), {}
        end_s = time.monotonic() + timeout_s
        while missing:
            try:
                number, answer = self._answers.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise WaitTimeout(f"waited {timeout_s:g} s for {what}") from None
            if answer is None:
                raise ClusterError(f"{self._purpose} failed in process {number}: {self._last_words(number)}")
            missing.discard(number)
            found[number] = answer
        return found

    def _start(self, module: str, number: int) -> None:
        # a session of its own: Ctrl-C comes to this process alone, which then ends the helpers
        helper = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._helpers.append(helper)
        said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._said.append(said)
        assert helper.stdout is not None
        assert helper.stderr is not None
        listener = threading.Thread(target=_listen, args=(helper.stderr, said), daemon=True)
        reader = threading.Thread(target=self._read, args=(number, helper.stdout, listener), daemon=True)
        for thread in (listener, reader):
            thread.start()
            self._readers.append(thread)

    def _read(self, number: int, stream: IO[bytes], listener: threading.Thread) -> None:
        with stream:
            for line in stream:
                self._answers.put((number, json.loads(line)))
        listener.join(_END_TIMEOUT_S)  # so that its last words are known
        self._answers.put((number, None))

    def _last_words(self, number: int) -> str:
        said = self._said[number]
        return next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")

    def _end(self) -> None:
        for helper in self._helpers:
            helper.kill()
        for helper in self._helpers:
            helper.wait(timeout=_END_TIMEOUT_S)
            if helper.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    helper.stdin.close()
        for thread in self._readers:
            thread.join(_END_TIMEOUT_S)


def _listen(stream: IO[bytes], said: deque[str]) -> None:
    with stream:
        for line in stream:
            said.append(line.decode("utf-8", "replace"))
