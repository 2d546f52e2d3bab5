"""Data sets are known again by their length and some samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from morph.contract.errors import JobError
from morph.contract.job_facts import JobFacts
from morph.data.fingerprint import data_facts
from morph.jobs.changes import require_same
from tests.data.jobs import job_with

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


def test_data_that_is_missing_or_new_is_told_apart() -> None:
    found = facts_of(Samples(same))
    require_same(found, JobFacts(), "job.py:job")
    with pytest.raises(JobError, match=r"eval_data: .*got 'none'"):
        require_same(found, JobFacts(data={**found.data, "eval_data": found.data["dataset"]}), "job.py:job")


def test_a_data_set_that_draws_is_known_again() -> None:
    def crop(_index: int, item: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**item, "noise": torch.rand(4)}

    require_same(facts_of(Samples(crop)), facts_of(Samples(crop)), "job.py")


def test_a_setting_that_differs_is_named_and_one_that_only_one_side_knows_is_not_compared() -> None:
    began = JobFacts(settings={"seed": "1", "optimizer(a)[0]['old']": "2"})
    require_same(JobFacts(settings={"seed": "1", "optimizer(a)[0]['new']": "3"}), began, "job.py:job")
    with pytest.raises(
        JobError, match=r"job\.py:job: seed: is not the setting that the run began with \(got '2'\); allo"
    ):
        require_same(JobFacts(settings={"seed": "2"}), began, "job.py:job")
