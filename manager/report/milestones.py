"""Selects events of a run for the user: its shapes, their changes and costs, but not the protocol."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from manager.controller.state.actions import Finish, NoteBadStep, ReasonCode, RequestNodes
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import CheckpointFound, Event, NodesGranted, WorkerAnswered
from manager.controller.state.state import ControllerState, Phase
from manager.journal.records import DecisionRecord
from manager.report.means import EvaluationReader
from manager.report.morphs import MorphReader, lost_by
from manager.report.values import MorphRecord
from morph.contract.messages import Committed, Prepared
from morph.contract.vm_names import vm_of
from morph.words import counted, numbers_told

MOST_NAMES = 4
MOST_SAMPLES = 4096
AS_SAID = frozenset(
    {
        ReasonCode.NODE_ABSENT,
        ReasonCode.NODES_STARTED,
        ReasonCode.REQUEST_REFUSED,
        ReasonCode.SETUP_FAILED,
        ReasonCode.NOTICE_TAKEN,
        ReasonCode.NODE_SPARED,
        ReasonCode.WORKER_SLOW,
        ReasonCode.WORKER_WELL,
        ReasonCode.MANAGER_RESUMED,
        ReasonCode.RESTING,
        ReasonCode.CHECKPOINT_ABANDONED,
        ReasonCode.STOP_NOTED,
        ReasonCode.FINISHED,
        ReasonCode.STOPPED,
        ReasonCode.FAILED,
    }
)
"""Decisions that a user sees unchanged. A save is included only after storage refused earlier ones."""


class Milestone(NamedTuple):
    """One line. ``code``: a reason's, or shape, morph, lost, waiting, requested, granted, queued, evaluation."""

    code: str
    sentence: str


@dataclass
class Milestones:
    """Derives the milestones of a run from its decisions, in order."""

    morphs: MorphReader = field(default_factory=MorphReader)
    evaluations: EvaluationReader = field(default_factory=EvaluationReader)
    _evaluated: int = -1
    _storage_refused: bool = False

    def begin_session(self, version: int) -> None:
        """Record that a manager starts from a version, without a shape."""
        self.morphs.end_session(version)

    def take_over(self, state: ControllerState) -> None:
        """Record that a manager continues from a state whose decisions were not read here."""
        self.begin_session(state.version)
        if state.plan is not None and state.slots:
            self.morphs.go_on(state.plan.shape, [slot.worker for slot in state.slots])

    def take(
        self, config: ControllerConfig, event: Event, record: DecisionRecord, time_s: float
    ) -> tuple[Milestone, ...]:
        """Process one decision; return its milestones for a user."""
        reader, told = self.morphs, []
        shape, phase, version = reader.shape, reader.phase, reader.version
        reader.over.clear()
        reader.take(config, event, record, time_s)
        for morph in reader.over:
            told.append(Milestone("morph", morph_line(morph)))
        gone = lost_by(event, record)
        is_told = record.reason.code is ReasonCode.SETUP_FAILED  # the worker did not train yet
        if gone and not is_told and (reader.open is None or not set(gone) <= set(reader.open.lost_workers)):
            trains = reader.shape is not None and reader.open is None and record.phase is not Phase.ENDED
            goes_on = f"; {reader.shape} goes on" if trains else ""
            told.append(Milestone("lost", f"{_named(gone)} lost{_injected(gone, reader.injected)}{goes_on}"))
        if shape is None and record.reshape is not None:
            workers = counted(len(record.reshape.slots), "worker")
            told.append(Milestone("shape", f"{reader.shape} on {workers}, from step {record.version}"))
        if record.phase is Phase.WAITING and phase is not Phase.WAITING:
            needed = counted(config.fewest_workers, "worker is", "workers are")
            told.append(Milestone("waiting", f"training waits until {needed} ready"))
        if isinstance(event, CheckpointFound):
            lost = version - record.version
            cost = f"; {lost} more step{'s' if lost > 1 else ''} are run again" if lost > 0 else ""
            without = f"version {version} is gone, and version {event.manifest.version} is the newest whole version"
            sentences = event.passed_over or ((without,) if lost > 0 else ())
            told += [Milestone("passed_over", sentence + cost) for sentence in sentences]
        for action in record.actions:
            if isinstance(action, NoteBadStep):
                told.append(Milestone("bad_step", action.sentence))
            elif isinstance(action, RequestNodes):
                told.append(Milestone("requested", f"{counted(action.count, 'more VM')} requested from the provider"))
        if isinstance(event, NodesGranted) and event.waiting:
            several = len({vm_of(node) for node in event.waiting}) > 1
            told.append(Milestone("queued", f"{_named(event.waiting)} {'wait' if several else 'waits'} in the queue"))
        if isinstance(event, NodesGranted) and event.detail:
            told.append(Milestone("granted", event.detail))
        told += self._evaluation(event)
        named = event.answer.named if isinstance(event, WorkerAnswered) and isinstance(event.answer, Prepared) else None
        if named is not None:
            numbers = numbers_told(named.samples, MOST_SAMPLES)
            told.append(Milestone("samples", f"the samples of step {named.step}: {numbers}"))
        code = record.reason.code
        saved_again = code is ReasonCode.CHECKPOINT_COMPLETE and self._storage_refused
        if code in AS_SAID or saved_again:
            ends = [action.sentence for action in record.actions if isinstance(action, Finish)]
            told.append(Milestone(code.value, "; ".join(ends) or record.reason.sentence))
        if code in (ReasonCode.CHECKPOINT_ABANDONED, ReasonCode.CHECKPOINT_COMPLETE):
            self._storage_refused = code is ReasonCode.CHECKPOINT_ABANDONED
        return tuple(told)

    def _evaluation(self, event: Event) -> list[Milestone]:
        """Return the evaluation that this answer completes, unless it repeats a reported one after a loss."""
        answer = event.answer if isinstance(event, WorkerAnswered) else None
        found = self.evaluations.take(answer) if isinstance(answer, Prepared | Committed) else None
        if found is None or found.version <= self._evaluated:
            return []
        self._evaluated = found.version
        return [Milestone("evaluation", f"evaluation at version {found.version}: {found.text}")]


def morph_line(morph: MorphRecord) -> str:
    """Return why the shape changed, the shapes before and after, the change's time (with the next step), its cost."""
    parts = [
        f"{_named(names)} {word}{_injected(names, map(vm_of, morph.injected))}"
        for names, word in ((morph.lost_workers, "lost"), (morph.joined, "joined"), (morph.left, "left"))
        if names and (word == "lost" or morph.planned)
    ]
    number = morph.steps_redone
    cost = "no step lost" if not number else f"{number} step{'s' if number > 1 else ''} run again"
    took = "(no step since)" if morph.pause_ms is None else f"in {morph.pause_ms / 1e3:.3g} s, {cost}"
    why = ", ".join(parts) or morph.cause + (" (injected)" if morph.injected else "")
    return f"{why}; {morph.from_shape} -> {morph.to_shape or 'no shape'} {took}"


def _named(workers: Collection[str]) -> str:
    """Return their VMs by name, or only their number if there are many."""
    vms = list(dict.fromkeys(map(vm_of, workers)))
    return ", ".join(vms) if len(vms) <= MOST_NAMES else f"{len(vms)} VMs"


def _injected(workers: Collection[str], injected: Iterable[str]) -> str:
    vms = set(map(vm_of, workers))
    taken = vms.intersection(injected)
    return "" if not taken else " (injected)" if taken == vms else f" ({len(taken)} of {len(vms)} injected)"
