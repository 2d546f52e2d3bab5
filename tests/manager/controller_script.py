"""A script that gives a controller one event after another."""

from __future__ import annotations

from collections.abc import Sequence

from simulated_cluster import TIMES
from simulated_job import UNITS, file_of, make_config

from manager.controller.decide import decide
from manager.controller.state.actions import Action, SendCommit, SendReshape, SendStep
from manager.controller.state.events import (
    Event,
    ManifestWritten,
    NodeAppeared,
    NodeFacts,
    Tick,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state.saves import Saving
from manager.controller.state.state import (
    ControllerState,
    Decision,
    Measured,
    Phase,
    Provisioning,
    StepProgress,
    Waits,
    initial_state,
)
from manager.controller.state.validate import validate
from morph.contract.decided import LossScale
from morph.contract.messages import Aborted, Committed, Prepared, Reshaped, UnitWritten, WorkerReady

SLICES = {"step": StepProgress, "saving": Saving, "waits": Waits, "provisioning": Provisioning, "measured": Measured}


def changed(state: ControllerState, **fields: object) -> ControllerState:
    """Return the state with some fields replaced, each in the part of the state that has it."""
    for name, kind in SLICES.items():
        own = {field: fields.pop(field) for field in kind.model_fields if field in fields}
        state = state.model_copy(update={name: getattr(state, name).model_copy(update=own)}) if own else state
    assert fields.keys() <= ControllerState.model_fields.keys(), fields
    return state.model_copy(update=fields)


class Script:
    """A controller and its last reason; time advances by a tenth of a second with each event."""

    def __init__(self, **fields: object) -> None:
        self.state: ControllerState = initial_state(make_config(**fields))
        self.now_s = 0.0
        self.last: Decision | None = None

    def tell(self, event: Event, at_s: float | None = None) -> tuple[Action, ...]:
        self.now_s = self.now_s + 0.1 if at_s is None else at_s
        self.last = decide(self.state, event, self.now_s)
        self.state = self.last.state
        validate(self.state)
        return self.last.actions

    def wake(self) -> tuple[Action, ...]:
        """Let time pass until a tick finds something to do; one after a wait that ended early only sets the next."""
        for _ in range(5):
            assert self.last.wake_at_s is not None
            wake_at_s = self.last.wake_at_s
            assert decide(self.state, Tick(), wake_at_s - 0.001).actions == ()
            actions = self.tell(Tick(), at_s=wake_at_s)
            if actions or self.code not in ("nothing_due", "start_wait"):
                return actions
        raise AssertionError("ticks find nothing to do")

    @property
    def code(self) -> str:
        return self.last.reason.code

    @property
    def sentence(self) -> str:
        return self.last.reason.sentence

    @property
    def members(self) -> list[str]:
        """The present members, by stage and replica."""
        return [slot.worker for slot in self.state.slots]

    def ready(self, *workers: str, node_type: str = "") -> tuple[Action, ...]:
        for worker in workers:
            self.tell(NodeAppeared(node=worker, facts=NodeFacts(node_type=node_type)))
        actions: tuple[Action, ...] = ()
        for worker in workers:
            actions = self.tell(WorkerAnswered(worker=worker, answer=WorkerReady(worker=worker, pid=1, setup_s=1)))
        return actions

    def reshaped(self, *workers: str, loss_scale: LossScale | None = None) -> tuple[Action, ...]:
        """Let workers (by default all busy ones) answer their reshape."""
        actions: tuple[Action, ...] = ()
        for worker in workers or self.busy:
            answer = Reshaped(
                worker=worker,
                generation=self.state.generation,
                groups_s=0,
                state_s=0,
                received_bytes=0,
                loss_scale=loss_scale,
            )
            actions = self.tell(WorkerAnswered(worker=worker, answer=answer))
        return actions

    def prepared(self, *workers: str, overflowed: bool = False) -> tuple[Action, ...]:
        """Let workers (by default all busy ones) answer their step."""
        actions: tuple[Action, ...] = ()
        for worker in workers or self.busy:
            actions = self.tell(WorkerAnswered(worker=worker, answer=self.prepared_answer(worker, overflowed)))
        return actions

    def prepared_with(self, worker: str, **facts: object) -> tuple[Action, ...]:
        """Let one worker answer its step, with these facts of its units."""
        answer = self.prepared_answer(worker).model_copy(update=facts)
        return self.tell(WorkerAnswered(worker=worker, answer=answer))

    def prepared_answer(self, worker: str, overflowed: bool = False) -> Prepared:
        return Prepared(
            worker=worker,
            generation=self.state.generation,
            step=self.state.version,
            attempt=self.state.step.attempt,
            overflowed=overflowed,
            times=TIMES,
        )

    def aborted(self, *workers: str, peer_lost: bool = False) -> tuple[Action, ...]:
        """Let workers (by default all busy ones) give up their orders."""
        actions: tuple[Action, ...] = ()
        for worker in workers or self.busy:
            answer = Aborted(worker=worker, generation=self.state.generation, peer_lost=peer_lost)
            actions = self.tell(WorkerAnswered(worker=worker, answer=answer))
        return actions

    def committed(self) -> tuple[Action, ...]:
        """Let every busy worker answer its commit."""
        actions: tuple[Action, ...] = ()
        for worker in self.busy:
            answer = Committed(worker=worker, generation=self.state.generation, version=self.state.version)
            actions = self.tell(WorkerAnswered(worker=worker, answer=answer))
        return actions

    def written(self, version: int, units: Sequence[str] = tuple(UNITS)) -> tuple[Action, ...]:
        """Report that units of a checkpoint under way are on storage, each by its writer."""
        actions: tuple[Action, ...] = ()
        writers = next(one.writers for one in self.state.saving.under_way if one.version == version)
        for writer in dict.fromkeys(writers[unit] for unit in units):
            entries = tuple(unit_written(writer, version, unit) for unit in units if writers[unit] == writer)
            actions = self.tell(UnitsWritten(worker=writer, written=entries))
        return actions

    def saved(self, version: int) -> tuple[Action, ...]:
        """Bring a complete checkpoint to storage."""
        self.written(version)
        return self.tell(ManifestWritten(version=version))

    @property
    def busy(self) -> list[str]:
        return [worker for worker in self.state.workers if worker in self.state.step.awaited]


def unit_written(worker: str, version: int, unit: str) -> UnitWritten:
    """Return a worker's report about a unit's file."""
    return UnitWritten(worker=worker, version=version, unit=unit, file=file_of(unit), size_bytes=1, sha256="0" * 64)


def receivers(actions: Sequence[Action], kind: type[SendReshape] | type[SendStep] | type[SendCommit]) -> list[str]:
    return sorted(action.worker for action in actions if isinstance(action, kind))


def formed(num_workers: int, **fields: object) -> Script:
    """Return a script in which workers n1, n2, ... have formed a shape, and have their first orders."""
    script = Script(**fields)
    script.ready(*(f"n{number + 1}" for number in range(num_workers)))
    script.reshaped()
    return script


def script_in(phase: Phase) -> Script:
    """Return a script whose controller is in this phase, with four VMs and two more that are starting."""
    script = Script(num_steps=2)
    if phase is Phase.STARTING:
        script.tell(NodeAppeared(node="n1"))
        return script
    script.ready("n1", "n2", "n3", "n4")
    if phase is not Phase.RESHAPING:
        script.reshaped()
    if phase in (Phase.COMMITTING, Phase.SEALING, Phase.ENDED):
        script.prepared()
        script.prepared()
    if phase in (Phase.SEALING, Phase.ENDED):
        script.committed()
        script.written(2)
    if phase is Phase.ENDED:
        script.tell(ManifestWritten(version=2))
    if phase is Phase.HOLDING:
        script.tell(NodeAppeared(node="n5"))
        script.tell(WorkerLost(worker="n1", cause="killed"))
        script.aborted()
    if phase is Phase.ABORTING:
        script.aborted("n1")
    if phase is Phase.RESTING:
        script.prepared()
        for _ in range(script.state.config.policy.max_fruitless_generations):
            script.aborted()
    if phase is Phase.WAITING:
        script.aborted("n1")
        for worker in ("n2", "n3", "n4"):
            script.tell(WorkerLost(worker=worker, cause="killed"))
    assert script.state.phase is phase
    return script
