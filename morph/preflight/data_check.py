"""Read samples of the user's data set more than once: every stage reads for itself, so they must come out the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from morph.contract.errors import JobError
from morph.cutting.source.locate import definition_line
from morph.cutting.trial_run.trial import run_users_code
from morph.data.loader import DataField, check_map_style, data_of, forget_data, num_at_hand, read_samples, require_alike
from morph.data.streams import Iterated
from morph.jobs.job import Job, MapDataset

_NUM_SAMPLES = 8
_READ_AGAIN = (
    "is another value when the sample is read again",
    "random numbers from torch, numpy.random and random, which Morph seeds for each sample and epoch; nothing from a "
    "clock, the network, or a counter or generator that the data set keeps: make one from the index, as in "
    "numpy.random.default_rng(index)",
)
_BUILT_AGAIN = (
    "is another value when the data set is built again",
    "a data set that has the same contents wherever and whenever it is built",
)
Samples = list[dict[str, Tensor]]


def check_data(job: Job) -> None:
    """Read some samples of training and of evaluation twice, and once more from a data set that is built anew.

    Raises:
        JobError: they differ, which names the entry; or the data set fails by itself.
    """
    fields: tuple[DataField, ...] = ("dataset", "eval_data")
    for field in fields:
        if getattr(job, field) is not None:
            run_users_code(partial(_check, job, field), job, None, field)


def reading_warnings(job: Job) -> tuple[str, ...]:
    """Say what it costs that a data set can only be read from its beginning."""
    fields: tuple[DataField, ...] = ("dataset", "eval_data")
    return tuple(
        f"{field} is a stream without shards: each worker and data worker that needs samples reads all of it, and "
        "after a restart it is read from its beginning (docs/training.md, Data in shards)"
        for field in fields
        if getattr(job, field) is not None and isinstance(getattr(data_of(job, field), "source", None), Iterated)
    )


def _check(job: Job, field: DataField) -> None:
    dataset = data_of(job, field)
    check_map_style(dataset, field)
    count, line = num_at_hand(dataset), definition_line(type(dataset).__getitem__)
    indices = sorted({count * part // _NUM_SAMPLES for part in range(_NUM_SAMPLES)})
    read = partial(_read, seed=job.seed)
    first = [{key: value.clone() for key, value in sample.items()} for sample in read(dataset, indices)]
    again = read(dataset, indices[::-1])[::-1]
    del dataset  # two of them may not fit
    forget_data(job, field)
    anew = read(data_of(job, field), indices)
    for found, (problem, allowed), source in (
        (again, _READ_AGAIN, line),
        (anew, _BUILT_AGAIN, definition_line(getattr(job, field))),
    ):
        for index, one, other in zip(indices, first, found, strict=True):
            for key in sorted(one.keys() | other.keys()):
                if key not in one or key not in other or not _same(one[key], other[key]):
                    raise JobError(problem, source=source, field=f"{field}()[{index}][{key!r}]", allowed=allowed)
    for index, sample in zip(indices, first, strict=True):
        require_alike(sample, first[0], f"{field}()[{index}]", "as in item 0; pad or crop samples in the data set")


def _read(dataset: MapDataset, indices: Sequence[int], seed: int) -> Samples:
    return read_samples(dataset, seed, [(0, index) for index in indices])


def _same(one: Tensor, other: Tensor) -> bool:
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True
