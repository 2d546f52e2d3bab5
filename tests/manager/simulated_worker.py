"""A simulated worker's own view of its job, and what may go wrong in a history."""

from __future__ import annotations

from dataclasses import dataclass, field

from manager.controller.actions import SendCommit, SendReshape, SendStep
from manager.controller.state import Phase

Order = SendReshape | SendStep | SendCommit


@dataclass(frozen=True)
class Faults:
    """How often what goes wrong; probabilities unless named otherwise. Everything off by default."""

    death_per_order: float = 0.0
    deaths_after_s: tuple[tuple[float, int], ...] = ()
    deaths_in: tuple[tuple[Phase, int, int], ...] = ()
    """(phase, how often it is entered before, how many die at once then)"""
    joins_after_s: tuple[float, ...] = ()
    silent_death: float = 0.0
    late_loss: float = 0.0
    doubled: float = 0.0
    overflow: float = 0.0
    non_finite: float = 0.0
    """share of steps with a gradient that is not finite; which ones, and in which unit, depends on the step alone"""
    stuck: float = 0.0
    spurious_abort: float = 0.0
    write_failure: float = 0.0
    stop_after_s: float | None = None
    quiet_after_s: float = 60.0


@dataclass
class SimulatedWorker:
    """A worker's own view: its present order, the units it has with their version, and what it prepared."""

    alive: bool = True
    token: int = 0
    order: Order | None = None
    units: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    stage_units: frozenset[str] = frozenset()
    prepared: int | None = None
    overflowed: bool = False
    non_finite: bool = False

    def has(self, unit: str, version: int) -> bool:
        """Whether it can give this unit at this version, applying what it prepared if need be."""
        if self.prepared is not None and self.prepared + 1 == version:
            return unit in self.stage_units
        return version in (self.units.get(unit), self.received.get(unit))
