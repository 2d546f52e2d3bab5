"""After a session whose cluster was lost comes another, until a session ends or the limit is reached."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from manager.controller.state.actions import Finish
from manager.engine.loop.driver import Observed
from manager.run import train as module
from manager.run.train import Restarts
from morph.contract.errors import ClusterError, ClusterLost

FINISHED = Finish(outcome="finished", sentence="done")
GONE = ClusterLost("the head node is gone")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between sessions, which take no time here."""
    waited: list[float] = []
    monkeypatch.setattr(module, "_wait", waited.append)
    return waited


def at_version(version: int, stop_reason: str | None = None, *, failed: bool = False) -> Observed:
    failing = SimpleNamespace(final=True) if failed else None
    state = SimpleNamespace(version=version, stop_reason=stop_reason, failing=failing)
    return cast(Observed, SimpleNamespace(decision=SimpleNamespace(state=state)))


def run(
    restarts: Restarts, *ends: Finish | ClusterError, begin: Callable[[int], object] = lambda _number: None
) -> Finish:
    """Let sessions end like this, one after the other, as ``train`` runs them; ``begin`` gets each one's number."""
    for number, end in enumerate(ends):
        begin(number)
        if (finish := restarts.after(end)) is not None:
            return finish
    raise AssertionError("no session is left")


def test_a_lost_cluster_is_replaced_at_once_then_after_growing_pauses(pauses: list[float]) -> None:
    told: list[str] = []
    failed = ClusterError("Ray did not start")
    ends = (GONE, failed, failed, GONE, FINISHED)
    assert run(Restarts(3600, told.append), *ends) == FINISHED
    assert pauses == [0.0, 5.0, 10.0, 20.0]
    assert told[0] == "the head node is gone; the run goes on from its newest checkpoint at once"
    assert told[1] == "Ray did not start; the run goes on from its newest checkpoint in 5 s"


def test_a_decided_step_makes_the_pauses_short_again(pauses: list[float]) -> None:
    restarts = Restarts(3600)

    def begin(number: int) -> None:
        for version in (5, 6) if number == 2 else (5, 5):
            restarts(at_version(version))

    assert run(restarts, GONE, GONE, GONE, FINISHED, begin=begin) == FINISHED
    assert pauses == [0.0, 5.0, 0.0]


def test_a_cluster_that_never_came_up_is_an_error_at_once(pauses: list[float]) -> None:
    with pytest.raises(ClusterError, match="no Ray"):
        run(Restarts(3600), ClusterError("no Ray"))
    assert pauses == []


@pytest.mark.parametrize("version", [0, 120])
def test_a_cluster_that_fails_to_start_is_retried_in_a_continued_run(pauses: list[float], version: int) -> None:
    """Its head node may have been killed while it started; in a run's first session, settings are more likely wrong."""
    restarts = Restarts(3600)
    failed = ClusterError("Ray did not start")
    restarts.begin_at(version)
    if version:
        assert run(restarts, failed, failed, FINISHED) == FINISHED
        assert pauses == [0.0, 5.0]
    else:
        with pytest.raises(ClusterError, match="Ray did not start"):
            run(restarts, failed, FINISHED)
    assert not restarts.has_run


def test_a_run_that_was_to_stop_is_not_begun_again(pauses: list[float]) -> None:
    restarts = Restarts(3600)
    restarts(at_version(5, "SIGINT"))
    with pytest.raises(ClusterLost, match="the head node is gone"):
        run(restarts, GONE)
    assert pauses == []


@pytest.mark.parametrize("asked", [None, "SIGINT"])
def test_an_error_that_ends_a_session_is_not_a_users_stop(pauses: list[float], asked: str | None) -> None:
    restarts = Restarts(3600)

    def begin(_number: int) -> None:
        restarts(at_version(5, asked))
        restarts(at_version(5, "vm0 failed at step 5", failed=True))

    lost = ClusterLost("vm0 failed at step 5")
    if asked is None:
        assert run(restarts, lost, FINISHED, begin=begin) == FINISHED
    else:
        with pytest.raises(ClusterLost):
            run(restarts, lost, begin=begin)
    assert pauses == ([0.0] if asked is None else [])


def test_at_the_limit_the_run_ends_and_says_whose_limit_it_is(pauses: list[float]) -> None:
    now_s = [0.0]
    restarts = Restarts(100, clock=lambda: now_s[0])

    def begin(_number: int) -> None:
        now_s[0] += 40

    with pytest.raises(ClusterError, match=r"the head node is gone; no step was decided for 100 s \(policy.give_up"):
        run(restarts, *[GONE] * 9, begin=begin)
    assert len(pauses) == 3


def test_a_signal_between_two_sessions_stops_the_run() -> None:
    failed = ClusterError("Ray did not start")

    def begin(number: int) -> None:
        if number:
            signal.setitimer(signal.ITIMER_REAL, 0.05)

    between_none = signal.getsignal(signal.SIGTERM)

    def ask(*_: object) -> None:
        if signal.getsignal(signal.SIGTERM) is between_none:  # this would end the tests
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    previous = signal.signal(signal.SIGALRM, ask)
    try:
        finish = run(Restarts(3600), GONE, failed, begin=begin)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert finish == Finish(outcome="stopped", sentence="SIGTERM before the run had a cluster again")


RESTS = Finish(outcome="stopped", sentence="n4 could not be set up; version 5 is saved", rests=True)


def test_a_run_without_progress_rests_ever_longer_up_to_its_limit(pauses: list[float]) -> None:
    told: list[str] = []
    times_s = iter([0.0, 60.0, 3000.0])
    restarts = Restarts(3600, told.append, lambda: next(times_s), 2000.0)
    assert run(restarts, RESTS, RESTS, RESTS, begin=lambda _: restarts.begin_at(5)) == RESTS
    assert pauses == [60.0, 120.0]
    assert told[0] == f"{RESTS.sentence}; the run rests without VMs, and tries again in 60 s"


def test_a_decided_step_makes_the_rests_short_again(pauses: list[float]) -> None:
    restarts = Restarts(3600, rest_at_most_s=2000.0)

    def begin(number: int) -> None:
        for version in (5, 6) if number != 1 else (6, 6):
            restarts(at_version(version))

    ends = (RESTS, RESTS, RESTS, FINISHED)
    assert run(restarts, *ends, begin=begin) == FINISHED
    assert pauses == [60.0, 120.0, 60.0]


def test_a_run_that_never_trained_does_not_rest(pauses: list[float]) -> None:
    assert run(Restarts(3600, rest_at_most_s=2000.0), RESTS) == RESTS
    assert pauses == []
