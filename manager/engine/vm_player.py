"""Makes local VMs come and go: all at the start, then as a trace says."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from manager.controller.events import NodeAppeared
from manager.engine.inbox import Inbox
from manager.journal.records import VM_KILLED, Fact
from morph.contract.errors import ClusterError
from morph.contract.trace import Trace, TraceEvent

STEP_S = 0.2


class VmHost(Protocol):
    """Where VMs run."""

    def add_vm(self, name: str) -> None:
        """Bring up a VM; blocks."""

    def kill_vm(self, name: str) -> bool:
        """Take a VM away without warning."""


class VmPlayer:
    """Plays a trace on a host of VMs, from a thread of its own; VMs boot one after the other in another.

    A VM that the trace brings back under an old name gets a new id (``name.2``): it is another machine.
    The trace's clock stands at its first moment until ``start_clock``: what comes at time 0 is booted first.
    """

    def __init__(self, host: VmHost, trace: Trace, inbox: Inbox) -> None:
        self._host = host
        self._events = trace.events
        self._inbox = inbox
        self._boots: queue.Queue[str | None] = queue.Queue()
        self._wanted: dict[str, str] = {}
        self._seen: dict[str, int] = {}
        self._up: set[str] = set()
        self._lock = threading.Lock()
        self._clock_started = threading.Event()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"morph-{name}", daemon=True)
            for name, target in (("vm-boot", self._boot_loop), ("vm-trace", self._trace_loop))
        ]

    def start(self) -> None:
        """Begin to boot the VMs of time 0."""
        for thread in self._threads:
            thread.start()

    def start_clock(self) -> None:
        """Let the trace's time run. Calling it again changes nothing."""
        self._clock_started.set()

    @property
    def finished(self) -> bool:
        """Whether the whole trace was played."""
        return not self._threads[1].is_alive()

    def close(self) -> None:
        """Stop playing. The boot thread must outlive the VMs (see ``RayCluster``): it ends with the process."""
        self._over.set()
        self._clock_started.set()
        self._threads[1].join(timeout=5.0)

    def _trace_loop(self) -> None:
        start_s = 0.0
        for event in self._events:
            if event.time_s > 0 and start_s == 0.0:
                self._clock_started.wait()
                start_s = time.monotonic()
            while not self._over.is_set() and start_s and time.monotonic() < start_s + event.time_s:
                self._over.wait(min(STEP_S, max(0.0, start_s + event.time_s - time.monotonic())))
            if self._over.is_set():
                return
            self._play(event)

    def _play(self, event: TraceEvent) -> None:
        if event.event == "add":
            count = self._seen[event.node_id] = self._seen.get(event.node_id, 0) + 1
            vm = event.node_id if count == 1 else f"{event.node_id}.{count}"
            with self._lock:
                self._wanted[event.node_id] = vm
            self._inbox.put(Fact(name="vm_requested", worker=vm, detail=event.zone))
            self._boots.put(vm)
            return
        with self._lock:
            vm = self._wanted.pop(event.node_id)
            was_up = vm in self._up
            self._up.discard(vm)
        if was_up:
            self._inbox.put(Fact(name=VM_KILLED, worker=vm))
            self._host.kill_vm(vm)

    def _boot_loop(self) -> None:
        boot: Callable[[str], None] = self._host.add_vm
        while (vm := self._boots.get()) is not None:
            with self._lock:
                wanted = vm in self._wanted.values()
            if not wanted or self._over.is_set():
                continue  # revoked before it was up
            try:
                boot(vm)
            except ClusterError as error:
                if not self._over.is_set():
                    self._inbox.put(Fact(name="vm_failed", worker=vm, detail=str(error)))
                continue
            with self._lock:
                wanted = vm in self._wanted.values()
                if wanted:
                    self._up.add(vm)
            if wanted:
                self._inbox.put(NodeAppeared(node=vm))
            else:
                self._host.kill_vm(vm)  # revoked while it booted
