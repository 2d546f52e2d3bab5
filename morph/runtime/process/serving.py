"""Serves one worker to the manager, whichever there is; it outlives them.

Orders are carried out one after the other; everything else is done at once, beside them. What was answered while no
manager was there is answered again to the next one, who asks again.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from morph.contract.base import Value
from morph.contract.messages import WorkerReady, WorkerSetup
from morph.link.caller import Talk, keep_liveness
from morph.link.encoding import ANSWER, BEAT, ORDERS, packed, unpack
from morph.link.home import Home


def serve(home: Home, worker: Any) -> None:
    """Call the manager and do what it says; does not return. When a thread of it cannot go on the process ends.

    ``worker``: a ``Worker``, or what answers as one does.
    """
    held = threading.Event()
    orders: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    talk = Talk(home, worker.tell_again, lambda message: _obey(worker, orders, message))
    until_ended(partial(keep_liveness, home, held.set))
    held.wait()  # who is heard can be seen to die
    until_ended(talk.hear)
    beats = False
    while True:
        name, order = orders.get()
        carry_out: Callable[[Any], Value] = getattr(worker, name)
        answer = carry_out(order)
        talk.send(packed(ANSWER, answer))  # one that nobody hears is remembered
        if isinstance(order, WorkerSetup) and isinstance(answer, WorkerReady) and not beats:
            beats = True
            until_ended(partial(_beat, worker, talk, order.heartbeat_wait_s))


def until_ended(work: Callable[[], object]) -> None:
    """Run in a thread; when it returns, the process ends."""

    def run() -> None:
        with suppress(EOFError, OSError):
            work()
        os._exit(0)

    threading.Thread(target=run, name="morph-serving", daemon=True).start()


def _obey(worker: Any, orders: queue.SimpleQueue[tuple[str, Any]], message: bytes) -> None:
    name, argument = unpack(message)
    if name in ORDERS:
        orders.put((name, argument))
    else:
        getattr(worker, name)(argument)


def _beat(worker: Any, talk: Talk, wait_s: float) -> None:
    while True:
        talk.wait()  # what one manager was told of is told again to the next
        talk.send(packed(BEAT, worker.heartbeat(wait_s)))
