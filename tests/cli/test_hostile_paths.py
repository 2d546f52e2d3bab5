"""Files that come from elsewhere name places outside of their own: they are refused, and nothing is written there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from morph.cli.main import app
from morph.contract.errors import TraceError
from morph.contract.trace import parse_trace
from simulator import synthetic_profile

ELSEWHERE = ["../elsewhere", "/elsewhere", "..", ".", "a/../../elsewhere", "\\elsewhere", ".hidden", " "]
HEADER = "time_s,event,node_id,zone,instance_type,source"
ROOT = Path(__file__).resolve().parents[2]


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("form", ["options", "job file"])
def test_a_profile_whose_job_is_named_like_a_path_makes_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    profile = json.loads(synthetic_profile(num_sections=4, batch_size=8, micro_batch_sizes=(1,)).model_dump_json())
    profile["job"]["name"] = name
    (inside / "profile.json").write_text(json.dumps(profile), encoding="utf-8")
    (inside / "cluster.yaml").write_text("", encoding="utf-8")
    (inside / "job.py").write_text("", encoding="utf-8")
    (inside / "run.yaml").write_text("job: {code: 'job.py:job', profile: profile.json}\n", encoding="utf-8")
    before = set(tmp_path.rglob("*"))
    options = ("run", "job.py:job", "--profile", "profile.json", "--cluster", "cluster.yaml")
    told = refused(*(options if form == "options" else ("run", "run.yaml")))
    assert "job.name" in told
    assert "profile.json" in told
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", [name for name in ELSEWHERE if name not in ("..", ".", ".hidden")])
def test_a_trace_names_no_vm_like_a_path(name: str) -> None:
    with pytest.raises(TraceError, match="node_id"):
        parse_trace([HEADER, f"0,add,{name},z,t,s"], "trace.csv")


@pytest.mark.slow
def test_weights_that_are_named_like_paths_are_no_weights_of_the_model(tmp_path: Path) -> None:
    hostile = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"../../elsewhere": torch.zeros(1), "/elsewhere": torch.zeros(1)}, str(hostile))
    job = f"{ROOT / 'configs/jobs/tiny_gpt.py'}:job"
    before = set(tmp_path.rglob("*"))
    told = refused("import", job, hostile, tmp_path / "run", "--m", 2)
    assert "weights.safetensors" in told
    assert set(tmp_path.rglob("*")) == before
