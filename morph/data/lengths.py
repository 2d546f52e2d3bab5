"""Assigns samples whose lengths vary to micro-batches, and pads them to one of a few declared lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from morph.contract.errors import wrong_job
from morph.data.order import EpochPlace

LABELS, IGNORED = "labels", -100
"""Entries of this name are padded with this value, which losses ignore, as in transformers."""


Size = tuple[int | None, int]
"""The padded length of a micro-batch, None if lengths do not vary, and its number of samples."""


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one micro-batch, in order; ``length``: their padded length, None if lengths do not vary."""

    places: tuple[EpochPlace, ...]
    length: int | None = None

    @property
    def size(self) -> Size:
        """Its length and number of samples."""
        return self.length, len(self.places)


def shares(micro_batches: Sequence[MicroBatch], size: int) -> tuple[float, ...]:
    """Return the samples of each micro-batch over m: its share in means over samples; empty if all are whole."""
    parts = tuple(len(each.places) / size for each in micro_batches)
    return () if all(share == 1 for share in parts) else parts


def divided(
    places: Sequence[EpochPlace],
    size: int,
    lengths: NDArray[np.int64] | None = None,
    buckets: Sequence[int] = (),
    *,
    by_length: bool = True,
) -> list[MicroBatch]:
    """Divide the samples of a mini-batch, or of an evaluation, among micro-batches, and return these.

    ``places`` are in the order of the data, and ``buckets``, the lengths to pad to, ascending. ``size`` is m, samples
    per micro-batch; one has fewer, if m does not divide them. With ``by_length``, samples are sorted by length, and
    each micro-batch is as long as the smallest bucket that holds its longest sample; otherwise samples keep their
    order. Micro-batches are numbered so that any range of them, such as those that a replica runs, has short and long
    ones in similar proportion. The result depends only on the samples and ``size``, so it is the same in every shape.
    """
    starts = range(0, len(places), size)
    if lengths is None:
        return [MicroBatch(tuple(places[start : start + size])) for start in starts]
    own = lengths[[index for _, index in places]]
    in_order = np.argsort(own, kind="stable") if by_length else np.arange(len(own))
    parts = [in_order[start : start + size] for start in starts]
    made = [
        MicroBatch(tuple(places[place] for place in part), buckets[int(np.searchsorted(buckets, own[part].max()))])
        for part in parts
    ]
    return [made[rank] for rank in _spread(len(made))]


@lru_cache(maxsize=8)
def _spread(count: int) -> tuple[int, ...]:
    """Return 0 .. count - 1 in an order in which every range is spread evenly: sorted by the reversed bits."""
    bits = max(1, (count - 1).bit_length())
    reversed_bits = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(count)]
    ranks = {value: rank for rank, value in enumerate(sorted(reversed_bits))}
    return tuple(ranks[value] for value in reversed_bits)


def checked_lengths(given: object, num_samples: int, buckets: Sequence[int], field: str) -> NDArray[np.int64]:
    """Return the lengths of a data set's samples, as int64 [samples]."""
    lengths = np.asarray(given)
    if lengths.shape != (num_samples,) or lengths.dtype.kind not in "iu" or lengths.min() < 0:
        raise wrong_job(
            f"lengths({field})",
            "does not return lengths",
            f"{list(lengths.shape)} {lengths.dtype}",
            f"a whole number for each of the {num_samples} samples",
        )
    longest = int(lengths.argmax())
    if lengths[longest] > buckets[-1]:
        raise wrong_job(
            f"lengths({field})",
            f"has a sample that is longer than all buckets: number {longest}",
            int(lengths[longest]),
            f"at most {buckets[-1]}; crop samples in the data set, or add a bucket",
        )
    return lengths.astype(np.int64)


def examples(lengths: NDArray[np.int64], count: int) -> list[int]:
    """Return the numbers of ``count`` samples of all lengths, from the shortest to the longest."""
    order = np.argsort(lengths, kind="stable")
    return sorted({int(order[part * (len(order) - 1) // max(1, count - 1)]) for part in range(count)})


@dataclass(frozen=True)
class Shape:
    """The form of one entry of a sample: its sizes, with None for a size that equals the micro-batch's length."""

    sizes: tuple[int | None, ...]
    dtype: torch.dtype

    def at(self, length: int | None) -> tuple[int, ...]:
        """Return the entry's sizes in a micro-batch of this length."""
        return tuple(size if size is not None else length or 0 for size in self.sizes)


def shapes_of(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Shape]:
    """Find which dimensions vary among samples; other differences are found when samples are loaded."""
    shapes = {}
    for name, first in samples[0].items():
        others = [sample[name] for sample in samples if name in sample and sample[name].dim() == first.dim()]
        sizes = [{other.shape[dim] for other in others} for dim in range(first.dim())]
        shapes[name] = Shape(tuple(next(iter(size)) if len(size) == 1 else None for size in sizes), first.dtype)
    return shapes


def pad(entry: Tensor, shape: Shape, length: int, value: float, *, rows: bool, field: str) -> Tensor:
    """Return an entry padded at its end to a length.

    ``rows``: whether the entry is of a batch, whose samples are the first dimension.
    """
    wanted = (*entry.shape[:1], *shape.at(length)) if rows else shape.at(length)
    fits = len(wanted) == entry.dim() and entry.dtype == shape.dtype
    sizes = zip(entry.shape[rows:], shape.sizes, strict=False)
    if not fits or any(size != declared if declared is not None else size > length for size, declared in sizes):
        allowed = ", ".join(f"up to {length}" if size is None else str(size) for size in shape.sizes)
        raise wrong_job(
            field,
            "is longer than its sample's length allows, or differs from the others",
            f"{tuple(entry.shape)} {entry.dtype}",
            f"({allowed}) {shape.dtype}" + (" for each sample" if rows else ""),
        )
    if entry.shape == wanted:
        return entry
    padded = entry.new_full(wanted, value)
    padded[tuple(slice(size) for size in entry.shape)] = entry
    return padded


def padding_of(name: str, padding: Mapping[str, float]) -> float:
    """Return the value with which an entry is padded."""
    default = IGNORED if name.rpartition(".")[2] == LABELS else 0
    return padding.get(name, default)
