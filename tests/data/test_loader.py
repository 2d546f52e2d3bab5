from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from morph.contract.errors import JobError
from morph.data import MicroBatchLoader, sample_indices


class Counting:
    def __init__(self, make: Callable[[int], Any], size: int = 20) -> None:
        self.make, self.size, self.reads = make, size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        return self.make(index)


def item(index: int) -> dict[str, Tensor]:
    return {"x": torch.full((3,), float(index)), "y": torch.tensor(index)}


def test_micro_batches_are_slices_of_the_mini_batch() -> None:
    loader = MicroBatchLoader(Counting(item), seed=4, batch_size=6, micro_batch_size=2)
    for step in (0, 7):
        loaded = [loader.load(step, micro_batch, ["y"])["y"] for micro_batch in range(3)]
        assert torch.cat(loaded).tolist() == sample_indices(4, step, 6, 20).tolist()


def test_only_wanted_entries_are_stacked() -> None:
    loader = MicroBatchLoader(Counting(item), seed=0, batch_size=6, micro_batch_size=2)
    assert loader.load(0, 0, []) == {}
    batch = loader.load(0, 0, ("x",))
    assert list(batch) == ["x"]
    assert batch["x"].shape == (2, 3)


def test_several_sections_read_a_sample_once() -> None:
    dataset = Counting(item)
    loader = MicroBatchLoader(dataset, seed=0, batch_size=6, micro_batch_size=2)
    first = loader.load(2, 1, ["x"])["x"]
    assert loader.load(2, 1, ["y", "x"])["x"] is first
    assert dataset.reads == 2


def test_old_micro_batches_are_forgotten_and_read_again() -> None:
    dataset = Counting(item)
    loader = MicroBatchLoader(dataset, seed=0, batch_size=2, micro_batch_size=2)
    first = loader.load(0, 0, ["x"])["x"]
    for step in range(1, 50):
        loader.load(step, 0, ["x"])
    assert torch.equal(loader.load(0, 0, ["x"])["x"], first)
    assert dataset.reads == 51 * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda index: torch.zeros(2), r"dataset\(\)\[\d+\]: is not a sample \(got 'Tensor'\)"),
        (lambda index: {"x": 3}, r"is not a sample \(got \"'x': int\"\)"),
        (lambda index: {"y": torch.zeros(1)}, r"'x': is missing in a sample; allowed: y"),
        (lambda index: {"x": torch.zeros(index + 1)}, r"'x': differs between samples"),
        (
            lambda index: {"x": torch.zeros(1, dtype=[torch.int64, torch.float32][index % 2])},
            r"int64.*float32|float32.*int64",
        ),
    ],
)
def test_items_of_another_kind_are_refused(make: Callable[[int], Any], message: str) -> None:
    loader = MicroBatchLoader(Counting(make), seed=0, batch_size=8, micro_batch_size=8)
    with pytest.raises(JobError, match=message):
        loader.load(0, 0, ["x"])


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(JobError, match="dataset: is empty"):
        MicroBatchLoader(Counting(item, size=0), seed=0, batch_size=8, micro_batch_size=8)
