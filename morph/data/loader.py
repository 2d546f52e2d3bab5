"""Load the batch entries of one micro-batch from the user's data set, which has a length and numbered items."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from morph.contract.errors import JobError
from morph.contract.job_facts import DataFacts, SampleFacts
from morph.data.order import sample_places
from morph.data.prefetch import DataWorkers
from morph.data.seeding import own_generators, seed_of
from morph.jobs.job import Job, MapDataset

DataField = Literal["dataset", "eval_data"]
_CACHED_MICRO_BATCHES = 8
_MOST_CACHED = 64
_BUILT = "_built_data"
"""The attribute of a job that holds its data sets."""


class MicroBatchLoader:
    """Loads micro-batch ``j`` of step ``t``: samples ``j*m .. (j+1)*m - 1`` of that mini-batch.

    The last few micro-batches are remembered, so that several sections of one stage load a sample once.

    Args:
        dataset: The data set.
        seed: The job's.
        batch_size: M.
        micro_batch_size: m.
        prefetcher: Reads what is expected. It is told what samples look like, so the first one is read now.

    Raises:
        JobError: something else than a data set, or a first sample that is none.
    """

    def __init__(
        self,
        dataset: MapDataset,
        seed: int,
        batch_size: int,
        micro_batch_size: int,
        prefetcher: DataWorkers | None = None,
    ) -> None:
        check_map_style(dataset, "dataset")
        self._dataset = dataset
        self._first: dict[str, Tensor] | None = None
        self._seed = seed
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._num_kept = _CACHED_MICRO_BATCHES
        self._samples: dict[tuple[int, int], list[dict[str, Tensor]]] = {}
        self._stacked: OrderedDict[tuple[int, int], dict[str, Tensor]] = OrderedDict()
        self._prefetcher = prefetcher
        self._expected: tuple[str, ...] = ()
        if prefetcher is not None:
            prefetcher.begin(self._first_sample(), micro_batch_size)

    def expect(
        self, places: Iterable[tuple[int, int]], keys: Iterable[str], over: Callable[[], bool], window: int
    ) -> None:
        """Have these micro-batches prefetched, if anything prefetches, and forget what was expected before.

        Args:
            places: Step and number of each, in the order in which they will be loaded.
            keys: The entries that will be wanted.
            over: Says that nobody waits for them any more.
            window: How many are in use at once: each is loaded again before its backward.
        """
        if self._prefetcher is None:
            return
        self._num_kept = min(max(_CACHED_MICRO_BATCHES, 2 * window), _MOST_CACHED)
        self._expected = tuple(sorted(keys))
        missing = [place for place in places if not self._stacked.get(place, {}).keys() >= set(self._expected)]
        batches = [(*place, self._expected) for place in missing if self._expected]
        self._prefetcher.expect(batches, self._samples_of, over)

    def load(self, step: int, micro_batch: int, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return the wanted entries, each [micro_batch_size, ...]. They are shared: do not write to them.

        Raises:
            JobError: when an item is not a dict of tensors, lacks a key, or differs in shape or dtype from item 0,
                for which the sections were made.
        """
        wanted = tuple(keys)
        if not wanted:
            return {}
        place = (step, micro_batch)
        stacked = self._remembered(place)
        if self._prefetcher is not None and not stacked.keys() >= set(wanted):
            stacked |= self._prefetcher.take((*place, self._expected))
        for key in wanted:
            if key not in stacked:
                stacked[key] = stack_entry(self._load_samples(place), key)
        return {key: stacked[key] for key in wanted}

    def _remembered(self, place: tuple[int, int]) -> dict[str, Tensor]:
        """The entries of a micro-batch that were stacked so far; those of others are let go in its favour."""
        stacked = self._stacked.setdefault(place, {})
        self._stacked.move_to_end(place)
        while len(self._stacked) > self._num_kept:
            oldest, _ = self._stacked.popitem(last=False)
            self._samples.pop(oldest, None)
        return stacked

    def _load_samples(self, place: tuple[int, int]) -> list[dict[str, Tensor]]:
        if place not in self._samples:
            places = self._samples_of(*place)
            samples = read_samples(self._dataset, self._seed, places)
            first = self._first_sample()
            for (_, index), sample in zip(places, samples, strict=True):
                field = f"dataset()[{index}]"
                require_alike(sample, first, field, "as in item 0; pad or crop samples in the data set")
            self._samples[place] = samples
        return self._samples[place]

    def _samples_of(self, step: int, micro_batch: int) -> list[tuple[int, int]]:
        """Epoch and index of each sample."""
        first = micro_batch * self._micro_batch_size
        return sample_places(self._dataset, self._seed, step, self._batch_size, first, self._micro_batch_size)

    def _first_sample(self) -> dict[str, Tensor]:
        if self._first is None:
            (self._first,) = read_samples(self._dataset, self._seed, [(0, 0)])
        return self._first


def require_alike(sample: Mapping[str, Tensor], like: Mapping[str, Tensor], field: str, allowed: str) -> None:
    """Refuse a sample without an entry of another, or with one of another shape or type.

    Raises:
        JobError: naming the entry, behind ``field``, and what is ``allowed``, behind the other's shape.
    """
    for key, wanted in like.items():
        found = sample.get(key)
        if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise JobError(
                "differs from the others",
                source="Job",
                field=f"{field}[{key!r}]",
                value="nothing" if found is None else f"{tuple(found.shape)} {found.dtype}",
                allowed=f"{tuple(wanted.shape)} {wanted.dtype}, {allowed}",
            )


def data_of(job: Job, field: DataField = "dataset") -> MapDataset:
    """Return a job's data set, which is built the first time: that may mean reading or tokenising a corpus.

    What it draws from the global generators while it is built depends on the job's seed alone.
    """
    built = job.__dict__.setdefault(_BUILT, {})
    if field not in built:
        make = getattr(job, field)
        with own_generators() as seed_all:
            seed_all(seed_of(job.seed, "dataset"))
            built[field] = numbered(make())
    data: MapDataset = built[field]
    return data


def forget_data(job: Job, field: DataField) -> None:
    """Let go of a job's data set; it is built anew when it is next requested."""
    job.__dict__.get(_BUILT, {}).pop(field, None)


def read_samples(dataset: MapDataset, seed: int, places: Iterable[tuple[int, int]]) -> list[dict[str, Tensor]]:
    """Read samples; what one draws from the global generators depends on (seed, epoch, index) alone.

    Args:
        dataset: The data set.
        seed: The job's.
        places: Epoch and index of each sample.

    Raises:
        JobError: a sample that is not a dict with string keys and tensor values.
    """
    samples, places = [], list(places)
    expect_samples(dataset, seed, places)
    with own_generators() as seed_all:
        for epoch, index in places:
            seed_all(seed_of(seed, "sample", epoch, index))
            samples.append(check_sample(dataset[index], index))
    return samples


def expect_samples(dataset: object, seed: int, places: Sequence[tuple[int, int]]) -> None:
    """Say which samples are read next to a data set that wants to know (``Stream.expect_samples``)."""
    expect = getattr(dataset, "expect_samples", None)
    if expect is not None and places:
        expect(seed, places)


def num_at_hand(dataset: Any) -> int:
    """How many of its first samples can be read at any time, to look at some: not all, where they lie in shards."""
    return int(getattr(dataset, "num_at_hand", len(dataset)))


def numbered(dataset: Any) -> Any:
    """Return a data set whose samples have numbers: an ``IterableDataset`` of known length becomes one."""
    if not isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return dataset
    from morph.data.streams import Iterated, Stream

    return Stream(Iterated(lambda: dataset, len(dataset)), window=0)


def check_sample(sample: object, index: int) -> dict[str, Tensor]:
    """Return the sample.

    Raises:
        JobError: when it is not a dict with string keys and tensor values.
    """
    field = f"dataset()[{index}]"
    allowed = "a dict from names to dense tensors"
    if not isinstance(sample, dict) or not sample:
        raise JobError("is not a sample", source="Job", field=field, value=type(sample).__name__, allowed=allowed)
    for key, value in sample.items():
        sparse = isinstance(value, Tensor) and value.layout is not torch.strided
        if not isinstance(key, str) or not isinstance(value, Tensor) or sparse:
            shown = f"{key!r}: {value.layout if sparse else type(value).__name__}"
            raise JobError("is not a sample", source="Job", field=field, value=shown, allowed=allowed)
    return sample


def stack_entry(samples: Sequence[Mapping[str, Tensor]], key: str) -> Tensor:
    """Stack one entry of the samples to [len(samples), ...].

    Raises:
        JobError: when a sample lacks the entry, or has another shape or dtype than the first.
    """
    for position, sample in enumerate(samples):
        if key not in sample:
            have = ", ".join(sorted(sample))
            raise JobError("is missing in a sample", source="Job", field=f"dataset item {key!r}", allowed=have)
        first, value = samples[0][key], sample[key]
        if value.shape != first.shape or value.dtype != first.dtype:
            raise JobError(
                f"differs between samples of one micro-batch (sample {position} against sample 0)",
                source="Job",
                field=f"dataset item {key!r}",
                value=f"{tuple(value.shape)} {value.dtype} and {tuple(first.shape)} {first.dtype}",
                allowed="equal shapes and dtypes; pad or crop samples in the data set",
            )
    return torch.stack([sample[key] for sample in samples])


_ALLOWED = "a map-style data set: len(dataset), and dataset[i] -> a dict from names to tensors"


def check_map_style(dataset: object, field: str) -> int:
    """Return the number of samples.

    Args:
        dataset: What the job's function returned.
        field: That function's name in the job.

    Raises:
        JobError: it is something else, or is empty.
    """
    problem, allowed = None, _ALLOWED
    if isinstance(dataset, DataLoader):
        problem = "returns a DataLoader; Morph forms the batches itself, so return the data set that it loads"
    elif isinstance(dataset, IterableDataset):
        problem = "returns an IterableDataset of unknown length"
        allowed = "morph.data.streams.Stream(Iterated(make, num_samples)), or a source in shards, such as Jsonl(urls)"
    elif not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        problem = "does not return a data set"
    if problem is not None:
        raise JobError(problem, source="Job", field=field, value=type(dataset).__name__, allowed=allowed)
    size = len(dataset)  # type: ignore[arg-type]  # it has a length
    if size == 0:
        raise JobError("is empty", source="Job", field=field, allowed="at least one sample")
    return size


# What a job's data sets are known by: read where the job is checked, and again by every worker before it joins.


NUM_SAMPLED = 8


def data_facts(job: Job) -> dict[str, DataFacts]:
    """Look at a job's data sets.

    Raises:
        JobError: a sample that is none.
    """
    found = {"dataset": _facts(data_of(job), job.seed)}
    if job.eval_data is not None:
        found["eval_data"] = _facts(data_of(job, "eval_data"), job.seed)
    return found


def _facts(dataset: MapDataset, seed: int) -> DataFacts:
    """Length, and samples spread evenly from the first to the last at hand."""
    length, last = len(dataset), num_at_hand(dataset) - 1
    indices = sorted({place * last // (NUM_SAMPLED - 1) for place in range(NUM_SAMPLED)}) if length else []
    samples = zip(indices, read_samples(dataset, seed, [(0, index) for index in indices]), strict=True)
    return DataFacts(
        num_samples=length,
        samples=tuple(
            SampleFacts(index=index, entries={key: _shown(value) for key, value in sample.items()})
            for index, sample in samples
        ),
    )


def _shown(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().flatten()
    digest = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} sha256 {digest[:16]}"
