from __future__ import annotations

import threading
import time

import pytest

from morph.contract.errors import GenerationAborted, PeerLost, WaitTimeout
from morph.runtime.groups.interrupt import Interrupt
from tests.waiting import BOUND_S


def never() -> bool:
    return False


def wait_in_thread(interrupt: Interrupt, ready: threading.Event | None = None) -> tuple[threading.Thread, list[object]]:
    """Start a thread that is certainly waiting when this returns; the list receives what ended its wait."""
    outcome: list[object] = []
    looked = threading.Event()

    def look() -> bool:
        looked.set()
        return ready is not None and ready.is_set()

    def run() -> None:
        try:
            outcome.append(interrupt.wait_for(look, "something", BOUND_S))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert looked.wait(BOUND_S)
    return thread, outcome


def test_a_lost_peer_ends_a_wait_and_says_what_was_lost_first() -> None:
    interrupt = Interrupt(4)
    thread, outcome = wait_in_thread(interrupt)
    interrupt.lose("connection reset")
    interrupt.lose("another one")
    thread.join(BOUND_S)
    assert isinstance(outcome[0], PeerLost)
    assert "generation 4" in str(outcome[0])
    assert "connection reset" in str(outcome[0])


def test_a_notification_makes_the_waiter_look_again() -> None:
    interrupt, ready = Interrupt(1), threading.Event()
    thread, outcome = wait_in_thread(interrupt, ready)
    ready.set()
    interrupt.notify()
    thread.join(BOUND_S)
    assert isinstance(outcome[0], float)
    assert 0 <= outcome[0] < BOUND_S


def test_an_abort_ends_every_wait() -> None:
    interrupt = Interrupt(3)
    waiters = [wait_in_thread(interrupt) for _ in range(4)]
    interrupt.abort()
    for thread, outcome in waiters:
        thread.join(BOUND_S)
        assert isinstance(outcome[0], GenerationAborted)
        assert "generation 3" in str(outcome[0])


def test_an_ended_generation_stays_ended() -> None:
    aborted, lost = Interrupt(1), Interrupt(2)
    aborted.abort()
    lost.lose("reset")
    assert aborted.over
    assert aborted.aborted
    assert lost.over
    assert not lost.aborted
    with pytest.raises(GenerationAborted):
        aborted.wait_for(lambda: True, "nothing", BOUND_S)
    with pytest.raises(PeerLost):
        lost.check()
    lost.abort()  # an abort has precedence, because the manager knows it already
    with pytest.raises(GenerationAborted):
        lost.check()


def test_a_wait_ends_at_its_bound_and_names_what_it_awaited() -> None:
    with pytest.raises(WaitTimeout, match=r"0\.01 s for the moon"):
        Interrupt(1).wait_for(never, "the moon", 0.01)


def test_a_wait_without_a_bound_has_its_generations() -> None:
    with pytest.raises(WaitTimeout, match=r"0\.02 s for the moon"):
        Interrupt(1, limit_s=0.02).wait_for(never, "the moon")


def test_a_condition_that_holds_is_not_waited_for() -> None:
    assert Interrupt(1).wait_for(lambda: True, "nothing", 0.0) < BOUND_S


def test_a_call_returns_its_result_and_raises_its_error() -> None:
    def fail() -> int:
        raise KeyError("gone")

    assert Interrupt(1).call(lambda: 7, "seven", BOUND_S) == 7
    with pytest.raises(KeyError, match="gone"):
        Interrupt(1).call(fail, "failing", BOUND_S)


def test_an_abort_leaves_a_blocked_call_behind() -> None:
    interrupt, entered, release = Interrupt(1), threading.Event(), threading.Event()

    def block() -> int:
        entered.set()
        release.wait(BOUND_S)
        return 1

    def abort() -> None:
        entered.wait(BOUND_S)
        interrupt.abort()

    helper = threading.Thread(target=abort)
    helper.start()
    start_s = time.monotonic()
    with pytest.raises(GenerationAborted):
        interrupt.call(block, "blocked", BOUND_S)
    assert time.monotonic() - start_s < BOUND_S / 2
    helper.join(BOUND_S)
    release.set()
    for thread in threading.enumerate():
        if thread.name == "morph-blocked":
            thread.join(BOUND_S)
            assert not thread.is_alive()


def test_a_call_is_bounded() -> None:
    release = threading.Event()
    with pytest.raises(WaitTimeout, match="slowness"):
        Interrupt(1).call(lambda: release.wait(BOUND_S), "slowness", 0.01)
    release.set()
