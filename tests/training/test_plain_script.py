"""The script of "Reproduce my plain script" ends with the weights that its job has in every shape."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch

from tests.system.harness import cut_for_workers
from tests.training.shapes import ShapesCrew, parameters_of
from tests.training.training_jobs import MICRO_BATCH_SIZE, NUM_SECTIONS
from tests.waiting import BOUND_S

PAGE = Path(__file__).parents[2] / "docs/start/plain-script.md"
FILES = re.compile(r"^`(\w+\.py)`[^`]*\n\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUM_STEPS = 20


@pytest.mark.slow
def test_the_documented_script_ends_within_1e_6_of_its_job_in_every_shape(crew: ShapesCrew, tmp_path: Path) -> None:
    files = dict(FILES.findall(PAGE.read_text(encoding="utf-8")))
    assert files.keys() == {"plain.py", "same.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    subprocess.run(
        [sys.executable, "plain.py"], cwd=tmp_path, check=True, timeout=2 * BOUND_S, env=os.environ | {"PYTHONPATH": ""}
    )
    plain = safetensors.torch.load_file(tmp_path / "plain.safetensors")
    job = f"{tmp_path / 'same.py'}:job"
    handed = cut_for_workers(job, NUM_SECTIONS, MICRO_BATCH_SIZE)
    alone = crew.train(job, [("1x1", NUM_STEPS)], tmp_path / "alone", cut=handed)
    shapes = crew.train(job, [("2x2", 6), ("1x3", 13), ("2x1", NUM_STEPS)], tmp_path / "shapes", lose=True, cut=handed)
    assert shapes.digests == alone.digests
    weights = parameters_of(shapes.manifest, tmp_path / "shapes")
    assert weights.keys() == plain.keys()
    assert max(float((weights[name] - plain[name]).abs().max()) for name in plain) < 1e-6
