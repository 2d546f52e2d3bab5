"""Step times: a plain loop, and Morph's workers in processes of their own, which share the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.harness import wall_s
from benchmarks.remote import Called, Remote
from benchmarks.workers import Crew, cut_job, loss_of, plan_by_hand
from morph.contract.cluster import LinkSetting
from morph.contract.plan import Plan
from morph.data import MicroBatchLoader
from morph.job import load_job
from morph.runtime.step.kernels import kernels_for, kernels_now, prepare_cublas, set_kernels
from morph.runtime.step.section_run import autocast


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class PlainLoop:
    """The job's training without Morph, with the same precision and kernels; made and run in a process of its own."""

    def times_s(self, job_path: str, device: str, num_steps: int) -> list[float]:
        """Seconds of so many steps, behind one to warm up."""
        torch.set_num_threads(1)
        prepare_cublas()
        job = load_job(job_path)
        set_kernels(kernels_for(job.accumulation, kernels_now()))
        model = job.model().to(device)
        optimizer = job.optimizer(model.named_parameters())
        micro_batch_size = job.micro_batch_size
        assert micro_batch_size is not None
        loader = MicroBatchLoader(job.dataset(), job.seed, job.batch_size, micro_batch_size)
        num, keys = job.batch_size // micro_batch_size, tuple(job.dataset()[0])
        found = []
        for step in range(num_steps + 1):
            begin_s = time.perf_counter()
            for micro_batch in range(num):
                batch = loader.load(step, micro_batch, keys)
                with autocast(job.precision, device):
                    loss = loss_of(job, model, {key: value.to(device) for key, value in batch.items()})
                (loss / num).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            synchronize(device)
            found.append(time.perf_counter() - begin_s)
        return found[1:]


def plan_of(depth: int, fingerprint: str, num_sections: int, micro_batch_size: int, num: int) -> Plan:
    """One replica of one or two equal stages, in the order 1F1B."""
    orders = ["F" + "FB" * (num - 1) + "B", "FB" * num][-depth:]
    return plan_by_hand(
        [num_sections * stage // depth for stage in range(depth + 1)],
        1,
        {num: orders},
        num_micro_batches=num,
        windows=[depth - stage for stage in range(depth)],
        schedule="varuna",
        m=micro_batch_size,
        fingerprint=fingerprint,
    )


def morph_times_s(
    job_path: str,
    device: str,
    depth: int,
    num_steps: int,
    folder: str,
    links: LinkSetting = "staged",
    make: Callable[[Callable[[], object]], Called] = Remote,
) -> list[float]:
    """Seconds of so many steps of ``depth`` workers, behind one to warm up; exact sums."""
    model = cut_job(job_path)
    m = model.micro_batch_size
    num = load_job(job_path).batch_size // m
    crew = Crew(job_path, model, folder, depth, device=device, links=links, make=make)
    try:
        crew.begin(plan_of(depth, model.fingerprint, len(model.sections), m, num))
        return [wall_s(crew.step) for _ in range(num_steps + 1)][1:]
    finally:
        crew.end()
