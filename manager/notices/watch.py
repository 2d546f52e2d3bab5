"""Polls a source of notices from boot on, and reports each notice once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from manager.notices.source import NoticeSource, NoticeUnavailable, Standing
from morph.contract.base import Shown, Value
from morph.contract.waits import Backoff

EVERY_S = 1.0
ERROR_WAIT_MAX_S = 5.0
RETRY_AFTER_MAX_S = 60.0
JOIN_TIMEOUT_S = 2.0


class Given(Value):
    """A new notice. ``lead_s`` counts from the report."""

    notice: Shown
    lead_s: float | None
    certain: bool


class Withdrawn(Value):
    """A notice that is no longer valid, although the VM still exists."""

    notice: Shown
    certain: bool = True


class Trouble(Value):
    """The source gives no answers; reported once for each new sentence, and with "" when it is over."""

    source: Shown
    sentence: Shown


Told = Given | Withdrawn | Trouble


class NoticeWatch:
    """Polls one source in its own thread, in which ``tell`` is called. Errors are reported, and polling continues.

    ``every_s``: the time between polls; it grows with consecutive errors, up to ``ERROR_WAIT_MAX_S`` or the time for
    which the service asks.
    """

    def __init__(self, source: NoticeSource, tell: Callable[[Told], None], every_s: float = EVERY_S) -> None:
        self._source = source
        self._tell = tell
        self._every_s = every_s
        self._standing: dict[str, Standing] = {}
        self._left: set[str] = set()
        self._acknowledged: set[str] = set()
        self._lock = threading.Lock()
        self._trouble = ""
        self._num_errors = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"morph-notices-{source.name}", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def close(self) -> None:
        """Stop reporting. A call that hangs in the source ends by itself."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def left(self, notice: str) -> None:
        """Record that nothing of value is left on this VM: the next poll acknowledges the notice."""
        with self._lock:
            self._left.add(notice)

    def poll(self) -> float:
        """Poll once and report what is new; returns the seconds until the next poll."""
        try:
            standing_by_name = {standing.notice: standing for standing in self._source.standing()}
            answered_s = time.monotonic()
            self._tell_changes(standing_by_name, answered_s)
            self._acknowledge()
        except NoticeUnavailable as error:
            return self._failed(str(error), error.retry_after_s)
        except Exception as error:  # a bug must not end the watch: without it the VM is lost without a warning
            return self._failed(f"{type(error).__name__}: {error}", None)
        if self._trouble:
            self._trouble, self._num_errors = "", 0
            self._say(Trouble(source=self._source.name, sentence=""))
        return self._every_s

    def _tell_changes(self, present: dict[str, Standing], answered_s: float) -> None:
        new = [standing for name, standing in present.items() if name not in self._standing]
        gone = [standing for name, standing in self._standing.items() if name not in present]
        self._standing = present
        for standing in gone:
            with self._lock:
                self._left.discard(standing.notice)
                self._acknowledged.discard(standing.notice)
            self._say(Withdrawn(notice=standing.notice, certain=standing.certain))
        for standing in new:
            lead_s = standing.lead_s
            if lead_s is not None:
                lead_s = max(0.0, lead_s - (time.monotonic() - answered_s))
            self._say(Given(notice=standing.notice, lead_s=lead_s, certain=standing.certain))

    def _acknowledge(self) -> None:
        with self._lock:
            due = [name for name in self._left - self._acknowledged if name in self._standing]
        for name in due:
            self._source.acknowledge(name)
            with self._lock:
                self._acknowledged.add(name)

    def _failed(self, sentence: str, retry_after_s: float | None) -> float:
        self._num_errors += 1
        if sentence != self._trouble:
            self._trouble = sentence
            self._say(Trouble(source=self._source.name, sentence=sentence))
        wait_s = Backoff(self._every_s, ERROR_WAIT_MAX_S).pause_s(self._num_errors - 1)
        return max(wait_s, min(retry_after_s or 0.0, RETRY_AFTER_MAX_S))

    def _say(self, news: Told) -> None:
        if not self._over.is_set():
            self._tell(news)

    def _run(self) -> None:
        while not self._over.is_set():
            self._over.wait(self.poll())
