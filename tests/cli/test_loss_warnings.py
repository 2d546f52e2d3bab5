"""``morph cut``, ``calibrate`` and ``run`` say on standard error when the loss is no mean over samples, and go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from morph.cli.checks import check_job
from morph.cli.main import app
from morph.contract.profile import load_profile
from tests.cli.given import JOBS

SUMMED = JOBS.replace("functional.mse_loss(model(", 'functional.mse_loss(reduction="sum", input=model(').replace(
    ', batch["y"])', ', target=batch["y"])'
)
WARNING = "warning: the loss is a sum over the samples, not their mean (2 samples together: "


def test_a_summed_loss_is_warned_of_by_each_command_that_looks_at_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs.py").write_text(SUMMED, encoding="utf-8")
    job, profile = f"{tmp_path}/jobs.py:good", tmp_path / "profile.json"
    found = CliRunner().invoke(app, ["cut", job, "--json"])
    assert found.exit_code == 0
    assert found.stderr.startswith(WARNING)
    assert found.stdout.startswith("{")
    found = CliRunner().invoke(app, ["calibrate", job, "-o", str(profile), "--samples", "5", "-m", "2"])
    assert found.exit_code == 0
    assert WARNING in found.stderr
    check_job(job, load_profile(profile))
    assert WARNING in capsys.readouterr().err
