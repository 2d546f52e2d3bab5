"""Loads the evaluation data: the first samples, or all, of a separate data set, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from morph.contract.errors import wrong_job
from morph.data.batches import Recipe
from morph.data.lengths import MicroBatch, Size, divided, shares
from morph.data.loader import check_map_style
from morph.data.prefetch import DataWorkers
from morph.jobs.job import MapDataset

EPOCH = -1
"""An epoch that training never has. All evaluations draw the same random numbers, so that they can be compared."""


class EvaluationLoader:
    """Loads micro-batch ``j``: samples ``j*m .. (j+1)*m - 1``; the last one may have fewer.

    If lengths vary, samples of similar length share micro-batches. The data must have the entries and shapes of
    ``training_sample``. ``num_samples``: the most to use; None: all. ``recipe``: None makes micro-batches by stacking.
    """

    def __init__(
        self,
        dataset: MapDataset,
        seed: int,
        training_sample: Mapping[str, Tensor],
        micro_batch_size: int,
        num_samples: int | None,
        prefetcher: DataWorkers | None = None,
        recipe: Recipe | None = None,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        available = check_map_style(dataset, "eval_data")
        if num_samples is not None and num_samples > available:
            raise wrong_job("eval_samples", "is too large", num_samples, f"{available}")
        self._dataset = dataset
        self._recipe = recipe or Recipe(seed)
        self._training_sample = training_sample
        self._prefetcher = prefetcher
        self._expected: tuple[str, ...] = ()
        self._taken: tuple[int, dict[str, Tensor]] = -1, {}
        places = [(EPOCH, index) for index in range(num_samples or available)]
        self._micro_batches = divided(places, micro_batch_size, lengths, self._recipe.buckets)
        self.num_micro_batches = len(self._micro_batches)
        self.shares = shares(self._micro_batches, micro_batch_size)
        """The share of each micro-batch in means over samples; empty if all are whole."""
        self._read(MicroBatch(((EPOCH, 0),)))

    def size(self, micro_batch: int) -> Size:
        """Return the bucket and the number of samples of a micro-batch."""
        return self._micro_batches[micro_batch].size

    def order(self) -> NDArray[np.int64]:
        """Return the position of each sample among the samples of all micro-batches, as int64 [samples]."""
        return np.argsort([index for part in self._micro_batches for _, index in part.places], kind="stable")

    def expect(self, micro_batches: Sequence[int], keys: Iterable[str], over: Callable[[], bool]) -> None:
        """Have these micro-batches prefetched. See ``DataWorkers.expect``."""
        if self._prefetcher is not None:
            self._expected = tuple(sorted(keys))
            batches = [(EPOCH, micro_batch, self._expected) for micro_batch in micro_batches]
            self._prefetcher.expect(batches, lambda _, micro_batch: self._micro_batches[micro_batch], over)

    def load(self, micro_batch: int, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return the requested entries, each [samples of the micro-batch, ...]."""
        if not keys:
            return {}
        if self._prefetcher is not None and self._taken[0] != micro_batch:
            self._taken = micro_batch, self._prefetcher.take((EPOCH, micro_batch, self._expected))
        if self._taken[0] == micro_batch and self._taken[1].keys() >= set(keys):
            return {key: self._taken[1][key] for key in keys}
        return self._read(self._micro_batches[micro_batch], keys)

    def _read(self, wanted: MicroBatch, keys: Sequence[str] | None = None) -> dict[str, Tensor]:
        samples, like = self._recipe.read(self._dataset, wanted.places), self._training_sample
        return self._recipe.alike(samples, wanted.places, like, "eval_data()", "as in training", keys, wanted.length)
