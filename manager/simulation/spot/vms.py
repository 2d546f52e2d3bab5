"""VMs and their workers in virtual time: the durations of orders, and the answers to them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import simpy

from manager.controller.state.actions import Abort, SendCommit, SendPreCopy, SendReshape, SendStep
from manager.controller.state.config import units_by_stage
from manager.controller.state.events import AnsweredAlike, PreCopyReported, Single, UnitsWritten, WorkerAnswered
from manager.simulation.spot.job import SpotJob
from manager.simulation.spot.sums import StepStart, WorkerSums, with_losses
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
from morph.contract.plan import PipelineKind, Plan
from morph.contract.salvage import KeptSums, PartialSum, Salvage, share_in
from morph.contract.timeline import ComputeTimes

Told = Single | AnsweredAlike
Acting = Generator[simpy.Event, Any, None]
"""A process: an action of workers that takes time."""
NO_SUM = "0" * 64
ALIKE: Literal["answered_alike"] = "answered_alike"
_PER_S = 1024
"""Times are rounded to this fraction of a second, whose sums are exact, so that skipping steps changes nothing."""


class StagePace(NamedTuple):
    """When (s) a stage has run the first micro-batch of a step backward, and the time (s) for each further one."""

    first_s: float
    period_s: float

    def num_backwards(self, share: int, elapsed_s: float) -> int:
        """Return how many micro-batches of a share are run backward this number of seconds after the step began."""
        if elapsed_s < self.first_s:
            return 0
        return min(share, 1 + math.floor((elapsed_s - self.first_s) / self.period_s)) if self.period_s else share


def stage_paces(plan: Plan, step_s: float) -> list[StagePace]:
    """Return each stage's pace in a step that takes ``step_s`` as a whole.

    A pipeline of even stages completes one micro-batch every t once it is full: P forwards come before the first
    backward of the last stage, and P - s - 1 backwards of later stages before the first of stage s. t is that of the
    whole step.
    """
    forward, busy_s, paces = _forward_share(plan), (1 - _rest_share(plan)) * step_s, []
    for stage in range(len(plan.stages)):
        kind = plan.kind_of(plan.replicas_of(stage)[0])
        depth, period_s = kind.num_stages, period_of(kind, busy_s)
        paces.append(StagePace((depth * forward + (depth - plan.position(stage)) * (1 - forward)) * period_s, period_s))
    return paces


def copied(done: int, every: int, share: int) -> int:
    """Return the number of micro-batches in the last copy of a worker's partial sums that arrived.

    Copies are made whenever a multiple of ``every`` micro-batches of the ``share`` is left to do.
    """
    left = max(1, math.ceil((share - done) / every)) * every
    return max(0, share - left)


def rounded(time_s: float) -> float:
    """Round a time up to one whose sums are exact."""
    return math.ceil(time_s * _PER_S) / _PER_S


def partial_step_s(plan: Plan, step_s: float, salvage: Salvage | None) -> float:
    """Return the time of a step that runs only its missing part; ``step_s`` is the time of a whole one."""
    if salvage is None:
        return step_s
    pipelines_s, rest = [0.0], _rest_share(plan)
    for replica in range(plan.num_replicas):
        if num := len(share_in(plan, replica, salvage)):
            kind = plan.kind_of(replica)
            pipelines_s.append((num + kind.num_stages - 1) * period_of(kind, (1 - rest) * step_s))
    return rounded(rest * step_s + max(pipelines_s))


def period_of(kind: PipelineKind, busy_s: float) -> float:
    """Return the time between two micro-batches of a kind of pipeline that is busy for ``busy_s`` of a step."""
    return busy_s / (kind.longest_share + kind.num_stages - 1)


def _rest_share(plan: Plan) -> float:
    """Return the part of a step's time outside the pipelines."""
    parts_s = plan.expected.parts_s
    known_s = sum(parts_s.values())
    return sum(parts_s.get(part, 0.0) for part in ("all_reduce", "optimizer", "commit")) / known_s if known_s else 0.0


def _forward_share(plan: Plan) -> float:
    """Return the forward's share of a micro-batch's time in a stage; a third if the plan does not say."""
    parts_s = plan.expected.parts_s
    compute_s = sum(parts_s.get(part, 0.0) for part in ("forward", "recompute", "backward"))
    return parts_s["forward"] / compute_s if compute_s and "forward" in parts_s else 1 / 3


@dataclass
class Formed:
    """The present shape: its order, and the time of its steps, drawn once."""

    order: ReshapeOrder
    step_s: float
    times: ComputeTimes
    following_at_s: float
    """The time at which every follower has the state that it follows."""
    followed: bool = False
    """Whether the last step that was begun is followed."""

    @property
    def plan(self) -> Plan:
        """The plan, P x D."""
        return self.order.plan


class Workers:
    """The workers of all present VMs. A process of ``env`` carries out each order and reports to the manager."""

    def __init__(self, job: SpotJob, seed: int, env: simpy.Environment, tell: Callable[[Sequence[Told]], None]) -> None:
        self.job, self._env, self._tell = job, env, tell
        self.alive: set[WorkerId] = set()
        self.formed: Formed | None = None
        self._sums = _Sums(job)
        self._random = random.Random(seed)
        self._aborted = 0

    def start(self, worker: WorkerId) -> None:
        """Start a VM's worker, which is ready after its setup."""
        setup_s = self.job.durations.setup_s
        ready = WorkerReady(worker=worker, pid=1, setup_s=setup_s)
        self._env.process(self._report(setup_s, [WorkerAnswered(worker=worker, answer=ready)]))

    def abort(self, aborts: Sequence[Abort]) -> None:
        """Give up orders."""
        self._aborted = aborts[0].generation
        self._sums.stop(self.formed, self._env.now, self.job.durations.aborted_s, self.alive)
        like = Aborted(worker="", generation=self._aborted, peer_lost=True)
        self._env.process(self._give_up(like, [action.worker for action in aborts]))

    def _give_up(self, like: Aborted, workers: Sequence[WorkerId]) -> Acting:
        """Let the remaining workers report that they have given up, with their sums."""
        yield self._env.timeout(self.job.durations.aborted_s)
        events: list[Told] = []
        without: list[WorkerId] = []
        for worker in workers:
            if worker in self.alive:
                kept = self._sums.told(worker)
                if kept is None:
                    without.append(worker)
                else:
                    answer = like.model_copy(update={"worker": worker, "kept": kept})
                    events.append(WorkerAnswered.model_construct(worker=worker, answer=answer))
        if without:
            events.append(AnsweredAlike.model_construct(kind=ALIKE, workers=tuple(without), answer=like))
        self._tell(events)

    def reshape(self, orders: Sequence[SendReshape]) -> None:
        """Form a shape; the worker that receives or sends most decides how long it takes."""
        order, times = orders[0].order, self.job.durations
        mini_batch_s, parts_s = order.plan.expected.mini_batch_s, order.plan.expected.parts_s
        jitter = max(0.5, self._random.gauss(1.0, times.spread)) if times.spread else 1.0
        compute = ComputeTimes(
            forward_s=jitter * parts_s.get("forward", 0.0 if parts_s else mini_batch_s),
            recompute_s=jitter * parts_s.get("recompute", 0.0),
            backward_s=jitter * parts_s.get("backward", 0.0),
            reduce_s=0.0,
            wait_s=0.0,
            step_s=jitter * mini_batch_s,
        )
        self._sums.keep(order.version)
        state_s, received = self._moved(order)
        longest_s = max(state_s.values(), default=0.0)
        step_s = times.slowness * jitter * mini_batch_s + times.order_s + self._shared_s(order)
        following_s = times.groups_s + longest_s + self._following_s(order)
        self.formed = Formed(order, step_s, compute, self._env.now + following_s)
        like = Reshaped(worker="", generation=order.generation, groups_s=times.groups_s, state_s=0.0, received_bytes=0)
        movers = [
            like.model_copy(update={"worker": worker, "state_s": state_s[worker], "received_bytes": received[worker]})
            for worker in (action.worker for action in orders if action.worker in state_s)
        ]
        others = tuple(action.worker for action in orders if action.worker not in state_s)
        self._env.process(self._answer(times.groups_s + longest_s, others, like, movers))

    def _shared_s(self, order: ReshapeOrder) -> float:
        """Return how long a step's gradients travel to followers, once all are computed (seconds)."""
        first = {slot.worker for slot in order.slots if slot.stage == 0}  # the other stages end earlier
        sizes = (
            sum(self.job.sum_bytes(unit) for unit in follow.units) / 2
            for follow in order.follows
            if follow.worker in first
        )
        return rounded(max(sizes, default=0.0) / self.job.durations.link_bytes_per_s)

    def _following_s(self, order: ReshapeOrder) -> float:
        """Return how long the followed state travels during the first steps (seconds)."""
        sizes = (
            sum(self.job.unit_bytes[unit] for unit in follow.units if unit not in follow.known)
            for follow in order.follows
        )
        return max(sizes, default=0.0) / self.job.durations.link_bytes_per_s

    def _moved(self, order: ReshapeOrder) -> tuple[dict[WorkerId, float], Counter[WorkerId]]:
        """Return how long each worker's links are busy (seconds), and the bytes that it receives."""
        times, sizes = self.job.durations, self.job.unit_bytes
        received: Counter[WorkerId] = Counter()
        sent: Counter[WorkerId] = Counter()
        loaded: Counter[WorkerId] = Counter()
        for source in order.sources:
            if source.peer is not None and source.kind != "ahead":
                received[source.worker] += sizes[source.unit]
                sent[source.peer] += sizes[source.unit]
            if source.kind == "checkpoint":
                loaded[source.peer or source.worker] += sizes[source.unit]
        for entry in () if order.salvage is None else order.salvage.sums:
            if entry.holder != entry.receiver:
                num_bytes = self.job.sum_bytes(entry.sum.unit)
                received[entry.receiver] += num_bytes
                sent[entry.holder] += num_bytes
        busy_s = {worker: loaded[worker] / times.storage_bytes_per_s for worker in loaded}
        for worker in {*received, *sent}:
            sends_s = max(received[worker], sent[worker]) / times.link_bytes_per_s
            busy_s[worker] = busy_s.get(worker, 0.0) + sends_s
        return busy_s, received + loaded

    def step(self, orders: Sequence[SendStep], order: StepOrder) -> None:
        """Run a step, and write a checkpoint meanwhile, on the workers that got ``orders``, including ``order``."""
        assert self.formed is not None
        step_s = partial_step_s(self.formed.plan, self.formed.step_s, self.formed.order.salvage_in(order))
        writers = {action.worker: action.order.checkpoint_units for action in orders if action.order.checkpoint_units}
        stall_s = self._save(writers, order.step) if writers else 0.0
        workers = tuple([action.worker for action in orders])
        if self.formed.order.keep_sums:
            self._sums.begin(order, self._env.now + stall_s)
        prepared = self.prepared(order, begun_s=self._env.now)
        self._env.process(self._answer(step_s + stall_s, workers, prepared))

    def prepared(self, order: StepOrder, num_steps: int = 1, *, begun_s: float) -> Prepared:
        """Return the answer, equal for all workers, to a step that began at this time, or to several at once."""
        assert self.formed is not None
        followed = self.formed.followed = bool(self.formed.order.follows) and begun_s >= self.formed.following_at_s
        times, salvage = self.formed.times, self.formed.order.salvage_in(order)
        factor = float(num_steps)
        if salvage is not None:
            factor = partial_step_s(self.formed.plan, self.formed.step_s, salvage) / self.formed.step_s
        if factor != 1:
            times = times.model_copy(update={name: value * factor for name, value in times.model_dump().items()})
        return Prepared(
            worker="",
            generation=order.generation,
            step=order.step,
            attempt=order.attempt,
            followed=followed,
            times=times,
        )

    def commit(self, orders: Sequence[SendCommit]) -> None:
        """Apply and write a version."""
        order = orders[0].order
        writers = {action.worker: action.order.checkpoint_units for action in orders if action.order.checkpoint_units}
        stall_s = self._save(writers, order.version) if writers else 0.0
        like = Committed(worker="", generation=order.generation, version=order.version)
        workers = tuple(action.worker for action in orders)
        self._env.process(self._answer(self.job.durations.order_s + stall_s, workers, like))

    def send_pre_copies(self, orders: Iterable[SendPreCopy]) -> None:
        """Transfer units during training: a receiver has them once its own and its senders' links have carried them."""
        sent: Counter[WorkerId] = Counter()
        wanted: dict[WorkerId, set[UnitId]] = {}
        for move in dict.fromkeys(move for action in orders for move in action.order.moves):
            sent[move.sender] += self.job.unit_bytes[move.unit]
            wanted.setdefault(move.receiver, set()).add(move.unit)
        number = max((action.order.number for action in orders), default=0)
        assert self.formed is not None
        for receiver, units in wanted.items():
            num_bytes = sum(self.job.unit_bytes[unit] for unit in units)
            busy_s = max([num_bytes, *sent.values()]) / self.job.durations.link_bytes_per_s
            report = PreCopyReport(number=number, following=tuple(sorted(units)), received_bytes=num_bytes)
            event = PreCopyReported(worker=receiver, report=report)
            # they are copied at a boundary; the next one is half a step away on average
            self._env.process(self._report(self.formed.step_s / 2 + busy_s, [event]))

    def _save(self, writers: dict[WorkerId, tuple[UnitId, ...]], version: int) -> float:
        """Copy and write state during training; return how long this stalls training (seconds)."""
        times, sizes = self.job.durations, self.job.unit_bytes
        most = max(sum(sizes[unit] for unit in units) for units in writers.values())
        stall_s, durable_s = times.save_stall_s(most), times.save_upload_s(most)
        events = [
            UnitsWritten.model_construct(
                worker=worker,
                written=tuple(
                    UnitWritten.model_construct(
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
        self._env.process(self._report(stall_s + durable_s, events))
        return stall_s

    def _answer(
        self,
        after_s: float,
        workers: tuple[WorkerId, ...],
        like: Reshaped | Prepared | Committed,
        others: Sequence[Reshaped] = (),
    ) -> Acting:
        """Let all workers answer after this time, these with one answer, unless a worker is gone or gave up by then."""
        yield self._env.timeout(after_s)
        everybody = (*workers, *(answer.worker for answer in others))
        if like.generation <= self._aborted or not self.alive.issuperset(everybody):
            return
        events: list[Told] = [WorkerAnswered.model_construct(worker=answer.worker, answer=answer) for answer in others]
        if workers:
            events.append(AnsweredAlike.model_construct(kind=ALIKE, workers=workers, answer=like))
        self._tell(events)

    def _report(self, after_s: float, events: Sequence[Single]) -> Acting:
        """Let each worker that is left after this time report its work."""
        yield self._env.timeout(after_s)
        self._tell([event for event in events if getattr(event, "worker", None) in self.alive])


class _Sums:
    """The partial sums of all workers; they are computed only when a step is abandoned, which is rare."""

    def __init__(self, job: SpotJob) -> None:
        num_sections = 1 + max(section for sections in job.units.values() for section in sections)
        self._job = job
        self._units = with_losses(job.units, num_sections)
        self._workers: dict[WorkerId, WorkerSums] = {}
        self._running: tuple[StepOrder, float] | None = None
        self._most_bytes: dict[tuple[int, ...], int] = {}

    def begin(self, order: StepOrder, now_s: float) -> None:
        """Record that a step is begun, or begun again at other scales."""
        self._running = order, now_s

    def stop(self, formed: Formed | None, now_s: float, aborted_s: float, alive: Container[WorkerId]) -> None:
        """Abandon the running step, if any: each worker has its own sums, and its copies of others' sums.

        A worker stops between two tasks, so all that it computes until it answers, ``aborted_s`` later, is in its sums.
        """
        if self._running is None or formed is None:
            return
        (order, begun_s), self._running = self._running, None
        if order.attempt or order.generation != formed.order.generation:
            self._workers = {}
            return
        salvage = formed.order.salvage_in(order)
        before, self._workers = self._workers, {}
        shape = formed.order
        keepers = {follow.worker: follow.follower for follow in shape.follows} if shape.copy_sums_every else {}
        copies: dict[WorkerId, list[PartialSum]] = {}
        named: dict[WorkerId, dict[WorkerId, None]] = {}
        for entry in () if salvage is None else salvage.sums:
            named.setdefault(entry.receiver, {})[entry.holder] = None
        start = StepStart(self._units, shape, first=salvage is not None)
        transit_s = self._transit_s(shape)
        paces = stage_paces(formed.plan, formed.step_s)
        for slot in formed.order.slots:
            sums = self._workers[slot.worker] = WorkerSums(self._units)
            holders = (before[holder] for holder in named.get(slot.worker, ()) if holder in before)
            sums.parts = [part for holder in holders for part in holder.parts]
            assert sums.begin(start, slot, order.step), "the named sums exist"
            elapsed_s = now_s - begun_s + (aborted_s if slot.worker in alive else 0.0)
            done = paces[slot.stage].num_backwards(len(sums.share), elapsed_s)
            keeper = keepers.get(slot.worker)
            if keeper is not None and slot.worker not in alive:  # its last copy is needed
                period_s = formed.step_s / formed.plan.kind_of(slot.replica).longest_share
                in_transit = math.ceil(transit_s / period_s)
                sums.run(copied(done - in_transit, formed.order.copy_sums_every, len(sums.share)))
                sums.keep(order.step)
                copies.setdefault(keeper, []).extend(sums.parts)
                continue
            sums.run(done)
            sums.keep(order.step)
        for keeper, parts in copies.items():
            if keeper in self._workers:
                self._workers[keeper].parts += parts

    def _transit_s(self, order: ReshapeOrder) -> float:
        """Return how long the transfer of a copy of a stage's sums takes (seconds)."""
        ends = tuple(stage.end_section for stage in order.plan.stages)
        if ends not in self._most_bytes:
            needed = units_by_stage(order.plan, self._job.units)
            self._most_bytes[ends] = max(sum(map(self._job.sum_bytes, units)) for units in needed)
        return self._most_bytes[ends] / self._job.durations.link_bytes_per_s

    def keep(self, version: int) -> None:
        """Record that a shape is formed at this version, and drop sums of other steps."""
        if self._running is not None and self._running[0].step != version:
            self._running = None
        self._workers = {worker: sums for worker, sums in self._workers.items() if sums.step == version}

    def told(self, worker: WorkerId) -> KeptSums | None:
        """Return the sums that a worker reports."""
        sums = self._workers.get(worker)
        return None if sums is None else sums.told()
