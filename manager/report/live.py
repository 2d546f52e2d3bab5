"""Gathers the present state of a run from decisions, for the terminal and the page."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from manager.accounting.spent import Prices
from manager.controller.state.actions import ReasonCode
from manager.controller.state.events import Event
from manager.controller.state.state import ControllerState, Decision, Phase
from manager.journal.records import Decided, DecisionRecord, Fact, JournalLine
from manager.report.events import Told
from manager.report.fold import Fold
from manager.report.remaining import Remaining, remaining
from manager.report.steps import Cost, Step
from morph.words import counted

RECENT = 40
SPEED_WINDOW = 10
MOST_SHAPES = 200
MOST_POINTS = 512
TOLD = frozenset(
    {
        ReasonCode.NODE_REGISTERED,
        ReasonCode.WORKER_READY,
        ReasonCode.NODES_REQUESTED,
        ReasonCode.NOTICE_KEPT,
        ReasonCode.NOTICE_ACKNOWLEDGED,
        ReasonCode.HOLDING,
        ReasonCode.FORMED,
        ReasonCode.SET_BACK,
        ReasonCode.TOO_FEW_WORKERS,
        ReasonCode.ABORTING,
        ReasonCode.WORKER_REMOVED,
        ReasonCode.OVERFLOW_RETRY,
        ReasonCode.CHECKPOINT_COMPLETE,
    }
)
"""Decisions that get a line with ``--verbose``, in addition to those that every user sees."""


@dataclass
class Series:
    """Points (time in s, value), evenly thinned: if there are too many, every other one goes, but never the newest."""

    _kept: list[tuple[float, float]] = field(default_factory=list)
    _newest: tuple[float, float] | None = None
    _stride: int = 1
    _seen: int = 0

    @property
    def points(self) -> list[tuple[float, float]]:
        """The points that are kept, oldest first."""
        if self._newest is None or self._kept[-1] == self._newest:
            return list(self._kept)
        return [*self._kept, self._newest]

    def add(self, time_s: float, value: float) -> None:
        """Append a point."""
        self._newest = (time_s, value)
        if self._seen % self._stride == 0:
            self._kept.append(self._newest)
        self._seen += 1
        if len(self._kept) == MOST_POINTS:
            self._kept = self._kept[::2]
            self._stride *= 2


@dataclass
class LiveRun:
    """The present state of a run. Times are in seconds, as stamped by the shell.

    ``num_steps``: None if open-ended. ``start_s``: the time of the first decision. ``version``: the version from which
    the run continues; ``trouble``: why workers cannot be set up now; ``saved_version``: the newest complete checkpoint.
    ``metrics``, ``learning_rates``: those of the last decided step. ``fold``: its ledger begins with the account of
    earlier sessions; ``takes_over``: whether the workers of the last of these live on. ``shapes``: each shape (None: no
    shape) with the time of its beginning. ``counts``: the number of workers, at each change. ``progress``: the version
    after each decided step; ``first_cost``: the cost until the first of them.
    """

    job: str
    num_steps: int | None
    batch_size: int
    prices: Prices | None = None
    start_s: float = 0.0
    time_s: float = 0.0
    phase: Phase = Phase.STARTING
    trouble: str = ""
    shape: str | None = None
    generation: int = 0
    version: int = 0
    saved_version: int | None = None
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    learning_rates: tuple[float, float] | None = None
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    workers: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    decided_s: deque[float] = field(default_factory=lambda: deque(maxlen=SPEED_WINDOW + 1))
    recent: deque[Told] = field(default_factory=lambda: deque(maxlen=RECENT))
    shapes: deque[tuple[float, str | None]] = field(default_factory=lambda: deque(maxlen=MOST_SHAPES))
    counts: Series = field(default_factory=Series)
    progress: Series = field(default_factory=Series)
    first_cost: Cost | None = None
    losses: Series = field(default_factory=Series)
    speeds: Series = field(default_factory=Series)
    rates: Series = field(default_factory=Series)
    metric_series: dict[str, Series] = field(default_factory=dict)
    fold: Fold = field(default_factory=Fold)
    takes_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(
        self, time_s: float, event: Event, decision: Decision, facts: Iterable[tuple[float, Fact]] = ()
    ) -> tuple[Told, ...]:
        """Process one decision; return the reports worth making. Other threads read while they hold ``lock``.

        ``facts``: the shell's facts since the previous decision, with their times: a pause begins with the kill of a
        VM.
        """
        with self.lock:
            if not self.time_s:
                self._begin(time_s, decision.state)
            self.time_s, self.fold.config = time_s, decision.state.config
            for at_s, fact in facts:
                self.fold.step(JournalLine(0, at_s, fact))
            events = []
            for _, _, record in self.fold.step(JournalLine(0, time_s, Decided(event, DecisionRecord.of(decision)))):
                if isinstance(record, Step):
                    self._decided(record, decision.state.version)
                elif isinstance(record, Told) and (not record.inner or record.code in TOLD):
                    events.append(record)
            self._stand(decision.state)
            self.recent.extend(record for record in events if not record.inner)
            return tuple(events)

    def _begin(self, time_s: float, state: ControllerState) -> None:
        self.start_s, morphs = time_s, self.fold.morphs
        if not self.takes_over:
            self.fold.step(JournalLine(0, time_s, state.config))
            return
        self.fold.ledger.unmanaged(time_s)
        morphs.end_session(state.version)
        if state.plan is not None and state.slots:
            morphs.go_on(state.plan.shape, [slot.worker for slot in state.slots])

    @property
    def examples_per_s(self) -> float | None:
        """The speed over the last decided steps."""
        if len(self.decided_s) < 2:
            return None
        return (len(self.decided_s) - 1) * self.batch_size / max(1e-9, self.decided_s[-1] - self.decided_s[0])

    @property
    def dollars(self) -> float | None:
        """The dollars spent so far; None if no price is known."""
        bill = self.fold.ledger.account().bill(self.prices)
        return None if bill is None else bill.total_usd

    @property
    def dollars_on_demand(self) -> float | None:
        """The price of the same VMs on demand; None without that price."""
        return self.fold.ledger.account().on_demand_usd(self.prices)

    @property
    def remaining(self) -> Remaining | None:
        """The forecast of this session; None if nothing can be said yet, or the session has ended."""
        if self.phase == Phase.ENDED:
            return None
        begun_usd = None if self.first_cost is None else self.first_cost.dollars(self.prices)
        return remaining(self.progress.points, self.time_s, self.num_steps, (begun_usd, self.dollars))

    @property
    def doing(self) -> str:
        """What the run does now, in words, and why its workers cannot be set up."""
        return self.phase.words + (f": {self.trouble}" if self.trouble else "")

    @property
    def headline(self) -> str:
        """The run in one line."""
        parts = [self.doing, *([self.shape] if self.shape else [])]
        parts.append(f"{self.version}/{self.num_steps} steps" if self.num_steps else counted(self.version, "step"))
        if self.examples_per_s:
            parts.append(f"{self.examples_per_s:.1f} examples/s")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.saved_version is not None:
            parts.append(f"saved after {counted(self.saved_version, 'step')}")
        dollars, on_demand = self.dollars, self.dollars_on_demand
        if dollars is not None:
            parts.append(f"${dollars:.4f}" + (f" (on demand ${on_demand:.4f})" if on_demand is not None else ""))
        if left := self.remaining:
            parts.append(left.text + ("" if left.end_usd is None else f", about ${left.end_usd[0]:.4f} at the end"))
        return "  ".join(parts)

    def role(self, worker: str) -> str:
        """Return what a worker does, in words."""
        if worker in self.places:
            stage, replica = self.places[worker]
            role = f"stage {stage}, replica {replica}"
        else:
            role = "warming up" if self.workers[worker] == "warming" else "spare"
        return f"{role}, {self.types[worker]}" if worker in self.types else role

    def _decided(self, step: Step, version: int) -> None:
        record, time_s = step.record, step.record.decided_at_s
        self.decided_s.append(time_s)
        self.progress.add(time_s, version)
        self.first_cost = self.first_cost or step.cost
        self.loss, self.metrics, self.learning_rates = record.loss, record.metrics, record.learning_rates
        if self.loss is not None:
            self.losses.add(time_s, self.loss)
        if self.learning_rates is not None:
            self.rates.add(time_s, self.learning_rates[1])
        for name, value in self.metrics.items():
            self.metric_series.setdefault(name, Series()).add(time_s, value)
        if self.examples_per_s is not None:
            self.speeds.add(time_s, self.examples_per_s)

    def _stand(self, state: ControllerState) -> None:
        self.version, self.phase, self.generation = state.version, state.phase, state.generation
        self.trouble = failed.sentence if (failed := state.provisioning.failed_setups) else ""
        self.saved_version = state.saving.checkpoint.version if state.saving.checkpoint else None
        plan, slots = state.plan, state.slots
        shape = plan.shape if plan and slots else None
        if shape != self.shape:
            self.shapes.append((self.time_s, shape))
        if len(state.workers) != len(self.workers):
            self.counts.add(self.time_s, len(state.workers))
        self.shape = shape
        self.types = {name: of for name, worker in state.workers.items() if (of := worker.facts.node_type)}
        self.places = {} if plan is None else {s.worker: (plan.position(s.stage), s.replica) for s in slots}
        self.workers = {name: worker.node.value for name, worker in state.workers.items()}
