"""Detecting silent workers, and the workers that are silent together with them."""

from __future__ import annotations

import pytest

from manager.engine.loop import silence
from manager.engine.loop.silence import Signs, Silence, heartbeat_wait_s, watch_every_s

TIMEOUT_S = 4.0
OUTAGE_TIMEOUT_S = 30.0


class Watch:
    """Checks as often as it should, while some workers give a sign of life each half second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *workers: str) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(silence.time, "monotonic", lambda: self.now_s)
        self.unheard_s: list[float] = []
        self.silence = Silence(TIMEOUT_S, OUTAGE_TIMEOUT_S, self.unheard_s.append)
        self.workers = {worker: Signs(ready=True) for worker in workers}
        self.gone: set[str] = set()

    def until_overdue(self, *, silent: dict[str, float], heard_again_s: float = 60.0) -> dict[str, float]:
        """Advance time until some worker is overdue, a minute at most.

        ``silent``: since when each of these workers is silent, in seconds from now; they are silent until
        ``heard_again_s``, unless they are dead.
        """
        begin_s = self.now_s
        while self.now_s < begin_s + 60:
            self.now_s += watch_every_s(TIMEOUT_S)
            since_s = self.now_s - begin_s
            for worker, signs in self.workers.items():
                if since_s <= silent.get(worker, 60.0) or (since_s >= heard_again_s and worker not in self.gone):
                    signs.beat_sent_s = self.now_s
            found = self.silence.overdue(self.workers)
            if found:
                return dict(found)
        raise AssertionError("nobody is ever overdue")


def test_the_workers_of_a_vm_that_falls_silent_are_overdue_together(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, "a.d0", "a.d1", "a.d2", "b.d0", "c")
    found = watch.until_overdue(silent={"a.d0": 1.0, "a.d1": 2.0, "a.d2": 1.5})
    assert set(found) == {"a.d0", "a.d1", "a.d2"}
    # this worker is not overdue by itself
    assert found["a.d0"] > TIMEOUT_S + heartbeat_wait_s(TIMEOUT_S) > found["a.d1"]


def test_a_worker_beside_a_silent_one_that_beats_is_not_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, "a.d0", "a.d1", "b.d0")
    assert set(watch.until_overdue(silent={"a.d0": 1.0, "b.d0": 3.0})) == {"a.d0"}


def test_workers_silent_together_are_awaited_and_the_last_is_overdue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(monkeypatch, "a", "b", "c")
    watch.gone = {"c"}
    begin_s = watch.now_s
    found = watch.until_overdue(silent={"a": 1.0, "b": 1.5, "c": 2.0}, heard_again_s=20.0)
    assert set(found) == {"c"}
    assert watch.now_s - begin_s > 20.0 + TIMEOUT_S  # its time begins anew
    assert watch.unheard_s == [pytest.approx(18.0, abs=1.0)]
    assert not watch.silence.outage


def test_workers_silent_beyond_an_outage_are_overdue_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(monkeypatch, "a", "b")
    begin_s = watch.now_s
    assert set(watch.until_overdue(silent={"a": 1.0, "b": 1.0})) == {"a", "b"}
    assert watch.now_s - begin_s == pytest.approx(1.0 + OUTAGE_TIMEOUT_S, abs=1.0)


def test_silence_of_a_single_vms_workers_is_not_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, "a.d0", "a.d1")
    begin_s = watch.now_s
    assert set(watch.until_overdue(silent={"a.d0": 1.0, "a.d1": 1.0})) == {"a.d0", "a.d1"}
    assert watch.now_s - begin_s < 2 * TIMEOUT_S
