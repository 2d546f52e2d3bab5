"""Objects in processes of their own, called over pipes."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

ANSWER_S = 300.0
END_S = 10.0


class Called(Protocol):
    """An object that is called by the names of its methods."""

    def send(self, method: str, *arguments: object) -> None:
        """Start a call; ``answer`` returns its result."""

    def answer(self) -> Any:
        """Result of the call started last."""

    def end(self) -> None:
        """End the process of the object, if it has its own."""


class InThisProcess:
    """An object that is made and called in this process."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._made, self._result = make(), None

    def send(self, method: str, *arguments: object) -> None:
        self._result = getattr(self._made, method)(*arguments)

    def answer(self) -> Any:
        return self._result

    def end(self) -> None:
        """Do nothing: there is no process to end."""


class Remote:
    """One object, made by ``make`` in a process of its own."""

    def __init__(self, make: Callable[[], object]) -> None:
        context = multiprocessing.get_context("spawn")
        self._calls, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, method: str, *arguments: object) -> None:
        self._calls.send((method, arguments))

    def answer(self) -> Any:
        """Wait for the result, ``ANSWER_S`` at most."""
        if not self._calls.poll(ANSWER_S):
            raise TimeoutError(f"waited {ANSWER_S:g} s for an answer")
        good, result = self._calls.recv()
        if not good:
            raise RuntimeError(result)
        return result

    def end(self) -> None:
        self._calls.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_S)


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


def call(called: Called, method: str, *arguments: object) -> Any:
    """Call an object and wait for the result."""
    called.send(method, *arguments)
    return called.answer()


def call_all(called: Sequence[Called], method: str, *arguments: object) -> list[Any]:
    """Make the same call to all objects at once."""
    for each in called:
        each.send(method, *arguments)
    return [each.answer() for each in called]


def end_all(called: Sequence[Called]) -> None:
    """End all of them."""
    for each in called:
        each.end()
