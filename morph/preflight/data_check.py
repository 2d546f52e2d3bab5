"""Reads samples of the user's data set more than once: each stage reads for itself, so they must never change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from morph.contract.errors import JobError
from morph.cutting.source.locate import definition_line
from morph.cutting.trial_run.trial import run_users_code
from morph.data.batches import Recipe, require_alike
from morph.data.loader import (
    DataField,
    check_map_style,
    data_of,
    forget_data,
    lengths_of,
    num_at_hand,
    order_of,
    recipe_of,
)
from morph.data.streams import reading_warning
from morph.jobs.job import Job, MapDataset
from morph.words import counted

_NUM_SAMPLES = 8
_READ_AGAIN = (
    "has another value when the sample is read again",
    "random numbers from torch, numpy.random and random, which Morph seeds for each sample and epoch; nothing from a "
    "clock, the network, or a counter or generator that the data set keeps: make one from the index, as in "
    "numpy.random.default_rng(index)",
)
_BUILT_AGAIN = (
    "has another value when the data set is built again",
    "a data set that has the same contents wherever and whenever it is built",
)
_COLLATED_AGAIN = (
    "has another value when the same samples are collated again",
    "random numbers from torch, numpy.random and random, which Morph seeds for each micro-batch; no generator or "
    "counter that collate_fn keeps",
)


def check_data(job: Job) -> None:
    """Read some samples twice, and from a data set that is built anew; collate and order them twice."""
    fields: tuple[DataField, ...] = ("dataset", "eval_data")
    for field in fields:
        if getattr(job, field) is not None:
            run_users_code(partial(_check, job, field), job, None, field)
    if job.sampler is not None:
        run_users_code(partial(_check_order, job), job, None, "sampler")


def reading_warnings(job: Job) -> tuple[str, ...]:
    """Return warnings for data sets that can be read only from their beginning, which is slow."""
    fields: tuple[DataField, ...] = ("dataset", "eval_data")
    warnings = [reading_warning(data_of(job, field), field) for field in fields if getattr(job, field) is not None]
    return tuple(sentence for sentence in warnings if sentence is not None)


def epoch_notes(job: Job) -> tuple[str, ...]:
    """Return a sentence on the samples that do not fill an epoch's last step, unless they make a short step."""
    epochs = order_of(job).epochs
    if not epochs.num_left or epochs.end == "short":
        return ()
    lacking = counted(epochs.batch_size - epochs.num_left, "sample")
    does = f"its last step takes {lacking} from the next epoch"
    others = "'short' makes a smaller step, 'drop' leaves the rest out"
    if epochs.end == "drop":
        does = f"{counted(epochs.num_left, 'sample is', 'samples are')} left out of each"
        others = "'short' makes a smaller step of them, 'fill' fills it from the next epoch"
    size = f"an epoch of {epochs.num_samples} samples is not a multiple of batch_size {epochs.batch_size}"
    return (f"{size}: {does} (epoch_end={epochs.end!r}; {others})",)


def _check(job: Job, field: DataField) -> None:
    dataset, recipe = data_of(job, field), recipe_of(job)
    lengths_of(job, field)
    check_map_style(dataset, field)
    count, line = num_at_hand(dataset), definition_line(type(dataset).__getitem__)
    indices = sorted({count * part // _NUM_SAMPLES for part in range(_NUM_SAMPLES)})

    def read(data: MapDataset, wanted: Sequence[int]) -> list[dict[str, Tensor]]:
        samples = recipe.read(data, [(0, index) for index in wanted])
        flats = [recipe.flat(sample, f"{field}()[{index}]") for index, sample in zip(wanted, samples, strict=True)]
        return [{key: value.clone() for key, value in flat.entries.items()} for flat in flats]

    first = read(dataset, indices)
    again = read(dataset, indices[::-1])[::-1]
    if job.collate_fn is not None:
        run_users_code(partial(_check_collated, job, recipe, dataset, indices), job, None, "collate_fn")
    del dataset  # two data sets may not fit in memory
    forget_data(job, field)
    anew = read(data_of(job, field), indices)
    for found, (problem, allowed), source in (
        (again, _READ_AGAIN, line),
        (anew, _BUILT_AGAIN, definition_line(getattr(job, field))),
    ):
        for index, one, other in zip(indices, first, found, strict=True):
            for key in _differing(one, other):
                raise JobError(problem, source=source, field=f"{field}()[{index}][{key!r}]", allowed=allowed)
    if job.lengths is not None:
        run_users_code(partial(_check_lengths, job, field), job, None, "lengths")
    for index, sample in zip(indices, () if job.collate_fn or job.buckets else first, strict=False):
        require_alike(sample, first[0], f"{field}()[{index}]", "as in item 0; pad or crop samples in the data set")


def _check_collated(job: Job, recipe: Recipe, dataset: MapDataset, indices: Sequence[int]) -> None:
    places, line = [(0, index) for index in indices], definition_line(job.collate_fn)
    batch, other = (recipe.batch(recipe.read(dataset, places), places, "dataset()") for _ in range(2))
    for key in _differing(batch.entries, other.entries):
        problem, allowed = _COLLATED_AGAIN
        raise JobError(problem, source=line, field=f"collate_fn()[{key!r}]", allowed=allowed)
    first = recipe.batch(recipe.read(dataset, places[:1]), places[:1], "dataset()")
    if first.form != batch.form:
        raise JobError(
            "returns numbers or names that differ between batches",
            source=line,
            field="collate_fn",
            allowed="the same names and plain numbers in every batch; put values that differ into tensors",
        )


def _check_lengths(job: Job, field: DataField) -> None:
    """Compare lengths with those of the data set that was built anew since lengths were first read."""
    lengths, again = lengths_of(job, field), np.asarray(job.lengths(data_of(job, field)))  # type: ignore[misc]
    if not np.array_equal(lengths, again):  # type: ignore[arg-type]  # there are some
        raise JobError(
            "returns other lengths when the data set is built again",
            source=definition_line(job.lengths),
            field=f"lengths({field})",
            allowed="a length for each sample that depends only on the data set",
        )


def _check_order(job: Job) -> None:
    one, other = (order_of(job).epoch(0) for _ in range(2))
    if len(one) != len(other) or not bool((one == other).all()):
        raise JobError(
            "returns another order when it is called again",
            source=definition_line(job.sampler),
            field="sampler",
            allowed="numbers that depend only on the data set, seed, epoch and global random generators",
        )


def _differing(first: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    keys = sorted(first.keys() | other.keys())
    return [key for key in keys if key not in first or key not in other or not _same(first[key], other[key])]


def _same(first: Tensor, other: Tensor) -> bool:
    try:
        torch.testing.assert_close(first, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True
