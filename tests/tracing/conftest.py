"""A small model of four equal blocks, and jobs around it that differ in the optimizer or the loss."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph import Job
from morph.cutting import ExportedJob, export_job
from morph.tracing import DependencyReport, check_dependencies

WIDTH = 8
NUM_SECTIONS = 3
Named = Iterable[tuple[str, nn.Parameter]]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = functional.gelu(block(x))
        return x


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.linspace(-1, 1, WIDTH) * (index + 1)}


def mean_square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def adamw(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)


def make_job(**fields: Any) -> Job:
    values: dict[str, Any] = {
        "name": "chain",
        "model": Chain,
        "loss": mean_square,
        "dataset": Samples,
        "optimizer": adamw,
        "batch_size": 4,
        "micro_batch_size": 2,
        "num_sections": NUM_SECTIONS,
        **fields,
    }
    return Job(**values)


def trace(job: Job, **options: Any) -> DependencyReport:
    """Check a job; jobs that differ only in the optimizer share one export."""
    same = (job.model, job.loss, job.dataset) == (Chain, mean_square, Samples)
    return check_dependencies(job, exported=_chain() if same else None, **options)


@cache
def _chain() -> ExportedJob:
    return export_job(make_job())


def optimizer_of(kind: type[torch.optim.Optimizer], **settings: Any) -> Callable[[Named], torch.optim.Optimizer]:
    def build(named: Named) -> torch.optim.Optimizer:
        return kind([parameter for _, parameter in named], **settings)

    return build


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tools() -> ModuleType:
    """This module's functions."""
    return sys.modules[__name__]
