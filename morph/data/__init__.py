"""Which samples belong to which micro-batch, and loading them; samplers are in ``morph.data.order``."""

from __future__ import annotations

from morph.data import order
from morph.data.loader import MicroBatchLoader, data_of
from morph.data.order import sample_indices
from morph.data.prefetch import DataWorkers

__all__ = ["DataWorkers", "MicroBatchLoader", "data_of", "order", "sample_indices"]
