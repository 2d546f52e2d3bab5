"""Every mistake in what a user gives is one line that says what is wrong; nothing is started or written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.manifest import write_manifest
from morph.cli.main import app
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.errors import RunDirError
from morph.contract.profile import Profile
from simulator import synthetic_profile

JOBS = """
import torch
from torch import nn
from torch.nn import functional

from morph import Job


class Samples:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "y": torch.zeros(4)}


class Lists(Samples):
    def __getitem__(self, index):
        return [torch.ones(4)]


class Numbers(Samples):
    def __getitem__(self, index):
        return {"x": 1.0, "y": 2.0}


class Plain(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.second(self.first(x))


class Branching(Plain):
    def forward(self, x):
        if x.sum() > 0:  # HERE
            return self.first(x)
        return self.second(x)


class Normed(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def loss(model, batch):
    return functional.mse_loss(model(batch["x"]), batch["y"])


def sgd(parameters):
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


def make(model=Plain, dataset=Samples, batch_size=8, micro_batch_size=2):
    return Job(name="small", model=model, loss=loss, dataset=dataset, optimizer=sgd, batch_size=batch_size,
               micro_batch_size=micro_batch_size, num_sections=2)


good = make()
wide = make(model=lambda: Plain(6))
branching = make(model=Branching)
normed = make(model=Normed)
lists = make(dataset=Lists)
numbers = make(dataset=Numbers)
half = make(batch_size=4)
number = 3


def indivisible():
    return make(micro_batch_size=3)


def failing():
    raise ValueError("not today")
"""
HEADER = "time_s,event,node_id\n"


@dataclass(frozen=True)
class Given:
    """A folder with a right job, profile and cluster file; the run directory that ``run`` names is not there yet."""

    folder: Path
    profile: Profile

    @property
    def job(self) -> str:
        return f"{self.folder / 'jobs.py'}:good"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def edited(self, edit: Callable[[dict[str, Any]], object]) -> Path:
        """A profile file with one mistake."""
        data = json.loads(self.profile.model_dump_json())
        edit(data)
        return self.file("edited.json", json.dumps(data))

    def refused(self, *arguments: object) -> str:
        """The one line with which the command line refuses; checks that nothing else happened."""
        before = sorted(self.folder.rglob("*"))
        children = psutil.Process().children(recursive=True)
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="morph")
        assert result.exit_code == 2, (result.output, result.exception)
        lines = result.stderr.splitlines()
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("error: ")
        assert result.stdout == ""
        new = {path for path in self.folder.rglob("*") if "__pycache__" not in path.parts} - set(before)
        assert new == set(), "something was written"
        assert psutil.Process().children(recursive=True) == children, "something was started"
        return lines[0].removeprefix("error: ")

    def run_refused(self, *more: object, job: str | None = None, profile: Path | None = None) -> str:
        """The line with which ``morph run`` refuses; options in ``more`` override these."""
        return self.refused(
            *("run", job or self.job, "--profile", profile or self.folder / "profile.json"),
            *("--cluster", self.folder / "cluster.yaml", "--run-dir", self.run_dir, *more),
        )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """A profile of the job ``good``, without having measured it."""
    from morph.cutting import cut, export_job
    from morph.job import load_job

    path = tmp_path_factory.mktemp("jobs") / "jobs.py"
    path.write_text(JOBS, encoding="utf-8")
    model = cut(export_job(load_job(f"{path}:good")), num_sections=2, micro_batch_size=1)
    profile = synthetic_profile(num_sections=2, batch_size=8, micro_batch_sizes=(1, 2, 3))
    units = [{"id": unit.id, "sections": unit.sections, "parameter_bytes": 80} for unit in model.units]
    job = profile.job.model_copy(update={"fingerprint": model.fingerprint, "micro_batch_size": 2})
    return Profile.model_validate({**profile.model_dump(), "job": job.model_dump(), "units": units})


@pytest.fixture
def given(measured: Profile, tmp_path: Path) -> Given:
    made = Given(tmp_path, measured)
    made.file("jobs.py", JOBS)
    made.file("profile.json", measured.model_dump_json())
    made.file("cluster.yaml", "vms: {num_vms: 2}\n")
    return made


# ---- the job ----


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.py:good", "missing.py: no such file; allowed: path/to/file.py:name"),
        ("jobs.py", "jobs.py: names no job; allowed: path/to/file.py:name"),
        ("cluster.yaml:good", "cluster.yaml: is not a Python file"),
        ("jobs.py:number", "jobs.py: number: is not a Job (got 'int'); allowed: a morph.Job"),
        ("jobs.py:failing", "failing: calling it failed: ValueError: not today"),
        (
            "jobs.py:indivisible",
            "micro_batch_size: is not right (got 3); allowed: a divisor of batch_size 8: 1, 2, 4, 8",
        ),
        ("jobs.py:lists", "dataset()[0]: is not a sample (got 'list'); allowed: a dict from names to tensors"),
        ("jobs.py:numbers", """dataset()[0]: is not a sample (got "'x': float"); allowed: a dict"""),
        ("jobs.py:normed", "norm.running_mean"),
    ],
)
@pytest.mark.parametrize("command", ["run", "calibrate"])
def test_a_wrong_job_is_refused(given: Given, name: str, problem: str, command: str) -> None:
    job = f"{given.folder}/{name}"
    if command == "run":
        assert problem in given.run_refused(job=job)
    else:
        assert problem in given.refused("calibrate", job, "-o", given.folder / "new.json")


def test_a_name_that_the_job_file_lacks_is_answered_with_those_it_has(given: Given) -> None:
    line = given.run_refused(job=f"{given.folder}/jobs.py:absent")
    assert line.endswith("jobs.py: defines no 'absent'; allowed: branching, good, half, lists, normed, numbers, wide")


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


def test_a_model_that_branches_on_its_data_is_refused_in_one_line_that_names_the_branch(given: Given) -> None:
    """In a process of its own: torch writes whole graphs to the real standard error, past what a test replaces."""
    number = next(index for index, line in enumerate(JOBS.splitlines(), 1) if "HERE" in line)
    for command in (
        ["run", "--profile", "profile.json", "--cluster", "cluster.yaml", "--run-dir", "run"],
        ["calibrate", "-o", "new.json"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "morph.cli.main", command[0], "jobs.py:branching", *command[1:]],
            cwd=given.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("error: ")
        assert f"jobs.py:{number}: Branching cannot be exported" in done.stderr
        assert not given.run_dir.exists()
        assert not (given.folder / "new.json").exists()


# ---- the profile ----


def test_a_profile_of_another_model_is_refused(given: Given) -> None:
    line = given.run_refused(job=f"{given.folder}/jobs.py:wide")
    assert "jobs.py:wide: fingerprint: the profile belongs to another model; calibrate again (got" in line


def test_a_profile_of_another_batch_size_is_refused(given: Given) -> None:
    line = given.run_refused(job=f"{given.folder}/jobs.py:half")
    assert line.endswith("batch_size: was made for another global batch; calibrate again (got 4); allowed: 8")


def test_a_profile_without_the_models_units_is_refused(given: Given) -> None:
    line = given.run_refused(profile=given.edited(lambda data: data.update(units=[])))
    assert "units: the profile names other parameter units than the model has; calibrate again (got 'none')" in line


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (
            lambda data: data.update(schema_version=2),
            "schema_version: written by a newer Morph: schema_version 2; this one reads 1",
        ),
        (
            lambda data: data["sections"][0]["forward"]["2"].update(median_s=-1.0),
            "sections.0.forward.2.median_s: Input should be greater than or equal to 0 (got -1.0)",
        ),
        (
            lambda data: data["sections"][1]["backward"]["1"].update(median_s=float("nan")),
            "sections.1.backward.1.median_s: Input should be a finite number (got nan)",
        ),
        (lambda data: data.update(surprise=1), "surprise: Extra inputs are not permitted (got 1)"),
        (lambda data: data["commit"].update(median_s="fast"), "commit.median_s: Input should be a valid number"),
        (lambda data: data.pop("commit"), "commit: Field required"),
    ],
)
def test_a_wrong_profile_is_refused_by_every_command_that_reads_it(
    given: Given, edit: Callable[[dict[str, Any]], object], problem: str
) -> None:
    path = given.edited(edit)
    for line in (
        given.run_refused(profile=path),
        given.refused("plan", path, "--gpus", 2),
        given.refused("simulate", path, "-P", 1),
    ):
        assert f"{path}: {problem}" in line


@pytest.mark.parametrize(
    ("name", "problem"),
    [("absent.json", "cannot be read: No such file"), ("jobs.py", "Invalid JSON"), ("", "cannot be read: Is a dir")],
)
def test_a_file_that_is_no_profile_is_refused(given: Given, name: str, problem: str) -> None:
    assert f"{given.folder / name}: {problem}" in given.run_refused(profile=given.folder / name)


# ---- shapes ----


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("plan", "--gpus", 0), "--gpus: at least one GPU is needed (got 0); allowed: 1 or more"),
        (("plan", "--gpus", 2, "--m", 3), "--m: does not divide the batch of 8 samples (got 3); allowed: 1, 2"),
        (("plan", "--gpus", 2, "--m", 5), "--m: was not measured (got 5); allowed: 1, 2"),
        (
            ("plan", "--gpus", 2, "--memory-gib", 1e-9),
            "--memory-gib, in bytes: the job does not fit in the memory of 2",
        ),
        (("simulate", "-P", 3), "-P: the model cannot be cut so (got 3); allowed: 1 to 2 (its sections)"),
        (("simulate", "-P", 0), "-P: the model cannot be cut so (got 0); allowed: 1 to 2 (its sections)"),
        (("simulate", "-P", 2, "-D", 5), "-D: replicas cannot share the micro-batches (got 5); allowed: 1 to 4"),
        (("simulate", "-P", 2, "--m", 3), "--m: does not divide the batch of 8 samples (got 3); allowed: 1, 2"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(given: Given, arguments: tuple[object, ...], problem: str) -> None:
    path = given.folder / "profile.json"
    assert f"{path}: {problem}" in given.refused(arguments[0], path, *arguments[1:])


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_a_memory_size_that_is_none_is_refused(given: Given, value: str) -> None:
    line = given.refused("plan", given.folder / "profile.json", "--gpus", 2, "--memory-gib", value)
    assert line == f"--memory-gib: is not a size (got {float(value)}); allowed: a number above 0"


def test_a_job_that_does_not_fit_is_refused_with_the_least_memory_that_would_do(given: Given) -> None:
    path = given.file("cluster.yaml", "vms: {num_vms: 2, memory_bytes: 100}\n")
    line = given.run_refused()
    start = f"{path}: vms.memory_bytes: the job does not fit in the memory of 2 devices (got 100); allowed: at least "
    assert line.startswith(start)
    least = int(line.removeprefix(start).removesuffix(" bytes per device"))
    given.file("cluster.yaml", f"vms: {{num_vms: 2, memory_bytes: {least - 1}}}\n")
    assert f"allowed: at least {least} bytes" in given.run_refused()


@pytest.mark.parametrize(
    ("option", "name"), [("--png", "nowhere/x.png"), ("--png", "."), ("-o", "nowhere/x.json"), ("-o", ".")]
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(given: Given, option: str, name: str) -> None:
    command = ("simulate", given.folder / "absent.json", "-P", 1) if option == "--png" else ("plan", "no", "--gpus", 1)
    line = given.refused(*command, option, given.folder / name)
    assert f"{given.folder / name}: cannot be written: it" in line


# ---- options, cluster files, traces ----


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--steps", "0", "--steps: Input should be greater than or equal to 1 (got '0')"),
        ("--steps", "nan", "--steps: Input should be a valid integer"),
        ("--trace-speed", "0", "--trace-speed: Input should be greater than or equal to 0.001 (got '0')"),
        ("--trace-speed", "nan", "--trace-speed: Input should be greater than or equal to 0.001 (got 'nan')"),
        ("--trace-speed", "inf", "--trace-speed: is not a number (got inf); allowed: 0.001 or more"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(given: Given, option: str, value: str, problem: str) -> None:
    assert problem in given.run_refused(option, value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("vms: {gpus: 3}", "vms.gpus: unknown key (got 3); allowed: the keys kind, num_vms, memory_bytes, device"),
        (
            "vms: {num_vms: two}",
            "vms.num_vms: Input should be a valid integer (got 'two'); allowed: an integer at least 1",
        ),
        ("policy: {checkpoint_every_steps: 1.5}", "policy.checkpoint_every_steps: Input should be a valid integer"),
    ],
)
def test_a_wrong_cluster_file_is_refused(given: Given, text: str, problem: str) -> None:
    path = given.file("cluster.yaml", text)
    assert f"{path}: {problem}" in given.run_refused()


def test_a_number_of_vms_to_keep_and_a_trace_exclude_one_another(given: Given) -> None:
    path = given.file("cluster.yaml", "vms: {keep: 2}")
    told = given.run_refused("--trace", given.file("trace.csv", HEADER + "0,add,x\n"))
    assert told == (
        f"{path}: vms.keep: a trace decides itself which VMs come and go (got 2); "
        "allowed: vms.keep or --trace, not both"
    )


def test_a_device_that_this_machine_lacks_is_refused(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = given.file("cluster.yaml", "vms: {device: cuda}")
    assert given.run_refused() == f"{path}: vms.device: this machine has no such device (got 'cuda'); allowed: cpu"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n0,add,x\n", ", line 1: wrong header (got 'a,b'); allowed: time_s,event,node_id,zone"),
        (HEADER + "zero,add,x\n", ", line 2: time_s: Input should be a valid number"),
        (HEADER + "nan,add,x\n", ", line 2: time_s: Input should be a finite number (got 'nan')"),
        (HEADER + "0,add,x\n1,explode,x\n", ", line 3: event: Input should be 'add' or 'remove' (got 'explode')"),
        (HEADER + "0,add,x\n1,remove,y\n", ", line 3: node_id: node is not there (got 'y')"),
        (HEADER + "0,add,x\n0,add,x\n", ", line 3: node_id: node is already there (got 'x')"),
        (HEADER + "5,add,x\n4,add,y\n", ", line 3: time_s: time steps back (got 4.0); allowed: at least 5.0"),
        (HEADER + "0,add\n", ", line 2: wrong number of columns; allowed: 3 columns"),
        (HEADER, ": holds no events"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(given: Given, text: str, problem: str) -> None:
    path = given.file("trace.csv", text)
    assert f"{path}{problem}" in given.run_refused("--trace", path)


# ---- run directories ----


def facts(profile: Profile, fingerprint: str | None = None) -> RunFacts:
    return RunFacts(
        job="jobs.py:good",
        fingerprint=fingerprint or profile.job.fingerprint,
        micro_batch_size=2,
        batch_size=8,
        num_sections=2,
    )


def test_a_run_directory_that_another_process_holds_is_refused_until_that_process_ends(given: Given) -> None:
    code = (
        "import sys; from pathlib import Path; from manager.run_dir import RunDir, RunFacts\n"
        "with RunDir(Path(sys.argv[1]), RunFacts.model_validate_json(sys.argv[2])):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    known = facts(given.profile)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(given.run_dir), known.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert given.run_refused() == f"{given.run_dir}: is in use by process {holder.pid}"
        holder.stdin.close()
        assert holder.wait(timeout=30) == 0
    with RunDir(given.run_dir, known):
        pass


def test_a_run_directory_that_is_a_file_is_refused(given: Given) -> None:
    given.file("run", "a file\n")
    assert given.run_refused() == f"{given.run_dir}: is not a directory"


def test_a_folder_with_other_files_is_no_run_directory(given: Given) -> None:
    given.run_dir.mkdir()
    (given.run_dir / "thesis.tex").write_text("years of work", encoding="utf-8")
    line = given.run_refused()
    assert line == f"{given.run_dir}: is not empty and is no run directory; allowed: a new or empty directory"


def test_a_run_directory_of_another_job_is_refused(given: Given) -> None:
    with RunDir(given.run_dir, facts(given.profile, fingerprint="another")):
        pass
    assert "run.json: fingerprint: belongs to another job or profile (got 'another')" in given.run_refused()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_directory_that_cannot_be_written_is_refused(given: Given) -> None:
    given.run_dir.mkdir(mode=0o500)
    assert given.run_refused() == f"{given.run_dir}: is not writable: Permission denied"


def test_a_claim_that_a_kill_cut_short_leaves_a_directory_that_can_be_claimed(given: Given) -> None:
    given.run_dir.mkdir()
    for name in ("run.lock", "run.json.tmp"):
        (given.run_dir / name).write_text("{", encoding="utf-8")
    with RunDir(given.run_dir, facts(given.profile)):
        assert (given.run_dir / "run.json").exists()


def test_fewer_steps_than_a_resumed_run_has_already_are_refused(given: Given) -> None:
    with RunDir(given.run_dir, facts(given.profile)) as opened:
        entry = UnitFile(unit="s0", file="s0.safetensors", size_bytes=0, sha256="0" * 64)
        manifest = Manifest(fingerprint=given.profile.job.fingerprint, version=5, units=(entry,))
        write_manifest(opened.checkpoint_url, manifest)
    for steps in (4, 5):
        line = given.run_refused("--steps", steps)
        assert line == f"{given.run_dir}: --steps: has reached that step already (got {steps}); allowed: above 5"


def test_a_directory_that_is_no_run_has_no_status(given: Given) -> None:
    assert given.refused("status", given.folder / "absent").endswith("absent: there is no such run directory")
    assert given.refused("status", given.job).endswith("there is no such run directory")
    assert given.refused("status", given.folder).endswith("is not a run directory: it has no run.json")
    with RunDir(given.run_dir, facts(given.profile)):
        pass
    assert given.refused("status", given.run_dir).endswith("journal.sqlite: holds no journal")


def test_a_lock_is_let_go_when_the_claim_is_refused(given: Given) -> None:
    with RunDir(given.run_dir, facts(given.profile, fingerprint="another")):
        pass
    for _ in range(2):
        with pytest.raises(RunDirError, match="belongs to another job"):
            RunDir(given.run_dir, facts(given.profile)).__enter__()


# ---- job files ----


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
    ],
)
def test_a_wrong_job_file_is_refused_with_its_dotted_field(given: Given, job: str, rest: str, problem: str) -> None:
    path = job_file(given, job, rest)
    assert f"{path}: {problem}" in given.refused("config", "check", path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--steps", "9"), "--steps: stands in the job file"),
        (("--profile", "p.json"), "--profile: stands in the job file"),
        (("--no-recompute",), "--no-recompute: stands in the job file"),
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
    from morph.cli.cluster_file import load_job_file

    shipped = Path(__file__).parents[2] / "configs/runs/tiny_gpt.yaml"
    file = load_job_file(shipped)
    assert (shipped.parent / file.job.code.partition(":")[0]).is_file()
    assert file.vms.num_vms == 6


def test_a_right_job_file_says_what_would_run(given: Given) -> None:
    told = CliRunner().invoke(app, ["config", "check", str(job_file(given))])
    assert told.exit_code == 0, told.output
    assert "7 steps, with 2 VMs in shape" in told.stdout
    assert not given.run_dir.exists()


def test_every_key_is_explained_with_where_its_value_comes_from(given: Given) -> None:
    told = CliRunner().invoke(app, ["config", "explain", str(job_file(given))])
    assert told.exit_code == 0, told.output
    rows = {cells[1].strip(): cells for line in told.stdout.splitlines() if (cells := line.split("│"))[2:]}
    assert [cell.strip() for cell in rows["job.steps"][2:4]] == ["7", "file"]
    assert [cell.strip() for cell in rows["policy.rules.stutter.samples"][2:4]] == ["8", "default"]
    assert "vms.num_vms" in rows


@pytest.mark.parametrize("kind", ["job", "cluster"])
def test_a_file_that_the_schema_takes_is_taken_and_one_that_it_refuses_is_refused(given: Given, kind: str) -> None:
    import jsonschema
    import yaml

    schema = json.loads(CliRunner().invoke(app, ["config", "schema", kind]).stdout)
    right = yaml.safe_load(job_file(given).read_text()) if kind == "job" else {"vms": {"num_vms": 2}}
    jsonschema.validate(right, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**right, "vmz": 3}, schema)
