"""A run resumes from the files that it stores beside its checkpoints, with its own job and no other code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from manager.engine.loop.lease import Lease, this_process
from manager.run.prepared import read_inputs
from manager.run.recovery import read_recovery, recover, recovery_of, write_recovery
from manager.run.request import IfChanged, RunRequest
from manager.run.session import SessionSpec
from manager.run_dir import RunDir, is_run, read_facts
from morph.checkpoint.manifest import read_manifest, write_manifest
from morph.checkpoint.versions import RECOVERY
from morph.cli.main import app
from morph.contract.cluster import Notify
from morph.contract.errors import CheckpointsTaken, ConfigError, InputError, RunDirError
from morph.contract.profile import load_profile
from morph.yaml_files import load_cluster
from tests.checkpoint.test_manifest import save
from tests.cli.given import JOBS, Begun, Given, begin
from tests.cli.test_provided_vms import vms_of

pytestmark = pytest.mark.slow

TRACE = "time_s,event,node_id\n0,add,a\n0,add,b\n5,remove,a\n"


def asked(given: Given, **fields: object) -> RunRequest:
    options: dict[str, object] = {
        "job": given.job,
        "profile": given.folder / "profile.json",
        "cluster": given.folder / "cluster.yaml",
        "trace": given.file("trace.csv", TRACE),
        "trace_speed": 2.0,
        "steps": 9,
        "pipeline_depth": 1,
        "checkpoint_url": str(given.folder / "ckpt"),
    }
    return RunRequest.model_validate({**options, **fields})


def with_checkpoint(url: str, fingerprint: str, units: tuple[str, ...]) -> None:
    """Write a checkpoint of the job, as far as its manifest says so."""
    save(url, 4)
    manifest = read_manifest(url, 4)
    files = tuple(manifest.units[0].model_copy(update={"unit": unit}) for unit in units)
    write_manifest(url, manifest.model_copy(update={"fingerprint": fingerprint, "units": files}))


@pytest.fixture
def lost(given: Given, sessions: list[SessionSpec], tmp_path_factory: pytest.TempPathFactory) -> Given:
    """Return another machine with the job and a run's checkpoints, after everything else of the run was lost."""
    begin(read_inputs(asked(given, settings=("policy.redundancy=off",)), given.run_dir))
    sessions.clear()
    units = tuple(unit.id for unit in given.profile.units)
    with_checkpoint(str(given.folder / "ckpt"), given.profile.job.fingerprint, units)
    there = Given(tmp_path_factory.mktemp("elsewhere"), given.profile)
    there.file("jobs.py", JOBS)
    shutil.move(given.folder / "ckpt", there.folder / "ckpt")
    shutil.rmtree(given.folder)
    return there


def resume(given: Given, *more: object, url: str | None = None) -> Result:
    options = ("--run-dir", given.run_dir, "--plain", "--no-page", *more)
    arguments = ["resume", url or f"file://{given.folder}/ckpt", *map(str, options)]
    return CliRunner().invoke(app, arguments, prog_name="morph")


def refused(given: Given, *more: object, url: str | None = None) -> str:
    """Return the line with which ``morph resume URL`` refuses, and check that no run directory is left."""
    result = resume(given, *more, url=url)
    assert result.exit_code in (1, 2), (result.output, result.exception)
    line: str = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert not given.run_dir.exists()
    return line


def test_a_run_resumes_on_another_machine_from_its_url_and_job(lost: Given, sessions: list[SessionSpec]) -> None:
    result = resume(lost, "--job", lost.job)
    assert isinstance(result.exception, Begun), result.output
    (session,) = sessions
    assert session.config.initial_version == 4
    assert (session.config.num_steps, session.trace.duration_s) == (9, 2.5)
    assert {plan.shape for plan in session.config.plans.values()} <= {"1x1", "1x2"}
    facts = read_facts(lost.run_dir)
    assert (facts.job, facts.checkpoint_url) == (lost.job, f"file://{lost.folder}/ckpt")
    assert session.code.sha256 == facts.code_sha256
    assert load_profile(lost.run_dir / "recovered/profile.json") == lost.profile
    kept = load_cluster(lost.run_dir / "recovered/cluster.yaml")
    assert (kept.vms.num_vms, kept.policy.redundancy) == (2, "off")
    for again in (resume(lost, "--job", lost.job), CliRunner().invoke(app, ["resume", str(lost.run_dir), "--no-page"])):
        assert isinstance(again.exception, Begun), again.output
    assert [later.config.initial_version for later in sessions] == [4, 4, 4]
    assert read_recovery(f"{lost.folder}/ckpt").command.steps == 9


def test_another_cluster_file_may_be_given(lost: Given, sessions: list[SessionSpec]) -> None:
    other = lost.file("other.yaml", "vms: {num_vms: 5}\n")
    assert isinstance(resume(lost, "--job", lost.job, "--cluster", other).exception, Begun)
    assert sessions[0].cluster.vms == load_cluster(other).vms


@pytest.mark.parametrize("if_changed", ["refuse", "keep"])
@pytest.mark.parametrize("text", [JOBS + "\nx = 1\n", "from new import x\n" + JOBS])
def test_a_job_that_differs_is_refused(lost: Given, text: str, if_changed: str) -> None:
    lost.file("new.py", "x = 1\n")
    lost.file("jobs.py", text)
    line = refused(lost, "--job", lost.job, "--if-changed", if_changed)
    assert "jobs.py: is not what the run began with" in line
    assert "jobs.py:good as it was; or --if-changed accept" in line


def test_a_run_resumes_with_a_different_job_if_the_user_accepts(lost: Given, sessions: list[SessionSpec]) -> None:
    lost.file("jobs.py", JOBS.replace("lr=0.1", "lr=0.2"))
    result = resume(lost, "--job", lost.job, "--if-changed", "accept")
    assert isinstance(result.exception, Begun), result.output
    assert sessions[0].config.initial_version == 4
    assert "changed_job_accepted" in [fact.name for fact in sessions[0].facts]


def test_missing_files_are_one_sentence_and_leave_nothing(lost: Given) -> None:
    assert "--job: is not given" in refused(lost)
    assert "no such file" in refused(lost, "--job", "nowhere.py:job")
    assert "there is nothing to recover a run from" in refused(lost, "--job", lost.job, url="memory://nowhere")
    assert "is not a run directory" in refused(lost, "--job", lost.job, url=str(lost.folder))
    assert "there is no such run directory" in refused(lost, url=str(lost.folder / "nowhere"))
    assert "Protocol not known" in refused(lost, "--job", lost.job, url="nowhere://there")
    lost.file("small.yaml", "vms: {num_vms: 70}\n")
    assert "vms.num_vms" in refused(lost, "--job", lost.job, "--cluster", lost.folder / "small.yaml")
    shutil.rmtree(lost.folder / "ckpt/v00000004")
    assert "holds no complete checkpoint" in refused(lost, "--job", lost.job)


def test_a_directory_that_holds_something_is_refused_and_stays(lost: Given) -> None:
    lost.run_dir.mkdir()
    (lost.run_dir / "mine").touch()
    result = resume(lost, "--job", lost.job)
    assert (result.exit_code, "is not empty and is not a run directory" in result.stderr) == (2, True)
    assert [path.name for path in lost.run_dir.iterdir()] == ["mine"]
    (lost.run_dir / "mine").unlink()
    other = read_recovery(f"{lost.folder}/ckpt").facts.model_copy(update={"checkpoint_url": "memory://another"})
    with RunDir(lost.run_dir, other):
        pass
    result = resume(lost, "--job", lost.job)
    assert "is a run directory already; allowed: a new or empty directory" in result.stderr
    assert is_run(lost.run_dir)
    result = CliRunner().invoke(app, ["resume", str(lost.run_dir), "--job", lost.job], prog_name="morph")
    assert "--job: applies only to a URL" in result.stderr


def edited(given: Given, edit: Callable[[dict[str, Any]], object]) -> None:
    path = given.folder / "ckpt" / RECOVERY
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda data: data["code"].update({"../../secret.txt": "0"}), "is not below the folder of the job's code"),
        (lambda data: data["code"].update({"/etc/passwd": "0"}), "is not below the folder of the job's code"),
        (lambda data: data.pop("profile"), "recovery.json: profile: is missing"),
        (lambda data: data.update(run="rm"), "recovery.json: run: is not a known field"),
        (lambda data: data["cluster"]["vms"].update(kind="moon"), "recovery.json: cluster.vms"),
        (lambda data: data.update(schema_version=2), "recovery.json: schema_version"),
    ],
)
def test_files_written_by_a_stranger_are_refused(
    lost: Given, edit: Callable[[dict[str, Any]], object], problem: str
) -> None:
    edited(lost, edit)
    assert problem in refused(lost, "--job", lost.job)


def test_no_setting_is_taken_from_storage(lost: Given, sessions: list[SessionSpec]) -> None:
    edited(lost, lambda data: data["command"].update(settings=["vms.num_vms=60", "vms.pass_variables=[HOME]"]))
    assert isinstance(resume(lost, "--job", lost.job).exception, Begun)
    assert sessions[0].cluster.vms == load_cluster(lost.run_dir / "recovered/cluster.yaml").vms
    assert sessions[0].cluster.vms.pass_variables == ()


def test_a_provider_is_not_taken_from_storage(lost: Given) -> None:
    edited(lost, lambda data: data["cluster"].update(vms={**vms_of("static"), "shared_storage": True}))
    line = refused(lost, "--job", lost.job)
    assert "--cluster: is not given, and the run's VMs were a provider's" in line
    assert f"{lost.folder}/ckpt/run/recovery.json shows what the run had" in line


def test_neither_the_users_free_text_nor_local_paths_are_stored(given: Given) -> None:
    given.file("cloud.yaml", "hosts: [{address: h1, node_address: 127.0.0.11, user: me}]\n")
    environment = {
        "setup": ["export TOKEN=SECRET1"],
        "packages": ["mine @ https://u:SECRET2@host/x.whl"],
        "python": "/opt/python",
    }
    vms = {**vms_of("static"), "shared_storage": True, "environment": environment, "pass_variables": ["NAMED"]}
    given.file("cluster.yaml", json.dumps({"vms": vms}))
    request = asked(given, trace=None, checkpoint_url="ftp://u:SECRET3@host/ckpt")
    run = read_inputs(request, given.run_dir)
    url = str(given.folder / "ckpt")
    write_recovery(url, recovery_of(run, run.facts(run.config()), run.job_files))
    text = (given.folder / "ckpt" / RECOVERY).read_text()
    assert "SECRET" not in text
    assert str(given.folder) not in text
    assert "class Plain" not in text
    stored = read_recovery(url)
    assert stored.cloud is not None
    assert stored.cluster.vms.environment.python == "/opt/python"
    with pytest.raises(ConfigError, match="is not given, and the run's VMs were a provider's"):
        recover(stored, url, given.job, given.run_dir, None, IfChanged.REFUSE)
    made = recover(stored, url, given.job, given.run_dir, given.folder / "cluster.yaml", IfChanged.REFUSE)
    assert (made.cluster, made.checkpoint_url) == (given.folder / "cluster.yaml", url)


def test_a_job_file_leaves_the_same_as_its_options(given: Given) -> None:
    job = {"code": "jobs.py:good", "profile": "profile.json", "steps": 9, "pipeline_depth": 1}
    beside = {"callbacks": ["jobs.py:good"], "notify": {"command": ["true"], "webhook": "https://example.com/secret"}}
    path = given.file("run.yaml", json.dumps({"job": job, "vms": {"num_vms": 2}, **beside}))
    by_file = read_inputs(RunRequest(job=str(path), steps=1), given.run_dir)
    by_options = read_inputs(asked(given, trace=None, trace_speed=1.0, checkpoint_url=None), given.run_dir)
    first, second = (recovery_of(run, run.facts(run.config()), run.job_files) for run in (by_file, by_options))
    assert first == second
    assert first.command.job == "jobs.py:good"
    assert "secret" not in first.model_dump_json()
    cluster = first.cluster.model_copy(update={"callbacks": ("jobs.py:bad",), "notify": Notify(command=("false",))})
    stranger = first.model_copy(update={"cluster": cluster})
    made = recover(stranger, str(given.folder / "ckpt"), given.job, given.run_dir, None, IfChanged.REFUSE)
    assert made.cluster is not None
    loaded = load_cluster(made.cluster)
    assert (loaded.callbacks, loaded.notify) == ((), None), "which program runs is not taken from storage"


def test_storage_that_refuses_the_files_is_reported_once_and_the_run_begins(
    given: Given, sessions: list[SessionSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("403 from the cloud")

    monkeypatch.setattr("manager.run.recovery.write_atomically", refuse)
    begin(read_inputs(asked(given), given.run_dir))
    assert len(sessions) == 1
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "403" in line]
    assert "recovery.json: cannot be written: 403 from the cloud; the run can be resumed in" in note
    with pytest.raises(RunDirError, match="there is nothing to recover a run from"):
        read_recovery(str(given.folder / "ckpt"))


def test_the_error_for_a_broken_file_names_its_place(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for text in ("", "{", "[]"):
        (tmp_path / RECOVERY).write_text(text)
        with pytest.raises(InputError, match=r"run/recovery\.json: "):
            read_recovery(str(tmp_path))


def test_checkpoints_that_another_manager_holds_are_refused_or_taken_over(
    given: Given, sessions: list[SessionSpec]
) -> None:
    request = asked(given)
    other = Lease(str(given.folder / "ckpt"), this_process("other", given.folder / "other"))
    other.take()
    with pytest.raises(RunDirError, match=r"its checkpoints are in use by the run in .*other"):
        begin(read_inputs(request, given.run_dir))
    assert not is_run(given.run_dir)
    run = read_inputs(request, given.run_dir)
    begin(run, take_over=True)
    with pytest.raises(CheckpointsTaken, match=re.escape(str(given.run_dir.resolve()))):
        other.hold()
    assert [spec.lease is not None for spec in sessions] == [True]
    begin(read_inputs(request, given.run_dir))  # the lease was released
