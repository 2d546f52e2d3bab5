"""Job files: a mistake is one line that says what is wrong; what the commands say of right ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from morph.cli.main import app
from morph.contract.cluster import AzureVms, JobPart, LocalVms, Policy, StaticVms
from tests.cli.given import Given


def job_file(given: Given, job: str = "code: 'jobs.py:good', profile: profile.json, steps: 7", rest: str = "") -> Path:
    return given.file("job.yaml", f"job: {{{job}}}\nvms: {{num_vms: 2}}\n{rest}")


@pytest.mark.parametrize(
    ("job", "rest", "problem"),
    [
        ("code: 'jobs.py:good'", "", "job.profile: Field required"),
        ("code: jobs.py, profile: profile.json", "", "job.code: String should match pattern"),
        ("code: 'missing.py:good', profile: profile.json", "", "job.code: there is no such file (got 'missing.py')"),
        ("code: 'jobs.py:good', profile: profile.json, step: 3", "", "job.step: unknown key (got 3)"),
        ("code: 'jobs.py:good', profile: profile.json, steps: 0", "", "job.steps: Input should be greater"),
        (
            "code: 'jobs.py:good', profile: profile.json, batch_size: 9",
            "",
            "job.batch_size: is not the profile's (got 9)",
        ),
        ("code: 'jobs.py:good', profile: profile.json, pipeline_depth: 0", "", "job.pipeline_depth: Input should be"),
        (
            "code: 'jobs.py:good', profile: profile.json, pipeline_depth: 3",
            "",
            "job.pipeline_depth: is not possible (got 3); allowed: 1 to 2",
        ),
        (
            "code: 'jobs.py:good', profile: profile.json, pipeline_depth: 1, num_replicas: 3",
            "",
            "job.num_replicas: is not possible (got 3); allowed: 1 to 2",
        ),
    ],
)
def test_a_wrong_job_file_is_refused_with_its_dotted_field(given: Given, job: str, rest: str, problem: str) -> None:
    path = job_file(given, job, rest)
    assert f"{path}: {problem}" in given.refused("config", "check", path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--steps", "9"), "--steps: is set in the job file"),
        (("--profile", "p.json"), "--profile: is set in the job file"),
        (("--no-recompute",), "--recompute: is set in the job file"),
        (("-P", "2"), "-P: is set in the job file"),
        (("-D", "1"), "-D: is set in the job file"),
    ],
)
def test_what_a_job_file_says_is_not_said_again(given: Given, options: tuple[str, ...], problem: str) -> None:
    assert problem in given.refused("run", job_file(given), *options)


@pytest.mark.parametrize("missing", ["--profile", "--cluster"])
def test_a_run_without_a_job_file_needs_its_options(given: Given, missing: str) -> None:
    options = {"--profile": given.folder / "profile.json", "--cluster": given.folder / "cluster.yaml"}
    left = [text for name, path in options.items() if name != missing for text in (name, path)]
    assert f"{missing}: is not given" in given.refused("run", given.job, *left)


def test_the_shipped_job_file_is_right_but_for_the_profile_that_the_user_makes() -> None:
    from morph.yaml_files import load_job_file

    shipped = Path(__file__).parents[2] / "configs/runs/tiny_gpt.yaml"
    file = load_job_file(shipped)
    assert (shipped.parent / file.job.code.partition(":")[0]).is_file()
    assert file.vms.num_vms == 6


def test_a_right_job_file_says_what_would_run(given: Given) -> None:
    told = CliRunner().invoke(app, ["config", "check", str(job_file(given))])
    assert told.exit_code == 0, told.output
    assert "7 steps, with 2 workers in shape" in told.stdout
    assert not given.run_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("pipeline_depth: 1, num_replicas: 1", "with 2 workers in shape 1x1, with 1 at least"),
        ("pipeline_depth: 2", "with 2 workers in shape 2x1, with 2 at least"),
    ],
)
def test_a_job_file_may_ask_for_a_shape(given: Given, asked: str, told: str) -> None:
    path = job_file(given, f"code: 'jobs.py:good', profile: profile.json, {asked}")
    assert told in CliRunner().invoke(app, ["config", "check", str(path)]).stdout


def test_every_key_is_explained_with_where_its_value_comes_from(given: Given) -> None:
    told = CliRunner().invoke(app, ["config", "explain", str(job_file(given))])
    assert told.exit_code == 0, told.output
    rows = {cells[1].strip(): cells for line in told.stdout.splitlines() if (cells := line.split("│"))[2:]}
    assert [cell.strip() for cell in rows["job.steps"][2:4]] == ["7", "file"]
    assert [cell.strip() for cell in rows["policy.rules.stutter.samples"][2:4]] == ["8", "default"]
    assert "vms.num_vms" in rows
    assert rows["job.pipeline_depth"][4].strip().startswith("P of every shape")


@pytest.mark.parametrize("vms", [LocalVms, AzureVms, StaticVms])
def test_every_key_has_a_meaning_to_explain(vms: type[BaseModel]) -> None:
    def without(model: type[BaseModel]) -> set[str]:
        found = set()
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                found |= without(field.annotation)
            elif not field.description:
                found.add(f"{model.__name__}.{name}")
        return found

    assert without(vms) | without(Policy) | without(JobPart) == set()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("subscription_id: a\nlocation: westus2\n", "a cloud file, which `morph cloud dry-run` checks"),
        ("hosts: []\n", "a file of hosts, which a cluster file names as vms.cloud"),
        ("storage: backups\n", "a job file of `morph spot-run`"),
    ],
)
@pytest.mark.parametrize("command", ["check", "explain"])
def test_a_file_of_another_kind_is_told_what_it_is(given: Given, text: str, what: str, command: str) -> None:
    path = given.file("other.yaml", text)
    told = given.refused("config", command, path)
    assert told == f"{path}: is {what}; allowed: a cluster file, or a job file of `morph run`"


@pytest.mark.parametrize("kind", ["job", "cluster"])
def test_a_file_that_the_schema_takes_is_taken_and_one_that_it_refuses_is_refused(given: Given, kind: str) -> None:
    import jsonschema
    import yaml

    schema = json.loads(CliRunner().invoke(app, ["config", "schema", kind]).stdout)
    right = yaml.safe_load(job_file(given).read_text()) if kind == "job" else {"vms": {"num_vms": 2}}
    jsonschema.validate(right, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**right, "vmz": 3}, schema)
