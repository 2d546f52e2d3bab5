"""The loader of micro-batches, what samples draw, their order, and how data sets are recognised in a later run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from morph.contract.errors import JobError
from morph.contract.job_facts import DataFacts, JobFacts
from morph.data import MicroBatchLoader, data_of, sample_indices
from morph.data.batches import Recipe
from morph.data.evaluation import EvaluationLoader
from morph.data.loader import data_facts, rows_of
from morph.data.seeding import own_generators
from morph.jobs.changes import require_same
from tests.data.jobs import job_with


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
    assert dataset.reads == 2 + 1, "two samples, and sample 0, like which they must be"


def test_old_micro_batches_are_forgotten_and_read_again() -> None:
    dataset = Counting(item)
    loader = MicroBatchLoader(dataset, seed=0, batch_size=2, micro_batch_size=2)
    first = loader.load(0, 0, ["x"])["x"]
    for step in range(1, 50):
        loader.load(step, 0, ["x"])
    assert torch.equal(loader.load(0, 0, ["x"])["x"], first)
    assert dataset.reads == 51 * 2 + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda index: {1, 2}, r"dataset\(\)\[\d+\]: is not a sample \(got 'set'\)"),
        (lambda index: {"x": {"a": object()}}, r"is not a sample \(got \"'x.a': object\"\)"),
        (lambda index: {"x": list(range(65))}, r"is not a sample \(got \"'x': a list of 65 values\"\)"),
        (lambda index: {"x.a": 1, "x": {"a": 2}}, r"is not a sample \(got \"'x.a': two entries of this name\"\)"),
        (lambda index: {"x": "text alone"}, r"is not a sample: it holds no tensor"),
        (lambda index: {"y": torch.zeros(1)}, r"'x': is missing in a sample; allowed: y"),
        (
            lambda index: {"x": torch.zeros(index + 1)},
            r"dataset\(\)\[\d+\]\['x'\]: differs from the others \(got '\(\d+,\) torch.float32'\); "
            r"allowed: \(1,\) torch.float32, as in item 0; pad or crop",
        ),
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


def test_with_one_sample_to_a_micro_batch_another_length_is_refused_too() -> None:
    loader = MicroBatchLoader(
        Counting(lambda index: {"x": torch.zeros(4 + (index == 7))}), seed=0, batch_size=20, micro_batch_size=1
    )
    place = sample_indices(0, 0, 20, 20).tolist().index(7)
    assert loader.load(0, (place + 1) % 20, ["x"])["x"].shape == (1, 4)
    with pytest.raises(JobError, match=r"dataset\(\)\[7\]\['x'\]: differs from the others \(got '\(5,\)"):
        loader.load(0, place, ["x"])


def drawn(index: int) -> dict[str, Tensor]:
    """Return one number from each global generator."""
    numbers = [torch.randn(()).item(), np.random.normal(), random.random()]
    return {"x": torch.tensor([float(index), *numbers])}


def rows(dataset: Counting, seed: int, step: int, micro_batches: tuple[int, ...] = (0, 1)) -> dict[int, list[float]]:
    """Return the draws of each sample of a step of two micro-batches of two."""
    loader = MicroBatchLoader(dataset, seed=seed, batch_size=4, micro_batch_size=2)
    batches = [loader.load(step, micro_batch, ["x"])["x"] for micro_batch in micro_batches]
    return {int(row[0]): row[1:].tolist() for row in torch.cat(batches)}


def test_a_samples_draws_depend_on_seed_epoch_and_sample_alone() -> None:
    dataset = Counting(drawn, size=4)
    first = rows(dataset, 3, 0)
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    assert rows(Counting(drawn, size=4), 3, 0, (1, 0)) == first
    epochs = [first, rows(dataset, 3, 1), rows(dataset, 3, 2), rows(dataset, 4, 0)]
    every = [number for epoch in epochs for numbers in epoch.values() for number in numbers]
    assert len(every) == len(set(every)) == 4 * 4 * 3


def test_an_epoch_that_begins_inside_a_mini_batch_draws_anew() -> None:
    loader = MicroBatchLoader(Counting(drawn, size=2), seed=0, batch_size=4, micro_batch_size=4)
    x = loader.load(0, 0, ["x"])["x"]
    assert sorted(x[:, 0].tolist()) == [0.0, 0.0, 1.0, 1.0]
    assert len(set(x[:, 1].tolist())) == 4


def test_every_evaluation_draws_alike() -> None:
    loaders = [EvaluationLoader(Counting(drawn), 3, drawn(0), 2, None) for _ in range(2)]
    assert torch.equal(loaders[0].load(1, ["x"])["x"], loaders[1].load(1, ["x"])["x"])
    assert len(set(loaders[0].load(0, ["x"])["x"][:, 1].tolist())) == 2


def test_a_data_set_may_draw_while_it_is_built() -> None:
    def make() -> Counting:
        order = [torch.randperm(9), torch.tensor(np.random.permutation(9)), torch.tensor(random.sample(range(9), 9))]
        return Counting(lambda _: {"x": torch.stack(order)})

    def built(seed: int) -> torch.Tensor:
        return data_of(job_with(make, seed))[0]["x"]

    assert torch.equal(built(5), built(5))
    assert not torch.equal(built(5), built(6))


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), str(np.random.get_state()[1:3]), random.getstate()


def test_global_generators_are_left_alone_even_when_a_sample_fails() -> None:
    def fails(index: int) -> dict[str, Tensor]:
        drawn(index)
        raise OSError("gone")

    before = states()
    with pytest.raises(OSError, match="gone"):
        MicroBatchLoader(Counting(fails), seed=0, batch_size=2, micro_batch_size=2).load(0, 0, ["x"])
    MicroBatchLoader(Counting(drawn), seed=0, batch_size=2, micro_batch_size=2).load(0, 0, ["x"])
    assert states() == before


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_blocks_that_end_in_any_order_leave_the_generators_as_before(order: tuple[int, ...]) -> None:
    """Blocks of several threads overlap; nested ones end from the inside, and each outer one draws on."""
    before, blocks, inside = states(), [own_generators() for _ in order], []
    for number, block in enumerate(blocks):
        block.__enter__()(number)
        inside.append(states())
    for place in order:
        blocks[place].__exit__(None, None, None)
        if order == (3, 2, 1, 0) and place:
            assert states() == inside[place - 1]
    assert states() == before


def walk(seed: int, num_steps: int, batch_size: int, dataset_size: int) -> list[int]:
    return [int(i) for step in range(num_steps) for i in sample_indices(seed, step, batch_size, dataset_size)]


@pytest.mark.parametrize(("batch_size", "dataset_size"), [(4, 10), (5, 5), (7, 3), (1, 6), (16, 5)])
def test_every_sample_comes_once_per_epoch(batch_size: int, dataset_size: int) -> None:
    order = walk(3, 40, batch_size, dataset_size)
    for first in range(0, len(order) - dataset_size, dataset_size):
        assert sorted(order[first : first + dataset_size]) == list(range(dataset_size))


def test_the_order_is_the_same_for_every_batch_size() -> None:
    assert walk(3, 30, 4, 11) == walk(3, 10, 12, 11) == walk(3, 120, 1, 11)


def test_a_step_needs_no_step_before_it() -> None:
    late = sample_indices(9, 1000, 8, 100)
    walk(9, 5, 8, 100)
    assert np.array_equal(late, sample_indices(9, 1000, 8, 100))
    assert late.dtype == np.int64


def test_epochs_and_seeds_differ() -> None:
    assert walk(0, 1, 50, 50) != walk(1, 1, 50, 50)
    order = walk(0, 2, 50, 50)
    assert order[:50] != order[50:]


def test_the_order_is_a_promise() -> None:
    assert walk(0, 1, 8, 8) == [6, 3, 1, 4, 5, 2, 7, 0]


LENGTH = 100


class Samples:
    def __init__(self, change: Callable[[int, dict[str, Tensor]], dict[str, Tensor]], length: int = LENGTH) -> None:
        self._change, self._length = change, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = {
            "tokens": torch.arange(4) + index,
            "scale": torch.tensor(0.5, dtype=torch.bfloat16),
            "none": torch.zeros(0, 3),
            "is_even": torch.tensor([index % 2 == 0]),
        }
        return self._change(index, item)


def same(_index: int, item: dict[str, Tensor]) -> dict[str, Tensor]:
    return item


def facts_of(dataset: Samples) -> JobFacts:
    return JobFacts(data=data_facts(job_with(lambda: dataset)))


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, numbers: list[int], fingerprint: str | None = None) -> None:
        self._numbers = numbers
        if fingerprint is not None:
            self.fingerprint = lambda: fingerprint

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(self._numbers[index])}


def facts_at_start(dataset: Numbers) -> JobFacts:
    return JobFacts(data=data_facts(job_with(lambda: dataset), rows_s=60.0))


@pytest.mark.parametrize("places", [(501,), (17, 802)], ids=["one is edited", "two are swapped"])
def test_a_start_finds_one_changed_sample_of_a_thousand(places: tuple[int, ...]) -> None:
    numbers = list(range(1000))
    began = facts_at_start(Numbers(numbers))
    require_same(facts_at_start(Numbers(numbers)), began, "job.py")
    for place, number in zip(places, places[::-1] if len(places) > 1 else (-1,), strict=True):
        numbers[place] = number
    with pytest.raises(
        JobError, match=r"dataset\(\), 1000 of its 1000 samples compared: is not the data that the run be"
    ):
        require_same(facts_at_start(Numbers(numbers)), began, "job.py")


def test_a_start_that_has_read_fewer_samples_compares_those_and_forgets_none() -> None:
    def rows(num: int, *changed: int) -> DataFacts:
        numbers = [-1 if index in changed else index for index in range(1000)]
        ticks = iter(range(num + 2))
        read = rows_of(Numbers(numbers), Recipe(), num + 0.5, lambda: float(next(ticks)))
        return DataFacts(num_samples=1000, rows=read)

    began, again = rows(600), rows(300)
    assert (max(began.rows), max(again.rows)) == (512, 256)
    assert began.most_compared(again) == 256
    assert again.joined(began).rows == began.rows
    assert rows(300, 0).joined(began).rows != began.rows, "the first sample is always read"
    assert rows(8, 1).rows == rows(8).rows, "sample 1 is not among the first eight that are read"


def test_what_a_data_set_says_of_itself_is_compared_everywhere() -> None:
    one, other = (facts_of(Numbers([1, 2], text)) for text in ("v1", "v2"))  # type: ignore[arg-type]  # any data set
    with pytest.raises(JobError, match=r"dataset\(\)\.fingerprint\(\): is not the data .*got 'v2'.*allowed: v1"):
        require_same(other, one, "job.py")
    assert facts_at_start(Numbers([1, 2], "v1")).data["dataset"].rows == {}

    class OfMolecules(Numbers):
        def fingerprint(self, molecule: str) -> str:
            return molecule

    assert facts_of(OfMolecules([1])).data["dataset"].fingerprint is None  # type: ignore[arg-type]  # any data set


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda index, item: {**item, "tokens": item["tokens"] + (index == 99)}, r"dataset\(\)\[99\]\['tokens'\]"),
        (lambda _, item: {**item, "tokens": item["tokens"].float()}, r"\[0\]\['tokens'\].*got 'float32 \[4\] sha256"),
        (lambda _, item: {**item, "tokens": item["tokens"].view(2, 2)}, r"got 'int64 \[2, 2\].*allowed: int64 \[4\]"),
        (lambda _, item: {**item, "scale": item["scale"] * 2}, r"\[0\]\['scale'\]"),
        (lambda _, item: {k: v for k, v in item.items() if k != "none"}, r"\[0\]\['none'\].*got 'absent'"),
        (lambda index, item: {**item, "more": torch.zeros(index)}, r"\[0\]\['more'\].*allowed: absent"),
    ],
)
def test_a_sample_that_differs_is_named_with_its_entry(
    change: Callable[[int, dict[str, Tensor]], dict[str, Tensor]], told: str
) -> None:
    began = facts_of(Samples(same))
    require_same(facts_of(Samples(same)), began, "job.py:job")
    with pytest.raises(JobError, match=told):
        require_same(facts_of(Samples(change)), began, "job.py:job")


@pytest.mark.parametrize("length", [0, 1, 5, 101])
def test_another_length_is_refused(length: int) -> None:
    found = facts_of(Samples(same, length))
    require_same(found, found, "job.py:job")
    with pytest.raises(JobError, match=rf"len\(dataset\(\)\): .*\(got {length}\); allowed: 100"):
        require_same(found, facts_of(Samples(same)), "job.py:job")


def test_missing_and_new_data_are_distinguished() -> None:
    found = facts_of(Samples(same))
    require_same(found, JobFacts(), "job.py:job")
    with pytest.raises(JobError, match=r"eval_data: .*got 'none'"):
        require_same(found, JobFacts(data={**found.data, "eval_data": found.data["dataset"]}), "job.py:job")


def test_a_data_set_that_draws_is_known_again() -> None:
    def crop(_index: int, item: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**item, "noise": torch.rand(4)}

    require_same(facts_of(Samples(crop)), facts_of(Samples(crop)), "job.py")


def test_a_differing_setting_is_named_and_an_unknown_one_is_ignored() -> None:
    began = JobFacts(settings={"seed": "1", "optimizer(a)[0]['old']": "2"})
    require_same(JobFacts(settings={"seed": "1", "optimizer(a)[0]['new']": "3"}), began, "job.py:job")
    with pytest.raises(
        JobError, match=r"job\.py:job: seed: is not the setting that the run began with \(got '2'\); allo"
    ):
        require_same(JobFacts(settings={"seed": "2"}), began, "job.py:job")
