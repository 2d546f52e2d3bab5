"""The receiving end of pre-copies: all streams to one worker, and the units that follow their senders."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from morph.contract.errors import PeerLost
from morph.link.listener import HELLO_TIMEOUT_S, Caller, Listener
from morph.runtime.attendants.wire import (
    GREETING_BYTES,
    Frame,
    StreamContext,
    acknowledge,
    apply_update,
    hold_update,
    level_of,
    receive_frame,
)
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.unit_state import UnitState

log = logging.getLogger(__name__)


class Incoming:
    """Receives units during training, in a thread that listens and one thread for each sender.

    ``make_unit_copy`` makes a unit that will be kept up to date. On emulated links, ``arrive`` blocks until this many
    bytes have arrived. ``known``: units that are already here at their senders' present version. ``take_sums`` is
    called with the sender's name and a frame of partial sums, or a frame that says that no more will come.
    """

    def __init__(
        self,
        context: StreamContext,
        senders: Mapping[str, str],
        *,
        make_unit_copy: Callable[[str], UnitState],
        arrive: Callable[[int], None],
        news: Callable[[], None],
        known: Mapping[str, UnitState] | None = None,
        expected: Iterable[str] = (),
        take_sums: Callable[[str, Frame], None] = lambda _sender, _frame: None,
    ) -> None:
        self._rendezvous = context.rendezvous(context.worker)
        self._senders = dict(senders)
        self._make_unit_copy, self._arrive, self._open_store = make_unit_copy, arrive, context.open_store
        self._faults, self._news, self._limit_s = context.faults, news, context.limit_s
        self._lock = threading.Lock()
        self._take_sums = take_sums
        self._unit_copies: dict[str, UnitState] = dict(known or {})
        self._versions: dict[str, int] = {unit: state.version for unit, state in self._unit_copies.items()}
        self._in_step: set[str] = set(self._unit_copies)
        self._synced: set[str] = set()
        self._broken: dict[str, str] = {}
        self._interrupt: Interrupt | None = None
        self._ended = False
        self.received_bytes = 0
        self._expected = {*senders.values(), *expected}
        self._met = threading.Condition(self._lock)
        self._told = ""
        self._listener = Listener.at(context.listen_host, 0, self._serve, "morph-ahead")
        self._told = self._rendezvous.told(*self._listener.address)
        try:
            threading.Thread(target=self._meet, name="morph-ahead-meet", daemon=True).start()
        except RuntimeError:  # there are too many
            self._listener.close(join_timeout_s=0.0)
            raise

    # ---- order lane ----

    def take(self, unit: str, version: int, interrupt: Interrupt, timeout_s: float) -> UnitState:
        """Block until a unit is at this version, and hand it out. Raises PeerLost, or as ``Interrupt.wait_for``."""
        self._interrupt = interrupt

        def there() -> bool:
            if self._versions.get(unit, -1) >= version:
                return True
            if self._senders[unit] in self._broken:
                raise PeerLost(self._broken[self._senders[unit]])
            return False

        interrupt.wait_for(there, f"unit {unit}, which was pre-copied", timeout_s)
        return self._unit_copies[unit]

    def in_step(self, version: int) -> dict[str, UnitState]:
        """Return the units in step with their senders: at this version, or with the gradients that lead to it."""
        with self._lock:
            units = {}
            for unit in self._in_step:
                state = self._unit_copies[unit]
                if state.version == version or (state.version == version - 1 and state.reduced is not None):
                    units[unit] = state
            self._in_step = set(units)
            return units

    @property
    def synced(self) -> tuple[str, ...]:
        """The units that are kept in step with their senders."""
        with self._lock:
            return tuple(unit for unit, sender in self._senders.items() if sender in self._synced - self._broken.keys())

    @property
    def broken(self) -> frozenset[str]:
        """The senders whose streams are broken."""
        with self._lock:
            return frozenset(self._broken)

    @property
    def error(self) -> str | None:
        """The reason why some units are not in step, and will not be."""
        with self._lock:
            return "; ".join(self._broken.values()) or None

    def end(self) -> None:
        """Drop everything; called from any thread."""
        with self._met:
            self._ended = True
            self._met.notify_all()
        self._listener.close(join_timeout_s=0.0)
        if self._interrupt is not None:
            self._interrupt.notify()

    # ---- its own threads ----

    def _meet(self) -> None:
        """Publish the address, and wait until all senders are connected; other callers do not prolong the wait."""
        try:
            with self._open_store() as store:
                store.set(self._rendezvous.key, self._told)
            with self._met:
                if not self._met.wait_for(lambda: self._ended or not self._expected, self._limit_s):
                    raise TimeoutError(f"{self._limit_s:.4g} s are over")
        except Exception as error:  # any error is passed to the threads that wait for a unit
            with self._lock:
                missing, self._expected = sorted(self._expected), set()
            for sender in missing:
                sentence = f"{sender} did not come to pre-copy units: {type(error).__name__}: {error}"
                self._give_up(sender, sentence, level_of(error))
        finally:
            self._listener.stop()

    def _serve(self, caller: Caller) -> None:
        connection = caller.connection
        connection.settimeout(HELLO_TIMEOUT_S)
        received = receive_frame(connection, GREETING_BYTES)
        sender = None if received is None else self._rendezvous.greeted(self._told, received[0].facts)
        if sender is None:
            return
        caller.known()
        with self._met:
            if sender not in self._expected:
                return
            self._expected.discard(sender)
            self._met.notify_all()
        connection.settimeout(2 * self._limit_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        acknowledge(connection)
        self._receive(connection, sender)

    def _receive(self, connection: socket.socket, sender: str) -> None:
        try:
            while (received := receive_frame(connection)) is not None:
                frame, size = received
                self._arrive(size)
                if frame.facts["kind"] != "undecided":
                    acknowledge(connection)  # the next frame travels while this one is applied
                self._take_in(frame, size, sender)
                if frame.facts["kind"] == "undecided":
                    acknowledge(connection)
                if self._interrupt is not None:
                    self._interrupt.notify()
            self._give_up(sender, f"{sender} hung up")
        except Exception as error:  # after any error, the units are sent again in the change
            sentence = f"the pre-copy from {sender} broke off: {type(error).__name__}: {error}"
            self._give_up(sender, sentence, level_of(error))

    def _take_in(self, frame: Frame, size: int, sender: str) -> None:
        facts = frame.facts
        with self._lock:
            self.received_bytes += size
        if facts["kind"] == "state":
            self._faults.reach("receive_ahead", facts["version"])
            unit_copy = self._make_unit_copy(facts["unit"])
            unit_copy.load(frame.tensors)
            with self._lock:
                self._unit_copies[facts["unit"]] = unit_copy
                self._versions[facts["unit"]] = unit_copy.version
        elif facts["kind"] in ("update", "undecided"):
            with self._lock:  # the worker owns units in step too, and alone once this object has ended
                if self._ended:
                    raise ConnectionError("it is over here")
                for unit, update in facts["units"].items():
                    gradients = _of(unit, frame.tensors)
                    if facts["kind"] == "update":
                        apply_update(self._unit_copies[unit], update, gradients)
                        self._versions[unit] = self._unit_copies[unit].version
                    else:
                        hold_update(self._unit_copies[unit], update, gradients)
                        self._in_step.add(unit)
        elif facts["kind"] in ("sums", "through"):
            self._take_sums(sender, frame)
        else:
            with self._lock:
                self._synced.add(sender)
            self._news()

    def _give_up(self, sender: str, error: str, level: int = logging.INFO) -> None:
        with self._lock:
            self._broken.setdefault(sender, error)
            ended = self._ended
        if self._interrupt is not None:
            self._interrupt.notify()
        if not ended:
            log.log(level, "pre-copied units are dropped: %s", error)
            self._news()


def _of(unit: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{unit}/"
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
