"""The planner's estimate of each stage's memory beside what workers take: every shape of three jobs, on a CPU.

    python benchmarks/stage_memory [--workers 4] [JOB ..]

Workers run three steps, as threads of one process; every storage that a worker makes is counted for as long as it
lives, and the most that there was in the third step is compared with the estimate: for as many micro-batches as were
in flight, and for the plan's window, which may not have been full. What kernels take for themselves is not seen. No
checkpoint is written and no sums are sent: the estimate leaves these out too.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.runtime.measured_memory import Measured, measured_job  # noqa: E402 (its folder is found just before)

JOBS = ("configs/jobs/tiny_gpt.py:job", "configs/jobs/gpt2_stdlib.py:job", "benchmarks/stage_memory/images.py:job")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=JOBS, metavar="JOB")
    parser.add_argument("--workers", type=int, default=4, help="shapes of at most so many, and the deepest")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print("job            shape  recompute  estimate/measured, least and most  with full windows  fullest, MB  while")
    for path in options.jobs:
        found = list(_measured(f"{ROOT}/{path}", options.workers))
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
            print(
                f"{job.profile.job.name:14} {one.shape:6} {'yes' if recompute else 'no':9} "
                f"{min(ratios):16.3f} {max(ratios):16.3f} {max(planned):18.3f} {peak / 1e6:12.2f}  "
                f"{one.moments[one.peaks.index(peak)]}",
                flush=True,
            )
            yield one


def _ratios(one: Measured, estimates: tuple[int, ...]) -> list[float]:
    return [estimate / peak for estimate, peak in zip(estimates, one.peaks, strict=True)]


if __name__ == "__main__":
    main()
