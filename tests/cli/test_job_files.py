"""Job files: a mistake gives one line that says what is wrong; commands describe valid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from manager.commands.config import length_text
from manager.run.prepared import read_inputs, resolve
from manager.run.request import RunRequest, run_dir_of
from morph.cli.main import app
from morph.contract.cluster import AwsVms, AzureVms, JobPart, LocalVms, Policy, StaticVms
from morph.contract.job_facts import Epochs
from morph.yaml_files import load_job_file
from tests.cli.given import JOBS, Given, without_phases
from tests.forked_modules import run_python


def job_file(given: Given, job: str = "code: 'jobs.py:good', profile: profile.json, steps: 7", rest: str = "") -> Path:
    return given.file("job.yaml", f"job: {{{job}}}\nvms: {{num_vms: 2}}\n{rest}")


@pytest.mark.parametrize(
    ("job", "rest", "problem"),
    [
        ("code: 'jobs.py:good'", "", "job.profile: is missing"),
        ("code: jobs.py, profile: profile.json", "", "job.code: String should match pattern"),
        ("code: 'missing.py:good', profile: profile.json", "", "job.code: there is no such file (got 'missing.py')"),
        ("code: 'jobs.py:good', profile: profile.json, step: 3", "", "job.step: unknown key (got 3)"),
        ("code: 'jobs.py:good', profile: profile.json, steps: 0", "", "job.steps: must be at least"),
        (
            "code: 'jobs.py:good', profile: profile.json, batch_size: 9",
            "",
            "job.batch_size: is not the profile's (got 9)",
        ),
        ("code: 'jobs.py:good', profile: profile.json, pipeline_depth: 0", "", "job.pipeline_depth: must be"),
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


def test_arguments_of_the_jobs_function_are_read_and_set(given: Given) -> None:
    path = job_file(given, "code: 'jobs.py:sized', profile: profile.json, arguments: {width: 3, text: 'a:b'}")
    settings = ("job.arguments.width=4", "job.arguments.rate=1.0e-3")
    prepared = read_inputs(RunRequest(job=str(path), steps=1, settings=settings), None)
    assert prepared.request.job == f"{(given.folder / 'jobs.py').resolve()}:sized(width=4, text='a:b', rate=0.001)"
    wrong = job_file(given, "code: 'jobs.py:good', profile: profile.json, arguments: {width: [3]}")
    assert "job.arguments.width" in given.refused("config", "check", wrong)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 1e-3), ("-2E5", -2e5), ("1.5e3", 1500.0), (".5", 0.5), ("1_000", 1000), ("010", 10), ("0x1F", 31),
        ("1:30", "1:30"), ("3h", "3h"), ("10.0.0.1", "10.0.0.1"), ("'1e-3'", "1e-3"),
    ],
)  # fmt: skip
def test_numbers_as_people_write_them_are_numbers_and_quoted_text_is_text(
    given: Given, written: str, value: float | str
) -> None:
    job = f"code: 'jobs.py:sized', profile: profile.json, arguments: {{rate: {written}}}"
    read = load_job_file(job_file(given, job)).job.arguments["rate"]
    assert (type(read), read) == (type(value), value)
    if "'" not in written:
        (read,) = load_job_file(job_file(given), [f"job.arguments.rate={written}"]).job.arguments.values()
        assert (type(read), read) == (type(value), value)


def test_numbers_with_an_exponent_are_numbers_for_every_key(given: Given) -> None:
    path = job_file(given, rest="policy: {min_join_gain: 1e-2, takeover_patience_s: 1.2e1}\n")
    policy = load_job_file(path).policy
    assert (policy.min_join_gain, policy.takeover_patience_s) == (0.01, 12)


@pytest.mark.parametrize(
    ("job", "options", "expected"),
    [
        ("", ("-P", 2, "-D", 3), {"pipeline_depth": 2, "num_replicas": 3, "steps": 7}),
        ("pipeline_depth: 1", ("-P", 2), {"pipeline_depth": 2}),
        ("", ("--steps", 9), {"steps": 9}),
        ("", ("--no-recompute", "--schedule", "1f1b"), {"recompute": False, "schedule": "1f1b"}),
        ("", ("--checkpoint-url", "elsewhere"), {"checkpoint_url": "HERE/elsewhere"}),
        ("profile: absent.json", ("--profile", "profile.json"), {"profile": "HERE/profile.json"}),
        ("", ("-P", 2, "--set", "job.num_replicas=1"), {"pipeline_depth": 2, "num_replicas": 1}),
    ],
)
def test_options_count_in_place_of_what_a_job_file_says(
    given: Given, monkeypatch: pytest.MonkeyPatch, job: str, options: tuple[object, ...], expected: dict[str, object]
) -> None:
    """Paths in options are relative to the working directory, those in the file to the file's."""
    asked: list[RunRequest] = []
    monkeypatch.setattr("manager.commands.carry_out.carry_out", lambda request, *_, **__: asked.append(request))
    monkeypatch.chdir(given.folder)
    lines = {"code": "'jobs.py:good'", "profile": "profile.json", "steps": "7"}
    lines |= dict([job.split(": ")]) if job else {}
    folder = given.folder / "below"
    folder.mkdir()
    for name in ("jobs.py", "profile.json"):
        (folder / name).write_bytes((given.folder / name).read_bytes())
    path = folder / "job.yaml"
    path.write_text(f"job: {{{', '.join(f'{key}: {value}' for key, value in lines.items())}}}\nvms: {{num_vms: 2}}\n")
    done = CliRunner().invoke(app, ["run", "below/job.yaml", *map(str, options)])
    assert done.exit_code == 0, done.output
    (request,) = asked
    found = read_inputs(RunRequest.model_validate_json(request.model_dump_json()), None).request
    assert {
        name: str(getattr(found, name)) if isinstance(value, str) else getattr(found, name)
        for name, value in expected.items()
    } == {
        name: value.replace("HERE", str(given.folder)) if isinstance(value, str) else value
        for name, value in expected.items()
    }


def test_an_option_that_a_job_file_cannot_take_is_refused(given: Given) -> None:
    path = job_file(given, "code: 'jobs.py:good', profile: profile.json, epochs: 2")
    line = given.refused("run", path, "--cluster", given.folder / "cluster.yaml")
    assert line.startswith("--cluster: is given with a job file, which describes its VMs itself (got ")
    assert line.endswith(f"; allowed: --set vms.KEY=VALUE, or the keys vms and policy of {path}")
    assert "give one of the two" in given.refused("run", path, "--steps", 9)
    assert given.refused("run", job_file(given), "-P", 3).startswith("-P: is not possible (got 3); allowed: 1 to 2")
    line = given.refused("run", job_file(given), "-P", 2, "--set", "job.pipeline_depth=1")
    assert line == "--set job.pipeline_depth: is set twice (got '2'); allowed: each key once"


@pytest.mark.parametrize("missing", ["--profile", "--cluster"])
def test_a_run_without_a_job_file_needs_its_options(given: Given, missing: str) -> None:
    options = {"--profile": given.folder / "profile.json", "--cluster": given.folder / "cluster.yaml"}
    left = [text for name, path in options.items() if name != missing for text in (name, path)]
    assert f"{missing}: is not given" in given.refused("run", given.job, *left)


@pytest.mark.parametrize(("name", "num_vms"), [("tiny_gpt", 6), ("gpt2_shards", 4)])
def test_a_shipped_job_file_lacks_only_the_users_profile(name: str, num_vms: int) -> None:
    shipped = Path(__file__).parents[2] / f"configs/runs/{name}.yaml"
    file = load_job_file(shipped)
    assert (shipped.parent / file.job.code.partition(":")[0]).is_file()
    assert file.vms.num_vms == num_vms


def test_a_right_job_file_says_what_would_run(given: Given) -> None:
    told = CliRunner().invoke(app, ["config", "check", str(job_file(given))])
    assert told.exit_code == 0, told.output
    assert "7 steps, with 2 workers in shape" in told.stdout
    assert not given.run_dir.exists()


def test_its_run_directory_is_named_as_a_user_would_type_it(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    path = job_file(given, "code: 'jobs.py:good', profile: profile.json, run_dir: ../runs/mine")
    folder = path.resolve().parent
    for working_directory, named in ((folder.parent, Path("runs/mine")), (folder, folder.parent / "runs/mine")):
        monkeypatch.chdir(working_directory)
        request = RunRequest(job=str(path), steps=1)
        assert resolve(request, path, load_job_file(path)).run_dir == run_dir_of(request, None) == named
    plain = RunRequest(job=given.job, steps=1, profile=given.folder / "profile.json")
    in_file = RunRequest(job=str(job_file(given)), steps=1)
    for request in (plain, in_file):
        assert run_dir_of(request, None) == Path("runs") / given.profile.job.name
        assert run_dir_of(request, Path("mine")) == Path("mine")
    assert run_dir_of(RunRequest(job=given.job, steps=1), None) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("pipeline_depth: 1, num_replicas: 1", "with 2 workers in shape 1x1, at least 1 needed"),
        ("pipeline_depth: 2", "with 2 workers in shape 2x1, at least 2 needed"),
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


def test_a_path_that_looks_like_markup_is_printed_as_it_is(given: Given) -> None:
    path = job_file(given)
    told = CliRunner().invoke(app, ["config", "explain", str(path.rename(path.with_name("[b]:100:.yaml")))])
    assert "[b]:100:.yaml" in "".join(told.stdout.split())


@pytest.mark.parametrize("vms", [LocalVms, AzureVms, AwsVms, StaticVms])
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
def test_the_refusal_of_a_file_of_another_kind_names_this_kind(
    given: Given, text: str, what: str, command: str
) -> None:
    path = given.file("other.yaml", text)
    told = given.refused("config", command, path)
    assert told.startswith(f"{path}: is {what}; allowed: a cluster file, ")


@pytest.mark.parametrize("kind", ["job", "cluster"])
def test_the_schema_accepts_a_right_file_and_refuses_an_unknown_key(given: Given, kind: str) -> None:
    import jsonschema
    import yaml

    schema = json.loads(CliRunner().invoke(app, ["config", "schema", kind]).stdout)
    right = yaml.safe_load(job_file(given).read_text()) if kind == "job" else {"vms": {"num_vms": 2}}
    jsonschema.validate(right, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**right, "vmz": 3}, schema)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.py:good", "missing.py: no such file; allowed: path/to/file.py:name"),
        ("cluster.yaml:good", "cluster.yaml: is not a Python file"),
        ("jobs.py:number", "jobs.py: number: is not a Job (got 'int'); allowed: a morph.Job"),
        ("jobs.py:failing", "failing: calling it failed: ValueError: not today"),
        (
            "jobs.py:indivisible",
            "micro_batch_size: is not right (got 3); allowed: a divisor of batch_size 8: 1, 2, 4, 8",
        ),
        ("jobs.py:lists", "dataset()[0]: is not a sample (got 'set'); allowed: a nest (dict, tuple, list, dataclass)"),
        (
            "jobs.py:numbers",
            """dataset()[0]: is not a sample (got "'x': object"); allowed: a nest (dict, tuple, list""",
        ),
        ("jobs.py:extreme", "the forward changes buffer largest in a way that depends on"),
    ],
)
@pytest.mark.parametrize("command", ["run", "calibrate"])
def test_a_wrong_job_is_refused(given: Given, name: str, problem: str, command: str) -> None:
    job = f"{given.folder}/{name}"
    if command == "run":
        assert problem in given.run_refused(job=job)
    else:
        assert problem in given.refused("calibrate", job, "-o", given.folder / "new.json")


@pytest.mark.parametrize("command", ["run", "calibrate", "cut"])
def test_data_that_differs_when_read_again_is_refused_by_every_command(given: Given, command: str) -> None:
    job = f"{given.folder}/jobs.py:drifting"
    commands = {"calibrate": ("calibrate", job, "-o", given.folder / "new.json"), "cut": ("cut", job)}
    line = given.run_refused(job=job) if command == "run" else given.refused(*commands[command])
    assert "jobs.py:" in line
    assert "dataset()[0]['x']: has another value when the sample is read again; allowed: random numbers from" in line


@pytest.mark.parametrize("command", ["run", "calibrate", "cut", "trace-deps"])
def test_a_schedule_that_wants_the_loss_is_refused_with_its_line(given: Given, command: str) -> None:
    job = f"{given.folder}/jobs.py:plateau"
    number = next(index for index, line in enumerate(JOBS.splitlines(), 1) if line.startswith("plateau"))
    line = given.run_refused(job=job) if command == "run" else given.refused(command, job)
    assert f"jobs.py:{number}: lr_scheduler: returns a scheduler whose step needs a value" in line
    assert line.endswith("schedules that are a function of the number of steps alone, not of a loss")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("model=Plain()", "model: is not a function (got 'Plain'); allowed: a function, such as lambda: MyModel()"),
        ("model=nn.Linear", "model: cannot be called as it is: missing a required argument: 'in_features'"),
        ("dataset=Samples()", "dataset: is not a function (got 'Samples'); allowed: a function, such as lambda: My"),
        ("optimizer=torch.optim.SGD(Plain().parameters())", "optimizer: is not a function (got 'SGD'); allowed: a"),
        ("lr_scheduler=torch.optim.lr_scheduler.StepLR", "lr_scheduler: cannot be called as it is: missing a required"),
        ("loss=nn.MSELoss()", "loss: is not a function of the job's own (got 'MSELoss'); allowed: a function, such as"),
        ("loss=lambda batch: 0", "loss: cannot be called as it is: too many positional arguments (got '<lambda>')"),
    ],
)
def test_a_value_in_place_of_a_function_is_refused_with_its_line(given: Given, fields: str, problem: str) -> None:
    head = JOBS[: JOBS.index("def make(")]
    right = "name='a', model=Plain, loss=loss, dataset=Samples, optimizer=sgd, batch_size=8"
    name = fields.partition("=")[0]
    others = ", ".join(part for part in right.split(", ") if not part.startswith(f"{name}="))
    path = given.file("objects.py", f"{head}bad = Job({others}, {fields})\n")
    assert f"objects.py:{head.count(chr(10)) + 1}: {problem}" in given.refused("cut", f"{path}:bad")


def test_an_unknown_name_is_answered_with_those_of_the_job_file(given: Given) -> None:
    line = given.run_refused(job=f"{given.folder}/jobs.py:absent")
    have = "branching, drifting, extreme, good, half, lists, normed, numbers, plateau, wide"
    assert line.endswith(f"jobs.py: defines no 'absent'; allowed: {have}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\nimport nowhere_at_all\n", "wrong.py:2: cannot be imported: ModuleNotFoundError: No module named"),
        ("x = (\n", "wrong.py:1: cannot be imported: SyntaxError"),
        ("raise SystemExit(3)\n", "wrong.py:good: its code ends the process (got 'exit(3)')"),
    ],
)
@pytest.mark.parametrize("command", ["run", "calibrate"])
def test_a_job_file_that_cannot_be_imported_is_refused(given: Given, text: str, problem: str, command: str) -> None:
    job = f"{given.file('wrong.py', text)}:good"
    line = given.run_refused(job=job) if command == "run" else given.refused("calibrate", job, "-o", given.folder / "p")
    assert problem in line


COUPLED = """class Coupled(torch.optim.SGD):
    def step(self, closure=None):
        with torch.no_grad():
            parameters = self.param_groups[0]["params"]
            norm = sum(parameter.grad.square().sum().item() for parameter in parameters) ** 0.5
            for parameter in parameters:
                parameter.sub_(parameter.grad, alpha=0.1 / norm)


def sgd(parameters):
    return Coupled"""


def test_calibrate_refuses_an_optimizer_that_couples_parameter_units_with_its_line(given: Given) -> None:
    text = JOBS.replace("def sgd(parameters):\n    return torch.optim.SGD", COUPLED)
    given.file("jobs.py", text.replace("num_sections=2", "cut_points=('second',)"))
    number = next(index for index, line in enumerate(text.splitlines(), 1) if "norm = sum" in line)
    line = given.refused("calibrate", given.job, "-o", given.folder / "new.json")
    assert f"jobs.py:{number}: mixing:add@jobs.py:" in line
    assert "a Python number is computed from several units" in line


BOTH_COMMANDS = """
import sys
from morph.cli.main import main

for command, *options in (
    ["run", "--profile", "profile.json", "--cluster", "cluster.yaml", "--run-dir", "run"],
    ["calibrate", "-o", "new.json"],
):
    sys.argv = ["morph", command, "jobs.py:branching", *options]
    try:
        main()
    except SystemExit as end:
        print(end.code)
"""


@pytest.mark.slow
def test_a_model_that_branches_on_its_data_is_refused_with_the_branch(given: Given) -> None:
    """The command runs in its own process, because torch writes graphs to the real standard error, not the test's."""
    number = next(index for index, line in enumerate(JOBS.splitlines(), 1) if "HERE" in line)
    _, codes, errors = run_python("-c", BOTH_COMMANDS, cwd=given.folder)
    assert codes.split() == ["2", "2"], errors
    said = without_phases(errors)
    assert len(said) == 2, errors
    for line in said:
        assert line.startswith("error: ")
        assert f"jobs.py:{number}: Branching cannot be exported" in line
    assert not given.run_dir.exists()
    assert not (given.folder / "new.json").exists()


@pytest.mark.parametrize(
    ("end", "size", "said"),
    [
        ("fill", 705, "89 steps; the last samples of an epoch share a step with the first of the next"),
        ("short", 705, "90 steps; the last step of an epoch is shorter"),
        ("drop", 705, "88 steps; the last samples of an epoch are left out"),
        ("fill", 704, "88 steps"),
    ],
)
def test_the_check_of_a_job_file_says_how_many_steps_its_epochs_are(end: Any, size: int, said: str) -> None:
    part = JobPart(code="job.py:job", profile="profile.json", epochs=2)
    told = length_text(part, Epochs(num_samples=size, batch_size=16, end=end))
    assert told == f"2 epochs of {size} samples at 16 are {said}"
    assert length_text(JobPart(code="job.py:job", profile="profile.json", steps=1), None) == "1 step"
