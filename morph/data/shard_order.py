"""Orders samples that lie in shards at random, but so that shards are read mostly one after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MOST_EPOCHS, _MOST_STRETCHES = 2, 4
_SHORTEST_STRETCH = 4096


def _words(seed: int, key: tuple[int, ...], first: int, last: int) -> NDArray[np.uint64]:
    """Return words ``first .. last - 1`` of a stream of random words, which numpy promises for all versions."""
    words = np.random.PCG64(np.random.SeedSequence(entropy=seed, spawn_key=key)).advance(first)
    return np.asarray(words.random_raw(last - first), dtype=np.uint64)


class ShardOrder:
    """Makes random orders in which shards, of these ``sizes`` in samples, are read mostly one after the other.

    In each epoch the shards form a row, whose order is drawn if ``shuffle_shards``. The sample at place i of the row
    gets the key ``i + d``, where d is drawn from ``0 .. window - 1``, and samples come in the order of their keys. So a
    sample comes less than ``window`` places before or after its place in the row, and only the shards of that stretch
    are in use at once; a window of 1 leaves them as they are. Any part of the order is computed by itself: nothing is
    as long as the data set.
    """

    def __init__(self, sizes: Sequence[int], window: int, *, shuffle_shards: bool = True) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)]).astype(np.int64)
        self._window, self._shuffle_shards = window, shuffle_shards
        self._epochs: OrderedDict[tuple[int, int], ShardedEpoch] = OrderedDict()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def shard_of(self, index: int) -> tuple[int, int]:
        """Return the shard of a sample, and its place in that shard."""
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return shard, index - int(self._starts[shard])

    def __call__(self, seed: int, epoch: int) -> ShardedEpoch:
        key = seed, epoch
        if key not in self._epochs:
            row = np.arange(len(self._sizes), dtype=np.int64)
            if self._shuffle_shards:
                row = np.argsort(_words(seed, (epoch, 0), 0, len(row)), kind="stable").astype(np.int64)
            self._epochs[key] = ShardedEpoch(seed, epoch, self._sizes, self._starts, self._window, row)
            while len(self._epochs) > _MOST_EPOCHS:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(key)
        return self._epochs[key]


class ShardedEpoch:
    """The samples of one epoch, made by ``ShardOrder``. ``row``: the shards in the epoch's order."""

    def __init__(
        self,
        seed: int,
        epoch: int,
        sizes: NDArray[np.int64],
        starts: NDArray[np.int64],
        window: int,
        row: NDArray[np.int64],
    ) -> None:
        self._seed, self._epoch, self._starts, self._window = seed, epoch, starts, window
        self.row = row
        self.place_of = np.argsort(self.row, kind="stable")
        """The place in the row, by shard."""
        self._ends = np.cumsum(sizes[self.row])
        self._begins = self._ends - sizes[self.row]
        self._length = max(window, _SHORTEST_STRETCH)
        self._stretches: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NDArray[np.int64]:
        return self[np.arange(len(self), dtype=np.int64)]

    def __getitem__(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        numbers, within = np.divmod(np.asarray(offsets, dtype=np.int64), self._length)
        samples = np.empty(numbers.shape, dtype=np.int64)
        for number in np.unique(numbers):
            here = numbers == number
            samples[here] = self._stretch(int(number))[within[here]]
        return samples

    def _stretch(self, number: int) -> NDArray[np.int64]:
        """Return the indices at places ``number * length`` onwards.

        A key is less than ``window`` above its place, so at least ``key - window + 1`` and at most ``key`` samples have
        a smaller key: the sample that comes at g has a key of ``g .. g + window - 1``. Samples placed more than a
        window before it all have smaller keys, and samples placed as far after it all have larger ones.
        """
        if number not in self._stretches:
            first, last = number * self._length, min((number + 1) * self._length, len(self))
            low, high = max(0, first - self._window), min(len(self), last + self._window)
            draws = _words(self._seed, (self._epoch, 1), low, high) % np.uint64(self._window)
            places = low + np.argsort(np.arange(low, high) + draws.astype(np.int64), kind="stable")
            places = places[first - low : last - low]
            at = np.searchsorted(self._ends, places, side="right")
            self._stretches[number] = self._starts[self.row[at]] + places - self._begins[at]
            while len(self._stretches) > _MOST_STRETCHES:
                self._stretches.popitem(last=False)
        self._stretches.move_to_end(number)
        return self._stretches[number]
