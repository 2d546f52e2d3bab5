"""Worker actors: one Ray actor a device, orders on one lane, control beside it; JSON in bytes is all that they answer.

Every answer and every loss becomes an event on the driver's queue. A worker is lost when Ray says
that its process died (10-20 ms after a kill) or when its heartbeat has been silent for too long. A call
that Ray could not bring through, because a connection broke, is made again: the worker answers an order that comes
twice as it did before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from manager.controller.events import WorkerAnswered, WorkerLost
from manager.engine.inbox import Inbox, read_answer
from manager.engine.names import VM_RESOURCE
from manager.engine.silence import Signs, Silence, heartbeat_wait_s
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
from morph.runtime.serving import WorkerActor, pack

CONTROL_LANE = "control"
CALL_AGAIN_S = 0.2
ATTACH_TIMEOUT_S = 15.0


@dataclass(kw_only=True)
class _Handle(Signs):
    """A started worker."""

    actor: Any
    probe: int | None = None
    """That is not answered yet."""
    ahead: AheadOrder | None = None
    """The last one: how far it is may have been told in vain."""


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
        outage_timeout_s: float = 0.0,
        gpus: bool = False,
    ) -> None:
        self._inbox = inbox
        self._make_setup = make_setup
        self._silence = Silence(heartbeat_timeout_s, outage_timeout_s, inbox.put_unheard)
        self._wait_s = heartbeat_wait_s(heartbeat_timeout_s)
        self._check_cluster = check_cluster
        self._num_gpus = 1 if gpus else 0
        self._handles: dict[str, _Handle] = {}
        self._ray_lock = threading.RLock()
        self._closed = False
        remote: Any = ray.remote  # its types know only the plain form
        self._actor_class = remote(concurrency_groups={CONTROL_LANE: 2})(WorkerActor)

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
        """Go on with workers of a manager that was killed; returns those that it has.

        ``set_up``: those whose heartbeats begin now. One of them that does not answer within ``ATTACH_TIMEOUT_S`` is
        killed. The others are still being set up, or nobody wrote down that they are: they answer the setup that
        follows, and who is lost meanwhile is known by that.
        """
        calls: dict[str, Future[Any]] = {}
        for worker in workers:
            try:
                actor = ray.get_actor(worker)
            except ValueError:  # it was not started, or is gone
                continue
            self._handles[worker] = _Handle(actor=actor)
            calls[worker] = _on_control_lane(self._handles[worker], "follow", lifeline).future()
        answers = {worker: call for worker, call in calls.items() if worker in set_up}
        wait(answers.values(), ATTACH_TIMEOUT_S)
        for worker, call in answers.items():
            if not call.done() or call.exception() is not None:  # silent or gone, or it does not reach this manager
                self.end(worker)
            else:
                handle = self._handles[worker]
                handle.ready = True
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
        self._control(worker, "abort", generation)

    def ahead(self, worker: str, order: AheadOrder) -> None:
        """Tell a worker what to send ahead, or to expect, beside its running order."""
        if worker in self._handles:
            self._handles[worker].ahead = order
        self._control(worker, "ahead", order)

    def end(self, worker: str) -> None:
        """Kill a worker's process; no event follows."""
        handle = self._handles.get(worker)
        if handle and not handle.gone:
            handle.gone = True
            self._kill(handle)

    def close(self) -> None:
        """Call Ray no more, from whatever thread: a callback that did while Ray shuts down would hang both for ever."""
        with self._ray_lock:
            self._closed = True

    def connection_closed(self, worker: str) -> None:
        """Take note that a worker's lifeline closed: its process is gone."""
        handle = self._handles.get(worker)
        if handle is not None:
            self._lose(worker, handle, "its process is gone: its connection closed")

    def watch(self) -> bool:
        """Report workers whose heartbeat is overdue, and end them: one that wakes must not go on.

        Returns whether somebody can be heard, or nobody is to be.
        """
        self._check_cluster()
        for worker, silent_s in self._silence.overdue(self._handles):
            self._lose(worker, self._handles[worker], f"silent for {silent_s:.1f} s")
            self._kill(self._handles[worker])
        return not self._silence.outage

    def _send(self, worker: str, method: str, order: object) -> None:
        handle = self._handles[worker]
        if handle.probe is not None and not handle.gone:
            self._control(worker, "leave_probe", handle.probe)
        self._call(worker, handle, lambda: handle.actor.order.remote(pack(method, order)), self._answered)

    def _control(self, worker: str, method: str, argument: object) -> None:
        handle = self._handles.get(worker)
        if handle is not None:
            self._call(worker, handle, partial(_on_control_lane, handle, method, argument))

    def _call(
        self,
        worker: str,
        handle: _Handle,
        call: Callable[[], Any],
        returned: Callable[[str, _Handle, Any], None] | None = None,
        again: Callable[[], None] | None = None,
    ) -> None:
        """Call a worker, in whatever thread: again (or do ``again``) for as long as Ray cannot reach it.

        ``returned``: told what it returned; a worker whose call fails otherwise is lost. None: nobody asks.
        """

        def finished(future: Future[Any]) -> None:
            error = future.exception()
            if isinstance(error, ActorUnavailableError):
                repeat = again or partial(self._call, worker, handle, call, returned)
                later = threading.Timer(CALL_AGAIN_S, repeat)
                later.daemon = True
                later.start()
            elif returned is not None and error is not None:
                self._lose(worker, handle, _cause(error))
            elif returned is not None:
                try:
                    returned(worker, handle, future.result())
                except ValueError as wrong:
                    self._lose(worker, handle, f"does not speak as a worker does: {wrong}")
                    self._kill(handle)

        with self._ray_lock:
            if self._closed or handle.gone:
                return
            try:
                reference = call()
            except Exception as error:  # in Ray's thread nobody else would see it
                self._lose(worker, handle, _cause(error))
                return
        reference.future().add_done_callback(finished)

    def _answered(self, worker: str, handle: _Handle, message: bytes) -> None:
        answer = read_answer(worker, message)
        if isinstance(answer, Probed):
            handle.probe = None
            self._inbox.put_probed(answer)
            return
        if answer.kind == "ready":
            handle.ready = True
            self._beat(worker, handle)
        self._inbox.put(WorkerAnswered(worker=worker, answer=answer))

    def _beat(self, worker: str, handle: _Handle) -> None:
        """Ask for the next sign of life; called in Ray's threads."""
        handle.beat_sent_s = time.monotonic()
        self._await_beat(worker, handle)

    def _await_beat(self, worker: str, handle: _Handle) -> None:
        beat = partial(_on_control_lane, handle, "heartbeat", self._wait_s)
        self._call(worker, handle, beat, self._beaten, again=partial(self._beat_again, worker, handle))

    def _beat_again(self, worker: str, handle: _Handle) -> None:
        """A heartbeat did not come through: what it told of is to be told again. It is awaited as long as before."""
        self._control(worker, "follow", self._make_setup(worker).lifeline)
        if handle.ahead is not None:
            self._control(worker, "ahead", handle.ahead)
        self._await_beat(worker, handle)

    def _beaten(self, worker: str, handle: _Handle, message: bytes) -> None:
        self._inbox.put_beat(worker, Heartbeat.model_validate_json(message))
        self._beat(worker, handle)

    def _kill(self, handle: _Handle) -> None:
        with self._ray_lock:
            if not self._closed:
                ray.kill(handle.actor, no_restart=True)

    def _lose(self, worker: str, handle: _Handle, cause: str) -> None:
        if not handle.gone:
            handle.gone = True
            self._inbox.put(WorkerLost(worker=worker, cause=cause))


def _on_control_lane(handle: _Handle, method: str, argument: object) -> Any:
    return handle.actor.control.options(concurrency_group=CONTROL_LANE).remote(pack(method, argument))


def _cause(error: BaseException) -> str:
    if isinstance(error, RayError):
        return f"{type(error).__name__}: the worker's process or VM is gone"
    return f"{type(error).__name__}: {error}"
