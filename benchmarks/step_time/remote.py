"""Objects in processes of their own, called over pipes."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

ANSWER_S = 300.0
END_S = 10.0


def _serve(make: Callable[[], object], calls: Connection) -> None:
    served = make()
    while True:
        try:
            method, arguments = calls.recv()
        except EOFError:
            return
        try:
            calls.send((True, getattr(served, method)(*arguments)))
        except Exception:
            calls.send((False, traceback.format_exc()))


class Remote:
    """One object, made by ``make`` in a process of its own."""

    def __init__(self, make: Callable[[], object]) -> None:
        context = multiprocessing.get_context("spawn")
        self._calls, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, method: str, *arguments: object) -> None:
        """Start a call; ``answer`` has its result."""
        self._calls.send((method, arguments))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """Result of the call started last, within ``timeout_s``."""
        if not self._calls.poll(timeout_s):
            raise TimeoutError(f"waited {timeout_s:g} s for an answer")
        good, result = self._calls.recv()
        if not good:
            raise RuntimeError(result)
        return result

    def call(self, method: str, *arguments: object) -> Any:
        """Call and wait."""
        self.send(method, *arguments)
        return self.answer()

    def end(self) -> None:
        """End the process."""
        self._calls.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_S)


def call_all(remotes: list[Remote], method: str, *arguments: object) -> list[Any]:
    """The same call to all of them, at once."""
    for remote in remotes:
        remote.send(method, *arguments)
    return [remote.answer() for remote in remotes]
