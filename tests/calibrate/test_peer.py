from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_process_that_exchanges_messages_loads_nothing_that_exports_or_cuts() -> None:
    told = "import sys, calibrate.links.peer; print(*(name for name in sys.argv[1:] if name in sys.modules))"
    heavy = ("sympy", "morph.cutting.exporting.export", "calibrate.writing.measure", "ray")
    command = [sys.executable, "-c", told, *heavy, "morph.runtime.step.links"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["morph.runtime.step.links"]
