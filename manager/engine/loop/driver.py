"""The live loop: observe, decide, journal, act. It contains no policy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from manager.controller.decide import decide
from manager.controller.state.actions import (
    Abort,
    AcknowledgeNotice,
    Action,
    EndWorker,
    FindCheckpoint,
    Finish,
    MarkBest,
    NoteBadStep,
    NoteCorrection,
    NoteNextSave,
    ProbeWorker,
    ReleaseNodes,
    RequestNodes,
    SendCommit,
    SendPreCopy,
    SendReshape,
    SendStep,
    StartWorker,
    WriteManifest,
)
from manager.controller.state.events import Event, StopRequested, Tick
from manager.controller.state.state import ControllerState, Decision
from manager.controller.state.validate import validate
from manager.engine.loop.checkpoint_store import CheckpointStore
from manager.engine.loop.event_queue import EventQueue, Stamped
from manager.engine.loop.lease import Lease
from manager.engine.loop.silence import watch_every_s
from manager.journal.journal import Journal, patiently
from manager.journal.records import CLUSTER_LOST, Fact
from morph.contract.base import Value
from morph.contract.errors import ClusterLost
from morph.contract.vm_names import vm_of

LATE_S = 1.0
"""Seconds. An event that waited longer did so because the manager was paused: it is stamped with the current time."""
TIMES_EVERY_S = 1.0
TIMES_PATIENCE_S = 10.0
TIMES_SHARE = 0.05
"""The largest share of the driver's time spent on compute times, for any number of workers."""


class OrderSender(Protocol):
    """Carries orders to workers; answers come back through the event queue."""

    def start(self, worker: str, vm: str) -> None:
        """Start and set up a worker."""

    def send(self, worker: str, order: Value) -> None:
        """Send an order; that of a pre-copy goes beside the running order, and that of a probe ends with the next."""

    def abort(self, worker: str, generation: int) -> None:
        """Abort a generation on a worker."""

    def end(self, worker: str) -> None:
        """Kill a worker."""

    def watch(self) -> bool:
        """Look for silent workers every ``watch_every_s``; False while all are silent: then no time-out counts."""


class Requests(Protocol):
    """Requests VMs from a provider; all methods return at once, and answers come back through the event queue."""

    def know(self, workers: Collection[str]) -> None:
        """Record the workers that the controller knows, before its decision is carried out."""

    def request(self, action: RequestNodes) -> None:
        """Ask for VMs."""

    def release(self, action: ReleaseNodes) -> None:
        """Give VMs back."""


@dataclass(frozen=True)
class Observed:
    """One turn of the loop, for observers that show or end the run. ``facts``: since the last decision, with times."""

    time_s: float
    event: Event
    decision: Decision
    request_stop: Callable[[str], None]
    facts: tuple[tuple[float, Fact], ...] = ()


Observer = Callable[[Observed], None]


class Driver:
    """Drives one run to its end. The journal gets every event and decision before its actions are carried out.

    ``checkpoint_url``: manifests are written there. ``observers``: called after each decision, in this thread.
    ``requests``: requests VMs; None: requests are only journalled. ``acknowledge``: tells a worker that has a notice
    that it holds nothing of value; None: workers are not told. ``lease``: that of ``checkpoint_url``; None: no other
    manager can write there.
    """

    def __init__(
        self,
        state: ControllerState,
        event_queue: EventQueue,
        pool: OrderSender,
        journal: Journal,
        checkpoint_url: str,
        observers: Sequence[Observer],
        requests: Requests | None = None,
        acknowledge: Callable[[str, str], object] | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.state = state
        self._event_queue = event_queue
        self._pool = pool
        self._journal = journal
        rules = state.config.policy.rules
        back_steps = rules.losses.back_steps if rules.losses.when_bad == "go_back" else None
        self._checkpoints = CheckpointStore(checkpoint_url, rules.checkpoints, event_queue, lease, back_steps)
        self._observers = observers
        self._facts: list[tuple[float, Fact]] = []
        self._requests = requests
        self._acknowledge = acknowledge or (lambda _node, _notice: None)
        self._finish: Finish | None = None
        self._wake_at_s: float | None = None
        self._watch_s = watch_every_s(state.config.policy.heartbeat_timeout_s)
        self._times_at_s = time.monotonic() + TIMES_EVERY_S

    def request_stop(self, reason: str) -> None:
        """Request the end at the next step boundary; safe in a signal handler."""
        self._event_queue.put(StopRequested(reason=reason))

    def tell(self, *items: Event | Fact) -> None:
        """Handle these events before those in the event queue: a manager that takes over has already seen them."""
        for item in items:
            if self._finish is None:
                self._take(Stamped(self._event_queue.now_s(), item))

    def run(self) -> Finish:
        """Block until the controller finishes the run.

        CheckpointsTaken: another manager has its checkpoints. ClusterLost: the machines are lost; a last fact says so.
        """
        try:
            with closing(self._checkpoints):
                while self._finish is None:
                    self._turn()
            return self._finish
        except ClusterLost as error:
            self._event_queue.put(Fact(name=CLUSTER_LOST, detail=str(error)))
            raise

    def _turn(self) -> None:
        self._checkpoints.check()
        # handle waiting events, at the current time, before judging time-outs: more may come during a pause
        now_s = self._event_queue.now_s()
        for _ in range(len(self._event_queue)):
            self._take_next(0.0)
        is_heard = self._pool.watch()
        is_due = self._wake_at_s is not None and now_s >= self._wake_at_s
        if self._finish is None and is_due and is_heard:
            self._handle(now_s, Tick())
        self._hand_on_times()
        if self._finish is None:
            due_s = self._watch_s if self._wake_at_s is None else self._wake_at_s - self._event_queue.now_s()
            self._take_next(min(self._watch_s, due_s))

    def _take_next(self, timeout_s: float) -> None:
        if self._finish is None and (stamped := self._event_queue.get(timeout_s)) is not None:
            self._take(stamped)

    def _hand_on_times(self) -> None:
        """Pass the workers' compute times to the controller, now and then and when nothing else waits."""
        overdue_s = time.monotonic() - self._times_at_s
        if self._finish is not None or overdue_s < 0 or (len(self._event_queue) and overdue_s < TIMES_PATIENCE_S):
            return
        begin_s = time.monotonic()
        seen = self._event_queue.paces.take()
        if seen is not None:
            self._handle(self._event_queue.now_s(), seen)
        took_s = time.monotonic() - begin_s
        self._times_at_s = begin_s + max(TIMES_EVERY_S, took_s / TIMES_SHARE)

    def _take(self, stamped: Stamped) -> None:
        if isinstance(stamped.item, Fact):
            fact, limit_s = stamped.item, self.state.config.policy.rules.wait.vms_patience_s
            patiently(lambda: self._journal.append_fact(stamped.time_s, fact), limit_s)
            self._facts.append((stamped.time_s, fact))
        else:
            self._handle(stamped.time_s, stamped.item)

    def _handle(self, time_s: float, event: Event) -> None:
        def write_down() -> tuple[float, Decision]:
            """Decide, once more after each pause, so that the time-out of an order begins now."""
            now_s = self._event_queue.now_s()
            at_s = time_s if now_s - time_s < LATE_S else now_s
            decision = decide(self.state, event, at_s)
            self._journal.append_decision(at_s, event, decision)
            return at_s, decision

        at_s, decision = patiently(write_down, self.state.config.policy.rules.wait.vms_patience_s)
        self.state = decision.state
        if os.environ.get("MORPH_VALIDATE") == "1":
            validate(self.state)
        self._wake_at_s = decision.wake_at_s
        if self._requests is not None:
            self._requests.know(decision.state.workers)
        for action in decision.actions:
            self._act(action)
        facts, self._facts = tuple(self._facts), []
        for observer in self._observers:
            observer(Observed(at_s, event, decision, self.request_stop, facts))

    def _act(self, action: Action) -> None:  # noqa: C901 (a branch for each action)
        match action:
            case SendStep() | SendReshape() | SendCommit() | SendPreCopy():
                self._pool.send(action.worker, action.order)
            case Abort(worker=worker, generation=generation):
                self._pool.abort(worker, generation)
            case StartWorker(worker=worker):
                self._pool.start(worker, vm_of(worker))
            case EndWorker(worker=worker):
                self._pool.end(worker)
            case WriteManifest(manifest=manifest, spared=spared):
                self._checkpoints.write(manifest, spared)
            case MarkBest(best=best):
                self._checkpoints.mark(best)
            case FindCheckpoint():
                self._checkpoints.find(action.at_most)
            case ProbeWorker(worker=worker):
                self._pool.send(worker, action.order())
            case RequestNodes() if self._requests is not None:
                self._requests.request(action)
            case ReleaseNodes() if self._requests is not None:
                self._requests.release(action)
            case RequestNodes() | ReleaseNodes():  # these VMs come by themselves
                self._event_queue.put(Fact(name="not_carried_out", detail=action.model_dump_json()))
            case AcknowledgeNotice(worker=worker, notice=notice):
                self._acknowledge(worker, notice)
            case NoteCorrection() | NoteNextSave() | NoteBadStep():  # the journal has it
                pass
            case Finish():
                self._finish = action
