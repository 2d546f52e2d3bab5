"""``morph rehearse``: mistakes are one line, and nothing is started for them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manager.engine.local_vms.namespaces import check_permitted
from morph.cli.main import app
from morph.contract.errors import ConfigError
from simulator import synthetic_profile
from tests.cli.given import without_phases


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(synthetic_profile(num_sections=6).model_dump_json(), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["-P", "4", "-D", "3", "--hosts", "10"], ["--hosts", "4 x 3 needs 12 workers", "got 10", "12 or more"]),
        (["-P", "7"], ["-P", "got 7", "1 to 6"]),
        (["-P", "2", "-D", "0"], ["-D", "got 0", "from 1 to 100000"]),
        (["-P", "2", "--m", "5"], ["--m", "got 5"]),
        (["-P", "2", "--set", "time_scale=0"], ["--set time_scale", "got 0.0", "above 0"]),
        (["-P", "2", "--set", "message_scale=nan"], ["--set message_scale", "nan"]),
        (["-P", "2", "--set", "state_scale=3"], ["--set state_scale", "got 3.0", "at most 1"]),
        (["-P", "2", "--slow", "1"], ["--slow", "got '1'", "STAGE:FACTOR"]),
        (["-P", "2", "--slow", "1:-2"], ["--slow", "got '1:-2'"]),
        (["-P", "2", "--slow", "5:1.5"], ["--slow", "stage 5", "stages 0 to 1"]),
        (["-P", "2", "--memory-gib", "-1"], ["--memory-gib", "above 0"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(profile: Path, arguments: list[str], parts: list[str]) -> None:
    before = set(profile.parent.iterdir())
    done = CliRunner().invoke(app, ["rehearse", str(profile), *arguments, "--run-dir", str(profile.parent / "run")])
    assert done.exit_code == 2, done.output
    (line,) = without_phases(done.stderr)
    assert line.startswith("error: ")
    for part in parts:
        assert part in line
    assert set(profile.parent.iterdir()) == before


def test_a_missing_profile_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["rehearse", str(tmp_path / "none.json"), "-P", "2"])
    assert done.exit_code == 2
    assert "none.json" in done.stderr


@pytest.mark.parametrize(
    ("user", "tools", "part"),
    [(1000, {"ip", "tc"}, "needs root"), (0, {"ip"}, "tc (package iproute2) is not installed")],
)
def test_namespaces_that_cannot_be_made_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, user: int, tools: set[str], part: str
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}" if name in tools else None)
    with pytest.raises(ConfigError) as caught:
        check_permitted()
    assert part in str(caught.value)
    assert "loopback" in str(caught.value)
