"""A job that consists only of its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from morph.jobs.job import Job


def job_with(dataset: Callable[[], Any], seed: int = 0) -> Job:
    return Job(
        name="data",
        model=lambda: torch.nn.Linear(3, 3),
        loss=lambda model, batch: model(batch["x"]).sum(),
        dataset=dataset,
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        batch_size=4,
        seed=seed,
    )
