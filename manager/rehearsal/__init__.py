"""Rehearsals: emulated workers run a job's shape under the real manager, for comparison with the simulator."""

from __future__ import annotations

from manager.rehearsal.measurements import Rehearsal, Rehearsed
from manager.rehearsal.planning import Planned, plan_rehearsal
from manager.rehearsal.run import digest_of, rehearse, rehearse_changes, run_facts
from manager.rehearsal.spec import RehearsalSpec

__all__ = [
    "Planned",
    "Rehearsal",
    "RehearsalSpec",
    "Rehearsed",
    "digest_of",
    "plan_rehearsal",
    "rehearse",
    "rehearse_changes",
    "run_facts",
]
