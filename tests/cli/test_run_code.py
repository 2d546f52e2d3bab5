"""A run trains on the code and data with which it began; if these have changed, the user decides before loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from manager.controller.state.config import ControllerConfig
from manager.controller.state.state import initial_state
from manager.run.job_code import TrainedCode
from manager.run.prepared import Inputs
from manager.run.request import IfChanged, RunRequest, keep_request
from manager.run.session import SessionSpec
from manager.run_dir import RunDir, RunFacts, read_facts
from morph.contract.cluster import ClusterConfig, LocalVms
from morph.contract.errors import JobError, RunDirError
from morph.contract.profile import load_profile
from morph.jobs.snapshot import collect
from tests.cli.given import JOBS, Given, begin, without_phases
from tests.waiting import BOUND_S

pytestmark = pytest.mark.slow

SCALED = JOBS.replace("float(index)", "float(index) * SCALE").replace(
    "class Samples:",
    """from pathlib import Path

SCALE = float((Path(__file__).parent / "scale.txt").read_text())


class Samples:""",
)


SCALED += "faster = make(optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.2))\n"


def facts(given: Given, job: str | None = None) -> RunFacts:
    return RunFacts(
        job=job or given.job,
        fingerprint=given.profile.job.fingerprint,
        micro_batch_size=2,
        batch_size=8,
        num_sections=2,
    )


def run_code(given: Given, if_changed: IfChanged = IfChanged.REFUSE, job: str | None = None) -> TrainedCode:
    path = job or given.job
    return TrainedCode(path, given.profile, collect(path), if_changed, print, unpack=False)


@pytest.fixture
def begun(given: Given) -> Given:
    """Begin a run whose data set depends on a file in the folder of its code."""
    given.file("jobs.py", SCALED)
    given.file("scale.txt", "2")
    with RunDir(given.run_dir, facts(given)) as opened:
        run_code(given).begin(opened)
    return given


def test_the_initial_code_and_data_are_kept_and_used_again(begun: Given) -> None:
    known = read_facts(begun.run_dir)
    assert known.code_sha256 is not None
    assert known.known_by.data["dataset"].num_samples == 16
    with RunDir(begun.run_dir, facts(begun)) as opened:
        again = run_code(begun)
        code = again.of(opened)
        assert again.begin(opened) == code
        assert [fact.name for fact in again.facts(code)] == ["job_code"]
    assert code.sha256 == known.code_sha256
    assert read_facts(begun.run_dir) == known


@pytest.mark.parametrize("name", ["other.py:good", "jobs.py:faster"])
def test_another_jobs_run_is_refused_as_such_and_not_as_changed(begun: Given, name: str) -> None:
    begun.file("other.py", f"{SCALED}# another\n")
    job = f"{begun.folder}/{name}"
    said = f"{begun.run_dir}: belongs to the job {begun.job} (got '{job}'); allowed: that job, or another --run-dir"
    code = run_code(begun, job=job)
    with RunDir(begun.run_dir, facts(begun, job)) as opened, pytest.raises(RunDirError) as refused:
        _ = code.of(opened) and code.begin(opened)
    assert str(refused.value) == f"{said}; for the same job under another name: --if-changed accept"


def test_changed_code_is_refused_kept_out_or_accepted_as_the_user_says(begun: Given) -> None:
    began = read_facts(begun.run_dir)
    begun.file("jobs.py", SCALED.replace("lr=0.1", "lr=0.2"))
    with RunDir(begun.run_dir, facts(begun)) as opened:
        with pytest.raises(RunDirError, match=r"jobs\.py: was changed since the run began; allowed: as it was; --if-c"):
            run_code(begun).of(opened)
        kept = run_code(begun, IfChanged.KEEP)
        code = kept.of(opened)
        assert (code.sha256, kept.begin(opened)) == (began.code_sha256, code)
        assert [(fact.name, fact.detail) for fact in kept.facts(code)][1:] == [("changed_code_ignored", "jobs.py")]
        assert read_facts(begun.run_dir) == began
        accepted = run_code(begun, IfChanged.ACCEPT)
        other = accepted.of(opened)
        assert read_facts(begun.run_dir) == began  # as long as its VMs may still turn out to be alive
        assert accepted.begin(opened) == other
        told = [fact.name for fact in accepted.facts(other)]
        assert told == ["job_code", "changed_code_accepted", "changed_job_accepted"]  # its learning rate differs
    assert other.sha256 == read_facts(begun.run_dir).code_sha256 != began.code_sha256
    assert {path.stem for path in (begun.run_dir / "code").iterdir()} == {began.code_sha256, other.sha256}


def test_accepted_changes_are_listed_and_another_optimizer_is_refused(
    begun: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    def accepted(text: str) -> str:
        begun.file("jobs.py", text)
        with RunDir(begun.run_dir, facts(begun)) as opened:
            code = run_code(begun, IfChanged.ACCEPT)
            code.of(opened)
            return code.facts(code.begin(opened))[-1].detail

    text = SCALED.replace("lr=0.1", "lr=0.2, momentum=0.9")
    detail = accepted(text.replace("num_sections=2", "num_sections=2, seed=4"))
    assert "seed: 4 (was 0); optimizer[0]['lr'] of s0: 0.2 (was 0.1); optimizer[0]['momentum'] of s0: 0.9" in detail
    assert detail.endswith("as saved: weights, optimizer state, step counts")
    assert f"going on with what was changed: changed code: jobs.py; {detail}" in capsys.readouterr().err
    for other in ("AdamW([parameter for _, parameter in parameters]", "SGD([{'params': [p]} for _, p in parameters]"):
        with pytest.raises(JobError, match=r"optimizer\(s0\).*: cannot be changed within a run"):
            accepted(SCALED.replace("SGD([parameter for _, parameter in parameters]", other))


def test_code_that_would_not_even_load_any_more_is_kept_out(begun: Given) -> None:
    begun.file("jobs.py", "def broken(:")
    with RunDir(begun.run_dir, facts(begun)) as opened:
        run_code(begun, IfChanged.KEEP).of(opened)
        code = run_code(begun, IfChanged.KEEP)
        code.of(opened)
        code.begin(opened)


def test_changed_data_is_refused_by_its_sample_and_entry_or_accepted(begun: Given) -> None:
    begun.file("scale.txt", "3")
    with RunDir(begun.run_dir, facts(begun)) as opened:
        with pytest.raises(
            JobError, match=r"dataset\(\)\[2\]\['x'\]: is not the data that the run began with \(got 'fl"
        ):
            run_code(begun).begin(opened)
        before = read_facts(begun.run_dir)
        accepted = run_code(begun, IfChanged.ACCEPT)
        told = accepted.facts(accepted.begin(opened))
        assert [fact.name for fact in told] == ["job_code", "changed_job_accepted"]
        assert "dataset()[2]['x']" in told[1].detail
    assert read_facts(begun.run_dir).known_by != before.known_by


def test_a_changed_setting_read_from_elsewhere_is_refused_by_name(
    begun: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun.file("jobs.py", SCALED.replace("lr=0.1", "lr=float(__import__('os').environ.get('RATE', '0.1'))"))
    with RunDir(begun.run_dir, facts(begun)) as opened:
        run_code(begun, IfChanged.ACCEPT).begin(opened)
        run_code(begun).begin(opened)
        monkeypatch.setenv("RATE", "0.2")
        with pytest.raises(
            JobError, match=r"\['lr'\]: is not the setting that .* \(got '0\.2'\); allowed: 0\.1; or --if-c"
        ):
            run_code(begun).begin(opened)


REFUSED = """
import json, sys
from pathlib import Path

from typer.testing import CliRunner

from manager.run_dir import RunDir, read_facts
from morph.cli.main import app
from morph.contract.errors import RunDirError

folder, arguments = Path(sys.argv[1]), sys.argv[2:]
told = []

def tell(*commands):
    for given in commands or (arguments, ["resume", str(folder / "run")]):
        result = CliRunner().invoke(app, given, prog_name="morph")
        slow = [name for name in ("torch", "numba", "pandas", "matplotlib") if name in sys.modules]
        told.append((result.exit_code, slow, result.stderr.strip()))

def living(run_dir, command):
    raise RunDirError("lives, and was requested " + command["the job's code"])

with RunDir(folder / "run", read_facts(folder / "run")):
    tell()
import manager.engine.machines.attachment as attachment
attachment.find_living = living
tell()
(folder / "jobs.py").write_text("raise SystemExit")
tell()
tell([*arguments, "--run-dir", str(folder)])
print(json.dumps(told))
"""


def test_reasons_to_refuse_a_run_are_reported_before_torch_is_loaded(begun: Given) -> None:
    profile, cluster = begun.folder / "profile.json", begun.folder / "cluster.yaml"
    keep_request(begun.run_dir, RunRequest(job=begun.job, profile=profile, cluster=cluster, steps=9), (profile,))
    options = ["--profile", profile, "--cluster", cluster, "--run-dir", begun.run_dir]
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(begun.folder), "run", begun.job, *map(str, options), "--steps", "9"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    digest = read_facts(begun.run_dir).code_sha256
    parts = ["run: is in use by process ", f"lives, and was requested {digest}", "jobs.py: was changed since the"]
    wanted = [part for part in parts for _ in ("run", "resume")]
    assert [slow for _, slow, _ in told[:2]] == [[], []], "whether it is in use takes no second"
    for part, (code, slow, line) in zip([*wanted, "is not empty and is not a run"], told, strict=True):
        assert (code, "torch" in slow) == (2, False)
        (line,) = without_phases(line)
        assert part in line


@pytest.mark.parametrize("m", [1, 2])
def test_a_resumed_run_keeps_the_planned_micro_batch_size(given: Given, m: int, sessions: list[SessionSpec]) -> None:
    free = load_profile(given.edited(lambda profile: profile["job"].pop("micro_batch_size")))
    with RunDir(given.run_dir, facts(given).model_copy(update={"micro_batch_size": m})):
        pass
    vms = ClusterConfig(vms=LocalVms(num_vms=2))
    run = Inputs(RunRequest(job=given.job, steps=9), free, vms, given.run_dir, collect(given.job))
    begin(run)
    (begun,) = sessions
    assert {begun.micro_batch_size, *(plan.micro_batch_size for plan in begun.config.plans.values())} == {m}


def test_shapes_are_planned_once_and_never_for_an_adopted_run(
    given: Given, sessions: list[SessionSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For hundreds of VMs, planning takes longer than VMs survive without their manager."""
    planned: list[Inputs] = []
    plan = Inputs.config

    def counted(run: Inputs) -> ControllerConfig:
        planned.append(run)
        return plan(run)

    monkeypatch.setattr(Inputs, "config", counted)
    free = load_profile(given.edited(lambda profile: profile["job"].pop("micro_batch_size")))
    vms = ClusterConfig(vms=LocalVms(num_vms=2))
    run = Inputs(RunRequest(job=given.job, steps=9), free, vms, given.run_dir, collect(given.job))
    begin(run)
    assert planned == [run]
    lives = initial_state(sessions[0].config.model_copy(update={"num_steps": 7}))
    found = SimpleNamespace(state=lives, vms=("vm0",))
    monkeypatch.setattr("manager.engine.machines.attachment.find_living", lambda *_: found)
    begin(run)
    assert planned == [run]
    assert [spec.config.num_steps for spec in sessions] == [9, 7]
    assert sessions[1].micro_batch_size == sessions[0].micro_batch_size
    assert sessions[1].command == sessions[0].command
    assert sessions[1].cut == sessions[0].cut is not None  # although the job was not loaded
