from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json
from manager.engine.commit_round import measure_commit_round
from manager.engine.ray_environment import prepare
print(json.dumps({"samples_s": measure_commit_round(5), "folder": str(prepare())}))
"""


@pytest.mark.system
def test_a_commit_round_is_measured_through_ray_and_leaves_nothing_behind() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found["samples_s"]) == 5
    assert all(0 < sample < 5 for sample in found["samples_s"])
    assert not Path(found["folder"]).exists()
