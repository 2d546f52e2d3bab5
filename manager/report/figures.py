"""The figures of a run's report and its evaluations, kept decision by decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from manager.accounting.ledger import Ledger
from manager.controller.state.actions import (
    EndWorker,
    Finish,
    MarkBest,
    NoteBadStep,
    NoteCorrection,
    NoteNextSave,
    ReasonCode,
    SendCommit,
    SendStep,
)
from manager.controller.state.config import ControllerConfig
from manager.controller.state.evaluations import mean_loss, mean_metrics, total_weight, totals_of
from manager.controller.state.events import (
    Event,
    ManagerResumed,
    ManifestWritten,
    NodeAppeared,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.profile_correction import Correction
from manager.controller.state.saves import NextSave
from manager.controller.state.state import Phase
from manager.journal.condensed import Column
from manager.journal.records import DIED_WITH_MANAGER, SESSION_OVER, DecisionRecord, Fact
from manager.report.steps import Cost, SetBack, Step, StepRecord
from manager.report.values import EvaluationRecord, Saved, SessionBegun, SessionOver, ShapeLeft, ShapeSpan, VmCount
from morph.contract.decided import Decided, LossScale
from morph.contract.happenings import Trouble
from morph.contract.messages import Committed, Evaluation, Prepared, ReshapeOrder, WorkerReady

MOST_EVALUATIONS = 100


class Seen(NamedTuple):
    """A decision, as every reader sees it. ``version``, ``shape``, ``phase``: those before it. ``answers``: all answers
    to the order of the step that it decides; none: it decides no step. ``ledger``: booked up to this moment.
    """

    sequence: int
    time_s: float
    config: ControllerConfig
    event: Event
    record: DecisionRecord
    version: int
    shape: str | None
    phase: Phase
    answers: tuple[Prepared, ...]
    evaluation: EvaluationRecord | None
    ledger: Ledger


@dataclass
class EvaluationReader:
    """Combines workers' answers into evaluations, the newest of each version; keeps the last ``MOST_EVALUATIONS``."""

    _shares: dict[int, list[Evaluation]] = field(default_factory=dict)
    _unfinished: dict[int, EvaluationRecord] = field(default_factory=dict)
    _complete: dict[int, EvaluationRecord] = field(default_factory=dict)

    def take(self, answer: Prepared | Committed) -> EvaluationRecord | None:
        """Add one worker's answer; return the evaluation that it completes, with the job's own metrics."""
        finished, share = answer.finished, answer.evaluation
        completed = None
        if finished is not None and finished.version in self._unfinished:
            record = self._unfinished.pop(finished.version)
            numbers = {name: value for name, value in finished.values.items() if value is not None}
            completed = self.note(record.model_copy(update={"metrics": record.metrics | numbers}))
        if share is None:
            return completed
        shares = self._shares.setdefault(share.version, [])
        shares.append(share)
        totals = totals_of(shares)
        if totals is None:
            return completed
        del self._shares[share.version]
        values = dict(totals.values)
        loss = values.pop("loss")
        numbers = {name: value for name, value in values.items() if value is not None}
        record = EvaluationRecord(version=share.version, loss=loss, metrics=numbers)
        if share.finishes:
            self._unfinished[share.version] = record
            return completed
        return self.note(record)

    def note(self, record: EvaluationRecord) -> EvaluationRecord:
        """Add a complete evaluation."""
        self._complete[record.version] = record
        if len(self._complete) > MOST_EVALUATIONS:
            del self._complete[min(self._complete)]
        return record

    def all(self) -> tuple[EvaluationRecord, ...]:
        """Return the last complete evaluations, by version."""
        return tuple(self._complete[version] for version in sorted(self._complete))


@dataclass
class Figures:
    """``over``: the steps and records of the present line. ``shape``: the last shape that was formed, in which
    ``num_in_shape`` steps are decided. ``num_decided``: the number of all decided steps.
    """

    num_sessions: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    checkpoint_version: int | None = None
    best_version: int | None = None
    finish: Finish | None = None
    ordered_s: float = 0.0
    loss_scale: LossScale | None = None
    shape: ShapeSpan | None = None
    num_in_shape: int = 0
    num_decided: int = 0
    num_redone: int = 0
    first_step: int | None = None
    first_loss: tuple[int, float] | None = None
    last_loss: tuple[int, float] | None = None
    living: set[str] = field(default_factory=set)
    num_vms: int | None = None
    correction: Correction | None = None
    next_save: NextSave | None = None
    trouble: str = ""
    over: list[Any] = field(default_factory=list)

    def begin_session(self, config: ControllerConfig, version: int, time_s: float) -> None:
        """Record that a manager begins; ``version``: the one decided before."""
        self._close_shape(self.end_s)
        self.pass_time(time_s)
        self.num_sessions, self.finish = self.num_sessions + 1, None
        self._set_back(version, config.initial_version)
        self.next_save, self.trouble = None, ""
        self.checkpoint_version = config.initial_checkpoint.version if config.initial_checkpoint else None
        self.living.clear()
        self.over.append(SessionBegun(version=config.initial_version, saved=self.checkpoint_version))
        self._count_vms(time_s)

    def pass_time(self, time_s: float) -> None:
        """Record the time of a line."""
        if not self.num_sessions:
            self.start_s = time_s
        self.end_s = max(self.end_s, time_s)

    def take_fact(self, fact: Fact, time_s: float) -> None:
        """Process a fact from the shell: the end of a session's VMs."""
        if fact.name in (SESSION_OVER, DIED_WITH_MANAGER):
            self.living.clear()
            self._count_vms(time_s)

    def take(self, seen: Seen) -> None:
        """Process a decision and the event that led to it."""
        event, record = seen.event, seen.record
        if seen.evaluation is not None:
            self.over.append(seen.evaluation)
        match event:
            case NodeAppeared(node=node):
                self.living.add(node)
            case WorkerLost():
                self.living.difference_update(event.workers)
            case ManagerResumed(living=living):
                self.living &= seen.ledger.warming.union(living)
            case ManifestWritten(version=version):
                self.checkpoint_version = max(version, self.checkpoint_version or 0)
                self.over.append(Saved(version=version))
        self.living.difference_update(action.worker for action in record.actions if isinstance(action, EndWorker))
        self._count_vms(seen.time_s)
        if seen.answers:
            self._step_decided(seen)
        self._set_back(seen.version + bool(seen.answers), record.version)
        if record.reshape is not None:
            self._formed(seen.config, record.reshape, seen.time_s)
        if record.reason.code is ReasonCode.SETUP_FAILED:
            self.trouble = record.reason.sentence
            self._trouble(seen, "setup_failed", self.trouble)
        elif isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady):
            self.trouble = ""
        self._act(seen)

    def take_columns(self, steps: Mapping[str, Column]) -> None:
        """Process steps that were decided one after another, with nothing else between them."""
        first, num, time_s = int(steps["step"][0]), len(steps["step"]), float(steps["decided_at_s"][-1])
        self.num_decided, self.num_in_shape = self.num_decided + num, self.num_in_shape + num
        self.first_step = first if self.first_step is None else min(self.first_step, first)
        self.ordered_s, self.end_s = time_s, max(self.end_s, time_s)

    def _act(self, seen: Seen) -> None:
        ends = []
        for action in seen.record.actions:
            match action:
                case SendStep(order=order):
                    self.loss_scale = order.loss_scale
                    self.ordered_s = seen.time_s if order.attempt == 0 else self.ordered_s
                case NoteCorrection(correction=correction):
                    self.correction = correction
                case NoteNextSave(next_save=next_save):
                    self.next_save = next_save
                case MarkBest(best=best):
                    self.best_version = best.version
                case NoteBadStep(sentence=sentence):
                    self._trouble(seen, "bad_step", sentence)
                case Finish():
                    self.finish = action
                    over = action.model_dump(include={"outcome", "sentence", "rests", "at_limit"})
                    ends.append(SessionOver(version=seen.record.version, **over))
        self.over += ends

    def _trouble(self, seen: Seen, kind: Literal["setup_failed", "bad_step"], sentence: str) -> None:
        self.over.append(Trouble(step=seen.record.version, time_s=seen.time_s, kind=kind, sentence=sentence))

    def _step_decided(self, seen: Seen) -> None:
        answers, last, facts = seen.answers, seen.answers[-1], _facts(seen.record)
        losses = [loss for answer in answers for loss in answer.losses]
        record = StepRecord(
            step=last.step,
            generation=last.generation,
            decided_at_s=seen.time_s,
            duration_s=max(0.0, seen.time_s - self.ordered_s),
            compute_s=max(answer.times.step_s for answer in answers),
            loss=mean_loss(losses),
            metrics=mean_metrics(losses),
            weight=total_weight(losses),
            learning_rates=extreme_rates(answers),
            gradient_norm=facts.gradient_norm if facts else None,
            skipped=facts.skipped if facts else False,
            loss_scale=self.loss_scale.factor if self.loss_scale else None,
            num_attempts=last.attempt + 1,
        )
        self.over.append(Step(seen.sequence, record, Cost.of(seen.ledger)))
        self.num_in_shape += 1
        self.num_decided += 1
        self.first_step = last.step if self.first_step is None else min(self.first_step, last.step)
        if record.loss is not None:
            loss = (record.step, record.loss)
            self.first_loss = loss if self.first_loss is None or loss[0] <= self.first_loss[0] else self.first_loss
            self.last_loss = loss if self.last_loss is None or loss[0] >= self.last_loss[0] else self.last_loss

    def _set_back(self, before: int, version: int) -> None:
        if version < before and self.first_step is not None:
            self.num_redone += max(0, before - max(version, self.first_step))
            self.over.append(SetBack(num_decided=self.num_decided, version=version))

    def _formed(self, config: ControllerConfig, order: ReshapeOrder, time_s: float) -> None:
        self._close_shape(time_s)
        plan, self.num_in_shape = order.plan, 0
        self.shape = ShapeSpan(
            generation=order.generation,
            shape=plan.shape,
            num_workers=plan.num_workers,
            pool=plan.pool if any(plan.pool.types) else None,
            batch_size=plan.num_micro_batches * plan.micro_batch_size,
            start_s=time_s,
            end_s=None,
            first_version=order.version,
            num_steps=0,
            expected_mini_batch_s=plan.expected.mini_batch_s,
            num_shared_cores=config.num_cores if config.shares_cores else None,
            measured_mini_batch_s=None,
        )
        self.over.append(self.shape)

    def _close_shape(self, time_s: float) -> None:
        if self.shape is not None and self.shape.end_s is None:
            self.shape = self.shape.model_copy(update={"end_s": time_s})
            self.over.append(ShapeLeft(end_s=time_s, num_steps=self.num_in_shape))

    def _count_vms(self, time_s: float) -> None:
        if self.num_vms != len(self.living):
            self.num_vms = len(self.living)
            self.over.append(VmCount(time_s=time_s, num_vms=self.num_vms))


def extreme_rates(answers: Iterable[Prepared]) -> tuple[float, float] | None:
    """Return the lowest and the highest learning rate of a step; None if no worker reported one."""
    known = [answer.learning_rates for answer in answers if answer.learning_rates is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def _facts(record: DecisionRecord) -> Decided | None:
    """Return what a decision tells workers about the step that it decides."""
    if record.reshape is not None:
        return record.reshape.decided
    orders = [action.order for action in record.actions if isinstance(action, SendStep | SendCommit)]
    return orders[0].decided if orders else None
