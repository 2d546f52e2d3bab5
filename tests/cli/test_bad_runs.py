"""Mistakes that commands refuse: each gives one line that says what is wrong; nothing is started or written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from typer.testing import CliRunner

from manager.commands.inject import seconds_of
from manager.engine.local_vms.namespaces import check_permitted
from manager.rehearsal import RehearsalSpec, plan_rehearsal, run_facts
from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.manifest import version_url, write_manifest
from morph.cli.main import app
from morph.contract import ranges
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.errors import ConfigError, InputError, RunDirError
from morph.contract.profile import Profile
from simulator import synthetic_profile
from tests.cli.given import Given, without_phases
from tests.waiting import BOUND_S

HEADER = "time_s,event,node_id\n"


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--steps", "0", "--steps: must be at least 1 (got '0')"),
        ("--steps", "nan", "--steps: must be an integer"),
        ("--trace-speed", "0", "--trace-speed: must be at least 0.001 (got '0')"),
        ("--trace-speed", "nan", "--trace-speed: must be at most 1000000000 (got 'nan')"),
        ("--steps", str(10**20), f"--steps: must be at most 2147483648 (got '{10**20}')"),
        ("--price", "inf", "--price: must be at most 1000000 (got 'inf')"),
        ("--on-demand-price", "1e300", "--on-demand-price: must be at most 1000000 (got '1e300')"),
        ("--trace-speed", "inf", "--trace-speed: must be at most 1000000000 (got 'inf')"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(given: Given, option: str, value: str, problem: str) -> None:
    assert problem in given.run_refused(option, value)


def test_a_number_of_vms_to_keep_and_a_trace_exclude_one_another(given: Given) -> None:
    path = given.file("cluster.yaml", "vms: {keep: 2}")
    told = given.run_refused("--trace", given.file("trace.csv", HEADER + "0,add,x\n"))
    assert told == (
        f"{path}: vms.keep: the trace determines which VMs come and go (got 2); allowed: vms.keep or --trace, not both"
    )


@pytest.mark.parametrize(("is_built", "lacks"), [(True, "finds none"), (False, "is built without CUDA")])
def test_a_device_that_this_machine_lacks_is_refused(
    given: Given, monkeypatch: pytest.MonkeyPatch, is_built: bool, lacks: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: is_built)
    path = given.file("cluster.yaml", "vms: {device: cuda}")
    why = f"this machine has no such device: torch {torch.__version__} {lacks} (got 'cuda'); allowed: cpu"
    assert given.run_refused() == f"{path}: vms.device: {why}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n0,add,x\n", ", line 1: wrong header (got 'a,b'); allowed: time_s,event,node_id,zone"),
        (HEADER + "zero,add,x\n", ", line 2: time_s: must be a number"),
        (HEADER + "nan,add,x\n", ", line 2: time_s: must be a finite number (got 'nan')"),
        (HEADER + "0,add,x\n1,explode,x\n", ", line 3: event: is not a kind of event (got 'explode')"),
        (HEADER + "0,add,x\n1,remove,y\n", ", line 3: node_id: node is not there (got 'y')"),
        (HEADER + "0,add,x\n0,add,x\n", ", line 3: node_id: node is already there (got 'x')"),
        (
            HEADER + "5,add,x\n4,add,y\n",
            ", line 3: time_s: time steps back, so the file is not sorted by time (got 4.0)",
        ),
        (HEADER + "0,add\n", ", line 2: wrong number of columns; allowed: 3 columns"),
        (HEADER, ": holds no events"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(given: Given, text: str, problem: str) -> None:
    path = given.file("trace.csv", text)
    assert f"{path}{problem}" in given.run_refused("--trace", path)


def test_a_profile_of_another_model_is_refused(given: Given) -> None:
    line = given.run_refused(job=f"{given.folder}/jobs.py:wide")
    assert (
        "jobs.py:wide: --profile: the profile belongs to another model; allowed: a profile of this job, as it is now: "
        in line
    )


def test_a_profile_of_another_batch_size_is_refused(given: Given) -> None:
    line = given.run_refused(job=f"{given.folder}/jobs.py:half")
    assert (
        "--profile: the profile was measured with another batch_size (got 4); allowed: batch_size=8; or a profile of"
        in line
    )
    assert line.endswith(f"morph calibrate {given.folder}/jobs.py:half -o FILE")


def test_a_profile_of_another_job_is_refused_with_both_names(given: Given) -> None:
    other = given.edited(lambda data: data["job"].update(name="other", batch_size=16))
    line = given.run_refused(profile=other)
    assert (
        "jobs.py:good: --profile: the profile belongs to another job, 'other' (got 'small'); allowed: a profile of"
        in line
    )


def test_a_profile_without_the_models_units_is_refused(given: Given) -> None:
    line = given.run_refused(profile=given.edited(lambda data: data.update(units=[])))
    assert "--profile: the profile has other parameter units" in line


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (
            lambda data: data.update(schema_version=2),
            "schema_version: written by a newer Morph: schema_version 2; this one reads 1",
        ),
        (
            lambda data: data["sections"][0]["forward"]["2"].update(median_s=-1.0),
            "sections.0.forward.2.median_s: must be at least 0 (got -1.0)",
        ),
        (
            lambda data: data["sections"][1]["backward"]["1"].update(median_s=float("nan")),
            "sections.1.backward.1.median_s: must be a finite number (got nan)",
        ),
        (lambda data: data.update(surprise=1), "surprise: is not a known field (got 1)"),
        (lambda data: data["commit"].update(median_s="fast"), "commit.median_s: must be a number"),
        (lambda data: data.pop("commit"), "commit: is missing"),
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
    [
        (
            "absent.json",
            "cannot be read: No such file or directory; allowed: a JSON file that `morph calibrate JOB -o FILE` wrote",
        ),
        ("jobs.py:job", "is a job; allowed: a JSON file that `morph calibrate "),
        ("jobs.py", "is Python code; allowed: a JSON file that `morph calibrate JOB -o FILE` wrote"),
        ("", "is a folder"),
    ],
)
def test_a_file_that_is_not_a_profile_is_refused(given: Given, name: str, problem: str) -> None:
    assert f"{given.folder / name}: {problem}" in given.run_refused(profile=given.folder / name)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("plan", "--gpus", 0), "--gpus: is out of range (got 0); allowed: a whole number from 1 to 100000"),
        (("plan", "--gpus", 2, "--m", 3), "--m: does not divide the batch of 8 samples (got 3); allowed: 1, 2"),
        (("plan", "--gpus", 2, "--m", 5), "--m: was not measured (got 5); allowed: 1, 2"),
        (("plan", "--gpus", 2, "--memory-gib", 1e-9), "--memory-gib: the job does not fit in the memory of 2"),
        (("simulate", "-P", 3), "-P: the model cannot be cut so (got 3); allowed: 1 to 2 (its sections)"),
        (("simulate", "-P", 0), "-P: the model cannot be cut so (got 0); allowed: 1 to 2 (its sections)"),
        (("simulate", "-P", 2, "-D", 5), "-D: replicas cannot share the micro-batches (got 5); allowed: 1 to 4"),
        (("simulate", "-P", 2, "--m", 3), "--m: does not divide the batch of 8 samples (got 3); allowed: 1, 2"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(given: Given, arguments: tuple[object, ...], problem: str) -> None:
    path = given.folder / "profile.json"
    assert f"{path}: {problem}" in given.refused(arguments[0], path, *arguments[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("-P", 3), "-P: is not possible (got 3); allowed: 1 to 2"),
        (("-D", 3), "-D: is not possible (got 3); allowed: 1 to 2"),
        (("-P", 2, "-D", 2), "-P: is not possible (got 2); allowed: 1 to 1"),
        (("-P", 0), "-P: must be at least 1 (got '0')"),
    ],
)
def test_a_shape_that_the_vms_can_never_form_is_refused(
    given: Given, options: tuple[object, ...], problem: str
) -> None:
    given.file("cluster.yaml", "vms: {num_vms: 2}\n")
    assert given.run_refused(*options).startswith(problem)


def test_the_refusal_of_a_too_large_job_names_the_least_memory(given: Given) -> None:
    path = given.file("cluster.yaml", "vms: {num_vms: 2, memory_bytes: 100}\n")
    line = given.run_refused()
    start = f"{path}: vms.memory_bytes: the job does not fit in the memory of 2 devices ("
    assert line.startswith(start)
    assert "e-08 GiB each): while the shape changes, " in line
    least = int(line.removesuffix(" bytes) per device").rpartition(" GiB (")[2])
    given.file("cluster.yaml", f"vms: {{num_vms: 2, memory_bytes: {least - 1}}}\n")
    assert f" GiB ({least} bytes) per device" in given.run_refused()


@pytest.mark.parametrize(
    ("option", "name"), [("--png", "nowhere/x.png"), ("--png", "."), ("-o", "nowhere/x.json"), ("-o", ".")]
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(given: Given, option: str, name: str) -> None:
    command = ("simulate", given.folder / "absent.json", "-P", 1) if option == "--png" else ("plan", "no", "--gpus", 1)
    line = given.refused(*command, option, given.folder / name)
    assert f"{given.folder / name}: cannot be written: it" in line


class Refusing(MemoryFileSystem):
    """Storage for which this user has no key."""

    protocol = "refusing"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        raise PermissionError("the key is wrong\nAsk whoever has the right one.")

    find = walk = info = cat_file = open = ls


def test_a_wrong_storage_key_is_reported_first_and_leaves_no_directory(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a run directory were left, the same command with the right storage would be refused as another run's."""
    monkeypatch.setitem(_registry, "refusing", Refusing)
    url = "refusing://bucket/run"
    arguments = ("run", f"{given.folder / 'jobs.py'}:failing", "--profile", given.folder / "profile.json")
    options = ("--cluster", given.folder / "cluster.yaml", "--run-dir", given.run_dir, "--checkpoint-url", url)
    result = CliRunner().invoke(app, [str(one) for one in (*arguments, *options)], prog_name="morph")
    assert (result.exit_code, without_phases(result.stderr)) == (1, [f"error: {url}: cannot be read: the key is wrong"])
    assert not given.run_dir.exists()


def test_repeated_messages_of_a_library_are_shown_once() -> None:
    code = (
        "import logging, sys\n"
        "from morph.cli.main import main\n"
        "sys.argv = ['morph', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "for word in ('wrong', 'wrong', 'other', 'wrong'):\n    logging.getLogger('azure').warning('the key: %s', word)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S, check=True)
    assert done.stderr == "the key: wrong\nthe key: other\n"


def facts(profile: Profile, fingerprint: str | None = None) -> RunFacts:
    return RunFacts(
        job="jobs.py:good",
        fingerprint=fingerprint or profile.job.fingerprint,
        micro_batch_size=2,
        batch_size=8,
        num_sections=2,
    )


def test_a_run_directory_is_refused_while_another_process_holds_it(given: Given) -> None:
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
        assert holder.stdout.readline() == "held\n"
        assert given.run_refused() == f"{given.run_dir}: is in use by process {holder.pid}"
        holder.stdin.close()
        assert holder.wait(timeout=BOUND_S) == 0
    with RunDir(given.run_dir, known):
        pass


def test_fewer_steps_than_a_resumed_run_has_already_are_refused(given: Given) -> None:
    with RunDir(given.run_dir, facts(given.profile)) as opened:
        entry = UnitFile(unit="s0", file="s0.safetensors", size_bytes=0, sha256="0" * 64)
        manifest = Manifest(fingerprint=given.profile.job.fingerprint, version=5, units=(entry,))
        write_manifest(opened.checkpoint_url, manifest)
        (Path(version_url(opened.checkpoint_url, 5)) / entry.file).touch()
    for steps in (4, 5):
        line = given.run_refused("--steps", steps)
        told = f"{given.run_dir}: --steps: has reached that step already (got {steps})"
        assert line == f"{told}; allowed: above 5, given to morph run"
    steps = 2 * 16 // given.profile.job.batch_size
    assert f"--steps: has reached that step already (got {steps})" in given.run_refused("--epochs", 2)
    told = "--epochs: is given with --steps (got 2); allowed: one of the two"
    assert given.run_refused("--epochs", 2, "--steps", 9) == told


def test_a_run_that_never_began_has_no_status(given: Given) -> None:
    with RunDir(given.run_dir, facts(given.profile)):
        pass
    assert given.refused("status", given.run_dir).endswith("journal.sqlite: holds no journal")


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
        (["-P", "2", "--slow", "5:1.5"], ["--slow", "got 5", "stages 0 to 1"]),
        (["-P", "2", "--memory-gib", "-1"], ["--memory-gib", "above 0"]),
        (["-P", "2", "--trace", "trace.csv"], ["-P", "one of -P (with -D), --plan and --trace"]),
        (["--trace", "trace.csv", "-D", "2"], ["-D", "is for one shape, and a trace leads to several"]),
        (["--trace", "trace.csv", "--jitter-seed", "1"], ["--jitter-seed", "is for one shape"]),
        (["--trace", "trace.csv", "--memory-gib", "0.001"], ["--memory-gib", "does not fit", "at least"]),
        (["--trace", "none.csv"], ["none.csv", "cannot be read"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(profile: Path, arguments: list[str], parts: list[str]) -> None:
    (profile.parent / "trace.csv").write_text("time_s,event,node_id\n0,add,a\n0,add,b\n5,remove,a\n", encoding="utf-8")
    before = set(profile.parent.iterdir())
    arguments = [str(profile.parent / one) if one.endswith(".csv") else one for one in arguments]
    done = CliRunner().invoke(app, ["rehearse", str(profile), *arguments, "--run-dir", str(profile.parent / "run")])
    assert done.exit_code == 2, done.output
    (line,) = without_phases(done.stderr)
    assert line.startswith("error: ")
    for part in parts:
        assert part in line
    assert set(profile.parent.iterdir()) == before


@pytest.mark.parametrize("rehearsed_first", [False, True])
def test_a_run_and_a_rehearsal_of_its_job_share_no_folder(tmp_path: Path, rehearsed_first: bool) -> None:
    """A rehearsal in a run's folder replaced the trained weights by emulated ones."""
    profile = synthetic_profile(num_sections=6, batch_size=8, micro_batch_sizes=(2,))
    rehearsal = run_facts(plan_rehearsal(RehearsalSpec(profile=profile, num_stages=2, num_hosts=2)))
    run = rehearsal.model_copy(update={"job": "job.py:job", "fingerprint": profile.job.fingerprint})
    first, second = (rehearsal, run) if rehearsed_first else (run, rehearsal)
    with RunDir(tmp_path / "run", first):
        pass
    with pytest.raises(RunDirError, match=f"belongs to the job {first.job}"), RunDir(tmp_path / "run", second):
        pass
    with RunDir(tmp_path / "run", first):
        pass


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


FACTS = RunFacts(job="jobs.py:good", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=2)
BY_LIFETIMES = ("--mttp", "3h")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("10m", 600),
        ("3h", 10_800),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2d", 172_800),
        ("45", 45),
        ("0s", 0),
    ],
)
def test_durations_are_read_as_users_write_them(text: str, seconds: float) -> None:
    assert seconds_of("--mttp", text, ranges.PATIENCE_S) == seconds


@pytest.mark.parametrize("text", ["", "h", "3 h", "-3h", "3x", "nan", "inf", "1e3", "3h5", "٣h", "0x10"])
def test_invalid_durations_are_refused_with_their_option(text: str) -> None:
    with pytest.raises(InputError) as raised:
        seconds_of("--notice", text, ranges.SECONDS)
    assert str(raised.value) == (f"--notice: is not a duration (got {text!r}); allowed: such as 30s, 10m, 3h or 1h30m")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "exactly one option chooses the VMs; allowed: --mttp, --trace or --vm"),
        ((*BY_LIFETIMES, "--vm", "a"), "option chooses the VMs (got '--mttp --vm'); allowed: --mttp, --trace or --vm"),
        (("--vm", "a", "--dry-run"), "--vm: takes a VM now, so there is nothing to predict; allowed: no --dry-run"),
        (("--mttp", "3x"), "--mttp: is not a duration (got '3x')"),
        (
            ("--mttp", "0.5s"),
            "--mttp: is out of range (got '0.5s'); allowed: a number from 1 to 1000000000, in seconds",
        ),
        (
            (*BY_LIFETIMES, "--notice", "2d"),
            "--notice: is out of range (got '2d'); allowed: a number from 0 to 86400, in",
        ),
        ((*BY_LIFETIMES, "--seed", "-1"), "--seed: is out of range (got -1)"),
        ((*BY_LIFETIMES, "--count", "0"), "--count: must be at least 1"),
        (("--trace", "absent.csv"), "absent.csv: cannot be read: No such file or directory"),
    ],
)
def test_wrong_options_are_refused(given: Given, options: tuple[str, ...], problem: str) -> None:
    assert problem in given.refused("inject", given.run_dir, *options)


def test_injecting_into_a_run_that_has_ended_is_refused(given: Given) -> None:
    with RunDir(given.run_dir, FACTS):
        pass
    for options in (BY_LIFETIMES, ("--vm", "vm0"), (*BY_LIFETIMES, "--dry-run")):
        line = given.refused("inject", given.run_dir, *options)
        assert line == f"{given.run_dir}: is not running: no process manages it"


def test_a_file_that_is_somebody_elses_is_refused_by_name(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDir(given.run_dir, FACTS):
        path = given.file("run/attach.json", "years of work")
        assert given.refused("inject", given.run_dir, *BY_LIFETIMES).startswith(f"{path}: is not JSON")
        read_text = Path.read_text

        def read(self: Path, **options: str) -> str:
            if self == path:
                raise PermissionError(13, "Permission denied", str(path))
            return read_text(self, **options)

        monkeypatch.setattr(Path, "read_text", read)
        line = given.refused("inject", given.run_dir, *BY_LIFETIMES)
        assert line == f"{path}: cannot be read: Permission denied"
