"""Helper processes for measuring: they receive messages as JSON lines, and are ended whatever happens.

One process imports their modules once, and forks them (``calibrate.helpers.helper_end``). When a helper's standard
input closes, because this process is done or was killed, it ends itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

from morph.contract.errors import ClusterError, WaitTimeout

Message = Mapping[str, Any]
_END_TIMEOUT_S = 10.0
_LAST_WORDS_S = 1.0
_KEPT_LINES = 50
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Used until helpers are forked: forking is not safe with threads. Helpers get this process's own settings."""


class Crew:
    """Helpers, numbered from 0; a context manager. Each runs ``python -m module``; errors name their ``purpose``."""

    def __init__(self, module: str, size: int, purpose: str) -> None:
        self._purpose = purpose
        self._answers: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._said: list[deque[str]] = []
        self._lines: list[IO[bytes]] = []
        self._readers: list[threading.Thread] = []
        try:
            self._forking = self._start(module, size)
        except BaseException:
            self._close()
            raise
        assert self._forking.stderr is not None
        self._forking_said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._forking_listener = self._thread(_listen, self._forking.stderr, self._forking_said)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def size(self) -> int:
        """Return the number of helpers."""
        return len(self._lines)

    def send(self, number: int, message: Message) -> None:
        """Send a helper a task; returns at once. If the helper is gone, ``gather`` raises an error."""
        with contextlib.suppress(BrokenPipeError):
            self._lines[number].write(json.dumps(message).encode() + b"\n")

    def gather(self, numbers: Iterable[int], what: str, timeout_s: float) -> dict[int, dict[str, Any]]:
        """Block until each helper has answered once, and return the answers. Raises ClusterError or WaitTimeout."""
        missing, answers = set(numbers), {}
        end_s = time.monotonic() + timeout_s
        while missing:
            try:
                number, answer = self._answers.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise WaitTimeout(f"waited {timeout_s:g} s for {what}") from None
            if answer is None:
                raise ClusterError(f"{self._purpose} failed in process {number}: {self._last_words(number)}")
            missing.discard(number)
            answers[number] = answer
        return answers

    def _start(self, module: str, size: int) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as theirs:
            pipes = [self._open(number, theirs) for number in range(size)]
            orders = {"pipes": pipes, "environment": {name: os.environ.get(name) for name in _ONE_THREAD}}
            # a session of its own: Ctrl-C reaches this process only, which then ends the helpers
            return subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(orders)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[descriptor for pipe in pipes for descriptor in pipe],
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,
            )

    def _open(self, number: int, theirs: contextlib.ExitStack) -> list[int]:
        """Make a helper's standard streams; return the helper's ends, which are closed together with ``theirs``."""
        (messages, line), (answers, answer), (words, word) = (os.pipe() for _ in range(3))
        self._lines.append(os.fdopen(line, "wb", buffering=0))
        for descriptor in (messages, answer, word):
            theirs.callback(os.close, descriptor)
        self._said.append(deque(maxlen=_KEPT_LINES))
        listener = self._thread(_listen, os.fdopen(words, "rb"), self._said[number])
        self._thread(self._read, number, os.fdopen(answers, "rb"), listener)
        return [messages, answer, word]

    def _thread(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        self._readers.append(thread)
        return thread

    def _read(self, number: int, stream: IO[bytes], listener: threading.Thread) -> None:
        with stream:
            for line in stream:
                self._answers.put((number, json.loads(line)))
        listener.join(_END_TIMEOUT_S)  # so that its last output is known
        self._answers.put((number, None))

    def _last_words(self, number: int) -> str:
        said = self._said[number]
        if not said:  # perhaps it was not forked
            self._forking_listener.join(_LAST_WORDS_S)
            said = self._forking_said
        return next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")

    def _end(self) -> None:
        self._forking.terminate()  # it kills the helpers first, if it has any
        try:
            self._forking.wait(timeout=_END_TIMEOUT_S)
        finally:
            self._forking.kill()
            self._forking.wait()
            assert self._forking.stdin is not None
            self._forking.stdin.close()
            self._close()

    def _close(self) -> None:
        for line in self._lines:
            line.close()
        for thread in self._readers:
            thread.join(_END_TIMEOUT_S)


def _listen(stream: IO[bytes], said: deque[str]) -> None:
    with stream:
        for line in stream:
            said.append(line.decode("utf-8", "replace"))
