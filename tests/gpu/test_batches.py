"""Batches of data workers are in pinned memory, and reach the device unchanged."""

from __future__ import annotations

import torch

from morph.runtime.device.staging import placed
from tests.data.test_ahead import KEYS, reading, step_of


def test_batches_that_data_workers_read_are_pinned_and_arrive_on_the_device() -> None:
    with reading("drawn", pinned=True) as found:
        found.expect(step_of(0))
        for step, micro_batch in step_of(0):
            batch = found.ahead.load(step, micro_batch, KEYS)
            assert all(batch[key].is_pinned() for key in KEYS if batch[key].numel())
            there = placed(batch, torch.device("cuda"))
            wanted = found.alone.load(step, micro_batch, KEYS)
            assert all(torch.equal(there[key].cpu(), wanted[key]) for key in KEYS)
        assert found.dataset.num_reads == 0
