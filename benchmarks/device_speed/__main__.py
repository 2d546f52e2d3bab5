"""Times on a real device: sums compared with its memory bandwidth, copies, forming and aborting NCCL, whole steps.

    make bench-gpu
    python -m benchmarks device_speed --device cpu --tiny

Steps of GPT-2 355M and of a model like Llama 3.2 1B are timed in Morph at 1x1 and 2x1 (two workers that share the
device, over staged links and through mailboxes) and in a plain loop with the same precision and kernels. Rates are of
the median of several runs. ``--device cpu --tiny`` runs everything but the mailboxes on a CPU with tiny sizes, as a
check that it works.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from benchmarks.device_speed.training import PlainLoop, morph_times_s, synchronize
from benchmarks.harness import TINY_JOB, option, wall_s
from benchmarks.remote import Called, Remote, call
from morph.contract.cluster import LinkSetting
from morph.runtime.device.devices import CudaDevice
from morph.runtime.device.nccl import Nccl
from morph.runtime.device.staging import Staging
from morph.runtime.state.fixed_point import add_fixed, fixed_sum, from_fixed

RUNS = 7
HERE = Path(__file__).resolve().parent
JOBS = {name: f"{HERE}/jobs.py:{name}" for name in ("gpt2_355m", "llama_1b")}
TINY = {"tiny_gpt": TINY_JOB}


def median_s(work: Callable[[], object], device: str, runs: int) -> float:
    """Return the device's median seconds, after one run to warm up."""

    def run() -> None:
        work()
        synchronize(device)

    synchronize(device)
    return statistics.median([wall_s(run) for _ in range(runs + 1)][1:])


def kernels(device: str, num: int, runs: int) -> None:
    """Print the rates of sums of so many elements, by the bytes that one pass over them moves."""
    gradient = torch.linspace(-1.0, 1.0, num, device=device)
    total = torch.zeros(num, dtype=torch.int64, device=device)
    largest = torch.zeros(1, dtype=torch.float64, device=device)
    other, sums = torch.empty_like(total), fixed_sum(total, largest, 20)
    rows, means = torch.stack([total, total]), torch.empty(num, device=device)
    works: tuple[tuple[str, int, Callable[[], object]], ...] = (
        ("copy within the device (16 bytes an element)", 16, lambda: other.copy_(total)),
        ("add a gradient to exact sums (20)", 20, lambda: add_fixed([sums], [gradient], [False])),
        ("means of two members' sums (20)", 20, lambda: from_fixed([rows], [20], 8, [means])),
    )
    for name, num_bytes, work in works:
        took_s = median_s(work, device, runs)
        print(f"{name}: {num * num_bytes / took_s / 1e9:.1f} GB/s")


def copies(device: str, num_bytes: int, runs: int) -> None:
    """A device's state through pinned memory: down, and up."""
    if device == "cpu":
        print("copies through pinned memory: need a CUDA device")
        return
    made = CudaDevice(torch.device(device))
    stream, on_device = made.stream(), torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    host = made.pinned((num_bytes,), torch.uint8)
    staging = Staging(made)
    for name, work in (
        ("copy to pinned memory", lambda: stream.copy(host, on_device)),
        ("copy to the device", lambda: staging.to_device([host])),
    ):
        print(f"{name}: {num_bytes / median_s(work, device, runs) / 1e9:.1f} GB/s")


def communicators(device: str) -> None:
    """Print the times to form and abort communicators of one rank."""
    if device == "cpu" or not dist.is_nccl_available():
        print("communicators: need a CUDA device, and a torch with NCCL")
        return
    library = Nccl(torch.device(device))
    begin_s = time.perf_counter()
    formed = [library.form(PrefixStore(str(index), HashStore()), 0, 1, 60.0) for index in range(2)]
    formed_s = time.perf_counter()
    library.abort(formed)
    print(f"communicators of one rank: forming two {formed_s - begin_s:.2f} s, ", end="")
    print(f"aborting both {time.perf_counter() - formed_s:.2f} s")


def steps(
    device: str,
    name: str,
    job_path: str,
    num_steps: int,
    depths: tuple[int, ...] = (1, 2),
    make: Callable[[Callable[[], object]], Called] = Remote,
) -> None:
    """Print a job's step times in a plain loop, and in pipelines of these depths."""
    loop = make(partial(PlainLoop, job_path, device))
    plain_s = statistics.median(call(loop, "times_s", num_steps))
    loop.end()
    print(f"{name}, plain loop: {plain_s:.3f} s a step")
    for depth in depths:
        ways: tuple[LinkSetting, ...] = ("staged", "ipc") if depth > 1 and device == "cuda" else ("staged",)
        for links in ways:
            with tempfile.TemporaryDirectory() as folder:
                took_s = statistics.median(morph_times_s(job_path, device, depth, num_steps, folder, links, make))
            way = f", links {links}" if depth > 1 else ""
            print(f"{name}, Morph {depth}x1{way}: {took_s:.3f} s a step, {took_s / plain_s:.2f} of the plain loop")


def main(
    device: Literal["cuda", "cpu"] = "cuda", tiny: Annotated[bool, option("sizes that say nothing")] = False
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"needs a CUDA device; torch {torch.__version__} finds none")
    name = torch.cuda.get_device_name() if device == "cuda" else "a processor"
    print(f"torch {torch.__version__}, {name}{', tiny sizes' if tiny else ''}")
    runs = 1 if tiny else RUNS
    kernels(device, 1 << 10 if tiny else 1 << 28, runs)
    copies(device, 1 << 12 if tiny else 1_200_000_000, runs)
    communicators(device)
    for job, job_path in (TINY if tiny else JOBS).items():
        steps(device, job, job_path, runs)
