"""The jobs whose steps are counted in docs/gpu.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.device_steps.steps import Shape

ROOT = Path(__file__).resolve().parents[2]
_JOBS = ROOT / "configs/jobs"
_TRAINING = ROOT / "tests/training/training_jobs.py"


@dataclass(frozen=True)
class Case:
    """A job in one shape; ``long``: its export takes a minute."""

    name: str
    job_path: str
    shape: Shape
    long: bool = False

    @property
    def title(self) -> str:
        """As in the docs' table."""
        shape = self.shape
        how = ", recomputed" if shape.recompute else ""
        return f"{self.name}, {shape.pipeline_depth}x{shape.num_replicas}, m = {shape.micro_batch_size}{how}"


CASES = (
    Case("tiny_gpt", f"{_JOBS / 'tiny_gpt.py'}:job", Shape(2, 2, 2)),
    Case("gpt2_stdlib", f"{_JOBS / 'gpt2_stdlib.py'}:job", Shape(4, 2, 8, recompute=True)),
    Case("four layers, bf16, clipped", f"{_TRAINING}:bf16", Shape(2, 2, 2, num_sections=4)),
    Case("batch norm, fp16", f"{_TRAINING}:normed_fp16", Shape(2, 2, 2, num_sections=4)),
    Case("four layers, fast sums", f"{_TRAINING}:scaled_fast", Shape(2, 2, 2, num_sections=4)),
    Case("gpt2_2_5b", f"{_JOBS / 'gpt2_big.py'}:gpt2_2_5b", Shape(9, 4, 4, recompute=True), long=True),
)
