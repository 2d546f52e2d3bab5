"""Progress of a command, on standard error: the current phase, and an estimate of the remaining time.

Standard output gets only the result. A terminal shows a bar; elsewhere each phase is one line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, Task

FIRST_TOLD_AFTER_S = 3.0
"""Seconds after which enough of the work is done to estimate the rest."""
LONG_S = 0.5
COMPILED_ONCE = "on a new machine the simulator is compiled first"
Told = Callable[[str, float], None]
"""A function of the current phase and the share of the work that is done, 0 to 1."""


def doing(what: str, file: TextIO | None = None) -> None:
    """Print the next phase at once."""
    print(f"{what} ...", file=file or sys.stderr, flush=True)


@contextmanager
def doing_if_long(what: str) -> Iterator[None]:
    """Show the phase if the block takes longer than ``LONG_S``."""
    bar = _bar(sys.stderr, remaining=False) if sys.stderr.isatty() else None
    if bar is not None:
        bar.add_task(what, total=None)
    timer = threading.Timer(LONG_S, doing if bar is None else bar.start, (what, sys.stderr) if bar is None else ())
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if bar is not None:
            bar.stop()


@contextmanager
def progress(*, remaining: bool = False) -> Iterator[Told]:
    """Show the progress of the block.

    ``remaining``: whether shares are shares of the block's time, from which the remaining time can be estimated.
    """
    file = sys.stderr  # the stream as it is now: while a job's code runs, its output is held back
    if not file.isatty():
        yield Lines(file, remaining)
        return
    with _bar(file, remaining=remaining) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def _bar(file: TextIO, *, remaining: bool) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from morph.tables import wide_console

    columns = (BarColumn(), TimeElapsedColumn(), *([rest_column()] if remaining else []))
    text, console = TextColumn("{task.description}", markup=False), wide_console(file=file)
    return Progress(*columns, text, console=console, transient=True, redirect_stderr=False)


class Lines:
    """Phases as lines; the remaining time is printed again each time the elapsed time has doubled."""

    def __init__(self, file: TextIO, remaining: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._what = file, ""
        self._clock, self._begun_s = clock, clock()
        self._told_after_s = FIRST_TOLD_AFTER_S if remaining else float("inf")

    def __call__(self, what: str, share: float) -> None:
        """Print a new phase, or the remaining time."""
        elapsed_s = self._clock() - self._begun_s
        if what != self._what and share < 1:
            self._what = what
            doing(what, self._file)
        if 0 < share < 1 and elapsed_s >= self._told_after_s:
            self._told_after_s = 2 * elapsed_s
            print(rest_text(elapsed_s, share), file=self._file, flush=True)


def rest_text(elapsed_s: float, share: float) -> str:
    """Return the remaining time at the pace so far, as text."""
    rest_s = round(elapsed_s * (1 - share) / share)
    return f"about {rest_s} s to go" if rest_s < 120 else f"about {round(rest_s / 60)} min to go"


def rest_column() -> ProgressColumn:
    """Return the remaining time as a part of a bar."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Rest(ProgressColumn):
        """The remaining time, which uses the time of drawing, so that it advances between updates."""

        def render(self, task: Task) -> Text:
            known = task.elapsed is not None and task.elapsed >= FIRST_TOLD_AFTER_S and 0 < task.completed < 1
            return Text(rest_text(task.elapsed or 0.0, task.completed) if known else "")

    return Rest()
