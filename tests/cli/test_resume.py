"""``morph resume``: a run's request is kept in its directory, and refused if its files have changed since then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from manager.commands import carry_out
from manager.run.request import IfChanged, RunRequest, keep_request, kept_request
from manager.run_dir import COMMAND, RunDir, RunFacts
from morph.cli.main import app
from morph.contract.errors import InputError, RunDirError
from tests.cli.given import without_phases

FACTS = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=2)


class Kept:
    """A folder with the files of a run and its run directory."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.files = folder / "run", []
        for name in ("job.py", "profile.json", "cluster.yaml", "trace.csv"):
            self.files.append(folder / name)
            self.files[-1].write_text(name, encoding="utf-8")
        with RunDir(self.run_dir, FACTS):
            pass

    def keep(self, **fields: object) -> None:
        options = {
            "job": "job.py:job",
            "profile": "profile.json",
            "cluster": "cluster.yaml",
            "trace": "trace.csv",
            "steps": 9,
            "checkpoint_url": "saved",
            "trace_speed": 2.0,
            "recompute": False,
        }
        command = RunRequest.model_validate({**options, **fields})
        keep_request(self.run_dir, command, tuple(Path(file.name) for file in self.files))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.chdir(tmp_path)
    return Kept(tmp_path)


def test_a_command_is_read_back_from_anywhere(kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = kept.run_dir.parent
    kept.keep()
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.chdir(tmp_path_factory.mktemp("elsewhere"))
        command = kept_request(kept.run_dir)
    assert command == RunRequest(
        job=f"{folder}/job.py:job",
        profile=folder / "profile.json",
        cluster=folder / "cluster.yaml",
        trace=folder / "trace.csv",
        steps=9,
        checkpoint_url=str(folder / "saved"),
        trace_speed=2.0,
        recompute=False,
    )


def test_a_job_file_is_kept_as_one(kept: Kept) -> None:
    kept.keep(job="cluster.yaml", profile=None, cluster=None)
    assert kept_request(kept.run_dir).job == str(kept.run_dir.parent / "cluster.yaml")


def test_a_url_is_kept_as_it_is(kept: Kept) -> None:
    kept.keep(checkpoint_url="az://models/tiny")
    assert kept_request(kept.run_dir).checkpoint_url == "az://models/tiny"


def test_the_last_command_counts(kept: Kept) -> None:
    kept.keep()
    kept.keep(steps=12)
    assert kept_request(kept.run_dir).steps == 12
    assert not list(kept.run_dir.glob("*.tmp"))


@pytest.mark.parametrize("number", range(4))
def test_a_file_that_was_changed_or_is_gone_is_named(kept: Kept, number: int) -> None:
    kept.keep()
    file = kept.files[number]
    file.write_text("another", encoding="utf-8")
    with pytest.raises(InputError, match=rf"{file.name}: was changed since the run was started; allowed: as it was"):
        kept_request(kept.run_dir)
    file.unlink()
    with pytest.raises(InputError, match=rf"{file.name}: cannot be read any more: No such file"):
        kept_request(kept.run_dir)


def test_a_run_without_kept_files_resumes_by_its_command(kept: Kept) -> None:
    with pytest.raises(RunDirError, match=r"command\.json.*allowed: the morph run command"):
        kept_request(kept.run_dir)


@pytest.mark.parametrize("text", ["{", '{"command": {"job": "a.py:b", "steps": 0}, "inputs": {}}'])
def test_a_file_that_is_broken_is_refused(kept: Kept, text: str) -> None:
    (kept.run_dir / COMMAND).write_text(text, encoding="utf-8")
    with pytest.raises(RunDirError, match=r"command\.json"):
        kept_request(kept.run_dir)


@pytest.mark.parametrize(
    ("name", "problem"), [("nowhere", "there is no such run directory"), (".", "is not a run directory")]
)
def test_a_directory_without_a_run_is_refused_in_one_line(kept: Kept, name: str, problem: str) -> None:
    result = CliRunner().invoke(app, ["resume", str(kept.run_dir.parent / name)], prog_name="morph")
    assert result.exit_code == 2
    (line,) = without_phases(result.stderr)
    assert problem in line


@pytest.mark.parametrize("kept_before", [True, False])
def test_ctrl_c_names_only_a_command_that_works(
    kept: Kept, kept_before: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its preparation is over, a new run has no directory: `morph resume` would refuse it."""
    run_dir = kept.run_dir.rename("my run") if kept_before else Path("not begun")
    kept.run_dir = run_dir
    if kept_before:
        kept.keep()

    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(carry_out, "read_inputs", lambda *_: SimpleNamespace(run_dir=run_dir, places={}))
    monkeypatch.setattr(carry_out, "check_device", lambda _: None)
    monkeypatch.setattr(carry_out, "prepared", interrupted)
    request = RunRequest(job="job.py:job", steps=9)
    with pytest.raises(KeyboardInterrupt):
        carry_out.carry_out(request, run_dir, carry_out.Shown(plain=True), IfChanged.REFUSE, take_over=False)
    said = "the same command continues from the newest checkpoint, and so does morph resume 'my run'\n"
    assert capsys.readouterr().err == (said if kept_before else "")
