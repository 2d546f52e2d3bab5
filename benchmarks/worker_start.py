"""Where a worker's start goes, in seconds of processor time: its imports, the job's, and its cut model, cold and warm.

``python benchmarks/worker_start.py [JOB] [--repeats N]`` starts one process after another; each does what a worker does
at its setup. Cold: nothing is kept. Warm: another process has cut the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

DEFAULT = ("configs/jobs/tiny_gpt.py:job", "configs/jobs/gpt2_stdlib.py:job")


def start(job_path: str, num_sections: int | None) -> dict[str, float]:
    """Do what a worker does, and return the processor time of each part."""
    parts: dict[str, float] = {}
    before_s = 0.0

    def told(name: str) -> None:
        nonlocal before_s
        now_s = time.process_time()
        parts[name], before_s = now_s - before_s, now_s

    import torch

    torch.set_num_threads(1)
    told("import torch")
    from morph.cutting.cache.cut_job import LoadedJob
    from morph.jobs.files import imported_once
    from morph.runtime.process.worker import Worker  # noqa: F401  # as a worker's process does
    from morph.runtime.state.deferred_compiler import prepare_torch
    from morph.runtime.workloads.job_workload import JobWorkload  # noqa: F401

    told("import the worker")
    with imported_once(job_path):
        loaded = LoadedJob(job_path)
        job = loaded.job
        told("load the job, with its imports")
        m = job.micro_batch_size or 1
        kept = loaded.kept(num_sections, m, None)
        told("read what was kept")
        if kept is None:
            from morph.cutting import cut

            exported = loaded.export()
            told("export, with its imports")
            model, initial = cut(exported, num_sections=num_sections, micro_batch_size=m), exported.initial_state
            told("cut")
            loaded.keep(exported, model, [num_sections])
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


def measured(job_path: str, cache: str, num_sections: int | None) -> dict[str, float]:
    """Start one process with this cache."""
    command = [sys.executable, __file__, "--one", str(num_sections or 0), job_path]
    environment = {**os.environ, "MORPH_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    parts: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return parts


def main() -> None:
    """Print one table per job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", default=DEFAULT)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(start(options.jobs[0], options.one or None)))
        return
    for job_path in options.jobs:
        cold: list[dict[str, float]] = []
        warm: list[dict[str, float]] = []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(measured(job_path, cache, None))
                warm.append(measured(job_path, cache, None))
        print(f"\n{job_path}: CPU seconds, median of {options.repeats}")
        print(f"{'':48}{'cold':>8}{'warm':>8}")
        for name in dict.fromkeys([*cold[0], *warm[0]]):
            print(f"{name:48}" + "".join(f"{_median(runs, name):8.2f}" for runs in (cold, warm)))
        print(f"{'in all':48}" + "".join(f"{_total(runs):8.2f}" for runs in (cold, warm)))


def _median(runs: list[dict[str, float]], name: str) -> float:
    return statistics.median(run.get(name, 0.0) for run in runs)


def _total(runs: list[dict[str, float]]) -> float:
    return statistics.median(sum(run.values()) for run in runs)


if __name__ == "__main__":
    main()
