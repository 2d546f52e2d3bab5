"""Run directories that cannot be used: each is one line that says what is wrong; nothing is started or written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manager.run_dir import RunDir, RunFacts
from morph.checkpoint.manifest import version_url, write_manifest
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.errors import RunDirError
from morph.contract.profile import Profile
from tests.cli.given import JOBS, Given


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
    assert line == f"{given.run_dir}: is not empty and is not a run directory; allowed: a new or empty directory"


def test_a_run_directory_of_another_job_is_refused(given: Given) -> None:
    with RunDir(given.run_dir, facts(given.profile, fingerprint="another")):
        pass
    assert given.run_refused().endswith(
        "run.json: fingerprint: belongs to another job or profile; allowed: the model that the run began with, or "
        "another --run-dir"
    )
    other = given.file("other.py", JOBS)
    said = f"{given.run_dir}: belongs to the job jobs.py:good (got '{other}:good'); allowed: that job, or another"
    assert given.run_refused(job=f"{other}:good") == f"{said} --run-dir"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_directory_that_cannot_be_written_is_refused(given: Given) -> None:
    given.run_dir.mkdir(mode=0o500)
    assert given.run_refused() == f"{given.run_dir}: is not writable: Permission denied"


def test_a_claim_that_a_kill_cut_short_leaves_a_directory_that_can_be_claimed(given: Given) -> None:
    given.run_dir.mkdir()
    for name in ("run.lock", ".run.json.4711.partial"):
        (given.run_dir / name).write_text("{", encoding="utf-8")
    with RunDir(given.run_dir, facts(given.profile)):
        assert (given.run_dir / "run.json").exists()


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
