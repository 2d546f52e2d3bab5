"""The subject of a measurement: a cut job on one device."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import partial

import torch

from calibrate.timing.bench import Bench, make_bench, one_of_each
from calibrate.timing.clocks import use_device
from morph.cutting import CutModel
from morph.cutting.cache.cut_job import LoadedJob
from morph.data import MicroBatchLoader, data_of
from morph.jobs.job import Job, MapDataset
from morph.preflight.data_check import check_data
from morph.runtime.device.devices import check_kernels
from morph.runtime.step.compilation import compiled
from morph.runtime.step.kernels import kernels_for, kernels_now, prepare_cublas, set_kernels


@dataclass(frozen=True)
class Subject:
    """See ``load_subject``."""

    job_path: str
    job: Job
    loaded: LoadedJob
    dataset: MapDataset
    num_sections: int | None
    device: torch.device

    def cut(self, micro_batch_size: int) -> CutModel:
        """Cut the job for one m; its sections are run as workers run them."""
        model = self.loaded.cut(self.num_sections, micro_batch_size).model
        return compiled(model) if self.job.compile else model

    def benches(self, model: CutModel, signatures: Container[str] | None = None) -> list[Bench]:
        """Set up one section of each kind, or only of the given kinds."""
        loader = MicroBatchLoader.of(self.job, model.micro_batch_size)
        return [
            make_bench(self.job, section, self.loaded.initial, partial(loader.example, model.length), self.device)
            for section in one_of_each(model)
            if signatures is None or section.signature in signatures
        ]


def load_subject(job_path: str, device: torch.device, num_sections: int | None = None) -> Subject:
    """Load a job, and set torch to the kernels that workers use. Raises JobError if it cannot be measured."""
    prepare_cublas()
    use_device(device)
    check_kernels(device, "device")
    loaded = LoadedJob(job_path)
    job = loaded.job
    set_kernels(kernels_for(job.accumulation, kernels_now()))
    check_data(job)
    return Subject(
        job_path=job_path,
        job=job,
        loaded=loaded,
        dataset=data_of(job),
        num_sections=job.num_sections if num_sections is None else num_sections,
        device=device,
    )
