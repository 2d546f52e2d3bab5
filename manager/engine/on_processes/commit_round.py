"""Measures the manager's time for a commit: an order to every worker, and the answers.

``python -m manager.engine.on_processes.commit_round`` is one worker; it reads the address to call from standard input.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from manager.controller.state.events import WorkerAnswered
from manager.engine.joining.link_server import Entrance, LinkServer, listen
from manager.engine.loop.event_queue import EventQueue
from manager.engine.loop.worker_pool import WorkerPool
from manager.host.ports import LOOPBACK
from morph.contract.errors import ClusterError
from morph.contract.messages import CommitOrder, Committed, WorkerSetup
from morph.link.home import Home
from morph.link.proof import new_secret
from morph.runtime.process.serving import serve, until_ended

_WARM_UP = 5
_START_TIMEOUT_S = 60.0
_ROUND_TIMEOUT_S = 30.0


class _Answerer:
    """A worker that follows the protocol but has nothing to apply."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def commit(self, order: CommitOrder) -> Committed:
        """Do nothing."""
        return Committed(worker=self._worker, generation=order.generation, version=order.version)

    def tell_again(self) -> None:
        """Report that nothing was written."""


class _Launcher:
    """A ``Launcher`` whose workers exist already and are set up."""

    def __init__(self, workers: list[str]) -> None:
        self._workers = workers

    def start_worker(self, _worker: str, _vm: str) -> None:
        """Do nothing: the workers exist."""

    def kill(self, _worker: str) -> None:
        """Do nothing: the workers end when this process closes their pipes."""

    def has_ended(self, _worker: str) -> bool:
        """Return False: a round without an answer shows that."""
        return False

    def adopt(self) -> list[str]:
        """Return all workers."""
        return self._workers


def measure_commit_round(num_samples: int, num_workers: int = 2) -> list[float]:
    """Time rounds (seconds) of new workers, which are ended then; ClusterError if one does not come up or answer."""
    workers = [f"vm{number}" for number in range(num_workers)]
    event_queue, entrance = EventQueue(), Entrance(listen(LOOPBACK), new_secret())
    make_setup: Callable[[str], WorkerSetup] = WorkerSetup.model_validate  # there is no setup to make
    pool = WorkerPool(event_queue, make_setup, _Launcher(workers), _START_TIMEOUT_S)
    with ExitStack() as ending:
        ending.callback(LinkServer(entrance, pool).close)
        for worker in workers:
            process = ending.enter_context(subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE))
            ending.callback(process.kill)
            assert process.stdin is not None
            process.stdin.write(entrance.home(worker).model_dump_json().encode() + b"\n")
            process.stdin.flush()
        pool.attach(())
        samples_s: list[float] = []
        for version in range(1, 1 + _WARM_UP + num_samples):
            begun_s = time.perf_counter()
            for worker in workers:
                pool.send(worker, CommitOrder(generation=1, version=version))
            for _ in workers:
                stamped = event_queue.get(_START_TIMEOUT_S if version == 1 else _ROUND_TIMEOUT_S)
                if stamped is None or not isinstance(stamped.item, WorkerAnswered):
                    raise ClusterError(f"measuring a commit's round failed: {stamped.item if stamped else 'no answer'}")
            samples_s.append(time.perf_counter() - begun_s)
    return samples_s[_WARM_UP:]


def main() -> None:
    """Be a worker for as long as standard input is open."""
    home = Home.model_validate_json(sys.stdin.buffer.readline())
    until_ended(sys.stdin.buffer.read)
    worker = _Answerer(home.worker)
    serve(home, lambda _setup: worker, worker)


if __name__ == "__main__":
    main()
