"""Sample order: a function of (seed, step, index) alone, so the same in every shape and after every restart."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def sample_indices(seed: int, step: int, batch_size: int, dataset_size: int) -> NDArray[np.int64]:
    """Return the data set indices of one mini-batch, in order, as int64 [batch_size].

    Samples have global positions 0, 1, 2, ...; ``step`` covers positions ``step * batch_size`` onwards. Position g
    is the ``g % dataset_size``-th entry of a permutation drawn for epoch ``g // dataset_size``, so every sample
    comes exactly once per epoch, and an epoch may end inside a mini-batch.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, offsets = np.divmod(positions, dataset_size)
    indices = np.empty(batch_size, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = _permutation(seed, int(epoch), dataset_size)[offsets[here]]
    return indices


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, dataset_size: int) -> NDArray[np.int64]:
    """Sort by raw random words: unlike ``Generator.permutation``, numpy promises that stream for all versions."""
    words = np.random.PCG64(np.random.SeedSequence(entropy=seed, spawn_key=(epoch,))).random_raw(dataset_size)
    permutation = np.argsort(words, kind="stable").astype(np.int64)
    permutation.flags.writeable = False
    return permutation
