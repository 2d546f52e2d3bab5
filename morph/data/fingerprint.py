"""What a job's data sets are known by: read where the job is checked, and again by every worker before it joins."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from morph.contract.job_facts import DataFacts, SampleFacts
from morph.data.loader import data_of, read_samples
from morph.jobs.job import Job, MapDataset

NUM_SAMPLED = 8


def data_facts(job: Job) -> dict[str, DataFacts]:
    """Look at a job's data sets.

    Raises:
        JobError: a sample that is none.
    """
    found = {"dataset": _facts(data_of(job), job.seed)}
    if job.eval_data is not None:
        found["eval_data"] = _facts(data_of(job, "eval_data"), job.seed)
    return found


def _facts(dataset: MapDataset, seed: int) -> DataFacts:
    """Length, and samples spread evenly from the first to the last."""
    length = len(dataset)
    indices = sorted({place * (length - 1) // (NUM_SAMPLED - 1) for place in range(NUM_SAMPLED)}) if length else []
    samples = zip(indices, read_samples(dataset, seed, [(0, index) for index in indices]), strict=True)
    return DataFacts(
        num_samples=length,
        samples=tuple(
            SampleFacts(index=index, entries={key: _shown(value) for key, value in sample.items()})
            for index, sample in samples
        ),
    )


def _shown(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().flatten()
    digest = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} sha256 {digest[:16]}"
