"""Serves one worker to the current manager; the worker outlives managers. Orders are carried out one at a time."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from morph.contract.base import Value
from morph.contract.messages import Failed, WorkerSetup
from morph.link.caller import Talk, keep_liveness
from morph.link.encoding import ANSWER, BEAT, ORDERS, packed, unpack
from morph.link.home import Home

log = logging.getLogger(__name__)
OWN_THREADS = "morph-"
"""Prefix of the names of Morph's own threads; a job's threads have other names."""


def end_with_threads() -> None:
    """From now on, end this process if an unexpected error ends one of Morph's threads."""
    before = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if failure.thread is None or not failure.thread.name.startswith(OWN_THREADS):
            before(failure)
            return
        try:
            log.critical("thread %s failed: the worker ends", failure.thread.name, exc_info=failure.exc_value)
        finally:
            os._exit(1)

    threading.excepthook = hook


def serve(home: Home, set_up: Callable[[WorkerSetup], Any], *workers: Any) -> None:
    """Call the manager and carry out its orders; does not return. If a thread cannot continue, the process ends.

    ``set_up``: makes the worker, as ``worker.set_up`` does; ``workers``: the worker, if it is set up already.
    """
    end_with_threads()
    held = threading.Event()
    orders: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    served = list(workers)
    talk = Talk(home, lambda: _tell_all(served, "tell_again"), lambda message: _obey(served, orders, message))
    until_ended(partial(keep_liveness, home, held.set))
    held.wait()  # from here on, the death of this worker can be seen
    until_ended(talk.hear)
    while True:
        name, order = orders.get()
        is_first = isinstance(order, WorkerSetup) and not served
        made = set_up(order) if is_first else served[0]
        if isinstance(made, Failed):
            answer: Value = made
        else:
            served[:] = [made]
            answer = getattr(made, name)(order)
        talk.send(packed(ANSWER, answer))  # an answer that reaches no manager is remembered
        if is_first and served:
            until_ended(partial(_beat, made, talk, order.heartbeat_wait_s))


def until_ended(work: Callable[[], object]) -> None:
    """Run in a thread; when it returns, or fails, the process ends."""

    def run() -> None:
        try:
            work()
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:
            log.exception("the worker ends")
            os._exit(1)
        os._exit(0)

    threading.Thread(target=run, name="morph-serving", daemon=True).start()


def _obey(served: list[Any], orders: queue.SimpleQueue[tuple[str, Any]], message: bytes) -> None:
    name, argument = unpack(message)
    if name in ORDERS:
        orders.put((name, argument))
    else:
        _tell_all(served, name, argument)


def _tell_all(served: list[Any], name: str, *arguments: Any) -> None:
    for worker in served:
        getattr(worker, name)(*arguments)


def _beat(worker: Any, talk: Talk, wait_s: float) -> None:
    while True:
        talk.wait()  # reports to one manager are repeated to the next one
        talk.send(packed(BEAT, worker.heartbeat(wait_s)))
