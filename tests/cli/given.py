"""A folder with valid input for ``morph run``, into which each test puts one mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from manager.commands.run_view import run_view
from manager.engine.on_processes import process_vms
from manager.run.prepared import Inputs, prepared
from manager.run.train import train
from morph.cli.main import app
from morph.contract.profile import Profile

JOBS = """
import torch
from torch import nn
from torch.nn import functional

from morph import Job


class Samples:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "y": torch.zeros(4)}


class Lists(Samples):
    def __getitem__(self, index):
        return {1, 2}


class Numbers(Samples):
    def __getitem__(self, index):
        return {"x": object(), "y": 2.0}


class Drifting(Samples):
    def __init__(self):
        self.noise = torch.Generator().manual_seed(0)

    def __getitem__(self, index):
        return {"x": torch.rand(4, generator=self.noise), "y": torch.zeros(4)}


class Plain(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.second(self.first(x))


class Branching(Plain):
    def forward(self, x):
        if x.sum() > 0:  # HERE
            return self.first(x)
        return self.second(x)


class Normed(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


class Extreme(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(4))

    def forward(self, x):
        x = self.first(x)
        self.largest.copy_(torch.maximum(self.largest, x.detach().amax(0)))
        return self.second(x)


def loss(model, batch):
    return functional.mse_loss(model(batch["x"]), batch["y"])


def sgd(parameters):
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


def make(model=Plain, dataset=Samples, batch_size=8, micro_batch_size=2, optimizer=sgd, lr_scheduler=None):
    return Job(name="small", model=model, loss=loss, dataset=dataset, optimizer=optimizer, batch_size=batch_size,
               micro_batch_size=micro_batch_size, num_sections=2, lr_scheduler=lr_scheduler)


good = make()
wide = make(model=lambda: Plain(6))
branching = make(model=Branching)
normed = make(model=Normed)
extreme = make(model=Extreme)
lists = make(dataset=Lists)
numbers = make(dataset=Numbers)
drifting = make(dataset=Drifting)
half = make(batch_size=4)
plateau = make(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
number = 3


def indivisible():
    return make(micro_batch_size=3)


def failing():
    raise ValueError("not today")
"""


def without_phases(stderr: str) -> list[str]:
    """Return the lines on standard error without progress reports, which depend on timing."""
    return [line for line in stderr.splitlines() if not line.endswith(" ...")]


@dataclass(frozen=True)
class Given:
    """A folder with a valid job, profile and cluster file; the run directory that ``run`` names does not exist yet."""

    folder: Path
    profile: Profile

    @property
    def job(self) -> str:
        return f"{self.folder / 'jobs.py'}:good"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def edited(self, edit: Callable[[dict[str, Any]], object]) -> Path:
        data = json.loads(self.profile.model_dump_json())
        edit(data)
        return self.file("edited.json", json.dumps(data))

    def refused(self, *arguments: object) -> str:
        """Return the one line with which the command line refuses, and check that nothing else happened."""
        before = sorted(self.folder.rglob("*"))
        children = psutil.Process().children(recursive=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process_vms, "HOST", "token")  # this command would import torch although there are no workers
            result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="morph")
        assert result.exit_code == 2, (result.output, result.exception)
        lines = without_phases(result.stderr)
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("error: ")
        assert result.stdout == ""
        new = {path for path in self.folder.rglob("*") if "__pycache__" not in path.parts} - set(before)
        assert new == set(), f"something was written: {new}"
        assert psutil.Process().children(recursive=True) == children, "something was started"
        return lines[0].removeprefix("error: ")

    def run_refused(self, *more: object, job: str | None = None, profile: Path | None = None) -> str:
        """Return the line with which ``morph run`` refuses; options in ``more`` override the usual ones."""
        return self.refused(
            *("run", job or self.job, "--profile", profile or self.folder / "profile.json"),
            *("--cluster", self.folder / "cluster.yaml", "--run-dir", self.run_dir, *more),
        )


class Begun(Exception):
    """Raised instead of starting a session."""


def begin(inputs: Inputs, *, take_over: bool = False) -> None:
    """Prepare a run, and begin to train it; for tests with the fixture ``sessions``."""
    with pytest.raises(Begun), prepared(inputs, take_over=take_over) as run:
        train(run, lambda live: run_view(live, plain=True))
