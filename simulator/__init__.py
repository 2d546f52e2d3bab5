"""Mini-batch simulator, planner and generators of profiles and traces. Pure: no torch, Ray, sockets or clock.

``plan`` finds the best P x D for a number of GPUs, ``plan_table`` for every number up to one, ``simulate``
answers for one shape.
"""

from __future__ import annotations

from simulator.answer import Simulation
from simulator.mini_batch import simulate
from simulator.planner import PlanChoice, plan, plan_table
from simulator.synthetic import synthetic_profile
from simulator.trace_generator import generate_trace

__all__ = ["PlanChoice", "Simulation", "generate_trace", "plan", "plan_table", "simulate", "synthetic_profile"]
