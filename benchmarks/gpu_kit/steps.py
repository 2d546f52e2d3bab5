"""Step time of a job, by a plain loop or by one worker of Morph in this process; and where it goes.

    python -m benchmarks.gpu_kit.steps MODE JOB [DEVICE]     MODE: plain, plain-free or morph

`plain`: the loop of benchmarks/device_speed with the kernels that exact sums allow. `plain-free`: torch's own choice of
kernels and a fused AdamW, what a user would write. `morph`: the whole of a worker's step, 1x1.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.device_speed.training import PlainLoop, synchronize
from benchmarks.remote import InThisProcess
from benchmarks.workers import Crew, cut_job
from morph import Job
from morph.jobs.job import load_job
from morph.runtime.process.single import single_plan
from morph.runtime.step.kernels import prepare_cublas

mode, job_path, device = sys.argv[1], sys.argv[2], (sys.argv[3:] or ["cuda"])[0]
if mode != "plain-free":
    prepare_cublas()
STEPS = 5 if device == "cuda" else 1
PEAK = 989e12  # dense bf16 of an H100 or H200, by the datasheet
torch.set_num_threads(1)


def morph() -> tuple[Job, int, int, Crew]:
    job, model = load_job(job_path), cut_job(job_path)
    num = job.batch_size // model.micro_batch_size
    begun = time.perf_counter()
    crew = Crew(job_path, model, tempfile.mkdtemp(), device=device, make=InThisProcess)
    print(f"setup {time.perf_counter() - begun:.1f} s")
    begun = time.perf_counter()
    crew.begin(single_plan(model.fingerprint, len(model.sections), model.micro_batch_size, num))
    print(f"reshape {time.perf_counter() - begun:.1f} s")
    return job, num, sum(torch.Size(shape).numel() for shape, _ in model.parameter_specs.values()), crew


crew: Crew | None = None
attempts: list[int] = []
if mode == "morph":
    job, num, count, crew = morph()
else:
    loop = PlainLoop(job_path, device, free=mode == "plain-free")
    job, num, count = loop.job, loop.num_micro_batches, sum(one.numel() for one in loop.model.parameters())


def step() -> None:
    if crew is None:
        loop.step()
        return
    crew.step()
    attempts.append(crew.attempts)


length = next(iter(job.dataset()[0].values())).numel()
took = []
for _ in range(STEPS + 2):
    synchronize(device)
    begun, thread_s = time.perf_counter(), time.thread_time()
    step()
    synchronize(device)
    took.append((time.perf_counter() - begun, time.thread_time() - thread_s))
wall, thread = (statistics.median(one) for one in zip(*took[2:], strict=True))
flops = 6 * count * job.batch_size * length
print(f"steps: {[round(one, 3) for one, _ in took]}")
if crew is not None:
    loss = statistics.fmean(entry.loss for entry in crew.answers[0].losses)
    print("attempts", attempts, "times", crew.answers[0].times, "loss", loss)
if device == "cuda":
    print(
        f"memory: most allocated {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, reserved "
        f"{torch.cuda.max_memory_reserved() / 2**30:.1f}"
    )
print(
    f"RESULT {mode} {job.name}: {wall:.3f} s a step ({num} micro-batches of {job.micro_batch_size}), host thread "
    f"{thread / num * 1e3:.1f} ms a micro-batch; "
    f"{job.batch_size * length / wall:.0f} tokens/s, {flops / wall / PEAK:.1%} of {PEAK / 1e12:.0f} TFLOP/s (6N)",
    flush=True,
)
activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
with profile(activities=activities) as found:
    synchronize(device)
    begun = time.perf_counter()
    step()
    synchronize(device)
    profiled_s = time.perf_counter() - begun
events = found.key_averages()
print(
    events.table(
        sort_by="self_device_time_total" if device == "cuda" else "self_cpu_time_total",
        row_limit=18,
        max_name_column_width=70,
    )
)
print(events.table(sort_by="self_cpu_time_total", row_limit=18, max_name_column_width=70))
on_device = [one for one in events if str(one.device_type).endswith("CUDA")]
busy_s = sum(one.self_device_time_total for one in on_device) / 1e6
calls = {
    one.key: one.count
    for one in events
    if one.key.startswith(
        (
            "cudaLaunch",
            "cuLaunch",
            "cudaMemcpy",
            "cudaStreamSync",
            "cudaEventSync",
            "cudaDeviceSync",
            "cudaMalloc",
            "cudaHostAlloc",
            "cudaFree",
            "cudaEventRecord",
            "cudaEventCreate",
        )
    )
}
print(f"calls: {calls}")
print(
    f"PROFILE {mode} {job.name}: device busy {busy_s:.3f} s of {profiled_s:.3f} s of the profiled step, "
    f"{sum(one.count for one in on_device)} kernels and copies",
    flush=True,
)
os._exit(0)
