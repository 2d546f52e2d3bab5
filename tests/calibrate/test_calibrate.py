from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from typer.testing import CliRunner

from calibrate import calibrate, write_profile
from calibrate.computing.contention import busy_counts
from calibrate.computing.optimizer import measure_units
from calibrate.computing.subject import load_subject
from calibrate.timing.samples import Sampling
from calibrate.writing.schema import schema_text
from morph.cli.main import app
from morph.contract.errors import InputError, JobError
from morph.contract.profile import Profile, load_profile
from morph.cutting import cut, export_job
from morph.jobs.job import load_job
from morph.machine import num_cores
from tests.forked_modules import SUBPROCESS

ROOT = Path(__file__).parents[2]
JOB = f"{ROOT}/configs/jobs/tiny_gpt.py:job"
SCHEMA = ROOT / "docs/reference/profile.schema.json"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
"""The profile comes from six processes, which start slowly on busy cores."""


@pytest.fixture(scope="module")
def profile() -> Profile:
    told: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calibrate.helpers.crew.subprocess", SUBPROCESS)
        patch.setattr("calibrate.computing.contention._WINDOW_S", 0.05)
        # other tests leave memory in use
        patch.setattr("calibrate.computing.contention._processes_that_fit", lambda: 99)
        result = calibrate(JOB, micro_batch_sizes=(4, 2), num_samples=5, progress=lambda _, share: told.append(share))
    assert told == sorted(told)
    assert told[0] == 0
    assert told[-1] == 1
    return result


def test_the_profile_describes_the_cut_model(profile: Profile) -> None:
    job = load_job(JOB)
    model = cut(export_job(job), num_sections=job.num_sections, micro_batch_size=3)
    assert profile.job.fingerprint == model.fingerprint
    assert profile.num_sections == len(model.sections)
    assert profile.micro_batch_sizes == (2, 4)
    assert (profile.job.batch_size, profile.job.micro_batch_size) == (12, 2)
    assert [section.label for section in profile.sections] == [section.label for section in model.sections]
    assert [(unit.id, unit.sections) for unit in profile.units] == [(unit.id, unit.sections) for unit in model.units]
    assert sum(unit.parameter_bytes for unit in profile.units) == 4 * profile.job.num_parameters
    assert profile.accumulator_bytes_per_parameter == 8


def test_bytes_follow_the_model(profile: Profile) -> None:
    assert [section.output_bytes_per_sample for section in profile.sections] == [2048] * 5 + [0]
    for section in profile.sections:
        assert section.gradient_bytes == 2 * section.parameter_bytes
        assert 2 * section.parameter_bytes < section.optimizer_bytes < 2.1 * section.parameter_bytes


def test_equal_sections_have_equal_times(profile: Profile) -> None:
    assert profile.sections[1].forward == profile.sections[3].forward
    assert profile.sections[2].backward == profile.sections[4].backward


def test_the_network_is_measured_for_what_the_job_sends(profile: Profile) -> None:
    sizes = {entry.size_bytes for entry in profile.inter_node.activation}
    assert {2 * 2048, 4 * 2048} < sizes
    assert {entry.ring_size for entry in profile.all_reduce} == {2, 3, 4}
    assert profile.checkpoint_write_bytes_per_s > 0
    assert profile.host_copy_bytes_per_s is not None
    assert profile.checkpoint_upload_bytes_per_s is None


def test_every_time_comes_with_its_spread(profile: Profile) -> None:
    links = (*profile.intra_node.activation, *profile.intra_node.gradient, *profile.all_reduce)
    times = [entry.time for entry in links] + [profile.commit]
    for section in profile.sections:
        times += [*section.forward.values(), *section.backward.values(), section.optimizer_step]
        assert section.peak_bytes.keys() == {2, 4}
    for time in times:
        assert time.mean_s is not None
        assert len(time.quantiles_s) == 17
        assert time.quantiles_s[0] <= time.median_s <= time.quantiles_s[-1]


def test_contention_is_measured_where_there_are_cores(profile: Profile) -> None:
    assert [entry.num_busy for entry in profile.contention] == list(busy_counts(num_cores()))


def test_substitutes_in_a_profile_are_named(profile: Profile) -> None:
    assert profile.sources.keys() == {"inter_node", "commit"}
    assert profile.inter_node == profile.intra_node


def test_calibrating_leaves_the_number_of_threads_alone(profile: Profile) -> None:
    assert profile.environment.threads_per_worker == 1
    assert profile.environment.torch == torch.__version__


def test_a_profile_is_written_whole_and_read_back(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("old", encoding="utf-8")
    write_profile(profile, path)
    assert load_profile(path) == profile
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), json.loads(SCHEMA.read_text(encoding="utf-8")))


@pytest.mark.parametrize(("name", "problem"), [("nowhere/p.json", "does not exist"), (".", "is a folder")])
def test_a_place_that_cannot_be_written_is_refused(profile: Profile, tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        write_profile(profile, tmp_path / name)


def test_the_published_schema_is_current() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), (
        "python -m calibrate.writing.schema docs/reference/profile.schema.json"
    )


def test_a_micro_batch_size_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(JobError, match=r"micro_batch_size: does not divide the global batch \(got 5\)"):
        calibrate(JOB, micro_batch_sizes=(5,))


def test_the_command_shows_a_table_and_writes_the_profile(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.calibrate", lambda *_, **__: profile)
    path = tmp_path / "profile.json"
    result = CliRunner().invoke(app, ["calibrate", JOB, "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert "tiny-gpt: 6 sections" in result.output
    assert "s0+s5" in result.output
    assert load_profile(path) == profile


def test_the_command_refuses_a_bad_output_before_measuring(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "missing.py:job", "-o", str(tmp_path / "no/p.json")])
    assert result.exit_code == 2
    assert "its folder does not exist" in result.output


class Estimating(torch.optim.SGD):
    """An optimizer whose step size grows too far while gradients keep their direction, like that of Prodigy."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            kept, gradient = self.state[parameter], parameter.grad.clone()
            onward = "last" in kept and float((kept["last"] * gradient).sum()) > 0
            kept["size"] = kept.get("size", 1.0) * (2.0 if onward else 0.5)
            if kept["size"] > self.defaults["lr"]:
                raise OverflowError("the step size is too large")
            kept["last"] = gradient


@pytest.mark.parametrize(("most", "ends"), [(8.0, False), (0.25, True)])
def test_an_optimizer_that_fails_while_it_is_measured_ends_in_one_sentence(most: float, ends: bool) -> None:
    subject = load_subject(JOB, torch.device("cpu"))
    job = replace(subject.job, optimizer=lambda named: Estimating([parameter for _, parameter in named], lr=most))
    subject = replace(subject, job=job)
    sampling = Sampling(budget_s=0.0, most=20, least=20)
    if ends:
        with pytest.raises(JobError, match=r"test_calibrate\.py:\d+: optimizer failed: OverflowError: the step size"):
            measure_units(subject, subject.cut(2), sampling)
    else:
        measured = measure_units(subject, subject.cut(2), sampling)
        assert min(unit.step.median_s for unit in measured.values()) > 0
