"""Waiting that a control thread can end: every wait of a worker goes through its generation's ``Interrupt``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from morph.contract.errors import GenerationAborted, PeerLost, WaitTimeout
from morph.contract.messages import DEFAULT_LIMIT_S

T = TypeVar("T")


class Interrupt:
    """A condition variable with an abort flag; ``limit_s``: bound of every wait without its own."""

    def __init__(self, generation: int, limit_s: float = DEFAULT_LIMIT_S) -> None:
        self.generation = generation
        self.limit_s = limit_s
        self._condition = threading.Condition()
        self._aborted = False
        self._lost: str | None = None
        self._at_end: list[Callable[[], None]] = []
        self._num_under_way = 0

    def abort(self) -> None:
        """End every present and future wait with ``GenerationAborted``."""
        with self._condition:
            self._aborted = True
            self._end()

    def lose(self, what: str) -> None:
        """End every present and future wait with ``PeerLost``: a connection of this generation failed."""
        with self._condition:
            self._lost = self._lost or what
            self._end()

    def at_end(self, act: Callable[[], None]) -> None:
        """Call ``act`` in a new thread once the generation is aborted or loses a peer; at once if that has happened."""
        with self._condition:
            self._at_end.append(act)
            if self.over:
                self._end()

    def _end(self) -> None:
        for act in self._at_end:
            threading.Thread(target=act, name="morph-end", daemon=True).start()
        self._at_end.clear()
        self._condition.notify_all()

    def begun(self) -> None:
        """Count an operation of the generation's groups as under way until ``ended`` is called for it."""
        with self._condition:
            self._num_under_way += 1

    def ended(self) -> None:
        """Count an operation as over, successful or not, and wake the waiting thread."""
        with self._condition:
            self._num_under_way -= 1
            self._condition.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether no operation is under way."""
        return self._num_under_way == 0

    def notify(self) -> None:
        """Wake the waiting thread so that it looks at its condition again."""
        with self._condition:
            self._condition.notify_all()

    @property
    def aborted(self) -> bool:
        """Whether the generation was aborted."""
        return self._aborted

    @property
    def over(self) -> bool:
        """Whether the generation was aborted or lost a peer."""
        return self._aborted or self._lost is not None

    def check(self) -> None:
        """Raise if the generation is over."""
        if self._aborted:
            raise GenerationAborted(f"generation {self.generation} was aborted")
        if self._lost is not None:
            raise PeerLost(f"generation {self.generation} lost a peer: {self._lost}")

    def wait_for(self, ready: Callable[[], bool], what: str, timeout_s: float | None = None) -> float:
        """Block until ``ready()``, for ``timeout_s`` or the generation's limit; return the seconds waited.

        Raises GenerationAborted; PeerLost if a connection failed; WaitTimeout, which names ``what``.
        """
        start_s = time.monotonic()
        timeout_s = self.limit_s if timeout_s is None else timeout_s
        with self._condition:
            while True:
                self.check()
                if ready():
                    return time.monotonic() - start_s
                left_s = start_s + timeout_s - time.monotonic()
                if left_s <= 0:
                    raise WaitTimeout(f"waited {timeout_s:g} s for {what}")
                self._condition.wait(left_s)

    def start(self, work: Callable[[], T], name: str) -> Future[T]:
        """Run a blocking call in a thread, which is left behind if it hangs; its end wakes the waiting thread."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # raised in the thread that asks for the result
                future.set_exception(error)
            self.notify()

        threading.Thread(target=run, name=f"morph-{name}", daemon=True).start()
        return future

    def call(self, work: Callable[[], T], what: str, timeout_s: float | None = None) -> T:
        """Run a blocking call that cannot be interrupted, in a thread that is left behind on abort."""
        future = self.start(work, what)
        self.wait_for(future.done, what, timeout_s)
        return future.result()
