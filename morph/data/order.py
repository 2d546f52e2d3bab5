"""The order of samples: a function of (seed, step) alone, and therefore the same in every shape and after every
restart.

An epoch is a list of sample numbers that a *sampler* returns: ``sampler(dataset, seed, epoch)``, given as
``Job.sampler`` or to ``morph.elastic.batches``. Each step takes the next ``batch_size`` of them, and an epoch may end
inside a step, unless ``Job.epoch_end`` says otherwise. ``shuffled`` is the default; ``weighted``, ``stratified`` and
``grouped`` make samplers. A data set may replace ``shuffled`` with an order of its own, ``sample_order(seed, epoch)``,
as ``morph.data.streams.Stream`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from morph.contract.errors import wrong_job
from morph.contract.job_facts import EpochEnd, Epochs
from morph.data.seeding import own_generators, seed_of

EpochPlace = tuple[int, int]
"""Epoch and index of a sample. The random numbers that reading the sample draws from global generators depend on both.
Each time a sample comes again within an epoch, ``AGAIN`` is added to its epoch, so that other numbers are drawn."""
AGAIN = 1 << 32
Sampler = Callable[[Any, int, int], ArrayLike]
OfDataSet = ArrayLike | Callable[[Any], ArrayLike]
"""One number for each sample, or a function of the data set that returns them."""


class Order(Protocol):
    """Returns the samples of a step; loading needs no other method."""

    def mini_batch(self, step: int) -> Sequence[EpochPlace]:
        """Return the places of the samples of one step, in order."""
        ...


class EpochOrder:
    """The order of a map-style data set.

    ``sampler``: the sampler; None: the data set's ``sample_order``, or ``shuffled``. ``end``: what happens to an
    epoch's last samples if they do not fill a step; see ``Job.epoch_end``.
    """

    def __init__(
        self, dataset: Any, seed: int, batch_size: int, sampler: Sampler | None = None, end: EpochEnd = "fill"
    ) -> None:
        self._dataset, self._seed, self._batch_size, self._sampler = dataset, seed, batch_size, sampler
        self._end: EpochEnd = end
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    @cached_property
    def epochs(self) -> Epochs:
        """How epochs divide into steps.

        Raises JobError if an epoch is smaller than one step, and is not filled from the next epoch.
        """
        size = len(self._dataset if self._sampler is None else self.epoch(0))
        if self._end != "fill" and size < self._batch_size:
            raise wrong_job(
                "batch_size",
                f"is larger than an epoch of {size} samples, and epoch_end is {self._end!r}",
                self._batch_size,
                f"at most {size}, or epoch_end='fill'",
            )
        return Epochs(num_samples=size, batch_size=self._batch_size, end=self._end)

    def mini_batch(self, step: int) -> list[EpochPlace]:
        """See ``Order``.

        Raises JobError if the sampler does not return numbers of samples, or returns more or fewer than in epoch 0.
        """
        positions, size = self.epochs.positions(step), self.epochs.num_samples
        if self._sampler is not None:
            return [self._place(*divmod(position, size)) for position in positions]
        own = getattr(self._dataset, "sample_order", None)
        indices = _indices_at(self._seed, positions, size, own)
        return [(position // size, int(index)) for position, index in zip(positions, indices, strict=True)]

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of an epoch's samples in order, as int64 [samples]."""
        if self._sampler is None:
            own = getattr(self._dataset, "sample_order", None)
            return shuffled(self._dataset, self._seed, epoch) if own is None else np.asarray(own(self._seed, epoch))
        return self._sampled(epoch)[0]

    def _place(self, epoch: int, offset: int) -> EpochPlace:
        indices, again = self._sampled(epoch)
        return epoch + AGAIN * int(again[offset]), int(indices[offset])

    def _sampled(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sample numbers, and how often each came before in the epoch, both int64 [samples]."""
        if epoch not in self._epochs:
            assert self._sampler is not None
            with own_generators(seed_of(self._seed, "order", epoch)):
                indices = np.asarray(self._sampler(self._dataset, self._seed, epoch))
            self._check(indices, epoch)
            for old in [old for old in self._epochs if old not in (0, epoch - 1)]:
                del self._epochs[old]
            self._epochs[epoch] = indices.astype(np.int64), _times_before(indices)
        return self._epochs[epoch]

    def _check(self, indices: NDArray[Any], epoch: int) -> None:
        size = len(self._dataset)
        wanted = "" if epoch == 0 else f"{len(self.epoch(0))} "
        right = indices.ndim == 1 and indices.dtype.kind in "iu" and len(indices) > 0
        right = right and (epoch == 0 or len(indices) == len(self.epoch(0)))
        if not right or indices.min() < 0 or indices.max() >= size:
            shown = f"{list(indices.shape)} {indices.dtype}"
            if right:
                shown = f"{indices.min()} to {indices.max()}"
            raise wrong_job(
                f"sampler(dataset, seed, {epoch})",
                "does not return an order",
                shown,
                f"{wanted}whole numbers from 0 to {size - 1}, as many in every epoch",
            )


def _times_before(indices: NDArray[Any]) -> NDArray[np.int64]:
    order = np.argsort(indices, kind="stable")
    starts = np.flatnonzero(np.diff(indices[order], prepend=-1))
    counts = np.diff(starts, append=len(indices))
    times = np.empty(len(indices), dtype=np.int64)
    times[order] = np.arange(len(indices)) - np.repeat(starts, counts)
    return times


def sample_indices(
    seed: int,
    step: int,
    batch_size: int,
    dataset_size: int,
    sample_order: Callable[[int, int], Any] | None = None,
) -> NDArray[np.int64]:
    """Return the data set indices of one mini-batch in the default order, as int64 [batch_size].

    Samples have global positions 0, 1, 2, ...; ``step`` covers positions ``step * batch_size`` onwards. Position g is
    the ``g % dataset_size``-th entry of a permutation drawn for epoch ``g // dataset_size``, so every sample comes
    exactly once per epoch, and an epoch may end inside a mini-batch. ``sample_order(seed, epoch)`` returns another
    permutation, which need not be an array: it is only indexed with arrays of positions.
    """
    return _indices_at(seed, range(step * batch_size, (step + 1) * batch_size), dataset_size, sample_order)


def _indices_at(
    seed: int, positions: range, dataset_size: int, sample_order: Callable[[int, int], Any] | None
) -> NDArray[np.int64]:
    epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), dataset_size)
    indices = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        order = _permutation(seed, int(epoch), dataset_size) if sample_order is None else sample_order(seed, int(epoch))
        indices[here] = order[offsets[here]]
    return indices


def shuffled(dataset: Any, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return every sample once, in random order: the default."""
    return _permutation(seed, epoch, len(dataset))


def weighted(weights: OfDataSet, num_samples: int | None = None) -> Sampler:
    """Return a sampler that draws by weight, with replacement, like torch's ``WeightedRandomSampler``.

    Args:
        weights: The weight of each sample, at least 0.
        num_samples: How many samples make an epoch; None: as many as the data set has.
    """

    def sampler(dataset: Any, seed: int, epoch: int) -> NDArray[np.int64]:
        sums = np.cumsum(_numbers_of(weights, dataset, "weights").astype(np.float64))
        if not 0 < sums[-1] < np.inf or np.any(np.diff(sums, prepend=0) < 0):
            raise wrong_job("sampler: weights", "are not weights to draw by", allowed="numbers from 0, not all 0")
        drawn = _uniform(seed, epoch, num_samples or len(dataset)) * sums[-1]
        indices: NDArray[np.int64] = np.minimum(np.searchsorted(sums, drawn, side="right"), len(sums) - 1)
        return indices

    return sampler


def stratified(labels: OfDataSet) -> Sampler:
    """Return a sampler of every sample once, in random order, with each label spread evenly over mini-batches."""

    def sampler(dataset: Any, seed: int, epoch: int) -> NDArray[np.int64]:
        kinds = np.unique(_numbers_of(labels, dataset, "labels"), return_inverse=True)[1]
        order, jitter = _permutation(seed, epoch, len(kinds)), _uniform(seed, epoch, len(kinds))
        when = np.empty(len(kinds))
        for kind in range(int(kinds.max()) + 1):
            members = order[kinds[order] == kind]
            when[members] = (np.arange(len(members)) + jitter[members]) / len(members)
        return np.argsort(when, kind="stable").astype(np.int64)

    return sampler


def grouped(lengths: OfDataSet, batch_size: int, *, window: int = 50) -> Sampler:
    """Return a sampler of every sample once that puts samples of similar length into one mini-batch.

    It works like ``group_by_length`` of transformers.

    Args:
        lengths: The length of each sample.
        batch_size: M.
        window: The number of mini-batches whose samples are sorted together; 1 keeps the samples of each mini-batch.
    """

    def sampler(dataset: Any, seed: int, epoch: int) -> NDArray[np.int64]:
        order = _permutation(seed, epoch, len(dataset))
        sizes = _numbers_of(lengths, dataset, "lengths")[order]
        within = np.lexsort((sizes, np.arange(len(order)) // (window * batch_size)))
        groups = np.array_split(order[within], range(batch_size, len(order), batch_size))
        whole = len(groups) - (len(groups[-1]) < batch_size)
        parts = [groups[place] for place in _permutation(seed + 1, epoch, whole)]
        return np.concatenate([*parts, *groups[whole:]])

    return sampler


def _numbers_of(values: OfDataSet, dataset: Any, name: str) -> NDArray[Any]:
    numbers = np.asarray(values(dataset) if callable(values) else values)
    if numbers.shape != (len(dataset),):
        raise wrong_job(f"sampler: {name}", "needs one value per sample", str(list(numbers.shape)), f"{len(dataset)}")
    return numbers


def _words(seed: int, epoch: int, count: int, key: tuple[int, ...] = ()) -> NDArray[np.uint64]:
    """Return raw random words: numpy promises the same words in all versions, but not from ``Generator``'s methods."""
    words: NDArray[np.uint64] = np.random.PCG64(
        np.random.SeedSequence(entropy=seed, spawn_key=(epoch, *key))
    ).random_raw(count)
    return words


def _uniform(seed: int, epoch: int, count: int) -> NDArray[np.float64]:
    return (_words(seed, epoch, count, (1,)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, dataset_size: int) -> NDArray[np.int64]:
    permutation = np.argsort(_words(seed, epoch, dataset_size), kind="stable").astype(np.int64)
    permutation.flags.writeable = False
    return permutation
