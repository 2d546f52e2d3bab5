"""The sending end of one stream: some units of this worker to one receiver, in a thread of its own.

It sends decided steps before a planned change (decision 0006); to a follower (0019) also undecided gradients.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from morph.contract.decided import Decided
from morph.contract.errors import PeerLost, WaitTimeout
from morph.runtime.attendants.wire import (
    CONNECT_TIMEOUT_S,
    Frame,
    StreamContext,
    close,
    copy_of_update,
    facts_of_update,
    gradients_of_update,
    level_of,
    send_frame,
)
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.unit_state import StateCopy, UnitState

log = logging.getLogger(__name__)

MOST_UPDATES_BEHIND = 8
"""The largest number of updates that may wait, whatever their size."""


@dataclass(frozen=True)
class _State:
    """A unit's state that is copied in its turn, or earlier if it is about to change."""

    facts: dict[str, Any]
    copy: StateCopy

    @property
    def num_bytes(self) -> int:
        return self.copy.num_bytes

    def frame(self) -> Frame:
        """Copy the state while the device computes."""
        tensors = self.copy.take()
        if tensors is None:
            raise ConnectionError(f"unit {self.facts['unit']} went back to a checkpoint")
        return Frame(self.facts, tensors)


class Outgoing:
    """Sends ``units`` one after the other, each followed by the updates of every later step; ``known`` are there
    already.

    Waiting memory is bounded: a stream that falls behind by more than its initial states is given up.
    """

    def __init__(
        self, context: StreamContext, receiver: str, units: Sequence[str], *, known: Sequence[str] = ()
    ) -> None:
        self.receiver = receiver
        self._name = f"what {context.worker} sends beside training to {receiver}"
        self._worker = context.worker
        self._rendezvous = context.rendezvous(receiver)
        self._open_store, self._limit_s = context.open_store, context.limit_s
        self._faults = context.faults
        self._to_begin = deque(units)
        self._synced: set[str] = set(known)
        self._in_step = False
        self._condition = threading.Condition()
        self._queue: deque[Frame | _State] = deque()
        self._sending = False
        self._told = False
        self._begun_bytes = self._unsent_bytes = self._unsent_updates = 0
        self._sent_bytes = self._sent_before = 0
        self._connection: socket.socket | None = None
        self._interrupt: Interrupt | None = None
        self.error: str | None = None
        threading.Thread(target=self._run, name="morph-ahead-send", daemon=True).start()

    # ---- order lane ----

    def begin(self, units: Mapping[str, UnitState]) -> None:
        """At the beginning of a step: copy as many further units as are likely to leave during it."""
        with self._condition:
            allowed = 2 * (self._sent_bytes - self._sent_before)
            self._sent_before = self._sent_bytes
            idle = not self._queue and not self._sending
        while self._to_begin and self.error is None and (idle or self._unsent_bytes < allowed):
            name = self._to_begin.popleft()
            if name not in units:
                self.end(f"{self._worker} does not hold unit {name}")
                return
            copy = units[name].copy_later()
            self._begun_bytes += copy.num_bytes
            self._synced.add(name)
            self._put(_State({"kind": "state", "unit": name, "version": units[name].version}, copy))
            idle = False

    def pass_on(self, states: Mapping[str, UnitState], decided: Decided | None) -> None:
        """Before a decided step is applied: copy it for the units that are kept in step."""
        names = [name for name in states if name in self._synced]
        if not names or self.error is not None or self._in_step:
            return
        facts: dict[str, dict[str, Any]] = {}
        tensors: dict[str, Tensor] = {}
        for name in names:
            facts[name], gradients = copy_of_update(states[name], decided)
            tensors |= {f"{name}/{parameter}": value for parameter, value in gradients.items()}
        with self._condition:
            behind_bytes, self._unsent_updates = self._unsent_bytes, self._unsent_updates + 1
            too_slow = self._unsent_updates > MOST_UPDATES_BEHIND and behind_bytes > self._begun_bytes
        if too_slow:
            self.end(f"{self._name} cannot keep up: {behind_bytes} bytes behind")
            return
        self._put(Frame({"kind": "update", "units": facts}, tensors))

    def share(self, states: Mapping[str, UnitState]) -> bool:
        """Send gradients if the receiver has caught up; return whether. They must not change until ``settled``."""
        with self._condition:
            idle = not self._queue and not self._sending and self._connection is not None
        if self.error is not None or not self._synced or self._to_begin or not (self._in_step or idle):
            return False
        self._in_step = True
        facts: dict[str, dict[str, Any]] = {}
        tensors: dict[str, Tensor] = {}
        for name in self._synced:
            facts[name] = facts_of_update(states[name])
            tensors |= {f"{name}/{key}": value for key, value in gradients_of_update(states[name]).items()}
        self._put(Frame({"kind": "undecided", "units": facts}, tensors))
        return True

    def settled(self, interrupt: Interrupt, timeout_s: float) -> bool:
        """Block until everything has arrived; returns whether it has. Raises GenerationAborted, PeerLost."""
        try:
            self.flush(interrupt, timeout_s)
        except WaitTimeout as error:
            self.end(str(error))
        except PeerLost:
            if self.error is None:
                raise
        return self.error is None

    def offer(self, make: Callable[[], Frame]) -> None:
        """Send partial sums if nothing else waits to be sent; otherwise drop them, because newer ones will follow."""
        with self._condition:
            busy = bool(self._queue) or self._sending or self._connection is None or self.error is not None
        if not busy:
            self._put(make())

    def through(self, step: int) -> None:
        """Tell the receiver that no more sums of a step will come."""
        self._put(Frame({"kind": "through", "step": step}, {}))

    def flush(self, interrupt: Interrupt, timeout_s: float) -> None:
        """Block until everything has arrived. Raises as ``Interrupt.wait_for``, ``PeerLost`` for a broken stream."""
        self._interrupt = interrupt

        def done() -> bool:
            if self.error is not None:
                raise PeerLost(self.error)
            return not self._queue and not self._sending

        interrupt.wait_for(done, f"{self._name} to leave", timeout_s)

    def end(self, error: str = "ended") -> None:
        """End the stream and drop everything; called from any thread."""
        with self._condition:
            self.error = self.error or error
            for entry in self._queue:
                if isinstance(entry, _State):
                    entry.copy.leave()
            self._queue.clear()
            self._condition.notify_all()
            connection = self._connection
        if connection is not None:
            close(connection)
        if self._interrupt is not None:
            self._interrupt.notify()

    # ---- its own thread ----

    def _put(self, entry: Frame | _State) -> None:
        with self._condition:
            if self.error is None:
                self._queue.append(entry)
                self._unsent_bytes += entry.num_bytes
                self._condition.notify_all()
            elif isinstance(entry, _State):
                entry.copy.leave()

    def _run(self) -> None:
        try:
            connection = self._connect()
            while (entry := self._next()) is not None:
                self._send(connection, entry)
        except Exception as error:  # any error is passed to the threads that wait for the receiver
            if self.error is None:
                log.log(level_of(error), "%s broke off: %s: %s", self._name, type(error).__name__, error)
            self.end(f"{self._name} broke off: {type(error).__name__}: {error}")

    def _connect(self) -> socket.socket:
        with self._open_store() as store:
            invitation = store.get(self._rendezvous.key).decode()
        connection = socket.create_connection(self._rendezvous.address(invitation), CONNECT_TIMEOUT_S)
        connection.settimeout(self._limit_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._condition:
            self._connection = connection
            ended = self.error is not None
        if ended:
            close(connection)
        send_frame(connection, Frame(self._rendezvous.hello(invitation, self._worker), {}))
        return connection

    def _next(self) -> Frame | _State | None:
        """Return the next frame, or None at the end; tell once that the receiver has everything."""
        with self._condition:
            self._sending = False
            if self._interrupt is not None and not self._queue:
                self._interrupt.notify()
            if not self._queue and not self._to_begin and self._synced and not self._told:
                self._told = self._sending = True
                return Frame({"kind": "follows"}, {})
            self._condition.wait_for(lambda: bool(self._queue) or self.error is not None)
            if self.error is not None:
                return None
            self._sending = True
            return self._queue.popleft()

    def _send(self, connection: socket.socket, entry: Frame | _State) -> None:
        kind, size = entry.facts["kind"], entry.num_bytes
        if kind == "state":
            self._faults.reach("send_ahead", entry.facts["version"])
        elif kind == "undecided":
            self._faults.reach("share_gradients")
        elif kind == "sums":
            self._faults.reach("share_sums")
        send_frame(connection, entry.frame() if isinstance(entry, _State) else entry)
        with self._condition:
            self._unsent_bytes -= size
            self._sent_bytes += size
            self._unsent_updates -= kind == "update"
