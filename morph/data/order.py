"""Sample order: a function of (seed, step, index) alone, so the same in every shape and after every restart."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


def sample_places(dataset: Any, seed: int, step: int, batch_size: int, first: int, count: int) -> list[tuple[int, int]]:
    """Return epoch and index of ``count`` samples of a mini-batch, from its ``first``.

    They come in the order of the data set, if it has one (``sample_order``).
    """
    size = len(dataset)
    indices = sample_indices(seed, step, batch_size, size, getattr(dataset, "sample_order", None))
    begin = step * batch_size + first
    return [((begin + offset) // size, int(index)) for offset, index in enumerate(indices[first : first + count])]


def sample_indices(
    seed: int,
    step: int,
    batch_size: int,
    dataset_size: int,
    sample_order: Callable[[int, int], Any] | None = None,
) -> NDArray[np.int64]:
    """Return the data set indices of one mini-batch, in order, as int64 [batch_size].

    Samples have global positions 0, 1, 2, ...; ``step`` covers positions ``step * batch_size`` onwards. Position g
    is the ``g % dataset_size``-th entry of a permutation drawn for epoch ``g // dataset_size``, so every sample
    comes exactly once per epoch, and an epoch may end inside a mini-batch. ``sample_order(seed, epoch)`` gives another
    one, which is asked for the entries at some offsets.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, offsets = np.divmod(positions, dataset_size)
    indices = np.empty(batch_size, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        order = _permutation(seed, int(epoch), dataset_size) if sample_order is None else sample_order(seed, int(epoch))
        indices[here] = order[offsets[here]]
    return indices


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, dataset_size: int) -> NDArray[np.int64]:
    """Sort by raw random words: unlike ``Generator.permutation``, numpy promises that stream for all versions."""
    words = np.random.PCG64(np.random.SeedSequence(entropy=seed, spawn_key=(epoch,))).random_raw(dataset_size)
    permutation = np.argsort(words, kind="stable").astype(np.int64)
    permutation.flags.writeable = False
    return permutation
