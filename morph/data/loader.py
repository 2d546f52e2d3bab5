"""Loads the entries of one micro-batch from the user's data set, which has a length and numbered items."""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from morph.contract.errors import wrong_job
from morph.contract.job_facts import DataFacts, SampleFacts
from morph.data.batches import Form, Recipe
from morph.data.lengths import MicroBatch, Size, checked_lengths, divided, examples, shapes_of, shares
from morph.data.order import EpochOrder, Order
from morph.data.prefetch import DataWorkers
from morph.data.seeding import own_generators, seed_of
from morph.jobs.job import Job, MapDataset

DataField = Literal["dataset", "eval_data"]
_CACHED_MICRO_BATCHES = 8
_MOST_CACHED = 64
_BUILT = "_built_data"
"""The attribute of a job that holds its data sets, and the form of its batches."""
_FORM, _RECIPE, _LENGTHS = "form", "recipe", "lengths"
_NUM_MEASURED = 8
_STEPS_OF_A_MIX = 64
_ALLOWED = "a map-style data set: len(dataset), and dataset[i] -> a dict, tuple or dataclass of tensors"
NUM_SAMPLED = 8
ROWS_S = 1.0
"""Longest time (seconds) that a start of a run spends on reading each data set, to find changed samples."""


class MicroBatchLoader:
    """Loads micro-batch ``j`` of step ``t``: samples ``j*m .. (j+1)*m - 1`` of that mini-batch.

    The loader keeps the last few micro-batches, so that several sections of one stage load a sample once.
    ``prefetcher``: reads expected micro-batches ahead. It needs the form of samples, so one sample is read at once.
    ``recipe``: how micro-batches are made of samples; None: by stacking.
    """

    def __init__(
        self,
        dataset: MapDataset,
        seed: int,
        batch_size: int,
        micro_batch_size: int,
        prefetcher: DataWorkers | None = None,
        recipe: Recipe | None = None,
        order: Order | None = None,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        check_map_style(dataset, "dataset")
        self._dataset = dataset
        self._first: dict[str, Tensor] | None = None
        self._recipe = recipe or Recipe(seed)
        self._order = order or EpochOrder(dataset, seed, batch_size)
        self._lengths = lengths
        self._mini_batches: OrderedDict[int, Sequence[MicroBatch]] = OrderedDict()
        self._micro_batch_size = micro_batch_size
        self._keeps_batches = False
        """Whether a short step has the micro-batches of a plain loop, so that lengths may not reorder its samples."""
        self._num_kept = _CACHED_MICRO_BATCHES
        self._samples: dict[tuple[int, int], list[Any]] = {}
        self._stacked: OrderedDict[tuple[int, int], dict[str, Tensor]] = OrderedDict()
        self._prefetcher = prefetcher
        self._expected: tuple[str, ...] = ()
        if prefetcher is not None:
            prefetcher.begin(self._first_sample(), micro_batch_size)

    @classmethod
    def of(cls, job: Job, micro_batch_size: int, prefetcher: DataWorkers | None = None) -> MicroBatchLoader:
        """Return the loader of a job's training data."""
        dataset, recipe = data_of(job), recipe_of(job)
        order, lengths = order_of(job), lengths_of(job)
        made = cls(dataset, job.seed, job.batch_size, micro_batch_size, prefetcher, recipe, order, lengths)
        made._keeps_batches = job.short_step is not None
        return made

    def expect(
        self, places: Iterable[tuple[int, int]], keys: Iterable[str], over: Callable[[], bool], window: int
    ) -> None:
        """Have these micro-batches prefetched, if there is a prefetcher, and cancel earlier requests.

        ``places``: step and number of each micro-batch, in the order in which they will be loaded. ``window``: how many
        micro-batches are in use at once: each is loaded again before its backward.
        """
        if self._prefetcher is None:
            return
        self._num_kept = min(max(_CACHED_MICRO_BATCHES, 2 * window), _MOST_CACHED)
        self._expected = tuple(sorted(keys))
        missing = [place for place in places if not self._stacked.get(place, {}).keys() >= set(self._expected)]
        batches = [(*place, self._expected) for place in missing if self._expected]
        self._prefetcher.expect(batches, self._micro_batch, over)

    def load(self, step: int, micro_batch: int, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return the requested entries, each [micro_batch_size, ...]. They are shared: do not write to them.

        Raises JobError if an item is not a dict of tensors, lacks a key, or differs in shape or dtype from item 0, for
        which the sections were made.
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
                stacked |= self._made(place, [key])
        return {key: stacked[key] for key in wanted}

    def _remembered(self, place: tuple[int, int]) -> dict[str, Tensor]:
        """Return the entries of a micro-batch that were stacked so far; drop the oldest micro-batch to make room."""
        stacked = self._stacked.setdefault(place, {})
        self._stacked.move_to_end(place)
        while len(self._stacked) > self._num_kept:
            oldest, _ = self._stacked.popitem(last=False)
            self._samples.pop(oldest, None)
        return stacked

    def size(self, step: int, micro_batch: int) -> Size:
        """Return the bucket and the number of samples of a micro-batch, which every stage can compute by itself."""
        return self._micro_batch(step, micro_batch).size

    def num_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of a step."""
        return len(self._divided(step))

    def shares(self, step: int) -> tuple[float, ...]:
        """Return the weight of each of a step's micro-batches in means over samples; empty if all have m samples."""
        return shares(self._divided(step), self._micro_batch_size)

    def samples_of(self, step: int) -> tuple[int, ...]:
        """Return the numbers of a step's samples in the data set, in their order."""
        return tuple(int(index) for _, index in self._order.mini_batch(step))

    def typical(self) -> int:
        """Return the number of a micro-batch of step 0 whose length is in the middle."""
        numbers = sorted(range(len(self._divided(0))), key=lambda number: self.size(0, number)[0] or 0)
        return 0 if self._lengths is None else numbers[len(numbers) // 2]

    def example(self, length: int | None, keys: Iterable[str], num_samples: int | None = None) -> dict[str, Tensor]:
        """Return entries of a micro-batch that is padded to ``length``; of the first one if lengths do not vary.

        ``num_samples``: return only this many of its first samples; None: all m.
        """
        if num_samples is not None:
            return {name: entry[:num_samples] for name, entry in self.example(length, keys).items()}
        if length is None or self._lengths is None:
            return self.load(0, 0, keys)
        lengths = self._lengths[: num_at_hand(self._dataset)]
        fitting = np.flatnonzero(lengths <= length).tolist() or [int(lengths.argmin())]
        wanted = sorted(fitting, key=lambda index: -lengths[index])[: self._micro_batch_size]
        places = [(0, wanted[position % len(wanted)]) for position in range(self._micro_batch_size)]
        samples = self._recipe.read(self._dataset, places)
        return self._recipe.batch(samples, places, "dataset()", list(keys), length).entries

    def _made(self, place: tuple[int, int], keys: list[str]) -> dict[str, Tensor]:
        wanted, first = self._micro_batch(*place), self._first_sample()
        samples, places = self._load_samples(place), wanted.places
        return self._recipe.alike(samples, places, first, "dataset()", "as in item 0", keys, wanted.length)

    def _load_samples(self, place: tuple[int, int]) -> list[Any]:
        if place not in self._samples:
            self._samples[place] = self._recipe.read(self._dataset, self._micro_batch(*place).places)
        return self._samples[place]

    def _micro_batch(self, step: int, micro_batch: int) -> MicroBatch:
        return self._divided(step)[micro_batch]

    def _divided(self, step: int) -> Sequence[MicroBatch]:
        if step not in self._mini_batches:
            while len(self._mini_batches) > 1:
                self._mini_batches.popitem(last=False)
            places, size = self._order.mini_batch(step), self._micro_batch_size
            by_length = not (self._keeps_batches and len(places) % size)
            self._mini_batches[step] = divided(places, size, self._lengths, self._recipe.buckets, by_length=by_length)
        return self._mini_batches[step]

    def _first_sample(self) -> dict[str, Tensor]:
        if self._first is None:
            self._first = self._recipe.like(self._dataset)
        return self._first


def with_step(batch: Mapping[str, Tensor], job: Job, step: int) -> Mapping[str, Tensor]:
    """Put the number of a step into the job's entry for it."""
    name = job.step_entry
    return {**batch, name: torch.full_like(batch[name], step)} if name is not None and name in batch else batch


def data_of(job: Job, field: DataField = "dataset") -> MapDataset:
    """Return a job's data set. It is built on first use, which may mean reading or tokenising a corpus.

    Random numbers from the global generators during the building depend only on the job's seed.
    """
    built = job.__dict__.setdefault(_BUILT, {})
    if field not in built:
        make = getattr(job, field)
        with own_generators(seed_of(job.seed, "dataset")):
            built[field] = numbered(make())
    data: MapDataset = built[field]
    return data


def forget_data(job: Job, field: DataField) -> None:
    """Drop a job's data set; the next use builds it anew."""
    job.__dict__.get(_BUILT, {}).pop(field, None)


def num_at_hand(dataset: Any) -> int:
    """Return how many of the first samples can be read at any time for inspection: not all if they lie in shards."""
    return int(getattr(dataset, "num_at_hand", len(dataset)))


def numbered(dataset: Any) -> Any:
    """Return a data set with numbered samples: an ``IterableDataset`` of known length is converted to one."""
    if not isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return dataset
    from morph.data.streams import Iterated, Stream

    return Stream(Iterated(lambda: dataset, len(dataset)), window=0)


def recipe_of(job: Job) -> Recipe:
    """Return how micro-batches are made of a job's samples; with buckets, this reads some samples."""
    built = job.__dict__.setdefault(_BUILT, {})
    if _RECIPE not in built:
        recipe = Recipe(job.seed, job.collate_fn, job.buckets, job.padding)
        built[_RECIPE] = measured(recipe, data_of(job), lengths_of(job))
    made: Recipe = built[_RECIPE]
    return made


def measured(recipe: Recipe, dataset: MapDataset, lengths: NDArray[np.int64] | None) -> Recipe:
    """Return the recipe with the shapes of entries, found from samples of all lengths; unchanged without lengths."""
    if lengths is None:
        return recipe
    known = examples(lengths[: num_at_hand(dataset)], _NUM_MEASURED)
    return replace(recipe, shapes=shapes_of(recipe.rows(dataset, known)))


def varying_dims(job: Job) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of each entry of a batch that are as long as the micro-batch."""
    shapes = recipe_of(job).shapes
    varying = {
        name: tuple(d for d, size in enumerate(shape.sizes, 1) if size is None) for name, shape in shapes.items()
    }
    if job.buckets and not any(varying.values()):
        raise wrong_job(
            "buckets",
            "have nothing to pad: no entry of the samples varies in length",
            job.buckets,
            "samples, or a collate_fn, that leaves the padding to Morph; or no buckets",
        )
    return varying


def mix_of(job: Job, micro_batch_size: int) -> dict[int | None, float]:
    """Return the fraction of micro-batches that is padded to each bucket, in an epoch or in its first steps."""
    lengths = lengths_of(job)
    if lengths is None:
        return {None: 1.0}
    order = order_of(job)
    steps = range(max(1, min(_STEPS_OF_A_MIX, order.epochs.num_steps)))
    made = [part for step in steps for part in divided(order.mini_batch(step), micro_batch_size, lengths, job.buckets)]
    counts = Counter(part.length for part in made)
    return {bucket: counts[bucket] / len(made) for bucket in job.buckets if counts[bucket]}


def lengths_of(job: Job, field: DataField = "dataset") -> NDArray[np.int64] | None:
    """Return the length of each sample of a job's data set, as int64 [samples]; None if lengths do not vary."""
    if job.lengths is None:
        return None
    built = job.__dict__.setdefault(_BUILT, {})
    if (_LENGTHS, field) not in built:
        data = data_of(job, field)
        built[_LENGTHS, field] = checked_lengths(job.lengths(data), len(data), job.buckets, field)
    lengths: NDArray[np.int64] = built[_LENGTHS, field]
    return lengths


def order_of(job: Job) -> EpochOrder:
    """Return the order of a job's training samples."""
    end = "short" if job.short_step is not None else job.epoch_end
    return EpochOrder(data_of(job), job.seed, job.batch_size, job.sampler, end)  # type: ignore[arg-type]  # a word


def short_sizes(job: Job, micro_batch_size: int) -> tuple[int, ...]:
    """Return the numbers of samples of the micro-batches of steps and evaluations that have fewer than m."""
    epochs, sizes = order_of(job).epochs, set()
    if epochs.end == "short":
        sizes.add(epochs.num_left % micro_batch_size)
    if job.eval_data is not None:
        sizes.add((job.eval_samples or len(data_of(job, "eval_data"))) % micro_batch_size)
    return tuple(sorted(sizes - {0}))


def form_of(job: Job) -> Form:
    """Return the form in which a job's loss gets its batch, whatever entries Morph transfers."""
    built = job.__dict__.setdefault(_BUILT, {})
    if _FORM not in built:
        recipe = recipe_of(job)
        built[_FORM] = recipe.batch(recipe.read(data_of(job), [(0, 0)]), [(0, 0)], "dataset()").form
    form: Form = built[_FORM]
    return form


def check_map_style(dataset: object, field: str) -> int:
    """Return the number of samples of a map-style data set. ``field``: the job's function that returned it."""
    problem, allowed = None, _ALLOWED
    if isinstance(dataset, DataLoader):
        problem = "returns a DataLoader; Morph forms the batches itself, so return the data set that it loads"
    elif isinstance(dataset, IterableDataset):
        problem = "returns an IterableDataset of unknown length"
        allowed = "morph.data.streams.Stream(Iterated(make, num_samples)), or a source in shards, such as Jsonl(urls)"
    elif not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        problem = "does not return a data set"
    if problem is not None:
        raise wrong_job(field, problem, type(dataset).__name__, allowed)
    size = len(dataset)  # type: ignore[arg-type]  # it has a length
    if size == 0:
        raise wrong_job(field, "is empty", allowed="at least one sample")
    return size


# Facts that identify a job's data sets: read where the job is checked, and again by every worker before it joins.


def data_facts(job: Job, rows_s: float = 0.0) -> dict[str, DataFacts]:
    """Return the facts of each of a job's data sets, by field.

    ``rows_s``: the time (seconds) to spend on digests of as many samples as possible; data sets that have a
    ``fingerprint()`` need none.
    """
    fields: tuple[DataField, ...] = ("dataset", "eval_data")
    facts_of, recipe = dict[str, DataFacts](), recipe_of(job)
    for field in fields:
        if getattr(job, field) is not None:
            dataset = data_of(job, field)
            facts = _facts(dataset, recipe).model_copy(update={"fingerprint": _fingerprint(dataset)})
            rows = {} if facts.fingerprint is not None or not rows_s else rows_of(dataset, recipe, rows_s)
            facts_of[field] = facts.model_copy(update={"rows": rows})
    return facts_of


def _fingerprint(dataset: Any) -> str | None:
    """Return the text that a data set's own ``fingerprint()`` returns; None if it has no such method."""
    own = getattr(dataset, "fingerprint", None)
    if not callable(own):
        return None
    try:
        inspect.signature(own).bind()
    except (TypeError, ValueError):  # another method of this name
        return None
    text = own()
    return text if isinstance(text, str) else None


def rows_of(
    dataset: MapDataset, recipe: Recipe, seconds: float, clock: Callable[[], float] = time.monotonic
) -> dict[int, str]:
    """Return digests of 1, 2, 4, ... samples, and of all that can be read in some seconds, by their number.

    The order in which samples are read depends only on their number and is spread over the data set, so two digests of
    the same number of samples are of the same samples. A sample that cannot be read ends the reading.
    """
    count, began_s, state = num_at_hand(dataset), clock(), hashlib.sha256()
    digests, done = dict[int, str](), 0
    step = next(step for step in range(max(1, round(count * 0.618)), count + 2) if math.gcd(step, count) == 1)
    while done < count and clock() - began_s < seconds:
        index = done * step % count
        try:
            (sample,) = recipe.read(dataset, [(0, index)])
            state.update(f"{index} {sorted(_entries(recipe, sample, index).items())}".encode())
        except Exception:  # the user's code fails: training reports it, if it needs the sample
            break
        done += 1
        if done & (done - 1) == 0 or done == count:
            digests[done] = state.hexdigest()[:16]
    return digests


def _facts(dataset: MapDataset, recipe: Recipe) -> DataFacts:
    """Return the length of a data set, and digests of samples spread evenly over those that are quick to read."""
    length, last = len(dataset), num_at_hand(dataset) - 1
    indices = sorted({place * last // (NUM_SAMPLED - 1) for place in range(NUM_SAMPLED)}) if length else []
    samples = zip(indices, recipe.read(dataset, [(0, index) for index in indices]), strict=True)
    return DataFacts(
        num_samples=length,
        samples=tuple(SampleFacts(index=index, entries=_entries(recipe, sample, index)) for index, sample in samples),
    )


def _entries(recipe: Recipe, sample: object, index: int) -> dict[str, str]:
    flat = recipe.flat(sample, f"dataset()[{index}]")
    texts = {name: f"text sha256 {_digest(repr(text).encode())}" for name, text in flat.texts.items() if _is_text(text)}
    return {key: _shown(value) for key, value in flat.entries.items()} | texts


def _is_text(value: object) -> bool:
    """Whether a value is text, and not a user's object, whose representation may contain its address."""
    return isinstance(value, str | bytes) or (isinstance(value, list | tuple) and all(map(_is_text, value)))


def _shown(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().flatten()
    digest = _digest(flat.view(torch.uint8).numpy().tobytes())
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} sha256 {digest}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
