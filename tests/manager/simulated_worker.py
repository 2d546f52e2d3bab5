"""A simulated worker's own view of its job, and what may go wrong in a history."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulated_job import SUMMED

from manager.controller.state.actions import SendCommit, SendReshape, SendStep
from manager.controller.state.state import Phase
from manager.simulation.spot.sums import WorkerSums
from morph.contract.messages import Answer, FailureCause, ReshapeOrder

Order = SendReshape | SendStep | SendCommit
OrderKey = tuple[str, int, int, int]


@dataclass(frozen=True)
class Faults:
    """How often what goes wrong; probabilities unless named otherwise. Everything off by default."""

    num_devices: int = 1
    """of each VM, whose notice or loss is that of all of its workers"""
    death_per_order: float = 0.0
    deaths_after_s: tuple[tuple[float, int], ...] = ()
    deaths_in: tuple[tuple[Phase, int, int], ...] = ()
    """(phase, how often it is entered before, how many die at once then)"""
    joins_after_s: tuple[float, ...] = ()
    comeback: float = 0.0
    """a machine whose worker died is back soon, under another id"""
    notices_after_s: tuple[tuple[float, float | None], ...] = ()
    """(when a worker is noticed, after how long it is really taken; None: it is not)"""
    notice_withdrawn: float = 0.0
    silent_death: float = 0.0
    late_loss: float = 0.0
    doubled: float = 0.0
    lost_message: float = 0.0
    """to or from a worker"""
    late_message: float = 0.0
    """by up to 3 s, so that messages overtake each other"""
    broken_stream: float = 0.0
    """what is sent ahead breaks off, or cannot keep up"""
    order_error: float = 0.0
    """an order fails: at each step once, but for devices that are lost"""
    error_causes: tuple[FailureCause, ...] = ("job", "device", "memory")
    overflow: float = 0.0
    non_finite: float = 0.0
    """share of steps with a gradient that is not finite; which ones, and in which unit, depends on the step alone"""
    stuck: float = 0.0
    spurious_abort: float = 0.0
    write_failure: float = 0.0
    load_failure: float = 0.0
    """a checkpoint cannot be loaded: it is damaged where an older one is whole, else storage failed for a moment"""
    slow: float = 0.0
    """share of workers that compute 30 % slower, for a while"""
    refused: float = 0.0
    """requests for VMs: refused or granted in part"""
    unanswered: float = 0.0
    """requests for VMs: lost, or their grant is"""
    restarts_after_s: tuple[float, ...] = ()
    """a new manager takes over"""
    dies_before: str = ""
    """the kind of action that the manager writes down, and dies before it does it, the first time"""
    fresh_starts_after_s: tuple[float, ...] = ()
    """manager and workers are gone; the run is begun again from its newest checkpoint"""
    clock_jumps: tuple[tuple[float, float], ...] = ()
    """(when, by how many seconds the manager's clock jumps)"""
    stop_after_s: float | None = None
    quiet_after_s: float = 60.0


def order_key(action: Order) -> OrderKey:
    """Return what makes an order the same order when it comes again."""
    order = action.order
    if isinstance(action, SendStep):
        return action.kind, order.generation, action.order.step, action.order.attempt
    return action.kind, order.generation, action.order.version, 0


def sequence_of(key: OrderKey) -> tuple[int, int, int, int]:
    """Return what grows from one order of a worker to its next."""
    kind, generation, version, attempt = key
    return generation, ("send_reshape", "send_step", "send_commit").index(kind), version, attempt


@dataclass
class SimulatedWorker:
    """A worker's own view: its present order, the units it has with their version, and what it prepared."""

    host: str = ""
    started: bool = False
    alive: bool = True
    deaf: bool = False
    slow: bool = False
    lost_device: bool = False
    token: int = 0
    order: Order | None = None
    begun: OrderKey | None = None
    last: tuple[OrderKey, Answer] | None = None
    newest: tuple[int, int, int, int] = (0, 0, 0, 0)
    aborted: int = 0
    ahead_number: int = 0
    units: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    shape: ReshapeOrder | None = None
    stage_units: frozenset[str] = frozenset()
    prepared: int | None = None
    shared: dict[str, int] = field(default_factory=dict)
    """of units that it keeps for others: the step whose gradients it holds"""
    begun_sums: WorkerSums | None = None
    sums: WorkerSums = field(default_factory=lambda: WorkerSums(SUMMED))
    overflowed: bool = False
    non_finite: bool = False

    def has(self, unit: str, version: int) -> bool:
        """Whether it can give this unit at this version, applying what it prepared if need be."""
        if self.prepared is not None and self.prepared + 1 == version:
            return unit in self.stage_units or self.shared.get(unit) == self.prepared
        return version in (self.units.get(unit), self.received.get(unit))

    def apply(self) -> None:
        """Apply what it prepared, once, to the units of its stage."""
        assert self.prepared is not None
        self.units = {unit: held + 1 if unit in self.stage_units else held for unit, held in self.units.items()}
        self.prepared = None
        self.sums = WorkerSums(SUMMED)

    def forget(self) -> None:
        """Drop all state."""
        self.units, self.received, self.stage_units, self.prepared = {}, {}, frozenset(), None
        self.shared, self.begun_sums = {}, None
        self.sums = WorkerSums(SUMMED)
