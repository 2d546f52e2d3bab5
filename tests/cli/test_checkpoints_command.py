"""``morph checkpoints``: what its commands print, refuse and leave unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from manager.commands.checkpoints import age_text
from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.manifest import complete_versions, version_url, write_atomically
from morph.checkpoint.versions import stored_versions
from morph.cli.main import app
from tests.checkpoint.test_manifest import _flipped, save

FACTS = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=2)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run with three complete checkpoints and one that is being written."""
    path = tmp_path / "run"
    with RunDir(path, FACTS) as opened:
        save(opened.checkpoint_url, 20, 40, 60)
        write_atomically(f"{version_url(opened.checkpoint_url, 80)}/s0.safetensors", b"x")
    return path


def checkpoints(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoints", *map(str, arguments)], prog_name="morph")


def said(*arguments: object) -> str:
    result = checkpoints(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refused(*arguments: object, code: int = 2) -> str:
    result = checkpoints(*arguments)
    assert result.exit_code == code, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_ls_has_a_row_for_each_run_folder_and_url(run_dir: Path) -> None:
    url = str(run_dir / "checkpoints")
    said("keep", run_dir, 20)
    for source in (run_dir, url, f"file://{url}"):
        rows = [line for line in said("ls", source).splitlines() if "v000" in line]
        assert [("whole" in row, "kept" in row, "incomplete" in row) for row in rows] == [
            (True, True, False),
            (True, False, False),
            (True, False, False),
            (False, False, True),
        ]
    listed = json.loads(said("ls", run_dir, "--json"))
    assert [(entry["version"], entry["state"], entry["kept"]) for entry in listed] == [
        (20, "whole", True), (40, "whole", False), (60, "whole", False), (80, "incomplete", False),
    ]  # fmt: skip


def test_verify_reads_every_byte_names_the_file_and_ends_with_one(run_dir: Path) -> None:
    url = str(run_dir / "checkpoints")
    assert [line.split(":")[1].split(",")[0].strip() for line in said("verify", run_dir).splitlines()] == [
        "whole", "whole", "whole", "incomplete",
    ]  # fmt: skip
    _flipped(url, 40)
    before = stored_versions(url)
    result = checkpoints("verify", run_dir)
    assert (result.exit_code, len(result.stdout.splitlines()), result.stderr) == (1, 4, "")
    line = result.stdout.splitlines()[1]
    assert line.startswith("version 40: damaged: ")
    assert "v00000040/s1" in line
    assert "the file differs from its manifest" in line
    assert stored_versions(url) == before
    assert len(said("verify", run_dir, "--version", 60).splitlines()) == 1
    assert "has no such checkpoint (got 7); allowed: 20, 40, 60, 80" in refused("verify", run_dir, "--version", 7)


def test_rm_removes_what_it_may_and_nothing_where_one_is_refused(run_dir: Path) -> None:
    url = str(run_dir / "checkpoints")
    said("keep", run_dir, 40)
    assert "is kept (got 40); allowed: versions that are neither kept nor the best; or --force" in refused(
        "rm", run_dir, 20, 40
    )
    assert "is the newest whole version (got 60); allowed: older versions; or --force" in refused("rm", run_dir, 20, 60)
    assert "has no such checkpoint (got 7)" in refused("rm", run_dir, 7)
    assert complete_versions(url) == (20, 40, 60)
    assert said("rm", run_dir, 20, 20) == "version 20 is removed\n"
    assert "no longer kept" in said("keep", run_dir, 40, "--undo")
    said("rm", run_dir, 40)
    with RunDir(run_dir, FACTS):
        assert "manages its run" in refused("rm", run_dir, 60, "--force")
    said("rm", run_dir, 60, 80, "--force")
    assert stored_versions(url) == ()


def test_a_copy_of_the_newest_passes_over_what_is_damaged(run_dir: Path, tmp_path: Path) -> None:
    url, target = str(run_dir / "checkpoints"), tmp_path / "copy"
    _flipped(url, 60)
    result = checkpoints("copy", run_dir, target)
    assert result.exit_code == 0
    assert result.stdout.startswith("copied version 40, ")
    assert "version 60 is skipped, and version 40 is the newest whole version" in result.stderr
    assert [(entry.version, entry.complete) for entry in stored_versions(str(target))] == [(40, True)]
    assert "is there already" in said("copy", url, target, "--version", 40).replace(f"in {target}", "there")
    assert "s1" in refused("copy", url, target, "--version", 60, code=1)
    assert "is a run directory" in refused("copy", url, run_dir)


@pytest.mark.parametrize("command", ["ls", "verify", "keep", "rm", "copy"])
def test_a_place_without_checkpoints_is_reported_in_one_sentence(command: str, tmp_path: Path) -> None:
    more = {"keep": [4], "rm": [4], "copy": [tmp_path / "target"]}.get(command, [])
    assert "there is no such folder" in refused(command, tmp_path / "nowhere", *more)
    assert "holds no complete checkpoint" in refused(command, tmp_path, *more)
    assert "Protocol not known: nowhere" in refused(command, "nowhere://there", *more)


@pytest.mark.parametrize(
    ("saved_s", "text"),
    [
        (None, "unknown"),
        (1000, "0 s"),
        (2000, "0 s"),
        (941, "59 s"),
        (880, "2.0 min"),
        (-6200, "2.0 h"),
        (-1e6, "11.6 d"),
    ],
)
def test_an_age_is_shown_in_its_largest_unit(saved_s: float | None, text: str) -> None:
    assert age_text(saved_s, 1000.0) == text
