"""Derives the morphs of a run from its events and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from manager.controller.state.actions import EndWorker, ReasonCode, SendCommit, SendStep
from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import Event, WorkerAnswered, WorkerLost
from manager.controller.state.state import Phase
from manager.journal.records import PREEMPTION_FAILED, PREEMPTION_INJECTED, VM_KILLED, DecisionRecord, Fact
from manager.report.values import MorphRecord, SourceKind, SourceSum
from morph.contract.messages import Prepared, Reshaped, ReshapeOrder
from morph.contract.vm_names import vm_of

KINDS: tuple[SourceKind, ...] = ("keep", "peer", "ahead", "checkpoint", "initial")
STANDING = (Phase.ABORTING, Phase.WAITING, Phase.HOLDING, Phase.RESTING)
GENERATION_LOST = (*STANDING, Phase.RESHAPING)


@dataclass
class MorphReader:
    """The open morph, and the finished ones.

    ``killed_s``: when the shell killed each VM. ``injected``: VMs preempted on purpose. ``version``: the last decided
    version.
    """

    killed_s: dict[str, float] = field(default_factory=dict)
    injected: set[str] = field(default_factory=set)
    over: list[MorphRecord] = field(default_factory=list)
    open: MorphRecord | None = None
    shape: str | None = None
    phase: Phase = Phase.STARTING
    generation: int = 0
    version: int = 0
    members: tuple[str, ...] = ()
    members_before: tuple[str, ...] = ()

    def all(self) -> tuple[MorphRecord, ...]:
        """Return every morph; a morph that is still open is the last."""
        return (*self.over, *((self._whole(self.open),) if self.open else ()))

    def take_fact(self, fact: Fact, time_s: float) -> None:
        """Process a fact from the shell about a VM's end."""
        if fact.worker is None:
            return
        if fact.name == VM_KILLED:
            self.killed_s[fact.worker] = time_s
        elif fact.name == PREEMPTION_INJECTED:
            self.injected.add(fact.worker)
        elif fact.name == PREEMPTION_FAILED:
            self.injected.discard(fact.worker)

    def end_session(self, version: int) -> None:
        """Record that the run was resumed in a new process, from a version: no morph of the old process is open."""
        self._close()
        self.injected.clear()  # VMs of a later session may have the same names
        self.shape, self.phase, self.generation, self.members, self.version = None, Phase.STARTING, 0, (), version

    def go_on(self, shape: str, members: Sequence[str]) -> None:
        """Record that a shape trains that was formed before the first line read here."""
        self.shape, self.members, self.phase = shape, tuple(members), Phase.TRAINING

    def take(self, config: ControllerConfig, event: Event, record: DecisionRecord, time_s: float) -> None:
        """Process a decision and the event that led to it."""
        answer = event.answer if isinstance(event, WorkerAnswered) else None
        if isinstance(answer, Reshaped):
            self._reshaped(answer)
        elif isinstance(answer, Prepared) and record.version == self.version + 1:
            self.version = record.version
            self._resumed(time_s)
        self._decided(config, event, record, time_s)
        self.version = record.version

    def _resumed(self, time_s: float) -> None:
        """Record that a step is decided: the open morph, if any, is over."""
        if self.open is not None and self.open.reformed_at_s is not None:
            self._change(resumed_at_s=time_s)
            self._close()

    def _reshaped(self, answer: Reshaped) -> None:
        """Record how long one member took, if it is in the present generation."""
        if self.open is not None and answer.generation == self.generation:
            self._change(
                groups_s=max(self.open.groups_s, answer.groups_s),
                state_s=max(self.open.state_s, answer.state_s),
                received_bytes=self.open.received_bytes + answer.received_bytes,
            )

    def _decided(self, config: ControllerConfig, event: Event, record: DecisionRecord, time_s: float) -> None:
        spare = record.reason.code is ReasonCode.WORKER_REMOVED and record.phase is not Phase.WAITING
        lost = () if spare else lost_by(event, record)
        formed_before = self.phase in (Phase.RESHAPING, Phase.TRAINING, Phase.COMMITTING)
        leaves = record.phase in STANDING or record.reshape is not None
        if self.open is None and self.shape is not None and formed_before and leaves:
            planned = isinstance(event, WorkerAnswered) and isinstance(event.answer, Prepared)
            self.open = _opened(record, self.version, time_s, self.shape, planned)
            self.members_before = self.members
        if self.open is not None and lost:
            self._add_lost(lost)
        if record.reshape is not None:
            self._formed(config, record.reshape)
        if self.open is not None and record.phase is Phase.RESTING:
            self._change(reformed_at_s=None)  # no shape writes it
        elif self.open is not None and any(isinstance(action, SendStep | SendCommit) for action in record.actions):
            if self.open.reformed_at_s is None:
                self._change(reformed_at_s=time_s)
        elif self.open is not None and record.phase in GENERATION_LOST:
            self._change(reformed_at_s=None)
        self.phase, self.generation = record.phase, record.generation

    def _add_lost(self, lost: tuple[str, ...]) -> None:
        assert self.open is not None
        first_s = min((self.killed_s[worker] for worker in lost if worker in self.killed_s), default=None)
        known_s = self.open.killed_at_s
        earliest = min((value for value in (first_s, known_s) if value is not None), default=None)
        extended = f"{self.open.cause}; {', '.join(lost)} lost too"
        cause = extended if self.open.planned or self.open.lost_workers else self.open.cause
        self._change(lost_workers=(*self.open.lost_workers, *lost), killed_at_s=earliest, planned=False, cause=cause)

    def _formed(self, config: ControllerConfig, order: ReshapeOrder) -> None:
        self.shape, self.members = order.plan.shape, tuple(slot.worker for slot in order.slots)
        if self.open is None:
            return
        known = {*self.members, *self.open.lost_workers}
        sums = {}
        for kind in KINDS:
            units = [source.unit for source in order.sources if source.kind == kind]
            if units:
                sums[kind] = SourceSum(count=len(units), size_bytes=sum(config.unit_bytes[unit] for unit in units))
        self._change(
            num_generations=self.open.num_generations + 1,
            to_shape=order.plan.shape,
            joined=tuple(worker for worker in self.members if worker not in self.members_before),
            left=tuple(worker for worker in self.members_before if worker not in known),
            steps_redone=max(0, self.open.version - order.version),
            sources=sums,
            groups_s=0.0,
            state_s=0.0,
            received_bytes=0,
        )

    def _change(self, **fields: object) -> None:
        assert self.open is not None
        self.open = self.open.model_copy(update=fields)

    def _close(self) -> None:
        if self.open is not None:
            self.over.append(self._whole(self.open))
        self.open = None

    def _whole(self, morph: MorphRecord) -> MorphRecord:
        injected = tuple(worker for worker in (*morph.lost_workers, *morph.left) if vm_of(worker) in self.injected)
        return morph.model_copy(update={"injected": injected})


def lost_by(event: Event, record: DecisionRecord) -> tuple[str, ...]:
    """Return the workers that a decision wrote off."""
    if isinstance(event, WorkerLost) and record.reason.code not in (ReasonCode.IGNORED, ReasonCode.NODE_ABSENT):
        return event.workers
    return tuple(action.worker for action in record.actions if isinstance(action, EndWorker))


def _opened(record: DecisionRecord, version: int, time_s: float, shape: str, planned: bool) -> MorphRecord:
    return MorphRecord(
        planned=planned,
        cause=_cause(record.reason.sentence, planned),
        detected_at_s=time_s,
        from_shape=shape,
        version=version,
    )


def _cause(sentence: str, planned: bool) -> str:
    """Return a decision's reason for leaving a shape; for a planned change, the clause after the decided step."""
    clauses = sentence.split("; ")
    return clauses[0] if not planned or len(clauses) == 1 else clauses[1].partition(", ")[0]
