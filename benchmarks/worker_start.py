"""Where a worker's start goes, in seconds of processor time: its imports, the job's, and its cut model, cold and warm.

    python -m benchmarks worker_start --repeats 3 [JOB ..]

One process after another does what a worker does at its setup. Cold: nothing is kept. Warm: another process has cut the
same model.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Annotated

import typer

from benchmarks.harness import GPT2_JOB, TINY_JOB, head, row


def start(job_path: str) -> dict[str, float]:
    """Do what a worker does, in a process that has imported nothing of it; returns the processor time of each part."""
    parts: dict[str, float] = {}
    before_s = time.process_time()

    def told(name: str) -> None:
        nonlocal before_s
        now_s = time.process_time()
        parts[name], before_s = now_s - before_s, now_s

    import torch

    torch.set_num_threads(1)
    told("import torch")
    from morph.cutting.cache.cut_job import LoadedJob
    from morph.jobs.files import imported_once
    from morph.runtime.process.worker import set_up  # noqa: F401  # as a worker's process does
    from morph.runtime.state.deferred_compiler import prepare_torch
    from morph.runtime.workloads.job_workload import JobWorkload  # noqa: F401

    told("import the worker")
    with imported_once(job_path):
        loaded = LoadedJob(job_path)
        job = loaded.job
        told("load the job, with its imports")
        m = job.micro_batch_size or 1
        kept = loaded.kept(None, m, None)
        told("read what was kept")
        if kept is None:
            from morph.cutting import cut

            exported = loaded.export()
            told("export, with its imports")
            model, initial = cut(exported, num_sections=None, micro_batch_size=m), exported.initial_state
            told("cut")
            loaded.keep(exported, model, [None])
            told("keep")
        else:
            model, initial = kept.model, kept.initial
        prepare_torch()
        told("load what a backward needs")
        for unit in model.units:
            for name in unit.names:
                assert initial[name].numel()
        told("make every unit's initial values")
    return parts


def measured(job_path: str, cache: str) -> dict[str, float]:
    """Start one process with this cache."""
    code = "import json, sys; from benchmarks.worker_start import start; print(json.dumps(start(sys.argv[1])))"
    environment = {**os.environ, "MORPH_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, job_path]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    parts: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return parts


def main(jobs: Annotated[list[str] | None, typer.Argument(metavar="JOB ..")] = None, repeats: int = 3) -> None:
    for job_path in jobs or [TINY_JOB, GPT2_JOB]:
        runs: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as cache:
                for found in runs:  # cold first
                    found.append(measured(job_path, cache))
        print(f"\n{job_path}: CPU seconds, median of {repeats}")
        head("| cold | warm")
        for name in dict.fromkeys([*runs[0][0], *runs[1][0]]):
            row(name, *(f"{statistics.median(one.get(name, 0.0) for one in found):.2f}" for found in runs))
        row("in all", *(f"{statistics.median(sum(one.values()) for one in found):.2f}" for found in runs))
