from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from manager.controller.state.events import StopRequested, Tick
from manager.engine.loop import event_queue as inbox_module
from manager.engine.loop.event_queue import EventQueue, read_answer
from manager.journal.records import Fact
from morph.contract.messages import WorkerReady


def test_events_come_out_in_order_with_their_time() -> None:
    now_s = iter([3.0, 4.0, 4.0])
    event_queue = EventQueue(lambda: next(now_s))
    items = [Tick(), Fact(name="vm_requested"), StopRequested(reason="enough")]
    for item in items:
        event_queue.put(item)
    taken = [event_queue.get(0.0) for _ in items]
    assert [entry.item for entry in taken if entry] == items
    assert [entry.time_s for entry in taken if entry] == [3.0, 4.0, 4.0]


def test_an_empty_inbox_gives_nothing_after_its_bound() -> None:
    assert EventQueue().get(0.0) is None
    assert EventQueue().get(-1.0) is None
    assert EventQueue().get(0.001) is None


@pytest.mark.timeout(100)
def test_a_signal_handler_may_put_while_the_same_thread_gets() -> None:
    """A handler may run between any two lines of Python, here between each.

    A queue with a plain lock would dead-lock.
    """
    event_queue, num_interruptions = EventQueue(), 0
    inside = {queue.__file__, inbox_module.__file__}

    def interrupt(frame: FrameType, event: str, _: object) -> Callable[..., object]:
        nonlocal num_interruptions
        if event == "line" and frame.f_code.co_filename in inside:
            event_queue.put(StopRequested(reason=str(num_interruptions)))
            num_interruptions += 1
        return interrupt

    previous = sys.gettrace()
    sys.settrace(interrupt)
    try:
        taken = event_queue.get(0.1)
    finally:
        sys.settrace(previous)
    assert num_interruptions > 0
    reasons = [] if taken is None else [taken.item]
    while (stamped := event_queue.get(0.0)) is not None:
        reasons.append(stamped.item)
    assert reasons == [StopRequested(reason=str(index)) for index in range(num_interruptions)]


def test_a_worker_answers_for_itself_alone_and_as_a_worker_does() -> None:
    ready = WorkerReady(worker="vm0", pid=1, setup_s=1.0)
    assert read_answer("vm0", ready.model_dump_json().encode()) == ready
    with pytest.raises(ValueError, match="answers for vm0"):
        read_answer("vm1", ready.model_dump_json().encode())
    for rubbish in (b"", b"[]", b'{"kind": "ready"}', b"\x80\x04."):
        with pytest.raises(ValueError):
            read_answer("vm0", rubbish)
