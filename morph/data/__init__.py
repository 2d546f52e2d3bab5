"""Which samples belong to which micro-batch, and loading them."""

from __future__ import annotations

from morph.data.loader import MicroBatchLoader, data_of
from morph.data.order import sample_indices, sample_places
from morph.data.prefetch import DataWorkers

__all__ = ["DataWorkers", "MicroBatchLoader", "data_of", "sample_indices", "sample_places"]
