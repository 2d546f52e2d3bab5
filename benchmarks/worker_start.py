"""Where a worker's start goes, in seconds of processor time: its imports, the job's, and its cut model.

    python -m benchmarks worker_start --repeats 3 [JOB ..]

One process after another does what a worker does at its setup: first one that makes the cut itself, then one that is
handed it by the manager.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import GPT2_JOB, TINY_JOB, head, row


def start(job_path: str, handed_path: str) -> dict[str, float]:
    """Run a worker's setup in a process without its imports; return the processor time of each part.

    The cut is read from a file, or made and written there if the file does not exist.
    """
    parts: dict[str, float] = {}
    before_s = time.process_time()

    def told(name: str) -> None:
        nonlocal before_s
        now_s = time.process_time()
        parts[name], before_s = now_s - before_s, now_s

    import torch

    torch.set_num_threads(1)
    told("import torch")
    from morph.contract.messages import HandedCut
    from morph.cutting.cache.cut_job import LoadedJob, load_and_cut
    from morph.jobs.job import load_job
    from morph.runtime.process.worker import set_up  # noqa: F401  # as a worker's process does
    from morph.runtime.state.optimizer_state import prepare_torch
    from morph.runtime.workloads.job_workload import JobWorkload  # noqa: F401

    told("import the worker")
    job = load_job(job_path)
    told("load the job, with its imports")
    m, handed = job.micro_batch_size or 1, Path(handed_path)
    cut = HandedCut.model_validate_json(handed.read_bytes()) if handed.exists() else None
    loaded = None if cut else LoadedJob(job_path)
    if loaded is not None:
        _ = loaded.exported
    told("export, with its imports")
    found = loaded.cut(None, m) if loaded else load_and_cut(job_path, num_sections=None, micro_batch_size=m, handed=cut)
    told("cut, or read the cut")
    prepare_torch()
    told("load what an optimizer and a backward need")
    for unit in found.model.units:
        for name in unit.names:
            assert found.initial[name].numel()
    told("make every unit's initial values")
    parts["peak memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if loaded is not None:
        handed.write_text(loaded.handed(len(found.model.sections), m).model_dump_json())
    return parts


def measured(job_path: str, handed_path: str) -> dict[str, float]:
    """Start one process with this file."""
    code = "import json, sys; from benchmarks.worker_start import start; print(json.dumps(start(*sys.argv[1:])))"
    environment = {**os.environ, "MORPH_CACHE_DIR": os.devnull, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, job_path, handed_path]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    parts: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return parts


def main(jobs: Annotated[list[str] | None, typer.Argument(metavar="JOB ..")] = None, repeats: int = 3) -> None:
    for job_path in jobs or [TINY_JOB, GPT2_JOB]:
        runs: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                for found in runs:
                    found.append(measured(job_path, f"{folder}/cut.json"))
        print(f"\n{job_path}: CPU seconds, median of {repeats}")
        head("| makes the cut | is handed it")
        for name in dict.fromkeys([*runs[0][0], *runs[1][0]]):
            row(name, *(f"{statistics.median(one.get(name, 0.0) for one in found):.2f}" for found in runs))
        totals = [[sum(one.values()) - one["peak memory, MB"] for one in found] for found in runs]
        row("processor time in all", *(f"{statistics.median(found):.2f}" for found in totals))
