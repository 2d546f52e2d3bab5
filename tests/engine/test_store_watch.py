"""The store is restarted at the same address; the run learns if that is impossible."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from manager.engine.loop.event_queue import EventQueue
from manager.engine.machines import store_watch
from manager.engine.machines.store_watch import Store, StoreWatch
from manager.journal.records import Fact
from morph.contract.errors import ClusterError, ClusterLost
from tests.waiting import BOUND_S


class FakeStore(Store):
    """A store with a given process, which starts only after ``num_failures`` failed attempts."""

    def __init__(self, pid: int, num_failures: int = 0) -> None:
        super().__init__(self._start_at, "127.0.0.1", 4711, pid)
        self.num_failures, self.num_starts = num_failures, 0

    def _start_at(self, _host: str, port: int) -> tuple[int, int]:
        self.num_starts += 1
        if self.num_starts <= self.num_failures:
            raise ClusterError("the port is taken")
        return os.getpid(), port


@pytest.fixture
def dead() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def event_queue(monkeypatch: pytest.MonkeyPatch) -> EventQueue:
    monkeypatch.setattr(store_watch, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(store_watch, "PAUSE_S", 0.001)
    return EventQueue()


def told(event_queue: EventQueue) -> str:
    stamped = event_queue.get(BOUND_S)
    assert isinstance(stamped.item, Fact)
    return stamped.item.name


def test_a_store_that_lives_is_left_alone(event_queue: EventQueue) -> None:
    store = FakeStore(os.getpid())
    watch = StoreWatch(store, event_queue)
    watch.check()
    watch.close()
    assert (store.num_starts, len(event_queue)) == (0, 0)


def test_a_dead_store_is_restarted_once_and_death_and_restart_are_reported(event_queue: EventQueue, dead: int) -> None:
    store = FakeStore(dead, num_failures=2)
    watch = StoreWatch(store, event_queue)
    watch.check()
    watch.check()  # while it is being started
    assert [told(event_queue), told(event_queue)] == ["store_lost", "store_started_again"]
    watch.close()
    watch.check()
    assert (store.num_starts, len(event_queue)) == (3, 0)


def test_a_store_that_cannot_be_restarted_ends_the_session(
    event_queue: EventQueue, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_watch, "RETRY_S", 0.0)
    watch = StoreWatch(FakeStore(dead, num_failures=10**9), event_queue)
    watch.check()
    watch._starting.join(BOUND_S)  # not closed earlier, because that ends its attempts
    watch.close()
    with pytest.raises(
        ClusterLost, match="the rendezvous store is gone and cannot be started again: the port is taken"
    ):
        watch.check()
