"""Step times: a plain loop, and Morph's workers in processes of their own, which share the device."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.step_time.remote import Remote, call_all
from morph.contract.cluster import LinkSetting
from morph.contract.decided import decided_step
from morph.contract.messages import Prepared, Reshaped, ReshapeOrder, Slot, Source, StepOrder, WorkerReady, WorkerSetup
from morph.contract.plan import Expectation, Plan, StagePlan
from morph.cutting.cache.cut_job import load_and_cut
from morph.data import MicroBatchLoader
from morph.jobs.job import load_job
from morph.runtime.groups.store import StoreHost
from morph.runtime.process.worker import Worker
from morph.runtime.step.kernels import kernels_for, kernels_now, prepare_cublas, set_kernels
from morph.runtime.step.section_run import autocast

LOOPBACK = "127.0.0.1"


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
                    loss = job.loss(model, {key: value.to(device) for key, value in batch.items()})
                (loss / num).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            synchronize(device)
            found.append(time.perf_counter() - begin_s)
        return found[1:]


def plan_of(depth: int, fingerprint: str, num_sections: int, micro_batch_size: int, num: int) -> Plan:
    """One replica of one or two equal stages, in the order 1F1B."""
    ends = [num_sections * (stage + 1) // depth for stage in range(depth)]
    orders = ["F" + "FB" * (num - 1) + "B", "FB" * num][-depth:]
    return Plan(
        fingerprint=fingerprint,
        schedule="varuna",
        micro_batch_size=micro_batch_size,
        num_micro_batches=num,
        num_replicas=1,
        stages=tuple(
            StagePlan(first_section=first, end_section=end, window=depth - stage, recompute=False)
            for stage, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
        ),
        orders={num: tuple(orders)},
        expected=Expectation(mini_batch_s=0, examples_per_s=0, lower_bound_s=0, peak_memory_bytes=0, parts_s={}),
    )


def morph_times_s(
    job_path: str, device: str, depth: int, num_steps: int, folder: str, links: LinkSetting = "staged"
) -> list[float]:
    """Seconds of so many steps of ``depth`` workers, behind one to warm up; exact sums."""
    job = load_job(job_path)
    model = load_and_cut(job_path, num_sections=job.num_sections, micro_batch_size=job.micro_batch_size).model
    store = StoreHost(LOOPBACK)
    workers = [Remote(Worker) for _ in range(depth)]
    try:
        for number, worker in enumerate(workers):
            worker.send(
                "setup",
                WorkerSetup(
                    worker=f"w{number}",
                    job_path=job_path,
                    fingerprint=model.fingerprint,
                    num_sections=len(model.sections),
                    micro_batch_size=model.micro_batch_size,
                    checkpoint_url=folder,
                    store_host=LOOPBACK,
                    store_port=store.port(),
                    listen_host=LOOPBACK,
                    device="cuda" if device == "cuda" else "cpu",
                    links=links,
                ),
            )
        for worker in workers:
            _expect(worker.answer(), WorkerReady)
        num = job.batch_size // model.micro_batch_size
        plan = plan_of(depth, model.fingerprint, len(model.sections), model.micro_batch_size, num)
        slots = tuple(Slot(worker=f"w{stage}", stage=stage, replica=0) for stage in range(depth))
        sources = tuple(
            Source(worker=f"w{stage}", unit=unit.id, kind="initial")
            for stage, entry in enumerate(plan.stages)
            for unit in model.units
            if set(unit.sections) & set(entry.sections)
        )
        order = ReshapeOrder(generation=1, version=0, plan=plan, slots=slots, sources=sources)
        for answer in call_all(workers, "reshape", order):
            _expect(answer, Reshaped)
        units = tuple(unit.id for unit in model.units)
        times_s, decided = [], None
        for step in range(num_steps + 1):
            begin_s = time.perf_counter()
            for attempt in range(8):
                asked = StepOrder(generation=1, step=step, attempt=attempt, decided=decided)
                answers = [_expect(answer, Prepared) for answer in call_all(workers, "step", asked)]
                if not any(answer.overflowed for answer in answers):
                    break
            else:
                raise RuntimeError("a gradient overflows again and again")
            times_s.append(time.perf_counter() - begin_s)
            norms = [answer.unit_norms_sq for answer in answers]
            decided = decided_step(step + 1, norms, [answer.non_finite for answer in answers], units)
        return times_s[1:]
    finally:
        for worker in workers:
            worker.end()


def _expect(answer: Any, kind: type[Any]) -> Any:
    if not isinstance(answer, kind):
        raise RuntimeError(f"{answer} is no {kind.__name__}")
    return answer
