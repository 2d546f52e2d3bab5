"""Builds a ``RunReport`` from the lines of a journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from manager.accounting.account import Account
from manager.accounting.ledger import Ledger
from manager.accounting.spent import NS_PER_S
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
from manager.controller.state.evaluations import mean_loss, mean_metrics, total_weight
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
from manager.journal.condensed import ACCOUNT, SEQUENCE, VERSION, Column, Head, Kept
from manager.journal.journal import Journal
from manager.journal.records import (
    DIED_WITH_MANAGER,
    OUTLIVES,
    SESSION_OVER,
    TOOK_OVER,
    Decided,
    DecisionRecord,
    Entry,
    Fact,
    Line,
    LineReader,
    lines,
)
from manager.report.means import EvaluationReader, extreme_rates
from manager.report.morphs import MorphReader
from manager.report.steps import Condensed, Cost, SetBack, Step, StepRecord, Steps
from manager.report.values import (
    EvaluationRecord,
    MorphRecord,
    RunOver,
    RunReport,
    Saved,
    SessionBegun,
    ShapeLeft,
    ShapeSpan,
    VmCount,
)
from manager.run_dir import JOURNAL
from morph.contract.decided import Decided as Decision
from morph.contract.decided import LossScale
from morph.contract.errors import RunDirError
from morph.contract.happenings import Trouble
from morph.contract.messages import Committed, Prepared, WorkerReady

Record = (
    SessionBegun
    | ShapeSpan
    | ShapeLeft
    | MorphRecord
    | EvaluationRecord
    | VmCount
    | SetBack
    | Saved
    | Trouble
    | RunOver
)
Told = tuple[int, float, Record | Step]
"""The line of a record or step, its time, and the record or step itself."""
RECORDS: dict[str, type[Record]] = {
    "session": SessionBegun,
    "shape": ShapeSpan,
    "left": ShapeLeft,
    "morph": MorphRecord,
    "evaluation": EvaluationRecord,
    "vms": VmCount,
    "set_back": SetBack,
    "saved": Saved,
    "trouble": Trouble,
    "over": RunOver,
}
"""The types of records, besides decided steps, into which lines are condensed, by the name in the journal."""
NAMES = {kind: name for name, kind in RECORDS.items()}
OF_RUN = "run"
"""The key of the run reader's state in a cut."""
_OF_REPORT = ("shape", "left", "morph", "evaluation", "vms", "set_back")


def read_report(run_dir: Path) -> RunReport:
    """Read the journal of a run, while it runs or later; RunDirError if there is none, or an empty one."""
    return report_in(run_dir / JOURNAL, source=str(run_dir))


def report_in(path: Path, source: str) -> RunReport:
    """Read a journal, which must exist while the report's steps are read; RunDirError if it is missing or empty."""
    with Journal.open(path, read_only=True) as journal:
        tail = journal.tail(0, _OF_REPORT)
        reader = RunReader.at(journal, tail.head)
        past = Past(tuple(record for _, _, record in told_in(tail.records)), Condensed(path, reader.num_decided))
        for entry in tail.entries:
            reader.take(entry)
    return reader.report(source, past)


def read_ledger(run_dir: Path) -> Ledger:
    """Return the account of a run's sessions so far (empty: not begun); RunDirError if the journal is unreadable."""
    if not (run_dir / JOURNAL).is_file():
        return Ledger()
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        tail = journal.tail()
        reader = RunReader.at(journal, tail.head)
        for entry in tail.entries:
            reader.take(entry)
            reader.told.clear()
    return reader.ledger


def ledger_now(run_dir: Path, now_s: float, *, lives_on: bool) -> Ledger:
    """Return the account of all sessions until ``now_s`` on the run's clock, up to which nodes that still live
    (``lives_on``) are booked; errors and empty account: ``read_ledger``.
    """
    ledger = read_ledger(run_dir)
    if lives_on:
        ledger.unmanaged(now_s)
    else:
        ledger.begin_session(now_s)
    return ledger


def report_of(entries: Iterable[Entry], source: str = "journal") -> RunReport:
    """Build the report from all lines of a journal that is not condensed; RunDirError if they have no configuration."""
    reader = RunReader()
    for line in lines(entries):
        reader.take_line(line)
    return reader.report(source)


def config_at(journal: Journal, sequence: int) -> ControllerConfig | None:
    """Return the configuration of the session that a line belongs to."""
    entry = journal.last_config(sequence)
    return None if entry is None else ControllerConfig.model_validate_json(entry.payload_json)


def evaluations_in(journal: Journal) -> list[EvaluationRecord]:
    """Return the evaluations in the condensed part."""
    records = told_in(journal.records("evaluation"))
    return [record for _, _, record in records if isinstance(record, EvaluationRecord)]


def told_in(records: Iterable[Kept]) -> Iterator[tuple[int, float, Record]]:
    """Read stored records, each with its line and time."""
    for kept in records:
        yield kept.sequence, kept.time_s, RECORDS[kept.kind].model_validate_json(kept.payload_json)


@dataclass(frozen=True)
class Past:
    """The condensed part of a journal."""

    records: tuple[Record, ...] = ()
    steps: Condensed = field(default_factory=Condensed)


@dataclass
class RunReader:
    """The state of a reader.

    ``told``: the steps and records, with their lines, since this list was last emptied. ``shape``: the last shape that
    was formed, in which ``num_in_shape`` steps are decided. ``num_decided``: the number of all decided steps.
    """

    config: ControllerConfig | None = None
    num_sessions: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    version: int = 0
    checkpoint_version: int | None = None
    best_version: int | None = None
    finish: Finish | None = None
    ordered_s: float = 0.0
    attempt: int = 0
    loss_scale: LossScale | None = None
    evaluations: EvaluationReader = field(default_factory=EvaluationReader)
    prepared: dict[tuple[int, int, int], dict[str, Prepared]] = field(default_factory=dict)
    shape: ShapeSpan | None = None
    num_in_shape: int = 0
    num_decided: int = 0
    num_redone: int = 0
    first_step: int | None = None
    first_loss: tuple[int, float] | None = None
    last_loss: tuple[int, float] | None = None
    living: set[str] = field(default_factory=set)
    num_vms: int | None = None
    morphs: MorphReader = field(default_factory=MorphReader)
    ledger: Ledger = field(default_factory=Ledger)
    correction: Correction | None = None
    next_save: NextSave | None = None
    trouble: str = ""
    told: list[Any] = field(default_factory=list)
    _sequence: int = 0
    _time_s: float = 0.0
    _lines: Any = field(default_factory=LineReader)

    @classmethod
    def at(cls, journal: Journal, head: Head | None) -> RunReader:
        """Return the reader in its state after the last condensed line, or at the beginning if there is none."""
        if head is None:
            return cls()
        if head.version == VERSION:
            reader = _STATE.validate_json(head.states[OF_RUN])
            reader.config = config_at(journal, head.sequence)
            return reader
        reader = cls()
        reader._fold(journal, head)
        return reader

    def _fold(self, journal: Journal, head: Head) -> None:
        """Read the condensed part: lines that are kept, the columns of the steps between them, and records.

        Only unfinished values at the head are missing: when the next save is due, a correction, half an evaluation, and
        the loss scale of one step.
        """
        names = (SEQUENCE, "step", "decided_at_s", "compute_s", "loss")
        steps, at = {name: journal.column(name) for name in names}, 0
        saved, session = journal.records("saved"), 0
        for line in lines(journal.each(until=head.sequence)):
            end = int(np.searchsorted(steps[SEQUENCE], line.sequence))
            self._take_columns({name: column[at:end] for name, column in steps.items()})
            at = end + (end < len(steps[SEQUENCE]) and int(steps[SEQUENCE][end]) == line.sequence)
            session = line.sequence if isinstance(line.says, ControllerConfig) else session
            self.take_line(line)
        self._take_columns({name: column[at:] for name, column in steps.items()})
        known = [told.version for at, _, told in told_in(saved) if at > session and isinstance(told, Saved)]
        self.checkpoint_version = max([*known, self.checkpoint_version or 0]) or self.checkpoint_version
        self.evaluations = EvaluationReader()
        for record in evaluations_in(journal):
            self.evaluations.note(record)
        has_loss = ~np.isnan(steps["loss"])
        with_loss, losses = steps["step"][has_loss], steps["loss"][has_loss]
        if len(losses):
            first, last = (np.flatnonzero(with_loss == edge)[-1] for edge in (with_loss.min(), with_loss.max()))
            self.first_loss = int(with_loss[first]), float(losses[first])
            self.last_loss = int(with_loss[last]), float(losses[last])
        self.ledger.advance(head.time_s)
        self.ledger.saved(self.checkpoint_version or 0)
        with suppress(KeyError, ValidationError):  # written by a version that stores no account
            self.ledger.rebook(Account.model_validate_json(head.states[ACCOUNT]))
        self._sequence, self._time_s, self.end_s = head.sequence, head.time_s, max(self.end_s, head.time_s)
        self.loss_scale = None
        self.prepared.clear()
        self.told.clear()

    def _take_columns(self, steps: Mapping[str, Column]) -> None:
        """Process steps that were decided one after another, with nothing else between them."""
        num = len(steps[SEQUENCE])
        if not num:
            return
        first, end = int(steps["step"][0]), int(steps["step"][-1]) + 1
        time_s = float(steps["decided_at_s"][-1])
        self.ledger.advance(time_s)
        self.ledger.settle_all(first, end, round(float(steps["compute_s"].sum()) * NS_PER_S))
        self.num_decided, self.num_in_shape = self.num_decided + num, self.num_in_shape + num
        self.first_step = first if self.first_step is None else min(self.first_step, first)
        self.version = self.morphs.version = end
        self.ordered_s, self.end_s = time_s, max(self.end_s, time_s)
        self.prepared.clear()

    @property
    def state_json(self) -> str:
        """The reader's state between two steps."""
        return _STATE.dump_json(self, exclude={"config", "prepared", "told", "_lines"}).decode()

    @property
    def steps(self) -> list[Step]:
        """The steps in ``told``."""
        return [one for _, _, one in self.told if isinstance(one, Step)]

    def take(self, entry: Entry) -> None:
        """Read one line."""
        line = self._lines.line(entry)
        if line is not None:
            self.take_line(line)

    def take_line(self, line: Line) -> None:
        """Process the content of a line."""
        time_s = self._time_s = line.time_s
        self._sequence = line.sequence
        if not self.num_sessions:
            self.start_s = time_s
        before_s, self.end_s = self.end_s, max(self.end_s, time_s)
        says = line.says
        if isinstance(says, Fact) and says.name == TOOK_OVER:
            self.ledger.unmanaged(time_s)
        elif isinstance(says, Fact) and says.name == DIED_WITH_MANAGER:
            self.ledger.outlived(time_s)
        elif not isinstance(says, ControllerConfig):
            self.ledger.advance(time_s)
        match says:
            case ControllerConfig():
                self._close_shape(before_s)
                self._begin_session(says, time_s)
            case Fact():
                self._take_fact(says, time_s)
            case Decided(event=event, record=record) if self.config is not None:
                self._decided(self.config, event, record, time_s)
        for morph in self.morphs.over:
            self._tell(morph)
        self.morphs.over.clear()

    def _tell(self, record: Record | Step) -> None:
        self.told.append((self._sequence, self._time_s, record))

    def _take_fact(self, fact: Fact, time_s: float) -> None:
        self.morphs.take_fact(fact, time_s)
        if fact.name == OUTLIVES:
            self.ledger.outlives_ns = round(float(fact.detail) * NS_PER_S)
        elif fact.name in (SESSION_OVER, DIED_WITH_MANAGER):
            self.ledger.end_session()
            self.living.clear()
            self._count_vms(time_s)

    def report(self, source: str, past: Past | None = None) -> RunReport:
        """Return the report, including the condensed part, ``past``."""
        if self.config is None:
            raise RunDirError("its journal holds no run", source=source)
        past = past or Past()
        told = [*past.records, *(one for _, _, one in self.told if not isinstance(one, Step))]
        steps = Steps(past.steps, self.steps, [one for one in told if isinstance(one, SetBack)])
        evaluations = {one.version: one for one in told if isinstance(one, EvaluationRecord)}
        return RunReport(
            job=self.config.job,
            num_steps=self.config.num_steps,
            start_s=self.start_s,
            end_s=self.end_s,
            version=self.version,
            checkpoint_version=self.checkpoint_version,
            best_version=self.best_version,
            outcome=self.finish.outcome if self.finish else "running",
            sentence=self.finish.sentence if self.finish else self.trouble or f"version {self.version} is decided",
            num_sessions=self.num_sessions,
            shapes=self._shapes(told, steps),
            morphs=(*(one for one in told if isinstance(one, MorphRecord)), *self.morphs.all()),
            steps=steps,
            steps_redone=self.num_redone,
            first_loss=self.first_loss,
            last_loss=self.last_loss,
            evaluations=tuple(evaluations[version] for version in sorted(evaluations)),
            account=self.ledger.account(),
            vms=tuple(one for one in told if isinstance(one, VmCount)),
            correction=self._correction_of_type(self.config.node_type),
            next_save=None if self.finish else self.next_save,
        )

    def _shapes(self, told: Sequence[Record], steps: Steps) -> tuple[ShapeSpan, ...]:
        """Return every shape with the median of its steps; the shapes divide the list of all steps in order."""
        left = [one for one in told if isinstance(one, ShapeLeft)]
        if self.shape is not None and self.shape.end_s is None:
            left.append(ShapeLeft(end_s=self.end_s, num_steps=self.num_in_shape))
        formed = [one for one in told if isinstance(one, ShapeSpan)]
        durations_s, at = steps.column("duration_s"), 0
        spans = []
        for number, (span, end) in enumerate(zip(formed, left, strict=True)):
            own_s, at = durations_s[at : at + end.num_steps], at + end.num_steps
            is_open = number == len(formed) - 1 and self.shape is not None and self.shape.end_s is None
            update = {
                "end_s": None if is_open and not self.finish else end.end_s,
                "num_steps": end.num_steps,
                "measured_mini_batch_s": float(np.median(own_s)) if len(own_s) else None,
            }
            spans.append(span.model_copy(update=update))
        return tuple(spans)

    def _correction_of_type(self, node_type: str) -> Correction | None:
        """Return the correction; if all GPUs were of one named type, return it as the correction of this type alone."""
        correction = self.correction
        if correction is None or not node_type:
            return correction
        return correction.model_copy(update={"types": {node_type: correction}})

    def _begin_session(self, config: ControllerConfig, time_s: float) -> None:
        self.morphs.end_session(config.initial_version)
        self.config, self.num_sessions, self.finish = config, self.num_sessions + 1, None
        self._set_back(config.initial_version)
        self.next_save, self.trouble = None, ""
        self.checkpoint_version = config.initial_checkpoint.version if config.initial_checkpoint else None
        self.living.clear()
        self.ledger.begin_session(time_s)
        self.prepared.clear()
        self._tell(SessionBegun(version=config.initial_version, saved=self.checkpoint_version))
        self._count_vms(time_s)

    def _decided(self, config: ControllerConfig, event: Event, record: DecisionRecord, time_s: float) -> None:
        match event:
            case WorkerAnswered(answer=Prepared() as answer):
                attempts = self.prepared.setdefault((answer.generation, answer.step, answer.attempt), {})
                attempts.setdefault(event.worker, answer)
                self._evaluated(self.evaluations.take(answer))
            case WorkerAnswered(answer=Committed() as committed):
                self._evaluated(self.evaluations.take(committed))
            case NodeAppeared(node=node):
                self.living.add(node)
            case WorkerLost():
                self.living.difference_update(event.workers)
            case ManagerResumed(living=living):
                self.living &= self.ledger.warming.union(living)
            case ManifestWritten(version=version):
                self.checkpoint_version = max(version, self.checkpoint_version or 0)
                self._tell(Saved(version=version))
        for action in record.actions:
            if isinstance(action, EndWorker):
                self.living.discard(action.worker)
            elif isinstance(action, NoteCorrection):
                self.correction = action.correction
            elif isinstance(action, NoteNextSave):
                self.next_save = action.next_save
            elif isinstance(action, Finish):
                self.finish = action
        self._count_vms(time_s)
        decided = record.version == self.version + 1 and isinstance(event, WorkerAnswered)
        answers: tuple[Prepared, ...] = ()
        if decided and isinstance(event, WorkerAnswered) and isinstance(event.answer, Prepared):
            last = event.answer
            answers = tuple(self.prepared.get((last.generation, last.step, last.attempt), {}).values())
            self._step_decided(answers, last, _facts(record), time_s)
        self.ledger.take(event, record, answers)
        self.morphs.take(config, event, record, time_s)
        self._set_back(record.version)
        self._orders(config, record, time_s)
        self._note_trouble(event, record)
        for end in (action for action in record.actions if isinstance(action, Finish)):
            over = end.model_dump(include={"outcome", "sentence", "rests", "at_limit"})
            self._tell(RunOver(version=self.version, **over))

    def _evaluated(self, record: EvaluationRecord | None) -> None:
        if record is not None:
            self._tell(record)

    def _note_trouble(self, event: Event, record: DecisionRecord) -> None:
        if record.reason.code is ReasonCode.SETUP_FAILED:
            self.trouble = record.reason.sentence
            self._tell(Trouble(step=record.version, time_s=self._time_s, kind="setup_failed", sentence=self.trouble))
        elif isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady):
            self.trouble = ""
        for note in (action for action in record.actions if isinstance(action, NoteBadStep)):
            self._tell(Trouble(step=record.version, time_s=self._time_s, kind="bad_step", sentence=note.sentence))

    def _orders(self, config: ControllerConfig, record: DecisionRecord, time_s: float) -> None:
        order = record.reshape
        if order is not None:
            self._close_shape(time_s)
            plan = order.plan
            self.shape, self.num_in_shape = (
                ShapeSpan(
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
                    num_shared_cores=config.num_cores if config.shares_cores(plan) else None,
                    measured_mini_batch_s=None,
                ),
                0,
            )
            self._tell(self.shape)
        self.best_version = next(
            (action.best.version for action in record.actions if isinstance(action, MarkBest)), self.best_version
        )
        step = next((action.order for action in record.actions if isinstance(action, SendStep)), None)
        if step is not None:
            self.attempt, self.loss_scale = step.attempt, step.loss_scale
            if step.attempt == 0:
                self.ordered_s = time_s

    def _step_decided(
        self, answers: tuple[Prepared, ...], last: Prepared, facts: Decision | None, time_s: float
    ) -> None:
        losses = [loss for answer in answers for loss in answer.losses]
        record = StepRecord(
            step=last.step,
            generation=last.generation,
            decided_at_s=time_s,
            duration_s=max(0.0, time_s - self.ordered_s),
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
        self._tell(Step(self._sequence, record, Cost.of(self.ledger)))
        self.prepared.clear()
        self.num_in_shape += 1
        self.num_decided += 1
        self.version = last.step + 1
        self.first_step = last.step if self.first_step is None else min(self.first_step, last.step)
        if record.loss is not None:
            loss = (record.step, record.loss)
            self.first_loss = loss if self.first_loss is None or loss[0] <= self.first_loss[0] else self.first_loss
            self.last_loss = loss if self.last_loss is None or loss[0] >= self.last_loss[0] else self.last_loss

    def _set_back(self, version: int) -> None:
        if version < self.version and self.first_step is not None:
            self.num_redone += max(0, self.version - max(version, self.first_step))
            self._tell(SetBack(num_decided=self.num_decided, version=version))
        self.version = version

    def _close_shape(self, time_s: float) -> None:
        if self.shape is not None and self.shape.end_s is None:
            self.shape = self.shape.model_copy(update={"end_s": time_s})
            self._tell(ShapeLeft(end_s=time_s, num_steps=self.num_in_shape))

    def _count_vms(self, time_s: float) -> None:
        if self.num_vms != len(self.living):
            self.num_vms = len(self.living)
            self._tell(VmCount(time_s=time_s, num_vms=self.num_vms))


_STATE = TypeAdapter(RunReader)


def _facts(record: DecisionRecord) -> Decision | None:
    """Return what a decision tells workers about the step that it decides."""
    if record.reshape is not None:
        return record.reshape.decided
    orders = [action.order for action in record.actions if isinstance(action, SendStep | SendCommit)]
    return orders[0].decided if orders else None
