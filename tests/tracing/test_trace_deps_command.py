from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from morph.cli.main import app
from morph.contract.errors import JobError
from morph.contract.profile import Profile, UnitProfile
from morph.cutting import cut, export_job
from morph.jobs.job import load_job
from morph.preflight.job_check import check_job
from simulator import synthetic_profile
from tests.waiting import BOUND_S

JOBS = """
import torch
from torch import nn
from morph import Job

class Items:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return {"x": torch.ones(4) * index}

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

def loss(model, batch):
    return model(batch["x"]).square().mean()

def plain(named):
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

class Clips(torch.optim.SGD):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()

def clips(named):
    return Clips([parameter for _, parameter in named], lr=0.1)

def make(optimizer, **fields):
    return Job(name="small", model=model, loss=loss, dataset=Items, optimizer=optimizer, batch_size=4, **fields)

clean = make(plain, num_sections=2)
broken = make(clips, num_sections=2)
allowed = make(clips, num_sections=2, allowed_dependencies=("mixing:stack@jobs.py:step",))
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.py"
    path.write_text(JOBS, encoding="utf-8")
    return path


def test_a_clean_job_exits_with_0(jobs: Path) -> None:
    result = CliRunner().invoke(app, ["trace-deps", f"{jobs}:clean"])
    assert result.exit_code == 0, result.output
    assert "no violation: the job may start" in result.output


def test_a_violation_exits_with_1_and_names_its_line(jobs: Path) -> None:
    result = CliRunner().invoke(app, ["trace-deps", f"{jobs}:broken"])
    assert result.exit_code == 1
    number = 1 + next(index for index, line in enumerate(JOBS.splitlines()) if "clip_grad_norm_" in line)
    assert f"at    {jobs}:{number} by " in result.output
    assert "set Job.clip_grad_norm" in result.output
    assert result.output.endswith("1 violation\n")


def test_an_allowed_violation_lets_the_job_start(jobs: Path) -> None:
    result = CliRunner().invoke(app, ["trace-deps", f"{jobs}:allowed"])
    assert result.exit_code == 0, result.output
    assert "allowed mixing:stack@jobs.py:step" in result.output


def test_json_has_every_finding(jobs: Path) -> None:
    result = CliRunner().invoke(app, ["trace-deps", f"{jobs}:broken", "--json", "-k", "3", "--m", "1"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["num_sections"], report["micro_batch_size"], report["num_violations"]) == (3, 1, 1)
    assert report["findings"][0]["units"] == ["s0", "s1", "s2"]


def profile_of(job_path: str) -> Profile:
    model = cut(export_job(load_job(job_path)), num_sections=2, micro_batch_size=1)
    made = synthetic_profile(num_sections=2, batch_size=4, micro_batch_sizes=(1, 2))
    facts = made.job.model_copy(update={"fingerprint": model.fingerprint})
    units = tuple(UnitProfile(id=unit.id, sections=unit.sections, parameter_bytes=80) for unit in model.units)
    return made.model_copy(update={"job": facts, "units": units})


@pytest.mark.slow
def test_a_job_with_a_violation_does_not_start(jobs: Path) -> None:
    profile = profile_of(f"{jobs}:clean")
    check_job(f"{jobs}:clean", profile)
    check_job(f"{jobs}:allowed", profile)
    with pytest.raises(JobError, match="clip_grad_norm") as refused:
        check_job(f"{jobs}:broken", profile)
    assert f"morph trace-deps {jobs}:broken" in str(refused.value)


def test_its_help_loads_no_torch() -> None:
    code = (
        "import sys\nsys.argv = ['morph', 'trace-deps', '--help']\nfrom morph.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S, check=True)
    assert "Example:" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
