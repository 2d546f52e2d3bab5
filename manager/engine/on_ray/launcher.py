"""Workers that Ray places and starts: one detached actor a device, which calls the manager as every worker does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

from manager.host.ports import VM_RESOURCE
from morph.link.home import Home
from morph.runtime.process.actor import WorkerActor

CALL_AGAIN_S = 0.2


class RayLauncher:
    """See ``Launcher``. An actor is called once, and returns from that call when its worker's process ends.

    A call that Ray could not bring through, because a connection broke, is made again, and so it is by a manager that
    takes over: it waits behind the one that the worker is in.

    Args:
        home: Where a worker calls.
        living: The workers that there may be.
        failed: Told, in a thread of Ray's, of a worker whose process could not be started, or ended; and why.
        gpus: Ray deals the GPUs of each VM, and lets each worker see one (CUDA_VISIBLE_DEVICES).
    """

    def __init__(
        self,
        home: Callable[[str], Home],
        living: Callable[[], Collection[str]],
        failed: Callable[[str, str], None],
        *,
        gpus: bool = False,
    ) -> None:
        self._home, self._living, self._failed = home, living, failed
        self._num_gpus = 1 if gpus else 0
        self._actors: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._closed = False
        remote: Any = ray.remote  # its types know only the plain form
        self._actor_class = remote(WorkerActor)

    def start_worker(self, worker: str, vm: str) -> None:
        """See ``Launcher``. The actor is detached and named, so that another manager finds it."""
        options = self._actor_class.options(
            name=worker,
            lifetime="detached",
            num_cpus=1,
            num_gpus=self._num_gpus,
            resources={VM_RESOURCE + vm: 1},
            max_restarts=0,
            max_task_retries=0,
        )
        with self._lock:
            self._actors[worker] = options.remote()
        self._call(worker)

    def kill(self, worker: str) -> None:
        """See ``Launcher``."""
        with self._lock:
            actor = self._actors.pop(worker, None)
            if actor is not None and not self._closed:
                ray.kill(actor, no_restart=True)

    def has_ended(self, _worker: str) -> bool:
        """See ``Launcher``: Ray says so itself."""
        return False

    def adopt(self) -> Collection[str]:
        """See ``Launcher``."""
        for worker in self._living():
            try:
                self._actors[worker] = ray.get_actor(worker)
            except ValueError:  # it was not started, or is gone
                continue
            self._call(worker)
        return tuple(self._actors)

    def close(self) -> None:
        """Call Ray no more, from whatever thread: a callback that did while Ray shuts down would hang both for ever."""
        with self._lock:
            self._closed = True

    def _call(self, worker: str) -> None:
        with self._lock:
            actor = self._actors.get(worker)
            if actor is None or self._closed:
                return
            try:
                call = actor.serve_home.remote(self._home(worker).model_dump_json().encode())
            except Exception as error:  # in Ray's thread nobody else would see it
                self._failed(worker, f"{type(error).__name__}: {error}")
                return
        call.future().add_done_callback(lambda ended: self._ended(worker, ended))

    def _ended(self, worker: str, call: Future[Any]) -> None:
        error = call.exception()
        if isinstance(error, ActorUnavailableError):
            later = threading.Timer(CALL_AGAIN_S, self._call, (worker,))
            later.daemon = True
            later.start()
        else:
            self._failed(worker, f"{type(error).__name__}: the worker's process or VM is gone")
