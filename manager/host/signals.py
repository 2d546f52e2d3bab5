"""Signals that save and end a run: SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal was closed) and ``STOP_SIGNAL``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNAL = signal.SIGUSR1
"""The signal that ``morph stop`` sends."""
STOPPED_BY_COMMAND = "stopped by morph stop"
BY_USER = (STOPPED_BY_COMMAND, "SIGINT", "SIGTERM", "SIGHUP")
"""The beginning of the reasons for stops that a user requested."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, STOP_SIGNAL)


@contextmanager
def stopping_on_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """While the context is open, the first signal requests a stop at the next boundary, with its name as the reason.

    For ``STOP_SIGNAL`` the reason is ``STOPPED_BY_COMMAND``. A hang-up or Ctrl-C that was ignored before stays ignored,
    as under nohup or in a script's background jobs; SIGTERM and ``STOP_SIGNAL`` are always handled. After a hang-up,
    output to the closed terminal is dropped. A second signal raises KeyboardInterrupt. Outside the main thread this
    does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requested = False
    terminals = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream and stream.isatty()]

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal requested
        if number == signal.SIGHUP:
            _let_go(terminals)
        if requested:
            raise KeyboardInterrupt
        requested = True
        request_stop(STOPPED_BY_COMMAND if number == STOP_SIGNAL else signal.Signals(number).name)

    with _handling(stop):
        yield


@contextmanager
def signals_blocked(hurry: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Ignore signals while everything is ended, which takes a bounded time: half an end would leave processes.

    ``hurry``: called with each signal, in the main thread; returns at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handling(lambda _number, _frame: hurry()):
        yield


def _let_go(terminals: list[int]) -> None:
    """Stop writing to a closed terminal, because an error there would end the run before it is saved."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for terminal in terminals:
        os.dup2(nothing, terminal)
    os.close(nothing)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {
        number: signal.signal(number, handler)
        for number in STOPPING
        if number in (signal.SIGTERM, STOP_SIGNAL) or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
