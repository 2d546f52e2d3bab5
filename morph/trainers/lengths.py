"""Fields of a job whose batches are as long as their longest sample, derived from a loader's samples and collator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from morph.contract.errors import JobError
from morph.data.batches import ALONE, Entries, flat_sample
from morph.data.lengths import padding_of
from morph.data.seeding import own_generators

NUM_EXAMPLES = 8
MOST_BUCKETS = 4
SMALLEST_BUCKET = 8
_SHOWN = 'lengths=lambda data: [len(sample["input_ids"]) for sample in data], buckets=(128, 512)'


@dataclass(frozen=True)
class JobCall:
    """The call from which a job is made, as a user begins it (``morph.hf.job(trainer``).

    ``field``: the collator's name in errors; ``column``: returns the lengths in a data set's column, or None.
    """

    call: str
    field: str
    collator: Any
    column: Callable[[Any], Any] = lambda _data: None

    @property
    def multiple(self) -> int:
        """The number to whose multiples the collator rounds every length up."""
        return getattr(self.collator, "pad_to_multiple_of", None) or 1

    def refusal(self, allowed: str) -> JobError:
        """Return the error that names the collator."""
        name = getattr(self.collator, "__name__", type(self.collator).__name__)
        function = self.call.partition("(")[0]
        return JobError("cannot be honoured", source=function, field=self.field, value=name, allowed=allowed)


def fields_of_lengths(
    loader: DataLoader[Any], others: Sequence[Any], given: Mapping[str, Any], source: JobCall
) -> dict[str, Any]:
    """Return ``lengths``, ``buckets`` and ``padding``; nothing if all samples make batches of one length."""
    data, collate = loader.dataset, loader.collate_fn
    is_list = not isinstance(data, IterableDataset) and hasattr(data, "__getitem__")
    if not is_list or not {"dataset", "collate_fn"}.isdisjoint(given) or given.get("lengths", data) is None:
        return {}
    places = np.linspace(0, len(data) - 1, min(NUM_EXAMPLES, len(data))).astype(int).tolist()  # type: ignore[arg-type]
    samples = [data[place] for place in places]
    alone = [_collated(collate, [sample]) for sample in samples]
    varying = [name for name, one in alone[0].items() if len({made[name].shape for made in alone}) > 1]
    if not varying:
        return {}
    longest = [max(made[name].shape[1] for name in varying if made[name].dim() > 1) for made in alone]
    try:
        together = _collated(collate, samples)
    except (RuntimeError, ValueError) as error:
        raise source.refusal("one that pads samples of different lengths") from error
    if any(together[name].shape[0] != len(samples) for name in varying):
        raise source.refusal("one whose batches have a row for each sample; or morph.data.Packed as data set")
    lengths = given["lengths"] if "lengths" in given else _lengths_of(data, places, longest, varying, source)
    return {
        "lengths": lengths,
        "buckets": given.get("buckets") or _buckets([lengths(some) for some in (data, *others)], source.multiple),
        "padding": _padding(together, alone, varying),
    }


def _collated(collate: Any, samples: list[Any]) -> Entries:
    with own_generators(0):
        return flat_sample(collate(samples), "collate_fn()", collated=True).entries


def _lengths_of(
    data: Any, places: Sequence[int], longest: Sequence[int], varying: Sequence[str], source: JobCall
) -> Callable[[Any], NDArray[np.int64]]:
    """Return a function that returns the lengths of a data set's samples, from entries that vary."""
    held = flat_sample(data[places[0]], "dataset()[0]", collated=True).entries
    names = [name for name in varying if name in held and held[name].dim() > 0]
    multiple = source.multiple

    def rounded(sizes: Any) -> NDArray[np.int64]:
        return -(-np.asarray(sizes, dtype=np.int64) // multiple) * multiple

    def read(some: Any, numbers: Iterable[int]) -> NDArray[np.int64]:
        samples = (some[number] for number in numbers)
        return rounded([max(len(_entry(sample, name)) for name in names) for sample in samples])

    if not names or read(data, places).tolist() != list(longest):
        allowed = "one whose batches are as long as the samples; or give the length of each sample's row in a batch"
        raise source.refusal(f"{allowed}: {source.call}, {_SHOWN})")
    column = source.column(data)
    has_column = column is not None and rounded([column[place] for place in places]).tolist() == list(longest)
    kept: dict[int, NDArray[np.int64]] = {}

    def lengths(some: Any) -> NDArray[np.int64]:
        if id(some) not in kept:
            column = source.column(some) if has_column else None
            kept[id(some)] = read(some, range(len(some))) if column is None else rounded(column[:])
        return kept[id(some)]

    return lengths


def _entry(sample: Any, name: str) -> Any:
    """Return the entry of a sample at a path, in the notation of ``flat_sample``."""
    if name == ALONE and not isinstance(sample, Mapping):
        return sample
    if isinstance(sample, Mapping) and name in sample:
        return sample[name]
    for part in name.split("."):
        if isinstance(sample, Mapping):
            sample = sample[part]
        else:
            sample = sample[int(part)] if part.isdecimal() else getattr(sample, part)
    return sample


def _buckets(lengths: Sequence[Any], multiple: int) -> tuple[int, ...]:
    """Return up to three powers of two, each long enough for some sample, and then the longest length."""
    shortest, longest = (int(of([of(some) for some in lengths])) for of in (min, max))
    power = 1 << max(0, (longest - 1).bit_length() - 1)
    buckets = [longest]
    while len(buckets) < MOST_BUCKETS and power >= max(shortest, SMALLEST_BUCKET):
        if power % multiple == 0:
            buckets.append(power)
        power //= 2
    return tuple(buckets[::-1])


def _padding(together: Entries, alone: Sequence[Entries], varying: Sequence[str]) -> dict[str, float]:
    """Return the values with which a collator pads short rows, by entry, if they differ from Morph's defaults."""
    entries = {}
    for name in varying:
        number, own = min(((n, one[name][0]) for n, one in enumerate(alone)), key=lambda pair: pair[1].shape[0])
        row = together[name][number]
        value = _fill(row, own) if row.dim() == 1 and own.shape[0] < row.shape[0] else None
        if value is not None and value != padding_of(name, {}):
            entries[name] = value
    return entries


def _fill(row: Tensor, own: Tensor) -> float | None:
    """Return the value before or after a row's own entries. A collator may draw these entries anew in each batch."""
    size = own.shape[0]
    sides = [(row[size:], row[:size]), (row[:-size], row[-size:])]
    even = [bool((fill == fill[0]).all()) for fill, _ in sides]
    kept = [uniform and torch.equal(rest, own) for uniform, (_, rest) in zip(even, sides, strict=True)]
    side = next((index for marks in (kept, even) for index, mark in enumerate(marks) if mark), None)
    return None if side is None else sides[side][0][0].item()
