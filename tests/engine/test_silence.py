"""Who is silent, and who is silent with them."""

from __future__ import annotations

import pytest

from manager.engine import silence
from manager.engine.silence import Signs, Silence, heartbeat_wait_s, watch_every_s

TIMEOUT_S = 4.0


class Watch:
    """Looks as often as it should, while some workers give a sign of life each half second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *workers: str) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(silence.time, "monotonic", lambda: self.now_s)
        self.silence = Silence(TIMEOUT_S)
        self.workers = {worker: Signs(ready=True) for worker in workers}

    def until_overdue(self, *, silent: dict[str, float]) -> dict[str, float]:
        """Go on until somebody is overdue. ``silent``: since when (seconds from now) each gives no sign any more."""
        begin_s = self.now_s
        while self.now_s < begin_s + 60:
            self.now_s += watch_every_s(TIMEOUT_S)
            for worker, signs in self.workers.items():
                if self.now_s - begin_s <= silent.get(worker, 60.0):
                    signs.beat_sent_s = self.now_s
            found = self.silence.overdue(self.workers)
            if found:
                return dict(found)
        raise AssertionError("nobody is ever overdue")


def test_the_workers_of_a_vm_that_falls_silent_are_overdue_together(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, "a.d0", "a.d1", "a.d2", "b.d0", "c")
    found = watch.until_overdue(silent={"a.d0": 1.0, "a.d1": 2.0, "a.d2": 1.5})
    assert set(found) == {"a.d0", "a.d1", "a.d2"}
    assert found["a.d0"] > TIMEOUT_S + heartbeat_wait_s(TIMEOUT_S) > found["a.d1"]  # which is not overdue by itself


def test_a_worker_beside_a_silent_one_that_beats_is_not_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, "a.d0", "a.d1", "b.d0")
    assert set(watch.until_overdue(silent={"a.d0": 1.0, "b.d0": 3.0})) == {"a.d0"}
