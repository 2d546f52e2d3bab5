"""Mini-batch simulator, planner, spot traces and synthetic profiles. Pure: no torch, Ray, sockets or clock.

``plan`` finds the best P x D for a number of GPUs or a pool of several types, ``plan_table`` and ``plan_frame`` for
every number up to one, ``pool_plan_table`` for every pool up to one,
``simulate`` simulates one shape and ``simulate_plan`` a given plan; a ``PlanRequest`` sets the conditions.
"""

from __future__ import annotations

from simulator.costs.answer import Simulation
from simulator.inputs.request import PlanRequest
from simulator.inputs.synthetic import synthetic_profile
from simulator.search.choice import PlanChoice
from simulator.search.mini_batch import simulate, simulate_plan
from simulator.search.planner import pipeline_times, plan, plan_frame, plan_table, pool_plan_table
from simulator.traces.model import TraceModel, spot_model

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
