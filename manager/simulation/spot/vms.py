"""VMs and their workers in virtual time: what an order takes, and what is answered to it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from manager.controller.state.actions import Abort, SendCommit, SendPreCopy, SendReshape, SendStep
from manager.controller.state.events import AnsweredAlike, PreCopyReported, Single, UnitsWritten, WorkerAnswered
from manager.simulation.spot.job import SpotJob
from morph.contract.messages import (
    Aborted,
    Committed,
    PreCopyReport,
    Prepared,
    Reshaped,
    ReshapeOrder,
    StepOrder,
    UnitId,
    UnitWritten,
    WorkerId,
    WorkerReady,
)
from morph.contract.plan import Plan
from morph.contract.timeline import ComputeTimes

Told = Single | AnsweredAlike
At = Callable[[float, Callable[[], Sequence[Told]]], None]
"""Puts down what is to be called after so many seconds; what that returns is told the controller."""
NO_SUM = "0" * 64
ALIKE: Literal["answered_alike"] = "answered_alike"


@dataclass
class Formed:
    """The present shape: the plan, and what a step takes in it, drawn once."""

    plan: Plan
    step_s: float
    times: ComputeTimes


class Workers:
    """The workers of all VMs that are there. ``at`` puts down what comes of their orders."""

    def __init__(self, job: SpotJob, seed: int, at: At) -> None:
        self.job, self.at = job, at
        self.alive: set[WorkerId] = set()
        self.formed: Formed | None = None
        self._random = random.Random(seed)
        self._aborted = 0

    def start(self, worker: WorkerId) -> None:
        """A VM's worker is started: it is ready after its setup."""
        setup_s = self.job.durations.setup_s
        ready = WorkerReady(worker=worker, pid=1, setup_s=setup_s)
        self.at(setup_s, lambda: self._of_living([WorkerAnswered(worker=worker, answer=ready)]))

    def abort(self, aborts: Sequence[Abort]) -> None:
        """Orders are given up."""
        self._aborted = aborts[0].generation
        like = Aborted(worker="", generation=aborts[0].generation, peer_lost=True)
        workers = [action.worker for action in aborts]

        def aborted() -> Sequence[Told]:
            living = tuple(worker for worker in workers if worker in self.alive)
            return [AnsweredAlike.model_construct(kind=ALIKE, workers=living, answer=like)] if living else ()

        self.at(self.job.durations.aborted_s, aborted)

    def reshape(self, orders: Sequence[SendReshape]) -> None:
        """A shape is formed: who receives or sends most decides how long it takes."""
        order, times = orders[0].order, self.job.durations
        mini_batch_s, parts_s = order.plan.expected.mini_batch_s, order.plan.expected.parts_s
        luck = max(0.5, self._random.gauss(1.0, times.spread)) if times.spread else 1.0
        compute = ComputeTimes(
            forward_s=luck * parts_s.get("forward", 0.0 if parts_s else mini_batch_s),
            recompute_s=luck * parts_s.get("recompute", 0.0),
            backward_s=luck * parts_s.get("backward", 0.0),
            reduce_s=0.0,
            wait_s=0.0,
            step_s=luck * mini_batch_s,
        )
        self.formed = Formed(order.plan, luck * mini_batch_s + times.order_s, compute)
        state_s, received = self._moved(order)
        longest_s = max(state_s.values(), default=0.0)
        like = Reshaped(worker="", generation=order.generation, groups_s=times.groups_s, state_s=0.0, received_bytes=0)
        movers = [
            like.model_copy(update={"worker": worker, "state_s": state_s[worker], "received_bytes": received[worker]})
            for worker in (action.worker for action in orders if action.worker in state_s)
        ]
        others = tuple(action.worker for action in orders if action.worker not in state_s)
        self._when_all(times.groups_s + longest_s, others, like, movers)

    def _moved(self, order: ReshapeOrder) -> tuple[dict[WorkerId, float], Counter[WorkerId]]:
        """Return for how long each worker's links are busy (seconds), and what it receives (bytes)."""
        times, sizes = self.job.durations, self.job.unit_bytes
        received: Counter[WorkerId] = Counter()
        sent: Counter[WorkerId] = Counter()
        loaded: Counter[WorkerId] = Counter()
        for source in order.sources:
            if source.kind == "peer" and source.peer is not None:
                received[source.worker] += sizes[source.unit]
                sent[source.peer] += sizes[source.unit]
            elif source.kind == "checkpoint":
                loaded[source.worker] += sizes[source.unit]
        busy_s = {worker: loaded[worker] / times.storage_bytes_per_s for worker in loaded}
        for worker in {*received, *sent}:
            sends_s = max(received[worker], sent[worker]) / times.link_bytes_per_s
            busy_s[worker] = busy_s.get(worker, 0.0) + sends_s
        return busy_s, received + loaded

    def step(self, orders: Sequence[SendStep]) -> None:
        """A step is run, and a checkpoint written beside it."""
        assert self.formed is not None
        order = orders[0].order
        writers = {action.worker: action.order.checkpoint_units for action in orders if action.order.checkpoint_units}
        stall_s = self._save(writers, order.step) if writers else 0.0
        workers = tuple(action.worker for action in orders)
        self._when_all(self.formed.step_s + stall_s, workers, self.prepared(order))

    def prepared(self, order: StepOrder, num_steps: int = 1) -> Prepared:
        """The answer to a step, or to so many at once: nothing in it differs from worker to worker."""
        assert self.formed is not None
        times = self.formed.times
        if num_steps > 1:
            times = times.model_copy(update={name: value * num_steps for name, value in times.model_dump().items()})
        return Prepared(worker="", generation=order.generation, step=order.step, attempt=order.attempt, times=times)

    def commit(self, orders: Sequence[SendCommit]) -> None:
        """A version is applied, and written."""
        order = orders[0].order
        writers = {action.worker: action.order.checkpoint_units for action in orders if action.order.checkpoint_units}
        stall_s = self._save(writers, order.version) if writers else 0.0
        like = Committed(worker="", generation=order.generation, version=order.version)
        self._when_all(self.job.durations.order_s + stall_s, tuple(action.worker for action in orders), like)

    def send_ahead(self, orders: Iterable[SendPreCopy]) -> None:
        """Units travel beside training: each receiver has them once its links and its senders' have carried them."""
        sent: Counter[WorkerId] = Counter()
        wanted: dict[WorkerId, set[UnitId]] = {}
        number = 0
        for move in {move for action in orders for move in action.order.moves}:
            sent[move.sender] += self.job.unit_bytes[move.unit]
            wanted.setdefault(move.receiver, set()).add(move.unit)
        number = max((action.order.number for action in orders), default=0)
        assert self.formed is not None
        for receiver, units in wanted.items():
            num_bytes = sum(self.job.unit_bytes[unit] for unit in units)
            busy_s = max([num_bytes, *sent.values()]) / self.job.durations.link_bytes_per_s
            report = PreCopyReport(number=number, following=tuple(sorted(units)), received_bytes=num_bytes)
            event = PreCopyReported(worker=receiver, report=report)
            # they are copied at a boundary, of which the next is half a step away on average
            self.at(self.formed.step_s / 2 + busy_s, lambda event=event: self._of_living([event]))  # type: ignore[misc]

    def _save(self, writers: dict[WorkerId, tuple[UnitId, ...]], version: int) -> float:
        """State is copied and written beside training; returns for how long that stalls it (seconds)."""
        times, sizes = self.job.durations, self.job.unit_bytes
        most = max(sum(sizes[unit] for unit in units) for units in writers.values())
        stall_s = most / times.copy_bytes_per_s if times.stall_s is None else times.stall_s
        durable_s = most / times.storage_bytes_per_s if times.durable_s is None else times.durable_s
        events = [
            UnitsWritten(
                worker=worker,
                written=tuple(
                    UnitWritten(
                        worker=worker,
                        version=version,
                        unit=unit,
                        file=f"{unit.replace('+', '_')}.safetensors",
                        size_bytes=sizes[unit],
                        sha256=NO_SUM,
                        stall_s=stall_s if index == 0 else 0.0,
                    )
                    for index, unit in enumerate(units)
                ),
            )
            for worker, units in writers.items()
        ]
        self.at(stall_s + durable_s, lambda: self._of_living(events))
        return stall_s

    def _when_all(
        self,
        after_s: float,
        workers: tuple[WorkerId, ...],
        like: Reshaped | Prepared | Committed,
        others: Sequence[Reshaped] = (),
    ) -> None:
        """Everybody answers after so long, these workers alike, unless one is gone by then, or was told to give up."""
        everybody = (*workers, *(answer.worker for answer in others))

        def answered() -> Sequence[Told]:
            if like.generation <= self._aborted or not self.alive.issuperset(everybody):
                return ()
            events: list[Told] = [WorkerAnswered(worker=answer.worker, answer=answer) for answer in others]
            if workers:
                events.append(AnsweredAlike.model_construct(kind=ALIKE, workers=workers, answer=like))
            return events

        self.at(after_s, answered)

    def _of_living(self, events: Sequence[Single]) -> Sequence[Told]:
        return [event for event in events if getattr(event, "worker", None) in self.alive]
