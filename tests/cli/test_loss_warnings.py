"""``morph cut``, ``calibrate`` and ``run`` warn, but continue, if the loss is not a mean over samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from calibrate.computing import compute
from calibrate.links.network import NetworkMeasurement
from calibrate.timing.samples import timing
from calibrate.writing import measure
from morph.cli.main import app
from morph.contract.errors import ProfileError
from morph.contract.job_facts import JobFacts
from morph.contract.profile import LinkProfile, Profile, SendTime, load_profile
from morph.jobs.snapshot import collect
from morph.preflight import job_check as checks
from morph.preflight.job_check import check_job
from tests.cli.given import JOBS, without_phases

SUMMED = JOBS.replace("functional.mse_loss(model(", 'functional.mse_loss(reduction="sum", input=model(').replace(
    ', batch["y"])', ', target=batch["y"])'
)
WARNING = "warning: the loss is a sum over the samples, not their mean (samples "


@pytest.fixture(autouse=True)
def measured_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep ``calibrate`` from measuring network, contention and disk, so that it starts no other process."""
    second = timing([1e-3])
    link = SendTime(size_bytes=1, time=second)
    network = NetworkMeasurement(LinkProfile(activation=(link,), gradient=(link,)), (), second)
    monkeypatch.setattr(measure, "measure_network", lambda *_, **__: network)
    monkeypatch.setattr(compute, "measure_contention", lambda *_, **__: ())
    monkeypatch.setattr(measure, "measure_checkpoint_speed", lambda _: 1e9)


@pytest.mark.slow
def test_every_command_that_looks_at_a_job_warns_of_a_summed_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs.py").write_text(SUMMED, encoding="utf-8")
    job, profile = f"{tmp_path}/jobs.py:good", tmp_path / "profile.json"
    found = CliRunner().invoke(app, ["cut", job, "--json"])
    assert found.exit_code == 0
    assert without_phases(found.stderr)[0].startswith(WARNING)
    assert found.stdout.startswith("{")
    found = CliRunner().invoke(app, ["calibrate", job, "-o", str(profile), "--samples", "5", "-m", "2"])
    assert found.exit_code == 0
    assert WARNING in found.stderr
    check_job(job, load_profile(profile))
    assert WARNING in capsys.readouterr().err


PLAYERS = """
import torch
import morph

class Players(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.maker, self.judge = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

def loss(model, batch):
    made = model.maker(batch["x"])
    return -model.judge(made).mean() + (model.judge(made.detach()) - model.judge(batch["x"])).mean()

def optimizers(named, num):
    of = {name: [p for key, p in named if key.startswith(name)] for name in ("maker", "judge")}
    parts = [(of["maker"], torch.optim.Adam), (of["judge"], torch.optim.SGD)]
    return morph.Optimizers(*parts) if num == 2 else torch.optim.Adam(p for _, p in named)

def job(num=2):
    data = lambda: [{"x": torch.randn(4, generator=torch.Generator().manual_seed(i))} for i in range(16)]
    return morph.Job(name="players", model=Players, loss=loss, dataset=data, batch_size=4, num_sections=2,
                     optimizer=lambda named: optimizers(list(named), num))
"""


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2])
def test_joined_optimizers_are_said_once_to_step_on_the_whole_loss(tmp_path: Path, num: int) -> None:
    """Each section of the two players has one optimizer, so only the whole job shows that there are two."""
    (tmp_path / "jobs.py").write_text(PLAYERS, encoding="utf-8")
    found = CliRunner().invoke(app, ["cut", f"{tmp_path}/jobs.py:job(num={num})"])
    assert found.exit_code == 0, found.output
    said = [line for line in found.output.splitlines() if "note: all optimizers of morph.Optimizers" in line]
    assert len(said) == num - 1
    assert all("(Adam, SGD) step on the gradients of the whole loss" in line for line in said)
    assert all("`morph elastic`" in line for line in said)


@pytest.mark.slow
def test_findings_about_a_job_are_kept_until_code_data_or_profile_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORPH_CACHE_DIR", str(tmp_path / "cache"))
    path, profile_path = tmp_path / "code" / "jobs.py", tmp_path / "profile.json"
    path.parent.mkdir()
    path.write_text(SUMMED, encoding="utf-8")
    job, looks = f"{path}:good", 0
    assert (
        CliRunner().invoke(app, ["calibrate", job, "-o", str(profile_path), "--samples", "5", "-m", "2"]).exit_code == 0
    )
    profile = load_profile(profile_path)
    look_at = checks._look_at

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return look_at(*arguments)

    monkeypatch.setattr(checks, "_look_at", counted)

    def check(profile: Profile = profile) -> tuple[int, JobFacts]:
        nonlocal looks
        looks = 0
        with collect(job).in_use():
            facts = check_job(job, profile).facts
        assert WARNING in capsys.readouterr().err
        return looks, facts

    first, again = check(), check()
    assert (first[0], again[0]) == (1, 0)
    assert first[1] == again[1]
    (kept,) = (tmp_path / "cache" / "checks").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert check() == first
    assert check()[0] == 0
    assert check(profile.model_copy(update={"job": profile.job.model_copy(update={"name": "another"})}))[0] == 1
    path.write_text(SUMMED + "\nMORE = 1\n", encoding="utf-8")
    assert check()[0] == 1
    with pytest.raises(ProfileError, match="another model"):
        check(profile.model_copy(update={"job": profile.job.model_copy(update={"fingerprint": "0" * 64})}))
