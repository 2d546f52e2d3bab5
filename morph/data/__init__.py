"""Assigns samples to micro-batches, and loads them; samplers are in ``morph.data.order``."""

from __future__ import annotations

from morph.data import order
from morph.data.loader import MicroBatchLoader, data_of
from morph.data.order import sample_indices
from morph.data.packing import Packed, document_mask
from morph.data.prefetch import DataWorkers

__all__ = ["DataWorkers", "MicroBatchLoader", "Packed", "data_of", "document_mask", "order", "sample_indices"]
