from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from morph.cutting import cut, export_job
from morph.cutting.cuts.cut_model import CutModel
from morph.data import MicroBatchLoader
from morph.jobs.job import Job, load_job
from tests.crew import Crew
from tests.system.harness import JOB, MICRO_BATCH_SIZE, NUM_SECTIONS, TinyJob, load_tiny_job, uninterrupted


@dataclass(frozen=True)
class CutJob:
    """The tiny job as a worker has it after its setup."""

    job: Job
    model: CutModel
    initial: Mapping[str, Tensor]
    loader: MicroBatchLoader

    def load(self, micro_batch: int, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return the entries of one micro-batch of step 0."""
        return self.loader.load(0, micro_batch, keys)


@pytest.fixture(scope="session")
def tiny() -> CutJob:
    torch.set_num_threads(1)
    job = load_job(JOB)
    exported = export_job(job)
    model = cut(exported, num_sections=NUM_SECTIONS, micro_batch_size=MICRO_BATCH_SIZE)
    loader = MicroBatchLoader(job.dataset(), job.seed, job.batch_size, MICRO_BATCH_SIZE)
    return CutJob(job, model, exported.initial_parameters, loader)


@pytest.fixture(scope="session")
def job() -> TinyJob:
    return load_tiny_job()


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the weights of a single worker after the module's ``NUM_STEPS``."""
    return uninterrupted(request.module.NUM_STEPS, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def processes(job: TinyJob) -> Iterator[Crew]:
    """Four workers that are not set up yet."""
    crew = Crew(job, ("w0", "w1", "w2", "w3"))
    try:
        yield crew
    finally:
        crew.close()


@pytest.fixture(scope="module")
def set_up(processes: Crew, job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> Crew:
    processes.set_up(JOB, job.fingerprint, tmp_path_factory.mktemp("checkpoints"))
    return processes


@pytest.fixture
def crew(set_up: Crew) -> Crew:
    """Four workers without state."""
    set_up.begin()
    return set_up
