"""Workers that Ray places and starts: one detached actor per device, which calls the manager as every worker does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pydantic import SecretStr

from manager.engine.on_ray.driver_line import DriverLine
from manager.engine.on_ray.driver_messages import Kill, Start, Told
from morph.contract.vm_names import vm_of
from morph.link.home import Home

RETRY_CALL_S = 0.2
ADOPT_TIMEOUT_S = 15.0


@dataclass
class _Started:
    """``is_adopted``: another manager may have started it. ``is_known``: the driver reported that it exists."""

    vm: str
    is_adopted: bool = False
    is_known: bool = False


class RayLauncher:
    """A ``Launcher``. If no driver has reported a worker as started, the next driver gets the order to start it again.

    A worker that exists is not ordered again: its connection shows its end, and its message may have ended the driver.
    ``home``: returns the address and credential with which a worker calls. ``living``: the workers that may exist.
    ``failed``: called, in a thread of the line, with a worker whose process ended or could not be started, and the
    reason. ``gpus``: whether Ray assigns the GPUs of each VM, and lets each worker see one (CUDA_VISIBLE_DEVICES).
    """

    def __init__(
        self,
        driver: DriverLine,
        home: Callable[[str], Home],
        living: Callable[[], Collection[str]],
        failed: Callable[[str, str], None],
        *,
        gpus: bool = False,
    ) -> None:
        self._driver, self._home, self._living, self._failed = driver, home, living, failed
        self._num_gpus = 1 if gpus else 0
        self._workers: dict[str, _Started] = {}
        self._unsent_kills: set[str] = set()
        self._changed = threading.Condition()
        driver.attend(self.told, self.connected)

    def start_worker(self, worker: str, vm: str) -> None:
        with self._changed:
            self._workers[worker] = _Started(vm)
        self._ask_for(worker)

    def kill(self, worker: str) -> None:
        with self._changed:
            was_started = self._workers.pop(worker, None) is not None
            if was_started and not self._driver.send(Kill(worker=worker)):
                self._unsent_kills.add(worker)

    def has_ended(self, _worker: str) -> bool:
        """See ``Launcher``: Ray itself reports ends."""
        return False

    def adopt(self) -> Collection[str]:
        living = tuple(self._living())
        with self._changed:
            self._workers.update({worker: _Started(vm_of(worker), is_adopted=True) for worker in living})
        for worker in living:
            self._ask_for(worker)
        with self._changed:
            self._changed.wait_for(lambda: all(entry.is_known for entry in self._workers.values()), ADOPT_TIMEOUT_S)
            return [worker for worker, entry in self._workers.items() if entry.is_known]

    def told(self, news: Told) -> None:
        """Handle the driver's report about a worker."""
        with self._changed:
            worker = self._workers.get(news.worker)
            if worker is None:
                return
            is_news = news.kind == "ended" and (worker.is_known or not worker.is_adopted)
            if news.kind == "started":
                worker.is_known = True
            elif news.kind == "ended":
                del self._workers[news.worker]
            self._changed.notify_all()
        if news.kind == "unreachable":
            later = threading.Timer(RETRY_CALL_S, self._ask_for, (news.worker,))
            later.daemon = True
            later.start()
        elif is_news:
            self._failed(news.worker, news.cause)

    def connected(self) -> None:
        """Handle the connection of a new driver, which knows no workers yet."""
        with self._changed:
            kills, self._unsent_kills = self._unsent_kills, set()
            workers = [worker for worker, entry in self._workers.items() if not entry.is_known]
        for worker in kills:
            self._driver.send(Kill(worker=worker))
        for worker in workers:
            self._ask_for(worker)

    def _ask_for(self, worker: str) -> None:
        """Send an order; if no driver accepts it, the next driver gets it."""
        with self._changed:
            known = self._workers.get(worker)
        if known is not None:
            home, exists = SecretStr(self._home(worker).model_dump_json()), known.is_adopted or known.is_known
            self._driver.send(Start(worker=worker, vm=known.vm, home=home, num_gpus=self._num_gpus, exists=exists))
