"""Mini-batch simulator, planner, spot traces and synthetic profiles. Pure: no torch, Ray, sockets or clock.

``plan`` finds the best P x D for a number of GPUs or a pool of several types, ``plan_table`` and ``plan_frame`` for
every number up to one, ``pool_plan_table`` for every pool up to one,
``simulate`` simulates one shape and ``simulate_plan`` a given plan; a ``PlanRequest`` sets the conditions.
Each is loaded when it is first used, so that commands start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.costs.answer import Simulation
    from simulator.inputs.request import PlanRequest
    from simulator.inputs.synthetic import synthetic_profile
    from simulator.search.choice import PlanChoice
    from simulator.search.mini_batch import simulate, simulate_plan
    from simulator.search.planner import pipeline_times, plan, plan_frame, plan_table, pool_plan_table
    from simulator.traces.model import TraceModel, spot_model

_LATER = {
    "PlanChoice": "simulator.search.choice",
    "PlanRequest": "simulator.inputs.request",
    "Simulation": "simulator.costs.answer",
    "TraceModel": "simulator.traces.model",
    "pipeline_times": "simulator.search.planner",
    "plan": "simulator.search.planner",
    "plan_frame": "simulator.search.planner",
    "plan_table": "simulator.search.planner",
    "pool_plan_table": "simulator.search.planner",
    "simulate": "simulator.search.mini_batch",
    "simulate_plan": "simulator.search.mini_batch",
    "spot_model": "simulator.traces.model",
    "synthetic_profile": "simulator.inputs.synthetic",
}

__all__ = [
    "PlanChoice",
    "PlanRequest",
    "Simulation",
    "TraceModel",
    "pipeline_times",
    "plan",
    "plan_frame",
    "plan_table",
    "pool_plan_table",
    "simulate",
    "simulate_plan",
    "spot_model",
    "synthetic_profile",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value
