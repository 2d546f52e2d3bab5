from __future__ import annotations

import signal
import time

from manager.controller.events import StopRequested, Tick
from manager.engine.inbox import Inbox
from manager.journal.records import Fact


def test_what_is_put_in_comes_out_in_order_with_its_time() -> None:
    inbox, before_s = Inbox(), time.time()
    items = [Tick(), Fact(name="vm_requested"), StopRequested(reason="enough")]
    for item in items:
        inbox.put(item)
    taken = [inbox.get(0.0) for _ in items]
    assert [entry.item for entry in taken if entry] == items
    times = [entry.time_s for entry in taken if entry]
    assert before_s <= times[0] <= times[1] <= times[2] <= time.time()


def test_an_empty_inbox_gives_nothing_after_its_bound() -> None:
    assert Inbox().get(0.0) is None
    assert Inbox().get(-1.0) is None
    assert Inbox().get(0.001) is None


def test_a_signal_handler_may_put_while_the_same_thread_gets() -> None:
    """Signals that arrive wherever the thread happens to be; a queue with a plain lock would stand still."""
    inbox, sent, num_signals = Inbox(), [], 300

    def handler(*_: object) -> None:
        inbox.put(StopRequested(reason=str(len(sent))))
        sent.append(len(sent))
        if len(sent) < num_signals:
            signal.setitimer(signal.ITIMER_REAL, 0.0002)

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
        received = []
        while len(received) < num_signals:
            stamped = inbox.get(1.0)
            if stamped is not None:
                assert isinstance(stamped.item, StopRequested)
                received.append(int(stamped.item.reason))
        assert received == list(range(num_signals))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
