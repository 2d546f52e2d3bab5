"""Example scripts that transformers publishes, with the two lines changed that the guide of Trainers shows: the weights
are those of ``python script.py``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from morph.checkpoint.manifest import complete_versions, read_manifest
from tests.trainers.published_scripts import ROOT, RUNS, Run, options, write_data, write_model
from tests.training.shapes import parameters_of
from tests.waiting import PATIENCE

SCRIPTS = Path(os.environ.get("MORPH_PUBLISHED_SCRIPTS", ROOT / ".venv" / "scripts"))
"""Made by ``make test-scripts``: the scripts, and the packages that they import."""
GUIDE = ROOT / "docs" / "guides" / "trainer.md"
MICRO_BATCH_SIZE, NUM_SECTIONS = 2, 2
RUN_S = 900 * PATIENCE


def changed(script: str) -> str:
    """Return a script with the change that the guide shows: a line before another, and one in place of another."""
    found = re.search(r"```diff\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    marks, (added, below, removed, instead) = zip(*((line[0], line[1:]) for line in found[1].splitlines()), strict=True)
    assert marks == ("+", " ", "-", "+")
    for old, new in ((below, f"{added}\n{below}"), (removed, instead)):
        assert script.count(f"\n{old}\n") == 1, old
        script = script.replace(f"\n{old}\n", f"\n{new}\n")
    return script


def ran(call: list[str], folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{SCRIPTS / 'packages'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "NLTK_DATA": str(folder / "nltk")}
    done = subprocess.run(
        [sys.executable, *call], cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, " ".join(f"{done.stdout}{done.stderr}"[-3000:].split())


def command_line(given: dict[str, Any]) -> list[str]:
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


@pytest.mark.long
@pytest.mark.skipif(not (SCRIPTS / "packages").is_dir(), reason="`make test-scripts` fetches the scripts")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_published_script_trains_under_morph_what_it_trains_alone(run: Run, tmp_path: Path) -> None:
    write_data(tmp_path)
    write_model(run, tmp_path)
    given = options(run, "alone")
    ran([str(SCRIPTS / run.script), *command_line(given)], tmp_path)
    steps = json.loads((tmp_path / "alone" / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]

    for neighbour in (SCRIPTS / run.script).parent.glob("*.py"):
        (tmp_path / neighbour.name).write_text(neighbour.read_text(encoding="utf-8"), encoding="utf-8")
    script = tmp_path / Path(run.script).name
    script.write_text(changed(script.read_text(encoding="utf-8")), encoding="utf-8")
    job = f"{script}:main({', '.join(f'{name}={value!r}' for name, value in options(run, 'under').items())})"
    url = str(tmp_path / "checkpoints")
    if run.refused is not None:
        with pytest.raises(AssertionError, match=re.escape(run.refused)):
            ran([str(Path(sys.executable).with_name("morph")), "cut", job], tmp_path)
        return
    sizes = ["--sections", str(NUM_SECTIONS), "--micro-batch", str(MICRO_BATCH_SIZE)]
    ran(["-m", "morph.runtime.process.single", job, "--steps", str(steps), *sizes, "--checkpoints", url], tmp_path)

    weights = load_file(tmp_path / "alone" / "model.safetensors")
    began = load_file(tmp_path / run.model / "model.safetensors")
    trained = parameters_of(read_manifest(url, complete_versions(url)[-1]), Path(url))
    assert trained.keys() <= weights.keys()
    assert sum(not weights[name].equal(began[name]) for name in trained) > len(trained) / 2
    for name, weight in trained.items():
        assert float((weight - weights[name]).abs().max()) <= 1e-5, name
