"""Data that differs when it is read or built again is refused; the error names the entry and the remedy."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from morph import Job
from morph.contract.errors import JobError
from morph.cutting.trial_run.trial import example_batch
from morph.data import data_of
from morph.data.loader import data_facts
from morph.jobs.job import MapDataset
from morph.preflight.data_check import check_data
from morph.preflight.mean_loss import loss_warnings

WIDTH = 16


class Data:
    """Crops of rows, made by ``crop(index)``."""

    def __init__(self, crop: Callable[[int], Tensor]) -> None:
        self.crop = crop

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"kept": torch.arange(index, index + 4), "x": self.crop(index).float()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch["x"]), batch["x"])


def job(dataset: Callable[[], MapDataset], eval_data: Callable[[], MapDataset] | None = None) -> Job:
    return Job(
        name="crops",
        model=lambda: nn.Linear(4, 4),
        loss=loss,
        dataset=dataset,
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        batch_size=4,
        eval_data=eval_data,
        eval_every_steps=None if eval_data is None else 1,
    )


def kept_numpy_generator() -> Data:
    generator = np.random.default_rng(0)
    return Data(lambda index: torch.from_numpy(generator.random(4)) + index)


def kept_torch_generator() -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(lambda index: torch.rand(4, generator=generator) + index)


def counter() -> Data:
    count = itertools.count()
    return Data(lambda index: torch.full((4,), float(next(count) + index)))


def fresh_generator() -> Data:
    return Data(lambda index: torch.from_numpy(np.random.default_rng().random(4)) + index)


def in_place() -> Data:
    rows = torch.rand(20, 4)
    return Data(lambda index: rows[index].mul_(1.5))


def another_each_time() -> Data:
    entropy = np.random.default_rng().random()
    return Data(lambda index: torch.full((4,), index + entropy))


def sometimes_shorter() -> Data:
    count = itertools.count()
    return Data(lambda _: torch.zeros(4 + next(count) % 2))


def augmented() -> Data:
    rows = torch.rand(20, WIDTH)

    def crop(index: int) -> Tensor:
        start = int(torch.randint(0, WIDTH - 4, ())) if random.random() < 0.5 else np.random.randint(WIDTH - 4)
        return torch.cat([rows[index, start : start + 3], torch.tensor([float("nan")])])

    return Data(crop)


def own_generator_for_each_sample() -> Data:
    return Data(lambda index: torch.from_numpy(np.random.default_rng(index).random(4)))


READ = r"\['x'\]: has another value when the sample is read again; allowed: random numbers from torch, numpy.random"
BUILT = r"\['x'\]: has another value when the data set is built again; allowed: a data set that has the same contents"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (kept_numpy_generator, READ),
        (kept_torch_generator, READ),
        (counter, READ),
        (fresh_generator, READ),
        (in_place, READ),
        (sometimes_shorter, READ),
        (another_each_time, BUILT),
    ],
)
def test_data_that_comes_out_differently_is_refused(make: Callable[[], Data], problem: str) -> None:
    with pytest.raises(JobError, match=rf"test_data_trial.py:\d+: dataset\(\)\[\d+\]{problem}"):
        check_data(job(make))
    with pytest.raises(JobError, match=re.escape("eval_data()[") + rf"\d+\]{problem}"):
        check_data(job(augmented, make))


@pytest.mark.parametrize("make", [augmented, own_generator_for_each_sample])
def test_random_data_that_comes_out_the_same_is_taken(make: Callable[[], Data]) -> None:
    check_data(job(make, make))


def test_checks_build_a_data_set_twice_and_keep_one() -> None:
    built: list[Data] = []

    def make() -> Data:
        built.append(augmented())
        return built[-1]

    checked = job(make)
    example_batch(checked)
    check_data(checked)
    data_facts(checked)
    loss_warnings(checked)
    assert len(built) == 2
    assert data_of(checked) is built[-1]


def test_the_error_of_a_data_set_names_its_line() -> None:
    def fails(index: int) -> Tensor:
        if index > 3:
            raise OSError("no such shard")
        return torch.zeros(4)

    with pytest.raises(JobError, match=r"test_data_trial.py:\d+: dataset failed: OSError: no such shard"):
        check_data(job(lambda: Data(fails)))
