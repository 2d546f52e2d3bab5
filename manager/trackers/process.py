"""The process of one helper: ``python -m manager.trackers.process``, as ``supervisor`` starts it, or ``morph sample``.

Each helper has a process of its own: a call that hangs is then ended without the others, and none gets credentials of
another. A tracker, a callback, the sender of alerts and ``Job.sample`` differ in their ``Sink`` alone.

It follows the journal of a run from its first line and reports new events, until its standard input ends; then it
reports the rest and ends. It writes each error as a line to standard output, and to its log. If one call takes too
long, or the rest does, it ends itself, whether its manager lives, listens or is gone. The manager then starts another
process, which continues after that event.
"""

from __future__ import annotations

import faulthandler
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import Field

from manager.accounting.spent import Prices
from manager.journal.journal import Journal
from manager.trackers.alerts import Alerts
from manager.trackers.reading import HappeningsReader
from manager.trackers.sinks import Callback, CallbackFailed, MlFlow, Sink, TensorBoard, WeightsAndBiases
from morph.contract.base import Value
from morph.contract.cluster import Notify
from morph.contract.errors import RunDirError
from morph.file_lock import locked

POLL_S = 0.5
LINES_AT_ONCE = 500
HANGS = 75
"""The exit code of a process that ended itself because a call took too long."""
REST_S = 120.0
"""Seconds for reporting the rest after the manager's end. A living manager ends this process earlier."""
GRACE_S = 5.0
SAY_S = 1.0
_OUTPUT = os.dup(1)
"""Standard output, for messages to the manager; output of libraries, their processes and callbacks goes to the log."""
TRACKERS: Mapping[str, Callable[[Path, str], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MlFlow,
}


class Watching(Value):
    """The task of one process. ``target``: the callback, file.py:name; ``limit_s``: the time limit of one call;
    ``notify``: alerts. ``forever``: whether another manager follows when this one ends.

    ``variables``: further environment variables, only for the process that reads checkpoints.
    """

    kind: Literal["tensorboard", "wandb", "mlflow", "callback", "notify", "samples"]
    target: str = ""
    number: int = 0
    run_dir: Path
    journal: Path
    checkpoint_url: str
    job: str
    prices: Prices | None = None
    limit_s: float
    notify: Notify | None = None
    budget_usd: float | None = None
    forever: bool = False
    variables: dict[str, str] = Field(default={}, repr=False, exclude=True)


class _Watchdog:
    """Ends the process when a call takes too long, or when the rest takes too long after the manager's end.

    Code that never lets another thread run is ended by a timer of the interpreter, ``GRACE_S`` later.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._what, self._since_s = limit_s, "", 0.0
        self._over_s: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    @contextmanager
    def bounds(self, what: str) -> Iterator[None]:
        """Bound a call, and report its CallbackFailed; any other error ends the process."""
        self._since_s, self._what = time.monotonic(), what
        faulthandler.dump_traceback_later(self._limit_s + GRACE_S, exit=True, file=2)
        try:
            yield
        except CallbackFailed as error:
            say(str(error))
        self._what = ""
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            time.sleep(min(0.2, self._limit_s / 4))
            what, now_s = self._what, time.monotonic()
            if what and now_s - self._since_s > self._limit_s:
                self._give_up(f"{what} took more than {self._limit_s:g} s, and was given up")
            if self._over_s is None and select.select([0], [], [], 0)[0]:  # only its end can come
                self._over_s = now_s
            if self._over_s is not None and now_s - self._over_s > REST_S:
                self._give_up(f"reporting the rest took more than {REST_S:g} s, and was given up")

    @staticmethod
    def _give_up(sentence: str) -> None:
        try:
            say(sentence)
        finally:
            os._exit(HANGS)


def say(sentence: str) -> None:
    """Send the manager a sentence, if it listens; the log has it in any case."""
    line = (" ".join(sentence.split()) + "\n").encode()
    with suppress(OSError):
        os.write(2, line)
    with suppress(OSError):  # the manager is gone
        if select.select([], [_OUTPUT], [], SAY_S)[1]:  # a line is shorter than what a writable pipe takes at once
            os.write(_OUTPUT, line[-select.PIPE_BUF :])


def sink_of(watching: Watching) -> Sink:
    """Make the sink."""
    if watching.kind == "callback":
        return Callback(watching.run_dir, watching.target, watching.number)
    if watching.kind == "notify":
        assert watching.notify is not None
        return Alerts(
            watching.run_dir, watching.job, watching.notify, watching.budget_usd, say, forever=watching.forever
        )
    return TRACKERS[watching.kind](watching.run_dir, watching.job)


def reader_of(watching: Watching) -> HappeningsReader:
    """Make the sink's reader of the journal."""
    own = {} if watching.notify is None else {"missed_saves": watching.notify.missed_saves}
    return HappeningsReader(watching.checkpoint_url, watching.prices, **own)


def follow(watching: Watching, sink: Sink) -> None:
    """Report the journal's events, until standard input ends."""
    watchdog, is_over = _Watchdog(watching.limit_s), False
    reader = reader_of(watching)
    with watchdog.bounds("its start"):
        seen = sink.open()
    journal: Journal | None = None
    try:
        while True:
            journal = journal or _opened(watching.journal)
            for sequence, happenings in () if journal is None else reader.new(journal, LINES_AT_ONCE):
                if happenings and sink.begin(sequence):
                    for happening in happenings:
                        if not seen.has(happening):
                            with watchdog.bounds(f"{type(happening).__name__} of step {happening.step}"):
                                sink.tell(happening)
            with watchdog.bounds("writing"):
                sink.flush()
            if is_over:
                break
            is_over = bool(select.select([sys.stdin], [], [], POLL_S)[0])  # only its end can come
        with watchdog.bounds("its end"):
            if not sys.stdin.readline():
                sink.manager_gone()
            sink.close()
    finally:
        if journal is not None:
            journal.close()


def _opened(path: Path) -> Journal | None:
    try:
        return Journal.open(path, read_only=True)
    except RunDirError:  # the run has not begun
        return None


def main(make: Callable[[Watching], Sink] = sink_of) -> int:
    """Run as the first line of standard input says."""
    watching = Watching.model_validate_json(sys.stdin.readline())
    os.dup2(2, 1)
    os.nice(10)
    name = watching.kind if watching.kind != "callback" else f"callback-{watching.number}"
    try:
        # a killed manager's process may still be reporting the rest
        with locked(watching.run_dir / "trackers" / f"{name}.lock", REST_S + watching.limit_s + GRACE_S, say):
            follow(watching, make(watching))
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
