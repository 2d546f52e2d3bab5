import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from morph.cli.plan import count_text, plan_command, time_text
from morph.cli.simulate import simulate_command
from morph.contract.errors import PlanError, ProfileError
from morph.contract.plan import Plan, load_plan
from simulator import plan, synthetic_profile

app = typer.Typer()
app.command("plan")(plan_command)
app.command("simulate")(simulate_command)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(synthetic_profile(tied=True).model_dump_json())
    return path


def _run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_plan_prints_the_best_shape_and_runners_up_and_writes_the_plan(profile: Path, tmp_path: Path) -> None:
    output = _run("plan", profile, "--gpus", 6, "-o", tmp_path / "plan.json")
    best = plan(synthetic_profile(tied=True), num_gpus=6).best
    assert f"{best.pipeline_depth} x {best.num_replicas}" in output
    assert "2 x 3" in output
    assert load_plan(tmp_path / "plan.json") == best
    assert list(tmp_path.glob("*.partial")) == []


def test_plan_prints_json_for_programs(profile: Path) -> None:
    answer = json.loads(_run("plan", profile, "--gpus", 6, "--json"))
    assert Plan.model_validate(answer["best"]) == plan(synthetic_profile(tied=True), num_gpus=6).best
    assert len(answer["runners_up"]) == 5


def test_simulate_prints_one_shape_and_draws_its_timeline(profile: Path, tmp_path: Path) -> None:
    output = _run("simulate", profile, "-P", 3, "-D", 2, "--png", tmp_path / "timeline.png")
    assert "3 x 2" in output
    assert "filling and draining" in output
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_prints_json_for_programs(profile: Path) -> None:
    answer = json.loads(_run("simulate", profile, "-P", 3, "-D", 2, "--schedule", "gpipe", "--json"))
    assert Plan.model_validate(answer["plan"]).schedule == "gpipe"
    assert sum(answer["ladder_s"].values()) == pytest.approx(answer["plan"]["expected"]["mini_batch_s"])


def test_mistakes_are_typed_errors(profile: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--gpus"):
        _run("plan", profile, "--gpus", 0)
    with pytest.raises(ProfileError, match="missing"):
        _run("plan", tmp_path / "missing.json", "--gpus", 2)
    with pytest.raises(PlanError, match="cannot be written"):
        _run("plan", profile, "--gpus", 2, "-o", tmp_path / "nowhere" / "plan.json")
    with pytest.raises(PlanError, match="cannot be written"):
        _run("simulate", profile, "-P", 1, "--png", tmp_path / "nowhere" / "timeline.png")


def test_numbers_are_shown_with_fitting_units() -> None:
    assert [time_text(value) for value in (12.3456, 0.0123, 1.5e-5, 3e-9)] == ["12.3 s", "12.3 ms", "15 us", "3 ns"]
    assert [count_text(value) for value in (8.3e9, 1.25e6, 999)] == ["8.3 B", "1.25 M", "999"]
