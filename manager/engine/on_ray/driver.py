"""The process that is Ray's driver: it starts workers as actors and reports the nodes.

``python -m manager.engine.on_ray.driver FD DIRECTORY ADDRESS`` starts it. FD is its connection to the manager; each
line on it is a value of ``driver_messages``. DIRECTORY is the run's directory, which has Ray's token. ADDRESS is that
of the head node, whose id follows on standard input. The process ends with the connection.

VMs send pickles over Ray, and reading a pickle can run any code. This process reads them because it has nothing to
steal: it is confined and has no credentials. Of the run's secrets it has only Ray's token, which every VM has, and a
worker's secret while it starts that worker.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from manager.engine.on_ray.driver_messages import MAX_LINE_BYTES, Hello, Kill, Nodes, Start, Told, read_order, write
from manager.engine.on_ray.ray_environment import confine_to
from manager.host.ports import VM_RESOURCE
from morph.contract.vm_names import MAX_DEVICES, is_name, workers_of
from morph.runtime.process.actor import WorkerActor

NAMESPACE = "morph"
HEAD_TIMEOUT_S = 120.0
NODES_EVERY_S = 0.25
LOOK_EVERY_S = 0.05


class RayDriver:
    """Carries out the manager's orders. Actors are detached and named, so that the next driver can find them.

    An actor is called once, and returns when its worker's process ends. A later driver's call waits behind the running
    one.
    """

    def __init__(self, library: Any, connection: socket.socket) -> None:
        self._library, self._connection = library, connection  # the first is ray, imported after confinement
        self._lock = threading.Lock()
        self._actor_class = library.remote(WorkerActor)
        self._actors: dict[str, Any] = {}

    def connect(self, address: str) -> None:
        """Wait for the head node, connect to it, and report the nodes from now on."""
        host, port = address.rsplit(":", 1)
        until_s = time.monotonic() + HEAD_TIMEOUT_S
        while True:
            with suppress(OSError), socket.create_connection((host, int(port)), LOOK_EVERY_S):
                break
            if time.monotonic() > until_s:
                sys.exit(f"no head node came up at {address} within {HEAD_TIMEOUT_S:g} s")
            time.sleep(LOOK_EVERY_S)
        node_id = sys.stdin.readline().strip()
        if not node_id:
            sys.exit("the process that owns Ray's nodes is gone")
        # Ray looks for its node among this machine's processes, which are hidden here: this one is found instead
        self._found = subprocess.Popen(
            ["raylet", "-c", "read ended", f"--node_id={node_id}"], executable="/bin/sh", stdin=subprocess.PIPE
        )
        self._library.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE)
        threading.Thread(target=self._tell_nodes, name="nodes", daemon=True).start()

    def serve(self) -> None:
        """Carry out orders until the manager is gone."""
        with self._connection.makefile("rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                order = read_order(line)
                if isinstance(order, Kill):
                    with suppress(ValueError):  # the actor is gone already
                        actor = self._actors.pop(order.worker, None) or self._library.get_actor(order.worker)
                        self._library.kill(actor, no_restart=True)
                else:
                    self._start(order)

    def _start(self, order: Start) -> None:
        try:
            if order.exists:
                actor = self._library.get_actor(order.worker)
            else:
                actor = self._actor_class.options(
                    name=order.worker,
                    get_if_exists=True,
                    lifetime="detached",
                    num_cpus=1,
                    num_gpus=order.num_gpus,
                    resources={VM_RESOURCE + order.vm: 1},
                    max_restarts=0,
                    max_task_retries=0,
                ).remote()
            self._actors[order.worker] = actor
            call = actor.serve_home.remote(order.home.get_secret_value().encode())
        except Exception as error:  # Ray's errors have no common class; a ValueError means that there is no such actor
            self.tell(Told(kind="ended", worker=order.worker, cause=f"{type(error).__name__}: {error}"[:1000]))
            return
        self.tell(Told(kind="started", worker=order.worker))
        call.future().add_done_callback(lambda ended: self._tell_end(order.worker, ended))

    def _tell_end(self, worker: str, call: Future[Any]) -> None:
        """Report how a worker's call ended, without the text that the other end sent."""
        name = type(call.exception()).__name__
        kind: Literal["ended", "unreachable"] = "unreachable" if name == "ActorUnavailableError" else "ended"
        self.tell(Told(kind=kind, worker=worker, cause=f"{name}: the worker's process or VM is gone"))

    def _tell_nodes(self) -> None:
        last: Nodes | None = None
        while True:
            with suppress(Exception):  # Ray's errors have no common class; Ray is asked again
                nodes = Nodes(
                    workers={
                        worker: node["NodeManagerAddress"]
                        for node in self._library.nodes()
                        if node["Alive"]
                        for resource, num_devices in node["Resources"].items()
                        if resource.startswith(VM_RESOURCE)
                        and is_name(resource.removeprefix(VM_RESOURCE))  # a node chooses its own name
                        and 1 <= num_devices <= MAX_DEVICES
                        for worker in workers_of(resource.removeprefix(VM_RESOURCE), int(num_devices))
                    }
                )
                if nodes != last:
                    self.tell(nodes)
                    last = nodes
            time.sleep(NODES_EVERY_S)

    def tell(self, value: Hello | Told | Nodes) -> None:
        """Send the manager a line, from any thread."""
        with self._lock:
            try:
                self._connection.sendall(write(value))
            except OSError:  # the manager is gone
                os._exit(0)


def main() -> None:
    """Confine this process, and then serve the manager."""
    connection, directory, address = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3]
    connection.set_inheritable(False)
    lacks = confine_to(directory).lacks
    import ray

    driver = RayDriver(ray, connection)
    driver.tell(Hello(lacks=lacks))
    driver.connect(address)
    driver.serve()
    os._exit(0)  # Ray's exit hooks would wait for processes that are gone


if __name__ == "__main__":
    main()
