"""Which samples belong to which micro-batch, and loading them."""

from __future__ import annotations

from morph.data.loader import MicroBatchLoader, build_dataset
from morph.data.order import sample_indices

__all__ = ["MicroBatchLoader", "build_dataset", "sample_indices"]
