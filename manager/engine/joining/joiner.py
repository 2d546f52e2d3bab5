"""Watches which workers' VMs have joined the cluster and which have left it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

from manager.controller.state.events import NodeAppeared, NodeFacts, Paid, WorkerLost
from manager.engine.loop.event_queue import EventQueue
from manager.journal.records import VM_UP, Fact
from morph.contract.errors import ClusterError

LOOK_EVERY_S = 1.0
CLOSE_TIMEOUT_S = 15.0


class Joiner:
    """Looks once a second, in its own thread; reports each worker's VM once when it is there and once when it is gone.

    ``nodes``: returns the workers whose VMs are in the cluster now (several for a VM with several devices), with their
    addresses; raises ClusterError if they are not known. ``request_of``: returns the request that a worker's VM
    answers; None: the VM is not ours, and is ignored. ``appeared``: workers whose VMs an earlier manager reported to
    the controller. ``known_of``: returns the price and type of workers whose grant was not reported yet; may block for
    a provider's list of VMs.
    """

    def __init__(
        self,
        nodes: Callable[[], Mapping[str, str]],
        request_of: Callable[[str], str | None],
        event_queue: EventQueue,
        appeared: Collection[str] = (),
        known_of: Callable[[Collection[str]], tuple[Mapping[str, Paid], Mapping[str, NodeFacts]]] = lambda _: ({}, {}),
    ) -> None:
        self._nodes, self._request_of, self._event_queue = nodes, request_of, event_queue
        self._known_of = known_of
        self._appeared = set(appeared)
        self._here: frozenset[str] = frozenset()
        self._trouble = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="morph-joiner", daemon=True)

    def start(self) -> None:
        """Start looking."""
        self._thread.start()

    def close(self) -> None:
        """Stop looking; blocks until the last look is over, for at most ``CLOSE_TIMEOUT_S``."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def look(self) -> None:
        """Look once."""
        try:
            nodes = self._nodes()
        except ClusterError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._event_queue.put(Fact(name="cluster_silent", detail=self._trouble))
            return
        self._trouble = ""
        requests = {worker: self._request_of(worker) for worker in sorted(set(nodes) - self._appeared)}
        new = {worker: request for worker, request in requests.items() if request is not None}
        paid, facts = self._known_of(new) if new else ({}, {})
        for worker, request in new.items():
            self._appeared.add(worker)
            event = NodeAppeared(node=worker, request=request, paid=paid.get(worker), facts=facts.get(worker))
            self._event_queue.put(event)
            self._event_queue.put(Fact(name=VM_UP, worker=worker, detail=nodes[worker]))
        for worker in sorted((self._here - set(nodes)) & self._appeared):
            self._event_queue.put(WorkerLost(worker=worker, cause="its VM left the cluster"))
        self._here = frozenset(nodes)

    def _run(self) -> None:
        while not self._over.is_set():
            self.look()
            self._over.wait(LOOK_EVERY_S)
