"""A first signal requests a saved end, a second ends at once; a signal that was ignored stays so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from manager.host.signals import STOP_SIGNAL, STOPPED_BY_COMMAND, STOPPING, signals_blocked, stopping_on_signals
from tests.conftest import hear_signals
from tests.waiting import BOUND_S


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "__stdout__", None)  # a terminal of pytest itself would be released
    monkeypatch.setattr(sys, "__stderr__", None)
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    assert {number: signal.getsignal(number) for number in STOPPING} == before


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    asked: list[str] = []
    with stopping_on_signals(asked.append):
        signal.raise_signal(number)
        assert asked == [STOPPED_BY_COMMAND if number == STOP_SIGNAL else number.name]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert len(asked) == 1


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_stays_so(number: signal.Signals) -> None:
    asked: list[str] = []
    before = signal.signal(number, signal.SIG_IGN)  # as do nohup, or a shell for background jobs of a script
    try:
        with stopping_on_signals(asked.append), signals_blocked():
            signal.raise_signal(number)
        with stopping_on_signals(asked.append):
            signal.raise_signal(number)
            assert asked == []
            signal.raise_signal(signal.SIGTERM)
        assert asked == ["SIGTERM"]
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_sigterm_is_heard_where_it_was_ignored_too() -> None:
    asked: list[str] = []
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stopping_on_signals(asked.append):
            signal.raise_signal(signal.SIGTERM)
        assert asked == ["SIGTERM"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", STOPPING)
def test_while_everything_is_ended_a_signal_changes_nothing(number: signal.Signals) -> None:
    with signals_blocked():
        signal.raise_signal(number)


def test_output_to_a_closed_terminal_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    outside, inside = os.openpty()
    with os.fdopen(inside, "w") as terminal, os.fdopen(outside, "rb", buffering=0) as window:
        monkeypatch.setattr(sys, "__stdout__", terminal)
        with stopping_on_signals(lambda _name: None):
            terminal.write("seen\n")
            terminal.flush()
            assert window.read(16) == b"seen\r\n"
            window.close()
            signal.raise_signal(signal.SIGHUP)
            terminal.write("dropped\n")
            terminal.flush()  # this would be an error if the terminal were still used


def test_outside_the_main_thread_nothing_is_changed() -> None:
    seen: list[object] = []

    def look() -> None:
        with stopping_on_signals(lambda _name: None), signals_blocked():
            seen.extend(signal.getsignal(number) for number in STOPPING)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(BOUND_S)
    assert seen == [signal.getsignal(number) for number in STOPPING]


def test_processes_of_tests_receive_signals_that_the_tests_ignore() -> None:
    ignored = [number for number in STOPPING if number != STOP_SIGNAL]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        hear_signals()
        signal.raise_signal(signal.SIGHUP)
        script = (
            f"import signal; print([signal.getsignal(number) is signal.SIG_IGN for number in {[*map(int, ignored)]}])"
        )
        told = subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=BOUND_S
        )
        assert told.stdout == "[False, False, False]\n"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
