"""The process that owns local Ray nodes keeps nothing of a node that was killed."""

from __future__ import annotations

import time

import psutil
import pytest

from manager.engine.ray_environment import prepare, stay_on_loopback

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

GONE_S = 20.0


def test_killed_nodes_leave_no_zombie_and_no_thread_behind() -> None:
    directory = prepare()
    stay_on_loopback()
    from manager.engine.ray_cluster import RayCluster  # Ray is imported with it, in the environment made for it

    cluster = RayCluster(directory)
    try:
        cluster.start()
        assert cluster._line is not None
        host = psutil.Process(cluster._line.pid)
        threads, zombies = [], []
        for number in range(3):
            cluster.add_vm(f"vm{number}")
            threads.append(host.num_threads())
            zombies.append(sum(child.status() == psutil.STATUS_ZOMBIE for child in host.children()))
            (raylet, *_) = cluster.vm_pids(f"vm{number}")
            cluster.prepare_kill([f"vm{number}"])()
            until_s = time.monotonic() + GONE_S
            while psutil.Process(raylet).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < until_s, "it was not killed"
                time.sleep(0.01)
        assert zombies == [0, 0, 0]
        assert threads[2] - threads[0] < 2, threads  # one for each lost node would be 2; Ray starts one now and then
    finally:
        cluster.close()
