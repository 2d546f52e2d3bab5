"""Worker actors: one Ray actor a device, orders on one lane, control beside it.

Every answer and every loss becomes an event on the driver's queue. A worker is lost when Ray says
that its process died (10-20 ms after a kill) or when its heartbeat has been silent for too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from manager.controller.events import AheadReported, CheckpointFailed, UnitsWritten, WorkerAnswered, WorkerLost
from manager.engine.inbox import Inbox
from manager.engine.names import HEAD_RESOURCE, VM_RESOURCE
from manager.engine.silence import Signs, Silence, heartbeat_wait_s
from morph.contract.errors import ClusterError
from morph.contract.messages import (
    AheadOrder,
    CommitOrder,
    Heartbeat,
    Lifeline,
    Probed,
    ProbeOrder,
    ReshapeOrder,
    StepOrder,
    WorkerSetup,
)
from morph.runtime.store import StoreHost
from morph.runtime.worker import Worker

CONTROL_LANE = "control"
STORE_NAME = "morph-store"
STORE_TIMEOUT_S = 60.0
ATTACH_TIMEOUT_S = 15.0


@dataclass(kw_only=True)
class _Handle(Signs):
    """A started worker."""

    actor: Any
    probe: int | None = None
    """That is not answered yet."""


class WorkerPool:
    """Starts, orders, watches and ends workers. Events go to ``inbox``; callbacks run in Ray's threads.

    ``check_cluster`` is called while workers are watched, and raises what ends the run. ``gpus``: each VM's GPUs are
    dealt by Ray, which lets each worker see one of its own (CUDA_VISIBLE_DEVICES).
    """

    def __init__(
        self,
        inbox: Inbox,
        make_setup: Callable[[str], WorkerSetup],
        heartbeat_timeout_s: float,
        check_cluster: Callable[[], None] = lambda: None,
        *,
        gpus: bool = False,
    ) -> None:
        self._inbox = inbox
        self._make_setup = make_setup
        self._silence = Silence(heartbeat_timeout_s)
        self._wait_s = heartbeat_wait_s(heartbeat_timeout_s)
        self._check_cluster = check_cluster
        self._num_gpus = 1 if gpus else 0
        self._handles: dict[str, _Handle] = {}
        self._ray_lock = threading.RLock()
        self._closed = False
        remote: Any = ray.remote  # its types know only the plain form
        self._actor_class = remote(concurrency_groups={CONTROL_LANE: 2})(Worker)

    def start(self, worker: str, vm: str) -> None:
        """Start a worker on its VM and set it up; ``WorkerReady`` follows as an answer.

        It is detached and named, so that it outlives this process and another manager finds it. One that was attached
        is set up again.
        """
        if worker not in self._handles:
            actor = self._actor_class.options(
                name=worker,
                lifetime="detached",
                num_cpus=1,
                num_gpus=self._num_gpus,
                resources={VM_RESOURCE + vm: 1},
                max_restarts=0,
                max_task_retries=0,
            ).remote()
            self._handles[worker] = _Handle(actor=actor)
        self._send(worker, "setup", self._make_setup(worker))

    def attach(self, workers: Sequence[str], set_up: Collection[str], lifeline: Lifeline) -> tuple[str, ...]:
        """Go on with workers of a manager that was killed; returns those that answer within ``ATTACH_TIMEOUT_S``.

        The rest is killed. ``set_up``: those whose heartbeats begin now.
        """
        calls: dict[str, Any] = {}
        for worker in workers:
            try:
                actor = ray.get_actor(worker)
            except ValueError:  # it was not started, or is gone
                continue
            self._handles[worker] = _Handle(actor=actor)
            calls[worker] = actor.follow.options(concurrency_group=CONTROL_LANE).remote(lifeline)
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=ATTACH_TIMEOUT_S)
        for worker, call in calls.items():
            handle = self._handles[worker]
            try:
                ray.get(call, timeout=0)
            except Exception:  # RayError: silent or gone; any other: it does not reach this manager
                self.end(worker)
            else:
                handle.ready = worker in set_up
                if handle.ready:
                    self._beat(worker, handle)
        return tuple(worker for worker in calls if not self._handles[worker].gone)

    def reshape(self, worker: str, order: ReshapeOrder) -> None:
        """Send a reshape order."""
        self._send(worker, "reshape", order)

    def step(self, worker: str, order: StepOrder) -> None:
        """Send a step order."""
        self._send(worker, "step", order)

    def commit(self, worker: str, order: CommitOrder) -> None:
        """Send a commit order."""
        self._send(worker, "commit", order)

    def probe(self, worker: str, order: ProbeOrder) -> None:
        """Have a worker time some work, until it gets another order; ``WorkerProbed`` follows."""
        self._send(worker, "probe", order)
        self._handles[worker].probe = order.probe

    def abort(self, worker: str, generation: int) -> None:
        """Abort a generation on a worker, beside its running order."""
        handle = self._handles.get(worker)
        if handle and not handle.gone:
            handle.actor.abort.options(concurrency_group=CONTROL_LANE).remote(generation)

    def ahead(self, worker: str, order: AheadOrder) -> None:
        """Tell a worker what to send ahead, or to expect, beside its running order."""
        handle = self._handles.get(worker)
        if handle and not handle.gone:
            handle.actor.ahead.options(concurrency_group=CONTROL_LANE).remote(order)

    def end(self, worker: str) -> None:
        """Kill a worker's process; no event follows."""
        handle = self._handles.get(worker)
        if handle and not handle.gone:
            handle.gone = True
            ray.kill(handle.actor, no_restart=True)

    def close(self) -> None:
        """Call Ray no more, from whatever thread: a callback that did while Ray shuts down would hang both for ever."""
        with self._ray_lock:
            self._closed = True

    def connection_closed(self, worker: str) -> None:
        """Take note that a worker's lifeline closed: its process is gone."""
        handle = self._handles.get(worker)
        if handle is not None:
            self._lose(worker, handle, "its process is gone: its connection closed")

    def watch(self) -> None:
        """Report workers whose heartbeat is overdue, and end them: one that wakes must not go on."""
        self._check_cluster()
        for worker, silent_s in self._silence.overdue(self._handles):
            self._lose(worker, self._handles[worker], f"silent for {silent_s:.1f} s")
            ray.kill(self._handles[worker].actor, no_restart=True)

    def _send(self, worker: str, method: str, order: object) -> None:
        handle = self._handles[worker]
        if handle.probe is not None and not handle.gone:
            handle.actor.leave_probe.options(concurrency_group=CONTROL_LANE).remote(handle.probe)
        if not handle.gone:
            self._answer(worker, getattr(handle.actor, method).remote(order))

    def _answer(self, worker: str, reference: Any) -> None:
        handle = self._handles[worker]

        def finished(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                self._lose(worker, handle, _cause(error))
                return
            answer = future.result()
            if isinstance(answer, Probed):
                handle.probe = None
                self._inbox.put_probed(answer)
                return
            if answer.kind == "ready":
                handle.ready = True
                self._beat(worker, handle)
            self._inbox.put(WorkerAnswered(worker=worker, answer=answer))

        reference.future().add_done_callback(finished)

    def _beat(self, worker: str, handle: _Handle) -> None:
        """Ask for the next sign of life; called in Ray's threads."""
        with self._ray_lock:
            if not self._closed:
                self._send_beat(worker, handle)

    def _send_beat(self, worker: str, handle: _Handle) -> None:
        handle.beat_sent_s = time.monotonic()
        try:
            reference = handle.actor.heartbeat.options(concurrency_group=CONTROL_LANE).remote(self._wait_s)
        except Exception as error:  # in Ray's thread nobody else would see it
            self._lose(worker, handle, _cause(error))
            return

        def finished(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                self._lose(worker, handle, _cause(error))
                return
            beat: Heartbeat = future.result()
            if beat.times is not None:
                self._inbox.paces.add(worker, beat.times)
            if beat.written:
                self._inbox.put(UnitsWritten(worker=worker, written=beat.written))
            if beat.checkpoint_error:
                self._inbox.put(CheckpointFailed(worker=worker, error=beat.checkpoint_error))
            if beat.ahead is not None:
                self._inbox.put(AheadReported(worker=worker, report=beat.ahead))
            if not handle.gone:
                self._beat(worker, handle)

        reference.future().add_done_callback(finished)

    def _lose(self, worker: str, handle: _Handle, cause: str) -> None:
        if not handle.gone:
            handle.gone = True
            self._inbox.put(WorkerLost(worker=worker, cause=cause))


def _cause(error: BaseException) -> str:
    if isinstance(error, RayError):
        return f"{type(error).__name__}: the worker's process or VM is gone"
    return f"{type(error).__name__}: {error}"


class Store:
    """The rendezvous store's process on the head node.

    Detached and named, as the workers are.

    Raises:
        ClusterError: when it does not come up within ``STORE_TIMEOUT_S``.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        remote: Any = ray.remote
        options = {"name": STORE_NAME, "lifetime": "detached", "num_cpus": 0, "resources": {HEAD_RESOURCE: 0.01}}
        self._actor: Any = remote(StoreHost).options(**options).remote(host, port)
        self.host = host
        try:
            found: Any = ray.get(self._actor.port.remote(), timeout=STORE_TIMEOUT_S)
        except RayError as error:
            raise ClusterError(f"the rendezvous store did not start within {STORE_TIMEOUT_S:g} s: {error}") from error
        self.port = int(found)
