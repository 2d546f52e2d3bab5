"""Turns the lines of a journal into events for people and programs: a run's shapes, their changes, losses and saves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from manager.controller.state.actions import Finish, NoteBadStep, ReasonCode, RequestNodes
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import CheckpointFound, Event, NodesGranted, WorkerAnswered
from manager.controller.state.state import Phase
from manager.journal.records import (
    DIED_WITH_MANAGER,
    OUTLIVES,
    SESSION_OVER,
    TOOK_OVER,
    TRACE_PLAYED,
    VM_KILLED,
    VM_UP,
    Fact,
    JournalLine,
)
from manager.report.figures import Seen
from manager.report.morphs import MorphReader, lost_by
from manager.report.values import MorphRecord
from morph.contract.base import Value
from morph.contract.messages import NamedSamples, Prepared
from morph.contract.vm_names import vm_of
from morph.words import counted, listed

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


ROUTINE = frozenset(
    {
        ReasonCode.AWAITING_ANSWERS,
        ReasonCode.STEP_STARTED,
        ReasonCode.STEP_DECIDED,
        ReasonCode.TIMES_NOTED,
        ReasonCode.UNITS_NOTED,
        ReasonCode.COMMIT_WAIT,
        ReasonCode.START_WAIT,
        ReasonCode.NOTHING_DUE,
        ReasonCode.IGNORED,
    }
)
INNER_FACTS = frozenset(
    {
        DIED_WITH_MANAGER,
        OUTLIVES,
        SESSION_OVER,
        TOOK_OVER,
        TRACE_PLAYED,
        VM_KILLED,
        VM_UP,
        "connection_broken",
        "job_code",
        "node_enrolled",
        "not_carried_out",
        "probe_failed",
        "vm_granted",
        "vm_released",
        "vm_requested",
    }
)


class Told(Value):
    """One thing that happened. ``code``: a reason's, a milestone's or a fact's name.

    ``inner``: it is about the manager's work, not the run's outcome; ``routine``: it is inner, and happens all the
    time.
    """

    sequence: int
    time_s: float
    code: str
    sentence: str
    phase: str | None = None
    generation: int | None = None
    version: int | None = None
    inner: bool = False
    routine: bool = False

    @property
    def line(self) -> str:
        """The event as text: time of day (UTC), version, code, sentence."""
        clock = datetime.fromtimestamp(self.time_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        at = "-" if self.version is None else str(self.version)
        return f"{clock}  {at:>6}  {self.code:<20}  {' | '.join(self.sentence.splitlines())}"


def told_of(line: JournalLine) -> Told:
    """Return a line as an event, with its reason's or fact's own sentence."""
    match line.says:
        case ControllerConfig():
            return Told(sequence=line.sequence, time_s=line.time_s, code="session", sentence="a manager starts")
        case Fact(name=name) as fact:
            sentence = ": ".join(text for text in (fact.worker, fact.detail) if text)
            inner = name in INNER_FACTS
            return Told(sequence=line.sequence, time_s=line.time_s, code=name, sentence=sentence, inner=inner)
        case decided:
            record, code = decided.record, decided.record.reason.code
            return Told(
                sequence=line.sequence,
                time_s=line.time_s,
                code=code.value,
                sentence=record.reason.sentence,
                phase=record.phase.value,
                generation=record.generation,
                version=record.version,
                inner=code not in AS_SAID,
                routine=code in ROUTINE and not record.reshape,
            )


@dataclass
class Milestones:
    """Derives from decisions what a user sees of them. ``evaluated``: the newest version whose evaluation was told."""

    evaluated: int = -1
    storage_refused: bool = False

    def take(self, seen: Seen, morphs: MorphReader) -> Iterator[tuple[str, str]]:
        """Process a decision that ``morphs`` has processed; yield code and sentence of each milestone.

        The code is a reason's, or shape, morph, lost, waiting, requested, granted, queued, evaluation.
        """
        event, record = seen.event, seen.record
        for morph in morphs.over:
            yield "morph", morph_line(morph)
        gone = lost_by(event, record)
        is_told = record.reason.code is ReasonCode.SETUP_FAILED  # the worker did not train yet
        if gone and not is_told and (morphs.open is None or not set(gone) <= set(morphs.open.lost_workers)):
            trains = morphs.shape is not None and morphs.open is None and record.phase is not Phase.ENDED
            goes_on = f"; {morphs.shape} goes on" if trains else ""
            yield "lost", f"{_named(gone)} lost{_injected(gone, morphs.injected)}{goes_on}"
        if seen.shape is None and record.reshape is not None:
            workers = counted(len(record.reshape.slots), "worker")
            yield "shape", f"{morphs.shape} on {workers}, from step {record.version}"
        if record.phase is Phase.WAITING and seen.phase is not Phase.WAITING:
            needed = counted(seen.config.fewest_workers, "worker is", "workers are")
            yield "waiting", f"training waits until {needed} ready"
        if isinstance(event, CheckpointFound):
            lost, newest = seen.version - record.version, event.manifest.version
            cost = f"; {counted(lost, 'more step is', 'more steps are')} run again" if lost > 0 else ""
            without = f"version {seen.version} is gone, and version {newest} is the newest whole version"
            sentences = event.passed_over or ((without,) if lost > 0 else ())
            yield from (("passed_over", sentence + cost) for sentence in sentences)
        for action in record.actions:
            if isinstance(action, NoteBadStep):
                yield "bad_step", action.sentence
            elif isinstance(action, RequestNodes):
                yield "requested", f"{counted(action.count, 'more VM')} requested from the provider"
        if seen.evaluation is not None and seen.evaluation.version > self.evaluated:  # else repeated after a loss
            self.evaluated = seen.evaluation.version
            yield "evaluation", f"evaluation at version {self.evaluated}: {seen.evaluation.text}"
        yield from _facts_of(event)
        code = record.reason.code
        saved_again = code is ReasonCode.CHECKPOINT_COMPLETE and self.storage_refused
        if code in AS_SAID or saved_again:
            ends = [action.sentence for action in record.actions if isinstance(action, Finish)]
            yield code.value, "; ".join(ends) or record.reason.sentence
        if code in (ReasonCode.CHECKPOINT_ABANDONED, ReasonCode.CHECKPOINT_COMPLETE):
            self.storage_refused = code is ReasonCode.CHECKPOINT_ABANDONED


def _facts_of(event: Event) -> Iterator[tuple[str, str]]:
    match event:
        case NodesGranted(waiting=waiting, detail=detail):
            if waiting:
                several = len({vm_of(worker) for worker in waiting}) > 1
                yield "queued", f"{_named(waiting)} {'wait' if several else 'waits'} in the queue"
            if detail:
                yield "granted", detail
        case WorkerAnswered(answer=Prepared(named=NamedSamples() as named)):
            numbers = listed(named.samples, MOST_SAMPLES)
            yield "samples", f"the samples of step {named.step}: {numbers}"


def morph_line(morph: MorphRecord) -> str:
    """Return why the shape changed, the shapes before and after, the change's time (with the next step), its cost."""
    parts = [
        f"{_named(names)} {word}{_injected(names, map(vm_of, morph.injected))}"
        for names, word in ((morph.lost_workers, "lost"), (morph.joined, "joined"), (morph.left, "left"))
        if names and (word == "lost" or morph.planned)
    ]
    cost = f"{counted(morph.steps_redone, 'step')} run again" if morph.steps_redone else "no step lost"
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
