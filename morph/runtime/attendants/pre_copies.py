"""A worker's part in pre-copies: it streams units to other workers, and receives theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable

from morph.contract.decided import Decided
from morph.contract.errors import PeerLost
from morph.contract.messages import CommitOrder, PreCopyOrder, PreCopyReport, ReshapeOrder, StepOrder
from morph.runtime.attendants.incoming import Incoming
from morph.runtime.attendants.outgoing import Outgoing
from morph.runtime.attendants.wire import StreamContext
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.unit_state import UnitState
from morph.runtime.step.generation import Generation
from morph.runtime.step.training_step import Attendant, Units
from morph.runtime.workloads.workload import Workload


class PreCopyLane(Attendant):
    """Carries out ``PreCopyOrder``; its failures do not disturb orders. ``news``: called when ``report`` has some."""

    def __init__(self, context: StreamContext, workload: Workload, news: Callable[[], None]) -> None:
        self._context, self._workload, self._news = context, workload, news
        self._lock = threading.Lock()
        self._number = 0
        self._outgoing: tuple[Outgoing, ...] = ()
        self._incoming: Incoming | None = None
        self._reported: PreCopyReport | None = None

    # ---- control lane ----

    def take(self, order: PreCopyOrder) -> None:
        """Begin an order, and drop older ones; returns at once."""
        with self._lock:
            if order.number <= self._number:
                if order.number == self._number:
                    self._reported = None
                    self._news()
                return
            self._drop()
            self._number, self._reported = order.number, None
            me, context = self._context.worker, self._context.for_order(str(order.number), order.limit_s)
            by_receiver: dict[str, list[str]] = {}
            for move in order.moves:
                if move.sender == me:
                    by_receiver.setdefault(move.receiver, []).append(move.unit)
            self._outgoing = tuple(Outgoing(context, receiver, units) for receiver, units in by_receiver.items())
            senders = {move.unit: move.sender for move in order.moves if move.receiver == me}
            if senders:
                self._incoming = Incoming(
                    context,
                    senders,
                    make_unit_copy=lambda unit: self._workload.make_unit_copy(unit, order.num_micro_batches),
                    arrive=self._workload.arrive,
                    news=self._news,
                )

    def report(self) -> PreCopyReport | None:
        """Return the changes since the last call; None: no change."""
        with self._lock:
            incoming = self._incoming
            if incoming is None:
                return None
            report = PreCopyReport(
                number=self._number,
                following=incoming.synced,
                received_bytes=incoming.received_bytes,
                error=incoming.error,
            )
            if not report.following and report.error is None:
                return None
            known = self._reported
            if known is not None and (known.following, known.error) == (report.following, report.error):
                return None
            self._reported = report
            return report

    # ---- order lane ----

    def before_reshape(self, order: ReshapeOrder) -> None:
        """Drop units that the new shape does not use."""
        with self._lock:
            me = self._context.worker
            used = [source for source in order.sources if source.kind == "ahead"] if order.ahead == self._number else []
            receivers = {source.worker for source in used if source.peer == me}
            unused = [stream for stream in self._outgoing if stream.receiver not in receivers]
            self._outgoing = tuple(stream for stream in self._outgoing if stream.receiver in receivers)
            for stream in unused:
                stream.end()
            if self._incoming is not None and me not in {source.worker for source in used}:
                self._incoming.end()
                self._incoming = None

    def at_version(self, current: Generation, order: StepOrder | CommitOrder, held: Units) -> None:  # noqa: ARG002
        """Start to send further units before a step, while all units are at its version."""
        for stream in self._outgoing if isinstance(order, StepOrder) else ():
            stream.begin(held)

    def before_apply(self, units: Units, decided: Decided | None) -> None:
        """Send a decided step."""
        for stream in self._outgoing:
            stream.pass_on(units, decided)

    def adopt(self, unit: str, version: int, interrupt: Interrupt) -> UnitState:
        """Wait for a unit that was pre-copied. Raises as ``Incoming.take``."""
        incoming = self._incoming
        if incoming is None:
            raise PeerLost(f"unit {unit} was pre-copied, and dropped")
        return self._workload.adopt(incoming.take(unit, version, interrupt, interrupt.limit_s))

    def after_reshape(self, order: ReshapeOrder, held: Units, interrupt: Interrupt) -> None:  # noqa: ARG002
        """Wait until everything pre-copied to others has arrived. Raises as ``Outgoing.flush``."""
        for stream in self._outgoing:
            stream.flush(interrupt, interrupt.limit_s)

    def end_reshape(self) -> None:
        """Drop everything."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        for stream in self._outgoing:
            stream.end()
        if self._incoming is not None:
            self._incoming.end()
        self._outgoing, self._incoming = (), None
