"""Workers of this machine, as their manager sees them: each in a process that is forked here, or in a thread."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from morph.contract.faults import Fault
from morph.contract.messages import Failed, Heartbeat
from morph.contract.salvage import counted_in
from morph.runtime.attendants.wire import Frame
from tests.device.worker_device import HERE, use_fake_device
from tests.waiting import BOUND_S, PATIENCE, poll_until

FORKS = multiprocessing.get_context("forkserver")
"""Imports a worker's modules once, so that members start without delay; separate processes would import for seconds."""
FORKS.set_forkserver_preload(["tests.runtime.ready_to_fork"])
if len(tempfile.gettempdir()) > 60:  # the server's socket has no room below it
    tempfile.tempdir = "/tmp"
    multiprocessing.util.get_temp_dir()  # which is kept
    tempfile.tempdir = None
SETUP_S = 300.0 * PATIENCE


@dataclass(frozen=True)
class Footprint:
    """The kernel resources of a worker's process."""

    num_threads: int
    num_descriptors: int


class Member:
    """One worker's process, as its manager sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.orders, orders = FORKS.Pipe()
        self._control, control = FORKS.Pipe()
        self._in_use = threading.Lock()
        self.process = FORKS.Process(target=_serve, args=(orders, control), name=name, daemon=True)
        self.process.start()
        orders.close()
        control.close()

    def send(self, method: str, *arguments: object) -> None:
        """Send an order; ``answer`` returns the result."""
        self.orders.send((method, arguments))

    def answer(self, timeout_s: float = BOUND_S) -> Any:
        """Return the answer to the last order, within ``timeout_s``."""
        return _receive(self.orders, f"an answer of {self.name}", timeout_s)

    @property
    def has_answered(self) -> bool:
        return self.orders.poll()

    def control(self, command: str, *arguments: object) -> Any:
        """Run a command on the control lane."""
        with self._in_use:
            self._control.send((command, arguments))
            return _receive(self._control, f"{self.name}'s control lane", BOUND_S)

    def stop(self) -> None:
        """Stop the process as if its machine hung: its connections stay open."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.join(BOUND_S)
        self.process.close()
        self.orders.close()
        self._control.close()


class ThreadMember:
    """One worker in a thread of this process, as its manager sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread = ThreadPoolExecutor(1, name)
        self._answer: Future[Any]

    def send(self, method: str, *arguments: object) -> None:
        self._answer = self._thread.submit(self.carry_out, method, *arguments)
        if method == "setup":  # a process imports and cuts one job at a time
            wait_for_futures([self._answer], SETUP_S)

    def carry_out(self, method: str, *arguments: object) -> Any:
        from morph.runtime.process.worker import set_up

        if method == "setup":  # a worker is set up only once; files on disk, as others in this process import them, too
            arguments = (arguments[0].model_copy(update={"code": None}),)  # type: ignore[attr-defined]
            made = set_up(*arguments)
            if isinstance(made, Failed):
                return made
            self.worker: Any = made
        return getattr(self.worker, method)(*arguments)

    def answer(self, timeout_s: float = BOUND_S) -> Any:
        return self._answer.result(timeout_s)

    def control(self, command: str, *arguments: object) -> Any:
        """Run a command on the control lane."""
        return getattr(self.worker, command)(*arguments)

    def end(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def _fixed(exponent: int, _num_contributions: int) -> int:
    return exponent


def _arm(worker: Any, faults: tuple[Fault, ...], slow_s: float) -> None:
    """Add faults to a worker, and let it compute only while no copy of its sums is under way.

    ``slow_s``: instead of that, transferring each unit's state to a follower takes this time.
    """
    plan, computes = worker._faults, threading.main_thread()

    def reach(phase: str, step: int | None = None) -> None:
        stream = worker._followers._outgoing
        if slow_s and phase in ("send_ahead", "receive_ahead"):
            time.sleep(slow_s)
        elif not slow_s and stream is not None and threading.current_thread() is computes:
            if stream._connection is not None:  # when this has arrived, everything before it has been handled
                stream._put(Frame({"kind": "follows"}, {}))
            deadline_s = time.monotonic() + BOUND_S
            while stream.error is None and (stream._queue or stream._sending) and time.monotonic() < deadline_s:
                time.sleep(0.001)
        type(plan).reach(plan, phase, step)

    plan._faults += faults
    plan.reach = reach


def _num_copied(worker: Any, sender: str, step: int) -> int:
    """Return the number of micro-batches in a worker's copy of another worker's sums."""
    of, parts = worker._followers._copies.get(sender, (-1, []))
    return max(
        (mask.bit_count() for part in parts for mask in counted_in(part.total).values() if of == step), default=0
    )


def _data_workers(worker: Any) -> tuple[tuple[int, ...], int]:
    """Wait until a worker's data workers can read; return their ids and the number of micro-batches it read itself."""
    workload = worker._workload
    found, loader = workload._data_workers, workload._loader
    if found is None:
        return (), 0
    poll_until(lambda: found._hear(0.0) or all(reader.ready for reader in found._readers), "data workers")
    if not hasattr(loader, "num_own"):
        loader.num_own, made = 0, loader._made

        def counted(place: tuple[int, int], keys: list[str]) -> Any:
            loader.num_own += place not in loader._samples
            return made(place, keys)

        loader._made = counted
    return found.pids, loader.num_own


def _heartbeat_of_none(wait_s: float) -> Heartbeat:
    """Answer a heartbeat of a worker that is not set up yet."""
    time.sleep(min(wait_s, 0.2))
    return Heartbeat(worker="")


def _serve(orders: Connection, control: Connection) -> None:
    """Run a worker's process: orders in this thread, control messages in another."""
    from morph.runtime.process.worker import Worker, set_up
    from morph.runtime.state import unit_state

    workers: list[Worker] = []
    first_exponent = unit_state.first_exponent

    def footprint() -> Footprint:
        return Footprint(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))  # noqa: PTH208

    def serve_control() -> None:
        commands: dict[str, Callable[..., Any]] = {
            "abort": lambda generation: workers[-1].abort(generation) if workers else None,
            "heartbeat": lambda wait_s: workers[-1].heartbeat(wait_s) if workers else _heartbeat_of_none(wait_s),
            "ahead": lambda order: workers[-1].ahead(order),
            "footprint": footprint,
            "arm": lambda faults, slow_s: _arm(workers[-1], faults, slow_s),
            "counted": lambda: getattr(workers[-1]._training.sums._running, "_num_counted", 0),
            "copied": lambda sender, step: _num_copied(workers[-1], sender, step),
            "ends": lambda: [type(one).__name__ for one in workers[-1]._generation.mailboxes.values()],  # type: ignore[union-attr]
            "staged_bytes": lambda: 0 if HERE.device is None else HERE.device.copied_bytes,
            "live_at_release": lambda: [] if HERE.device is None else HERE.device.live_at_release,
            "launches": lambda: [] if HERE.nccl is None else HERE.nccl.launches,
            "waiting": lambda: bool(workers[-1]._interrupt._condition._waiters),  # type: ignore[attr-defined]
        }
        while True:
            name, arguments = control.recv()
            control.send(commands[name](*arguments))

    threading.Thread(target=serve_control, daemon=True).start()
    while True:
        name, arguments = orders.recv()
        if name == "first_exponent":
            (wanted,) = arguments
            unit_state.first_exponent = partial(_fixed, wanted) if wanted is not None else first_exponent
            orders.send(None)
            continue
        if name == "fake_device":
            use_fake_device(*arguments)
            orders.send(None)
            continue
        if name == "data_workers":
            orders.send(_data_workers(workers[-1]))
            continue
        if name == "setup":  # a worker is set up only once
            for before in workers:
                # otherwise garbage collection waits for operations of the worker's groups
                if before._generation is not None:
                    before._reaper.reap(before._generation.groups)
                if beside := getattr(before._workload, "_data_workers", None):
                    beside.close()
            if HERE.device is not None:  # a setup cannot name this device
                arguments = (arguments[0].model_copy(update={"device": HERE.device.kind.type}),)
            made = set_up(*arguments)
            if isinstance(made, Failed):
                orders.send(made)
                continue
            workers[:] = [made]
        orders.send(getattr(workers[-1], name)(*arguments))


def _receive(connection: Connection, what: str, timeout_s: float) -> Any:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"waited {timeout_s:g} s for {what}")
    return connection.recv()
