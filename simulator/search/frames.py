"""Plans as pandas tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from morph.contract.plan import Plan
from morph.contract.profile import Profile
from simulator.given.request import PlanRequest
from simulator.search.objectives import usd_per_h_of
from simulator.search.planner import PlanChoice, plan_table

COLUMNS = (
    "num_gpus",
    "pipeline_depth",
    "num_replicas",
    "num_workers",
    "num_idle",
    "micro_batch_size",
    "examples_per_s",
    "examples_per_s_per_gpu",
    "mini_batch_s",
    "lower_bound_s",
    "peak_memory_bytes",
)


def plan_row(plan: Plan, num_gpus: int) -> dict[str, float | int]:
    """One plan for a number of GPUs; the keys are ``COLUMNS``."""
    expected = plan.expected
    values = (
        num_gpus,
        plan.pipeline_depth,
        plan.num_replicas,
        plan.num_workers,
        num_gpus - plan.num_workers,
        plan.micro_batch_size,
        expected.examples_per_s,
        expected.examples_per_s / num_gpus,
        expected.mini_batch_s,
        expected.lower_bound_s,
        expected.peak_memory_bytes,
    )
    return dict(zip(COLUMNS, values, strict=True))


def frame_of(rows: Iterable[Mapping[str, float | int]]) -> pd.DataFrame:
    """Rows as a table, with its columns even where there is no row."""
    listed = list(rows)
    return pd.DataFrame(listed) if listed else pd.DataFrame(columns=list(COLUMNS))


def choice_frame(choice: PlanChoice) -> pd.DataFrame:
    """The best shape and the runners-up, one row each; a further column has the value of another objective."""
    plans = (choice.best, *choice.runners_up)
    frame = frame_of(plan_row(plan, choice.num_gpus) for plan in plans)
    if choice.objective != "examples_per_s":
        frame[choice.objective] = choice.values
    return frame


def plan_frame(
    profile: Profile,
    max_gpus: int,
    request: PlanRequest = PlanRequest(),  # noqa: B008 (frozen)
    *,
    min_gpus: int = 1,
    **more: Any,
) -> pd.DataFrame:
    """The plan with most examples per second for every number of GPUs: :func:`simulator.plan_table` as a table.

    Columns: see ``COLUMNS``; with a price also usd_per_h and usd_per_1000_examples, for all G GPUs, idle ones too.
    """
    request = replace(request, **more)
    plans = plan_table(profile, max_gpus, request, min_gpus=min_gpus)
    frame = frame_of(plan_row(plan, num_gpus) for num_gpus, plan in plans.items())
    if request.usd_per_gpu_hour is not None:
        size = request.num_gpus_per_node or 1
        assert isinstance(size, int)
        usd_per_h = [usd_per_h_of(request.usd_per_gpu_hour, {size: 1}) / size * gpus for gpus in frame["num_gpus"]]
        frame["usd_per_h"] = usd_per_h
        frame["usd_per_1000_examples"] = frame["usd_per_h"] / 3600 / frame["examples_per_s"] * 1000
    return frame
