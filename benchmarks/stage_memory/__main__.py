"""The planner's estimate of each stage's memory compared with that of workers: every shape of three jobs, on a CPU.

    python -m benchmarks stage_memory --workers 4 JOB ..

Workers run three steps as threads of one process; every storage that a worker makes counts as long as it lives, and the
peak of the third step is compared with the estimate for the number of micro-batches that were in flight, and for the
plan's window, which may not have been full. Temporary memory inside kernels is not measured. No checkpoint is written
and no sums are sent, so the estimate leaves these out, too.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import GPT2_JOB, ROOT, TINY_JOB, head, option, row
from tests.runtime.measured_memory import Measured, measured_job

JOBS = [TINY_JOB, GPT2_JOB, f"{ROOT}/benchmarks/stage_memory/images.py:job"]


def main(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="JOB ..")] = None,
    workers: Annotated[int, option("shapes of at most so many, and the deepest")] = 4,
) -> None:
    logging.disable(logging.WARNING)
    for path in jobs or JOBS:
        head("job | shape | recompute | estimate/measured: least | most | with full windows | fullest, MB | while")
        found = list(_measured(path, workers))
        errors = [abs(ratio - 1) for one in found for ratio in _ratios(one, one.reached)]
        planned = [ratio for one in found for ratio in _ratios(one, one.estimates)]
        print(f"{path}: {len(found)} shapes, {len(errors)} stages, off by {max(errors):.1%} at most, ", end="")
        print(f"{sum(errors) / len(errors):.1%} in the mean; ", end="")
        print(f"plans {min(planned):.3f} to {max(planned):.3f} of what was taken", flush=True)


def _measured(path: str, num_workers: int) -> Iterator[Measured]:
    job = measured_job(path)
    num_sections, total = job.profile.num_sections, job.subject.job.batch_size // job.profile.micro_batch_sizes[0]
    shapes = [
        (depth, replicas)
        for depth in range(1, num_sections + 1)
        for replicas in range(1, min(num_workers, total) + 1)
        if depth * replicas <= num_workers or (depth == num_sections and replicas == 1)
    ]
    for depth, replicas in shapes:
        for recompute in (True, False) if depth > 1 else (False,):
            with tempfile.TemporaryDirectory() as directory:
                one = job.steps(depth, replicas, recompute=recompute, directory=Path(directory))
            ratios, planned, peak = _ratios(one, one.reached), _ratios(one, one.estimates), max(one.peaks)
            shares = (f"{share:.3f}" for share in (min(ratios), max(ratios), max(planned)))
            how = "yes" if recompute else "no"
            cells = (*shares, f"{peak / 1e6:.2f}", one.moments[one.peaks.index(peak)])
            row(job.profile.job.name, one.shape, how, *cells)
            yield one


def _ratios(one: Measured, estimates: tuple[int, ...]) -> list[float]:
    return [estimate / peak for estimate, peak in zip(estimates, one.peaks, strict=True)]
