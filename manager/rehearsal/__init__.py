"""Rehearsals: a job's shape run by emulated workers under the real manager, held against the simulator."""

from __future__ import annotations

from manager.rehearsal.planning import Planned, plan_rehearsal
from manager.rehearsal.run import Rehearsed, rehearse, run_facts
from manager.rehearsal.spec import RehearsalSpec

__all__ = ["Planned", "RehearsalSpec", "Rehearsed", "plan_rehearsal", "rehearse", "run_facts"]
