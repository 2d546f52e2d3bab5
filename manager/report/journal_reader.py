"""From the lines of a journal to a ``RunReport``."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path

from manager.accounting.ledger import Ledger
from manager.accounting.spent import NS_PER_S
from manager.controller.state.actions import (
    EndWorker,
    Finish,
    NoteCorrection,
    NoteNextSave,
    ReasonCode,
    SendCommit,
    SendStep,
)
from manager.controller.state.config import ControllerConfig
from manager.controller.state.evaluations import mean_loss, mean_metrics, total_weight
from manager.controller.state.events import (
    EVENT,
    Event,
    ManagerResumed,
    ManifestWritten,
    NodeAppeared,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.profile_correction import Correction
from manager.controller.state.saves import NextSave
from manager.journal.journal import Journal
from manager.journal.records import DIED_WITH_MANAGER, OUTLIVES, SESSION_OVER, TOOK_OVER, DecisionRecord, Entry, Fact
from manager.report.means import EvaluationReader, extreme_rates
from manager.report.morphs import MorphReader
from manager.report.values import RunReport, ShapeSpan, StepRecord, VmCount
from manager.run_dir import JOURNAL
from morph.contract.decided import Decided, LossScale
from morph.contract.errors import RunDirError
from morph.contract.messages import Committed, Prepared, WorkerReady
from morph.contract.timeline import StepTimeline

# The timelines that the workers of a run recorded, from its journal.


_MARK = '"timeline":{'


def read_timelines(run_dir: Path) -> dict[int, tuple[StepTimeline, ...]]:
    """Timelines by step, one of each worker, of the last time that every worker ran the step to its end.

    Raises:
        RunDirError: the directory holds no journal.
    """
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        return timelines_of(journal.read())


def timelines_of(entries: tuple[Entry, ...]) -> dict[int, tuple[StepTimeline, ...]]:
    """The same from the lines of a journal."""
    gathered: dict[tuple[int, int, int], dict[tuple[int, int], StepTimeline]] = {}
    found: dict[int, tuple[StepTimeline, ...]] = {}
    for entry in entries:
        if entry.kind == "config":
            gathered.clear()  # generations are counted anew
        if entry.kind != "event" or _MARK not in entry.payload_json:
            continue
        event = EVENT.validate_json(entry.payload_json)
        if not (isinstance(event, WorkerAnswered) and isinstance(event.answer, Prepared) and event.answer.timeline):
            continue
        answer, timeline = event.answer, event.answer.timeline
        together = gathered.setdefault((answer.generation, answer.step, answer.attempt), {})
        together[timeline.replica, timeline.stage] = timeline
        depth, replicas = map(int, timeline.shape.split("x"))
        if len(together) == depth * replicas:
            found[answer.step] = tuple(together[place] for place in sorted(together))
    return found


def read_report(run_dir: Path) -> RunReport:
    """Read the journal of a run, while it runs or later.

    Raises:
        RunDirError: the directory holds no journal, or an empty one.
    """
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        return report_of(journal.read(), source=str(run_dir))


def read_ledger(run_dir: Path) -> Ledger:
    """Return what the sessions of a run have booked so far; an empty one for a run that has not begun.

    Raises:
        RunDirError: the journal cannot be read.
    """
    if not (run_dir / JOURNAL).is_file():
        return Ledger()
    reader = RunReader()
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        for entry in journal.read():
            reader.take(entry)
    return reader.ledger


def ledger_now(run_dir: Path, now_s: float, *, lives_on: bool) -> Ledger:
    """Return what all sessions of a run have booked by now; an empty one for a run that has not begun.

    Args:
        run_dir: The run's directory.
        now_s: By the run's clock.
        lives_on: The nodes of the last session live, and are booked up to now.

    Raises:
        RunDirError: the journal cannot be read.
    """
    ledger = read_ledger(run_dir)
    if lives_on:
        ledger.unmanaged(now_s)
    else:
        ledger.begin_session(now_s)
    return ledger


def report_of(entries: tuple[Entry, ...], source: str = "journal") -> RunReport:
    """Build the report from a journal's lines.

    Raises:
        RunDirError: there is no configuration among them.
    """
    reader = RunReader()
    for entry in entries:
        reader.take(entry)
    return reader.report(source)


@dataclass
class RunReader:
    """What was read so far."""

    config: ControllerConfig | None = None
    num_sessions: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    version: int = 0
    checkpoint_version: int | None = None
    finish: Finish | None = None
    event: Event | None = None
    ordered_s: float = 0.0
    attempt: int = 0
    loss_scale: LossScale | None = None
    evaluations: EvaluationReader = field(default_factory=EvaluationReader)
    prepared: dict[tuple[int, int, int], dict[str, Prepared]] = field(default_factory=dict)
    shapes: list[ShapeSpan] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    living: set[str] = field(default_factory=set)
    vms: list[VmCount] = field(default_factory=list)
    morphs: MorphReader = field(default_factory=MorphReader)
    ledger: Ledger = field(default_factory=Ledger)
    correction: Correction | None = None
    next_save: NextSave | None = None
    trouble: str = ""

    def take(self, entry: Entry) -> None:
        """Read one line."""
        if not self.num_sessions:
            self.start_s = entry.time_s
        before_s, self.end_s = self.end_s, max(self.end_s, entry.time_s)
        fact = Fact.model_validate_json(entry.payload_json) if entry.kind == "fact" else None
        if fact is not None and fact.name == TOOK_OVER:
            self.ledger.unmanaged(entry.time_s)
        elif fact is not None and fact.name == DIED_WITH_MANAGER:
            self.ledger.outlived(entry.time_s)
        elif entry.kind != "config":
            self.ledger.advance(entry.time_s)
        match entry.kind:
            case "config":
                self._close_shape(before_s)
                self._begin_session(ControllerConfig.model_validate_json(entry.payload_json), entry.time_s)
            case "fact" if fact is not None:
                self._take_fact(fact, entry.time_s)
            case "event":
                self.event = EVENT.validate_json(entry.payload_json)
            case "decision":
                if self.event is not None and self.config is not None:
                    record = DecisionRecord.model_validate_json(entry.payload_json)
                    self._decided(self.config, self.event, record, entry.time_s)
                    self.event = None

    def _take_fact(self, fact: Fact, time_s: float) -> None:
        self.morphs.take_fact(fact, time_s)
        if fact.name == OUTLIVES:
            self.ledger.outlives_ns = round(float(fact.detail) * NS_PER_S)
        elif fact.name in (SESSION_OVER, DIED_WITH_MANAGER):
            self.ledger.end_session()
            self.living.clear()
            self._count_vms(time_s)

    def report(self, source: str) -> RunReport:
        """Close what is open."""
        if self.config is None:
            raise RunDirError("its journal holds no run", source=source)
        if self.finish is not None:
            self._close_shape(self.end_s)
        return RunReport(
            job=self.config.job,
            num_steps=self.config.num_steps,
            start_s=self.start_s,
            end_s=self.end_s,
            version=self.version,
            checkpoint_version=self.checkpoint_version,
            outcome=self.finish.outcome if self.finish else "running",
            sentence=self.finish.sentence if self.finish else self.trouble or f"version {self.version} is decided",
            num_sessions=self.num_sessions,
            shapes=tuple(self._measured(shape) for shape in self.shapes),
            morphs=self.morphs.all(),
            steps=tuple(self.steps),
            evaluations=self.evaluations.all(),
            account=self.ledger.account(),
            vms=tuple(self.vms),
            correction=self.correction,
            next_save=None if self.finish else self.next_save,
        )

    def _begin_session(self, config: ControllerConfig, time_s: float) -> None:
        self.morphs.end_session(config.initial_version)
        self.config, self.num_sessions, self.finish = config, self.num_sessions + 1, None
        self._set_back(config.initial_version)
        self.next_save, self.trouble = None, ""
        self.checkpoint_version = config.initial_checkpoint.version if config.initial_checkpoint else None
        self.living.clear()
        self.ledger.begin_session(time_s)
        self.prepared.clear()
        self._count_vms(time_s)

    def _decided(self, config: ControllerConfig, event: Event, record: DecisionRecord, time_s: float) -> None:
        match event:
            case WorkerAnswered(answer=Prepared() as answer):
                attempts = self.prepared.setdefault((answer.generation, answer.step, answer.attempt), {})
                attempts.setdefault(event.worker, answer)
                self.evaluations.take(answer)
            case WorkerAnswered(answer=Committed() as committed):
                self.evaluations.take(committed)
            case NodeAppeared(node=node):
                self.living.add(node)
            case WorkerLost():
                self.living.difference_update(event.workers)
            case ManagerResumed(living=living):
                self.living &= self.ledger.warming.union(living)
            case ManifestWritten(version=version):
                self.checkpoint_version = max(version, self.checkpoint_version or 0)
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

    def _note_trouble(self, event: Event, record: DecisionRecord) -> None:
        if record.reason.code is ReasonCode.SETUP_FAILED:
            self.trouble = record.reason.sentence
        elif isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady):
            self.trouble = ""

    def _orders(self, config: ControllerConfig, record: DecisionRecord, time_s: float) -> None:
        order = record.reshape
        if order is not None:
            self._close_shape(time_s)
            plan = order.plan
            self.shapes.append(
                ShapeSpan(
                    generation=order.generation,
                    shape=plan.shape,
                    num_workers=plan.num_workers,
                    batch_size=plan.num_micro_batches * plan.micro_batch_size,
                    start_s=time_s,
                    end_s=None,
                    first_version=order.version,
                    num_steps=0,
                    expected_mini_batch_s=plan.expected.mini_batch_s,
                    shared_mini_batch_s=config.expected_on_shared_cores_s(plan),
                    measured_mini_batch_s=None,
                )
            )
        step = next((action.order for action in record.actions if isinstance(action, SendStep)), None)
        if step is not None:
            self.attempt, self.loss_scale = step.attempt, step.loss_scale
            if step.attempt == 0:
                self.ordered_s = time_s

    def _step_decided(
        self, answers: tuple[Prepared, ...], last: Prepared, facts: Decided | None, time_s: float
    ) -> None:
        losses = [loss for answer in answers for loss in answer.losses]
        self.steps.append(
            StepRecord(
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
        )
        self.prepared.clear()
        shape = self.shapes[-1]
        self.shapes[-1] = shape.model_copy(update={"num_steps": shape.num_steps + 1})
        self.version = last.step + 1

    def _set_back(self, version: int) -> None:
        """Steps from ``version`` on are to be run again."""
        if version < self.version:
            self.steps = [
                record.model_copy(update={"redone_later": True}) if record.step >= version else record
                for record in self.steps
            ]
        self.version = version

    def _measured(self, shape: ShapeSpan) -> ShapeSpan:
        until_s = self.end_s if shape.end_s is None else shape.end_s
        times = [
            record.duration_s
            for record in self.steps
            if record.generation == shape.generation and shape.start_s < record.decided_at_s <= until_s
        ]
        return shape.model_copy(update={"measured_mini_batch_s": statistics.median(times)}) if times else shape

    def _close_shape(self, time_s: float) -> None:
        if self.shapes and self.shapes[-1].end_s is None:
            self.shapes[-1] = self.shapes[-1].model_copy(update={"end_s": time_s})

    def _count_vms(self, time_s: float) -> None:
        if not self.vms or self.vms[-1].num_vms != len(self.living):
            self.vms.append(VmCount(time_s=time_s, num_vms=len(self.living)))


def _facts(record: DecisionRecord) -> Decided | None:
    """What a decision tells the workers of the step that it decides."""
    if record.reshape is not None:
        return record.reshape.decided
    orders = [action.order for action in record.actions if isinstance(action, SendStep | SendCommit)]
    return orders[0].decided if orders else None
