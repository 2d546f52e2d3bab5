"""The process that owns local Ray nodes: boots them together, tells of their deaths, and keeps nothing of the dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from manager.engine.joining.link_server import listen
from manager.engine.on_ray.ray_environment import prepare, stay_on_loopback
from manager.machine.ports import VM_RESOURCE
from morph.contract.errors import ClusterError

if TYPE_CHECKING:
    from manager.engine.on_ray.ray_cluster import RayCluster

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

GONE_S = 120.0


def test_a_head_node_is_started_once_more_and_killed_nodes_leave_no_zombie_and_no_thread_behind() -> None:
    directory = prepare()
    stay_on_loopback()
    from manager.engine.on_ray.ray_cluster import RayCluster  # Ray is imported with it, in the environment made for it

    cluster = RayCluster(directory)
    try:
        with listen("127.0.0.1") as workers:  # the host keeps it
            starting = threading.Thread(target=cluster.start, args=(workers,))
            starting.start()
            first: list[psutil.Process] = []

            def found() -> bool:
                first.extend(_raylets(cluster))
                return bool(first)

            _wait_until(found, "no head node was started")
            first[0].kill()
            starting.join(2 * GONE_S)
        assert cluster._line is not None
        assert cluster.address
        assert [raylet.pid for raylet in _raylets(cluster)] == [cluster._head["raylet"]] != [first[0].pid]
        host = psutil.Process(cluster._line.pid)
        threads, zombies = [], []
        for number in range(3):
            cluster.add_vm(f"vm{number}")
            threads.append(host.num_threads())
            zombies.append(sum(child.status() == psutil.STATUS_ZOMBIE for child in host.children()))
            (raylet, *_) = cluster.vm_pids(f"vm{number}")
            cluster.prepare_kill([f"vm{number}"])()
            _wait_until(lambda raylet=raylet: not psutil.pid_exists(raylet), "it was not killed")
        assert zombies == [0, 0, 0]
        assert threads[2] - threads[0] < 2, threads  # one for each lost node would be 2; Ray starts one now and then
    finally:
        cluster.close()


def test_vms_boot_together_and_the_death_of_one_is_told_at_once_while_it_boots_and_when_it_is_up() -> None:
    directory = prepare()
    stay_on_loopback()
    from manager.engine.on_ray.ray_cluster import RayCluster

    gone: list[str] = []
    cluster = RayCluster(directory, gone=gone.append)
    outcomes: dict[str, str] = {}

    def boot(name: str) -> None:
        try:
            cluster.add_vm(name)
            outcomes[name] = "up"
        except ClusterError as error:
            outcomes[name] = str(error)

    try:
        with listen("127.0.0.1") as workers:  # the host keeps it
            cluster.start(workers)
        names = ("vm0", "vm1", "vm2")
        boots = [threading.Thread(target=boot, args=(name,)) for name in names]
        for thread in boots:
            thread.start()
        raylets: dict[str, psutil.Process] = {}

        def found() -> bool:
            for name, raylet in _booting(cluster, names):
                if name != "vm0" and name not in raylets:
                    raylet.suspend()  # neither is up before the other is found
                raylets[name] = raylet
            return {"vm1", "vm2"} <= raylets.keys()

        _wait_until(found, "no raylets were started")
        raylets["vm1"].kill()
        boots[1].join(GONE_S)
        assert outcomes.get("vm1") == "VM vm1 did not come up: its raylet ended while it booted"
        assert "vm2" not in outcomes, "it booted only behind the others"
        raylets["vm2"].resume()
        for thread in boots:
            thread.join(2 * GONE_S)
        assert (outcomes["vm0"], outcomes["vm2"]) == ("up", "up")
        assert set(cluster.joined()) == {"vm0", "vm2"}
        psutil.Process(cluster.vm_pids("vm0")[0]).kill()
        _wait_until(lambda: gone == ["vm0"], "nobody told of its end")
    finally:
        cluster.close()


def _raylets(cluster: RayCluster) -> Iterator[psutil.Process]:
    if cluster._line is not None:
        for child in psutil.Process(cluster._line.pid).children():
            with suppress(psutil.NoSuchProcess):
                if child.name() == "raylet":
                    yield child


def _booting(cluster: RayCluster, names: Iterable[str]) -> Iterator[tuple[str, psutil.Process]]:
    for raylet in _raylets(cluster):
        with suppress(psutil.NoSuchProcess):
            line = " ".join(raylet.cmdline())
            yield from ((name, raylet) for name in names if f"{VM_RESOURCE}{name}," in f"{line},")


def _wait_until(reached: Callable[[], bool], otherwise: str) -> None:
    until_s = time.monotonic() + GONE_S
    while not reached():
        assert time.monotonic() < until_s, otherwise
        time.sleep(0.01)
