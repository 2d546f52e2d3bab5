"""Makes a fleet of local VMs come and go as in a trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from itertools import groupby
from types import MappingProxyType

from manager.controller.state.events import Tick
from manager.engine.local_vms.vm_fleet import VmFleet, VmHost
from manager.engine.loop.event_queue import EventQueue
from manager.journal.records import TRACE_PLAYED, Fact, TraceMoment
from morph.contract.lives import recorded
from morph.contract.trace import Trace, TraceEvent

CLOSE_TIMEOUT_S = 5.0
STEP_S = 0.1


class TraceReplayer:
    """Plays a trace on a host of VMs, from its own thread.

    The trace's clock stays at time 0 until ``start_clock``, so that the VMs of time 0 are booted first; ``stop_clock``
    stops it again. Revocations of the same moment happen together, and each is announced with the lead time in the
    trace. VMs come with their zone, instance type and price; a later price applies to VMs that come after it. The
    position in the trace is recorded as a fact, so that another manager can continue from it (``begun``) and give the
    pending notices again, under the same names.
    """

    def __init__(
        self,
        host: VmHost,
        trace: Trace,
        event_queue: EventQueue,
        begun: TraceMoment | None = None,
        node_types: Collection[str] = (),
    ) -> None:
        self.fleet = VmFleet(host, event_queue, node_types)
        begun = begun or TraceMoment()
        self._trace = trace
        self._played = trace.events[: begun.num_played]
        self._clock_runs = threading.Event()
        self._clock_s = begun.clock_s
        self._num_played = begun.num_played
        self._over = threading.Event()
        self._finished = threading.Event()
        self._event_queue = event_queue
        self._thread = threading.Thread(target=self._run, name="morph-vm-trace", daemon=True)

    def start(self) -> None:
        """Start booting the VMs of time 0."""
        self._thread.start()

    def resume(
        self, up: Collection[str], appeared: Collection[str], requested: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Take over the VMs that an earlier manager played; call it before ``start``. See ``VmFleet.adopt``."""
        self.fleet.adopt([(event, self._usd_per_h(event)) for event in self._played], up, appeared, requested)

    def start_clock(self) -> None:
        """Start the trace's clock. Calling it again changes nothing."""
        if not self._clock_runs.is_set():
            self._clock_runs.set()
            self._note()

    def stop_clock(self) -> None:
        """Stop the trace's clock, to within ``STEP_S``, until the next ``start_clock``."""
        if self._clock_runs.is_set():
            self._clock_runs.clear()
            self._note()

    @property
    def finished(self) -> bool:
        """Whether the whole trace was played, or playing was stopped. A ``Tick`` follows, which wakes the driver."""
        return self._finished.is_set()

    def close(self) -> None:
        """Stop playing and booting."""
        self._over.set()
        self._clock_runs.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        self.fleet.close()

    def _run(self) -> None:
        try:
            self._play()
        finally:
            self._finished.set()
            if not self._over.is_set():
                self._event_queue.put(Tick())

    def _play(self) -> None:
        left = recorded(self._trace, self._num_played, self._clock_s)
        for time_s, changes in groupby(left, key=lambda change: change.time_s):
            self._wait_until(time_s)
            if self._over.is_set():
                return
            entries = list(changes)
            together = [change.event for change in entries if change.kind != "warned"]
            if together:
                self._num_played += len(together)
                self._note()  # first, so that another manager can do what this one no longer can
                self._play_together(together)
            for change in entries:
                if change.kind == "warned" and change.taken_s > time_s:
                    self.fleet.give_notice(change.event.node_id, change.taken_s - time_s)

    def _note(self) -> None:
        moment = TraceMoment(num_played=self._num_played, clock_s=self._clock_s, runs=self._clock_runs.is_set())
        self._event_queue.put(Fact(name=TRACE_PLAYED, detail=moment.model_dump_json()))

    def _wait_until(self, time_s: float) -> None:
        while self._clock_s < time_s and not self._over.is_set():
            self._clock_runs.wait()
            begin_s = time.monotonic()
            self._over.wait(min(STEP_S, time_s - self._clock_s))
            self._clock_s += time.monotonic() - begin_s

    def _play_together(self, events: list[TraceEvent]) -> None:
        revoked: list[str] = []
        rest: list[TraceEvent] = []
        for event in events:
            if event.event == "remove" and all(event.node_id != other.node_id for other in rest):
                revoked.append(event.node_id)
            else:
                rest.append(event)  # including the revocation of a VM that comes at this very moment
        if revoked:
            self.fleet.revoke(*revoked)
        for event in rest:
            if event.event == "add":
                self.fleet.request(event.node_id, event.zone, event.instance_type, self._usd_per_h(event))
            else:
                self.fleet.revoke(event.node_id)

    def _usd_per_h(self, event: TraceEvent) -> float | None:
        return self._trace.price_at(event.time_s, event.zone, event.instance_type)
