"""Mini-batch simulator, planner and generators of profiles and traces. Pure: no torch, Ray, sockets or clock.

``plan`` finds the best P x D for a number of GPUs, ``plan_table`` and ``plan_frame`` for every number up to one,
``simulate`` answers for one shape; a ``PlanRequest`` says how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulator.answers.answer import Simulation
from simulator.generators.synthetic import synthetic_profile
from simulator.generators.trace_generator import generate_trace
from simulator.given.request import PlanRequest
from simulator.search.mini_batch import simulate
from simulator.search.planner import PlanChoice, plan, plan_table

if TYPE_CHECKING:
    from simulator.search.frames import plan_frame

__all__ = [
    "PlanChoice",
    "PlanRequest",
    "Simulation",
    "generate_trace",
    "plan",
    "plan_frame",
    "plan_table",
    "simulate",
    "synthetic_profile",
]


def __getattr__(name: str) -> Any:
    """``plan_frame`` imports pandas, which is slow, and few ask for it."""
    if name == "plan_frame":
        from simulator.search.frames import plan_frame

        return plan_frame
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
