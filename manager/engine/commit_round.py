"""Measure what a commit costs the manager: an order to every worker through Ray, and the answers."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from manager.engine.inbox import read_answer
from manager.engine.names import VM_RESOURCE
from manager.engine.ray_environment import prepare, stay_on_loopback
from morph.contract.errors import ClusterError
from morph.contract.messages import CommitOrder, Committed
from morph.runtime.serving import pack, unpack

_WARM_UP = 5
_START_TIMEOUT_S = 60.0
_ROUND_TIMEOUT_S = 30.0


class _Answerer:
    """A worker that has nothing to apply, and speaks as one does."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def order(self, message: bytes) -> bytes:
        """Take a commit order; returns its answer."""
        _, order = unpack(message)
        answer = Committed(worker=self._worker, generation=order.generation, version=order.version)
        return answer.model_dump_json().encode()


def measure_commit_round(num_samples: int, num_workers: int = 2) -> list[float]:
    """Start Ray with some VMs on this machine, time the rounds in seconds, and end everything; takes some seconds.

    Raises:
        ClusterError: Ray or a worker did not come up, or did not answer.
    """
    directory = prepare()
    stay_on_loopback()
    import ray
    from ray.exceptions import RayError

    from manager.engine.ray_cluster import RayCluster

    cluster = RayCluster(directory)
    with ExitStack() as ending:
        ending.callback(cluster.close)
        cluster.start()
        remote: Any = ray.remote  # its types know only the plain form
        actors = []
        for number in range(num_workers):
            name = f"vm{number}"
            cluster.add_vm(name)
            options = {"num_cpus": 1, "resources": {VM_RESOURCE + name: 1}}
            actors.append(remote(_Answerer).options(**options).remote(name))
        samples_s: list[float] = []
        try:
            for version in range(1, 1 + _WARM_UP + num_samples):
                order = pack("commit", CommitOrder(generation=1, version=version))
                begun_s = time.perf_counter()
                started = [actor.order.remote(order).future() for actor in actors]
                for worker, answer in enumerate(started):
                    read_answer(f"vm{worker}", answer.result(_START_TIMEOUT_S if version == 1 else _ROUND_TIMEOUT_S))
                samples_s.append(time.perf_counter() - begun_s)
        except (RayError, TimeoutError) as error:
            raise ClusterError(f"measuring a commit's round through Ray failed: {error}") from error
    return samples_s[_WARM_UP:]
