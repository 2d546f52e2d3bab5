"""Items of any nesting become named entries and come back nested; orders are functions of seed and epoch."""

from __future__ import annotations

from collections import Counter, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from transformers import BatchEncoding

from morph.contract.errors import JobError
from morph.data import Packed, document_mask
from morph.data.batches import Recipe
from morph.data.order import AGAIN, EpochOrder, grouped, stratified, weighted
from morph.data.packing import packs

Pair = namedtuple("Pair", "left right")


@dataclass
class Item:
    nest: Any
    flag: bool


def nest_of(index: int) -> dict[str, Any]:
    return {
        "a": torch.arange(3) + index,
        "b": (np.full((2, 2), index, dtype=np.float32), [np.float32(0.5), index]),
        "pair": Pair(1.5 * index, index % 2 == 0),
        "text": f"sample {index}",
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict | BatchEncoding):
        return type(one) is type(other) and list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        kinds = {type(one), type(other)}
        return (len(kinds) == 1 or kinds == {tuple, list}) and all(
            map(equal, one, other)
        )  # torch's tuples become lists
    return bool(one == other)


def batch(items: list[Any], **options: Any) -> Any:
    return Recipe(**options).batch(items, [(0, index) for index in range(len(items))], "dataset()")


def test_items_are_stacked_as_torch_does_it() -> None:
    items = [nest_of(index) for index in range(3)]
    found = batch(items)
    assert list(found.entries) == ["a", "b.0", "b.1.0", "b.1.1", "pair.left", "pair.right"]
    assert equal(found.form.build(found.entries, found.texts), default_collate(items))


def test_dataclasses_and_mappings_keep_their_types() -> None:
    found = batch([Item(BatchEncoding({"ids": np.arange(4)}), flag=True)] * 2)
    made = found.form.build(found.entries)
    assert isinstance(made, Item)
    assert isinstance(made.nest, BatchEncoding)
    assert made.nest["ids"].shape == (2, 4)
    assert made.flag.tolist() == [True, True]


def test_an_item_may_be_a_tensor() -> None:
    found = batch([torch.ones(2), torch.zeros(2)])
    assert found.form.build(found.entries).tolist() == [[1, 1], [0, 0]]


def test_text_stays_on_the_host_and_says_so_when_it_is_used() -> None:
    found = batch([nest_of(0)])
    text = found.form.build(found.entries)["text"]
    assert repr(text) == "<text 'text', on the host>"
    for use in (len, str, iter, lambda value: value[0], lambda value: value.upper()):
        with pytest.raises(JobError, match=r"batch entry 'text': is text, which stays on the host"):
            use(text)


def test_what_collate_fn_draws_depends_on_its_samples_alone() -> None:
    def masked(items: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack(items) * torch.rand(len(items), 2), "kept": None, "rate": 0.5, "names": ["a", "b"]}

    recipe, items = Recipe(seed=3, collate_fn=masked), [torch.ones(2), torch.ones(2)]
    one, again, other = (recipe.batch(items, [(0, 0), (epoch, 1)], "dataset()") for epoch in (0, 0, 1))
    assert torch.equal(one.entries["x"], again.entries["x"])
    assert not torch.equal(one.entries["x"], other.entries["x"])
    made = one.form.build(one.entries)
    assert (made["kept"], made["rate"]) == (None, 0.5)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ({"x": torch.ones(1, 9)}, r"collate_fn\(\)\['x'\]: returns an entry without one row for each of the 2 samples"),
        ({"x": torch.tensor(1)}, r"got '\(\)'"),
        ({"x": object()}, r"collate_fn\(\): is not a sample \(got \"'x': object\"\)"),
        ({"x": 3}, "holds no tensor"),
    ],
)
def test_invalid_batches_are_refused(returned: Any, told: str) -> None:
    with pytest.raises(JobError, match=told):
        batch([torch.ones(2)] * 2, collate_fn=lambda _: returned)


class Documents:
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": list(range(10 * index, 10 * index + SIZES[index])), "labels": np.arange(SIZES[index])}


SIZES = [3, 5, 2, 8, 1, 4, 6]


def test_documents_are_packed_tightly_and_each_once() -> None:
    found = packs(SIZES, 8)
    assert sorted(number for pack in found for number in pack) == list(range(7))
    assert [sum(SIZES[number] for number in pack) for pack in found] == [8, 8, 8, 5]
    many = np.random.default_rng(0).integers(1, 100, 2000).tolist()
    assert len(packs(many, 128)) <= 1.01 * sum(many) / 128 + 1


def test_a_packed_sample_says_where_documents_begin() -> None:
    data = Packed(Documents(), 8, SIZES, {"input_ids": 99})
    sample = data[packs(SIZES, 8).index([4, 5])]
    assert sample["input_ids"].tolist() == [40, 50, 51, 52, 53, 99, 99, 99]
    assert sample["labels"].tolist() == [-100, -100, 1, 2, 3, -100, -100, -100]
    assert sample["position_ids"].tolist() == [0, 0, 1, 2, 3, 0, 1, 2]
    assert {len(entry) for index in range(len(data)) for entry in data[index].values()} == {8}


def test_documents_do_not_see_each_other() -> None:
    places = torch.tensor([[0, 0, 1, 0, 1, 2]])
    block = torch.block_diag(torch.ones(1, 1), torch.ones(2, 2), torch.ones(3, 3)).bool()
    assert torch.equal(document_mask(places, causal=False)[0, 0], block)
    assert torch.equal(document_mask(places)[0, 0], block.tril())


@pytest.mark.parametrize(
    ("lengths", "length", "told"),
    [
        (SIZES, 7, r"longer than all buckets: number 3 \(got 8\); allowed: at most 7"),
        ([*SIZES[:6], 5], 8, r"dataset\[6\]\['input_ids'\]: cannot be packed \(got '\[6\]'\)"),
        (SIZES[:3], 8, "a whole number for each of the 7 samples"),
    ],
)
def test_documents_that_cannot_be_packed_are_refused(lengths: list[int], length: int, told: str) -> None:
    with pytest.raises(JobError, match=told):
        list(map(Packed(Documents(), length, lambda _: lengths).__getitem__, range(4)))


LABELS = [0] * 30 + [1] * 10


def epochs(sampler: Any, count: int = 3, size: int = 40) -> list[list[int]]:
    order = EpochOrder(range(size), 7, 8, sampler)
    found = [order.epoch(epoch).tolist() for epoch in range(count)]
    assert found == [EpochOrder(range(size), 7, 8, sampler).epoch(epoch).tolist() for epoch in range(count)]
    assert len({tuple(epoch) for epoch in found}) == count
    return found


def test_weighted_samples_come_in_proportion_to_their_weights() -> None:
    (drawn,) = epochs(weighted([1.0] * 10 + [0.0] * 10 + [3.0] * 20, 7000), 1)
    counts = Counter(drawn)
    assert len(drawn) == 7000
    assert not any(counts[index] for index in range(10, 20))
    assert sum(counts[index] for index in range(10)) / 7000 == pytest.approx(1 / 7, abs=0.02)


def test_strata_are_spread_over_mini_batches() -> None:
    for epoch in epochs(stratified(LABELS)):
        assert sorted(epoch) == list(range(40))
        assert all(1 <= sum(LABELS[index] for index in epoch[first : first + 8]) <= 3 for first in range(0, 40, 8))


def test_grouped_samples_share_mini_batches_with_their_like() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 43)
    for epoch in epochs(grouped(lambda data: lengths[: len(data)], 8), size=43):
        assert sorted(epoch) == list(range(43))
        spreads = [np.ptp(lengths[epoch[first : first + 8]]) for first in range(0, 40, 8)]
        assert np.mean(spreads) < 30


def test_a_sample_that_comes_again_draws_anew() -> None:
    order = EpochOrder(range(4), 0, 3, lambda dataset, seed, epoch: [1, 1, 3, 1])
    places = [place for step in range(3) for place in order.mini_batch(step)]
    assert places[:5] == [(0, 1), (AGAIN, 1), (0, 3), (2 * AGAIN, 1), (1, 1)]
    assert len(set(places)) == 9


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([], r"does not return an order \(got '\[0\] float64'\)"),
        ([0.5], "float64"),
        ([0, 4], r"got '0 to 4'\); allowed: whole numbers from 0 to 3"),
        ([[0]], r"\[1, 1\]"),
    ],
)
def test_invalid_orders_are_refused(found: Any, told: str) -> None:
    with pytest.raises(JobError, match=told):
        EpochOrder(range(4), 0, 2, lambda *_: found).mini_batch(0)


def test_epochs_of_different_sizes_are_refused() -> None:
    with pytest.raises(
        JobError, match=r"sampler\(dataset, seed, 1\): does not return an order .* allowed: 2 whole numbers"
    ):
        EpochOrder(range(4), 0, 4, lambda dataset, seed, epoch: range(2 + epoch)).mini_batch(0)
