"""``--forever``: restart a run's manager, each time in a new process, until its user stops it or a limit is reached.

This process only waits and loads nothing heavy, so that it survives the causes of a manager's end (lack of memory, a
crash).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Literal

import typer

from manager.host.signals import BY_USER
from manager.run_dir import GOES_ON, GoesOn, write_in_run_dir
from morph.cli.reading.errors import EXIT_GOES_ON, EXIT_INPUT, EXIT_INTERRUPTED
from morph.contract.base import Value
from morph.contract.errors import CheckpointsTaken, RunDirError, RunFinished
from morph.contract.waits import Backoff

PAUSES = Backoff(first_s=1.0, most_s=3600.0)
"""Backoff after managers that made no progress. A manager that decided a step, or ran for at least the longest pause,
resets it."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MOST_SAID = 2000


class Ended(Value):
    """What a manager process reports to its parent.

    ``outcome``: the outcome of ``Finish``, an error, or a take-over of the run's checkpoints by another manager.
    ``began``: whether a session was begun. ``moved``: whether a step was decided. ``at_limit``: whether a user's limit
    is reached.
    """

    outcome: Literal["", "finished", "stopped", "failed", "error", "taken"] = ""
    sentence: str = ""
    run_dir: Path | None = None
    began: bool = False
    moved: bool = False
    at_limit: bool = False


class _Word:
    """Sends the report of this process to its parent, if ``kept_up`` started this process."""

    def __init__(self) -> None:
        self.pipe: int | None = None
        self.ended = Ended()

    def leave(self, **known: object) -> None:
        if self.pipe is None:
            return
        self.ended = self.ended.model_copy(update=known)
        with suppress(OSError):  # the parent is gone
            os.write(self.pipe, self.ended.model_dump_json().encode() + b"\n")


_word = _Word()
leave_word = _word.leave
"""Report the known fields of ``Ended``."""


def is_kept_up() -> bool:
    """Return whether ``kept_up`` started this process."""
    return _word.pipe is not None


@contextmanager
def kept_up(
    wanted: bool, pauses: Backoff = PAUSES, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Path | None]:
    """Run the block; if ``wanted``, in a child process, and in another one for as long as the run should continue.

    Only the children enter the block, with the run's directory if an earlier child has begun the run. Their parent
    stays in this function, forwards signals, and exits with the code of the last child.
    """
    known = _Keeper(pauses, sleep).keep() if wanted else None
    try:
        yield known
    except (KeyboardInterrupt, typer.Exit):
        raise
    except RunFinished as error:  # a service starts it again after each boot
        if not is_kept_up():
            raise
        _word.leave(outcome="finished", sentence=str(error))
        print(f"the run is finished: {error.source} has {error.value} steps", file=sys.stderr)
        raise typer.Exit from error
    except Exception as error:
        if not _word.ended.outcome:
            outcome = "taken" if isinstance(error, CheckpointsTaken) else "error"
            _word.leave(outcome=outcome, sentence=" ".join(f"{error}".split())[:MOST_SAID] or type(error).__name__)
        raise


def ends(ended: Ended, code: int, *, asked: bool, has_begun: bool) -> bool:
    """Return whether a run does not continue.

    It is finished, its user stopped it, a limit was reached, another manager took it over, or it never began.
    """
    if asked or ended.outcome in ("finished", "taken") or code == EXIT_GOES_ON:
        return True
    by_user = ended.outcome == "stopped" and ended.sentence.startswith(BY_USER)
    return by_user or ended.at_limit or (code == EXIT_INPUT and not has_begun)


class _Keeper:
    def __init__(self, pauses: Backoff, sleep: Callable[[float], None]) -> None:
        self._pauses, self._sleep = pauses, sleep
        self._child = 0
        self._asked: list[int] = []
        self._run_dir: Path | None = None

    def keep(self) -> Path | None:
        """Return in each child, with the run's directory once the run has begun; never return in the parent."""
        num_in_vain, has_begun = 0, False
        before = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        while True:
            began_s = time.monotonic()
            reading, writing = os.pipe()
            # a signal waits in the parent until the parent knows the child to which it forwards the signal
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
            self._child = 0 if self._asked else os.fork()
            if self._asked:
                raise typer.Exit(EXIT_INTERRUPTED)
            if not self._child:
                os.close(reading)
                os.setpgid(0, 0)  # the parent forwards a Ctrl-C, once
                for number, handler in before.items():
                    signal.signal(number, handler)
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
                _word.pipe = writing
                return self._run_dir if has_begun else None
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            os.close(writing)
            ended, code = self._ended(reading)
            has_begun |= ended.began
            if ends(ended, code, asked=bool(self._asked), has_begun=has_begun):
                by_signal = self._asked and code not in (0, EXIT_GOES_ON)  # not 137 (SIGKILL)
                raise typer.Exit(EXIT_INTERRUPTED if by_signal else code)
            in_vain = not ended.moved and time.monotonic() - began_s < self._pauses.most_s
            num_in_vain = num_in_vain + 1 if in_vain else 1
            self._pause(ended, code, self._pauses.pause_s(num_in_vain - 1))
            if self._asked:
                raise typer.Exit(EXIT_INTERRUPTED)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self._asked.append(number)
        with suppress(ProcessLookupError):
            if self._child:
                os.kill(self._child, number)

    def _ended(self, reading: int) -> tuple[Ended, int]:
        """Wait for the child's end; return its report and its exit code (after a signal, 128 plus its number)."""
        _, status = os.waitpid(self._child, 0)
        self._child, ended = 0, Ended()
        os.set_blocking(reading, False)  # a process that the child left behind may still hold the pipe
        with os.fdopen(reading, "rb") as pipe, suppress(BlockingIOError):
            for line in (pipe.read() or b"").splitlines():
                with suppress(ValueError):  # the child was killed while it wrote the last report
                    ended = Ended.model_validate_json(line)
        self._run_dir = ended.run_dir or self._run_dir
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return ended.model_copy(update={"sentence": f"its manager was killed by {name}"}), 128 + os.WTERMSIG(status)
        return ended, os.WEXITSTATUS(status)

    def _pause(self, ended: Ended, code: int, pause_s: float) -> None:
        why = ended.sentence or f"its manager ended with code {code}"
        print(f"{why}; the run continues in {pause_s:g} s (--forever)", file=sys.stderr, flush=True)
        path = None if self._run_dir is None else self._run_dir / GOES_ON
        with suppress(RunDirError):
            if path is not None and path.parent.is_dir():
                write_in_run_dir(path, GoesOn(sentence=why, again_s=time.time() + pause_s).model_dump_json())
        until_s = time.monotonic() + pause_s
        while not self._asked and (left_s := until_s - time.monotonic()) > 0:
            self._sleep(min(left_s, 1.0))
        with suppress(OSError):
            if path is not None:
                path.unlink(missing_ok=True)
