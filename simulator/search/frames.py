"""Plans as pandas tables."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from morph.contract.plan import Plan

COLUMNS = (
    "num_gpus",
    "shape",
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


def plan_row(plan: Plan, num_gpus: int) -> dict[str, float | int | str]:
    """Return one plan for a number of GPUs as a row; the keys are ``COLUMNS``."""
    expected = plan.expected
    values = (
        num_gpus,
        plan.shape,
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


def plans_frame(plans: Iterable[tuple[int, Plan]], usd_per_gpu_h: float | None = None) -> pd.DataFrame:
    """Return plans as a table with the columns ``COLUMNS``, one row for each number of GPUs; with the price of one GPU,
    also with ``usd_per_h`` and ``usd_per_1000_examples``, which count idle GPUs, too.
    """
    rows = [plan_row(plan, num_gpus) for num_gpus, plan in plans]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    if usd_per_gpu_h is not None:
        frame["usd_per_h"] = usd_per_gpu_h * frame["num_gpus"]
        frame["usd_per_1000_examples"] = frame["usd_per_h"] / 3600 / frame["examples_per_s"] * 1000
    return frame
