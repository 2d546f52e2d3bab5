"""A loader with data workers, and one without; imports only what a worker imports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from morph.data import DataWorkers, MicroBatchLoader
from morph.jobs.job import load_job
from tests.data import read_jobs
from tests.data.read_jobs import Drawn
from tests.forked_modules import SUBPROCESS
from tests.waiting import poll_until

KEYS = ("x", "picture", "even", "half", "none")
M, BATCH_SIZE = 2, 6


def spec_of(name: str) -> str:
    return f"{read_jobs.HERE}:{name}"


def is_ready(workers: DataWorkers) -> bool:
    workers._hear(0.0)
    return all(reader.ready for reader in workers._readers)


class Reading:
    """A loader with data workers and one without."""

    def __init__(self, name: str, count: int = 2, **options: Any) -> None:
        job = load_job(spec_of(name))
        self.dataset: Drawn = job.dataset()  # type: ignore[assignment]
        self.workers = DataWorkers(count, spec_of(name), **options)
        self.prefetcher = MicroBatchLoader(self.dataset, job.seed, BATCH_SIZE, M, self.workers)
        self.alone = MicroBatchLoader(job.dataset(), job.seed, BATCH_SIZE, M)
        self.dataset.num_reads = 0

    def expect(self, places: Sequence[tuple[int, int]], keys: Sequence[str] = KEYS, *, over: bool = False) -> None:
        self.prefetcher.expect(places, keys, lambda: over, window=1)

    def same(self, step: int, micro_batch: int, keys: Sequence[str] = KEYS) -> None:
        """Load a micro-batch both ways, and compare every bit and stride."""
        found, wanted = (loader.load(step, micro_batch, keys) for loader in (self.prefetcher, self.alone))
        assert list(found) == list(wanted) == list(keys)
        for key in keys:
            assert found[key].stride() == wanted[key].stride()
            assert found[key].dtype == wanted[key].dtype
            assert torch.equal(found[key], wanted[key])


@contextmanager
def reading(name: str, count: int = 2, *, is_forked: bool = True, **options: Any) -> Iterator[Reading]:
    """Open loaders; ``is_forked``: data workers come from a process that has torch, which a user's load themselves."""
    with mock.patch("morph.data.prefetch.subprocess", SUBPROCESS) if is_forked else nullcontext():
        found = Reading(name, count, **options)
        try:
            poll_until(lambda: is_ready(found.workers), "data workers")
            yield found
        finally:
            found.workers.close()


def step_of(step: int) -> list[tuple[int, int]]:
    return [(step, micro_batch) for micro_batch in range(BATCH_SIZE // M)]
