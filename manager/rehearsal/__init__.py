"""Rehearsals: emulated workers run a job's shape under the real manager, for comparison with the simulator."""

from __future__ import annotations

from manager.rehearsal.planning import Planned, plan_rehearsal
from manager.rehearsal.run import Rehearsed, rehearse, run_facts
from manager.rehearsal.spec import RehearsalSpec

__all__ = ["Planned", "RehearsalSpec", "Rehearsed", "plan_rehearsal", "rehearse", "run_facts"]
