"""A worker's roles in following: it streams its state to its follower, and keeps copies of those that it follows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from morph.contract.decided import Decided
from morph.contract.errors import PeerLost
from morph.contract.messages import CommitOrder, MicroBatchLoss, ReshapeOrder, StepOrder
from morph.contract.salvage import PartialSum
from morph.runtime.attendants.incoming import Incoming
from morph.runtime.attendants.outgoing import Outgoing
from morph.runtime.attendants.wire import Frame, StreamContext
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.unit_state import UnitState
from morph.runtime.step.generation import Generation
from morph.runtime.step.sums import HeldSum
from morph.runtime.step.training_step import Attendant, Units
from morph.runtime.workloads.workload import Workload

log = logging.getLogger(__name__)


class FollowerLane(Attendant):
    """Both roles of one worker, anew in each generation; their failures fail no order of the manager.

    ``workload``: makes the units that are followed.
    """

    def __init__(self, context: StreamContext, workload: Workload) -> None:
        self._context, self._workload = context, workload
        self._outgoing: Outgoing | None = None
        self._incoming: Incoming | None = None
        self._lock = threading.Lock()
        self._copies: dict[str, tuple[int, list[HeldSum]]] = {}
        self._through: dict[str, int] = {}
        self._offered = -1
        self._waits: Interrupt | None = None
        self._formed: ReshapeOrder | None = None
        self._known: dict[str, UnitState] = {}

    def after_reshape(self, order: ReshapeOrder, held: Units, interrupt: Interrupt) -> None:  # noqa: ARG002
        """Start a generation with its followers, to which connections are made with the first step."""
        self._end()
        me = self._context.worker
        known = [unit for follow in order.follows if follow.follower == me for unit in follow.known]
        self._formed, self._known = order, {unit: held[unit] for unit in known}

    def _connect(self, order: ReshapeOrder) -> None:
        try:
            self._open(order)
        except (OSError, RuntimeError) as error:  # no port to listen on, or no thread
            log.warning("nothing is kept for others, or by them: %s", error)

    def _open(self, order: ReshapeOrder) -> None:
        me, context = self._context.worker, self._context.for_order(f"follow/{order.generation}", order.limit_s)
        for state in self._known.values():
            if order.follow_in_host:
                state.offload()
            else:
                state.reload()
        mine = next((follow for follow in order.follows if follow.worker == me), None)
        if mine is not None:
            fresh = [unit for unit in mine.units if unit not in mine.known]
            self._outgoing = Outgoing(context, mine.follower, fresh, known=mine.known)
        others = [follow for follow in order.follows if follow.follower == me]
        if not others:
            return
        self._incoming = Incoming(
            context,
            {unit: follow.worker for follow in others for unit in follow.units},
            make_unit_copy=lambda unit: self._make_unit_copy(unit, order),
            arrive=self._workload.arrive,
            news=self._wake,
            known=self._known,
            expected=[follow.worker for follow in others],
            take_sums=self._keep,
        )

    def _make_unit_copy(self, unit: str, order: ReshapeOrder) -> UnitState:
        unit_copy = self._workload.make_unit_copy(unit, order.plan.num_micro_batches)
        if order.follow_in_host:
            unit_copy.offload()
        return unit_copy

    def at_version(self, current: Generation, order: StepOrder | CommitOrder, held: Units) -> None:  # noqa: ARG002
        """Connect before a generation's first step; before every step, start to send further units."""
        if isinstance(order, CommitOrder):
            return
        if self._formed is not None:
            self._connect(self._formed)
            self._formed = None
        if self._outgoing is not None:
            self._outgoing.begin(current.units)

    def before_apply(self, units: Units, decided: Decided | None) -> None:
        """Send a decided step to a follower that has not caught up."""
        if self._outgoing is not None:
            self._outgoing.pass_on(units, decided)

    def after_reduction(self, current: Generation) -> dict[str, bool]:
        """Send an undecided step's gradients; return which units the follower now has. Raises PeerLost."""
        outgoing, interrupt = self._outgoing, current.interrupt
        if outgoing is None or not outgoing.share(current.units):
            return {}
        return {"followed": outgoing.settled(interrupt, interrupt.limit_s)}

    def in_step(self, version: int) -> dict[str, UnitState]:
        """Return the copies of others' units that are at this version, or have the gradients that lead to it."""
        if self._incoming is not None:
            return self._incoming.in_step(version)
        return {unit: state for unit, state in self._known.items() if state.version == version}

    def offer_sums(self, step: int, copies: Callable[[], Sequence[HeldSum]]) -> None:
        """Send a copy of this worker's partial sums to its follower, unless the previous copy is still on its way."""
        if self._outgoing is not None:
            self._offered = step
            self._outgoing.offer(lambda: frame_of(step, copies()))

    def before_answer(self, step: int, interrupt: Interrupt) -> None:
        """Wait until the workers whose sums of a step are copied here have prepared the step too.

        Raises GenerationAborted; also PeerLost: the next shape then needs the copies here.
        """
        outgoing, incoming = self._outgoing, self._incoming
        if outgoing is not None and self._offered == step:
            outgoing.through(step)
        if incoming is None:
            return

        def late() -> set[str]:
            with self._lock:
                senders = [sender for sender, (of, _) in self._copies.items() if of == step]
                return {sender for sender in senders if self._through.get(sender, -1) < step}

        def is_settled() -> bool:
            return bool(late() & incoming.broken) or not late()

        self._waits = interrupt
        interrupt.wait_for(
            is_settled, f"workers whose sums of step {step} are copied here to prepare it", interrupt.limit_s
        )
        if cut_off := sorted(late() & incoming.broken):
            raise PeerLost(f"{', '.join(cut_off)}, whose sums are copied here, did not prepare step {step}")

    def sums_of_others(self, step: int) -> list[HeldSum]:
        """Return the copies of others' partial sums of a step."""
        with self._lock:
            return [part for of_step, parts in self._copies.values() if of_step == step for part in parts]

    def hand_in(self, version: int) -> Units:
        """End all following, and return the copies at this version; they are not updated any more."""
        units = self.in_step(version)
        self._end()
        return units

    def _end(self) -> None:
        if self._outgoing is not None:
            self._outgoing.end()
        if self._incoming is not None:
            self._incoming.end()
        self._outgoing = self._incoming = self._formed = None
        self._known = {}
        with self._lock:
            self._copies, self._through = {}, {}

    def _keep(self, sender: str, frame: Frame) -> None:
        step, received = frame.facts["step"], sums_of(frame)
        with self._lock:
            if frame.facts["kind"] == "through":
                self._through[sender] = step
            else:
                self._copies[sender] = step, received
        self._wake()

    def _wake(self) -> None:
        if self._waits is not None:
            self._waits.notify()


def frame_of(step: int, parts: Sequence[HeldSum]) -> Frame:
    """Return the frame of partial sums."""
    sums = [{"total": part.total.model_dump(), "losses": [loss.model_dump() for loss in part.losses]} for part in parts]
    tensors = {f"{index}/{name}": value for index, part in enumerate(parts) for name, value in part.tensors.items()}
    return Frame({"kind": "sums", "step": step, "sums": sums}, tensors)


def sums_of(frame: Frame) -> list[HeldSum]:
    """Return the partial sums in a frame."""
    described = frame.facts.get("sums", ())
    tensors: list[dict[str, Tensor]] = [{} for _ in described]
    for key, value in frame.tensors.items():
        index, _, name = key.partition("/")
        tensors[int(index)][name] = value
    return [
        HeldSum(
            PartialSum.model_validate(part["total"]),
            tensors_of,
            tuple(MicroBatchLoss.model_validate(loss) for loss in part["losses"]),
        )
        for part, tensors_of in zip(described, tensors, strict=True)
    ]
