from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from manager import run_dir
from manager.journal.journal import Journal
from manager.run_dir import RunDir, RunFacts, as_its_folder, read_facts, write_in_run_dir
from morph.contract.errors import RunDirError, RunDirStuck
from tests.small_disk import small_disk
from tests.waiting import BOUND_S

FACTS = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=12, num_sections=5)

HOLD = """
import sys
from pathlib import Path
from manager.run_dir import RunDir, RunFacts

with RunDir(Path(sys.argv[1]), RunFacts.model_validate_json(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_new_directory_is_made_and_claimed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with RunDir(path, FACTS) as opened:
        assert opened.path == path
        assert (path / "run.lock").read_text().split() == [str(os.getpid()), socket.gethostname()]
        assert opened.checkpoint_url == str(path / "checkpoints")
    assert read_facts(path) == FACTS
    assert (path / "run.lock").read_text() == ""


def test_files_of_a_held_run_are_private_and_others_untouched(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        for path in (tmp_path / "deep" / "run", given):
            with RunDir(path, FACTS), Journal.open(path / "journal.sqlite") as journal:
                journal.append(0.0, "fact", "{}")
                subprocess.run(["sh", "-c", f"mkdir {path}/checkpoints && touch {path}/checkpoints/unit"], check=True)
                modes = {str(found.relative_to(path)): found.stat().st_mode & 0o777 for found in path.rglob("*")}
                assert modes.pop("checkpoints") == path.stat().st_mode & 0o777 == 0o700
                assert {"run.json", "run.lock", "journal.sqlite-wal", "journal.sqlite-shm"} < set(modes)
                assert set(modes.values()) == {0o600}, modes
            for place, mode in ((path, 0o600), (tmp_path, 0o644)):
                with as_its_folder(place / "run.png"):
                    (place / "run.png").touch()
                assert (place / "run.png").stat().st_mode & 0o777 == mode
        (tmp_path / "outside").touch()
        assert (tmp_path / "outside").stat().st_mode & 0o777 == 0o644
        assert (tmp_path / "deep").stat().st_mode & 0o777 == 0o755
        with pytest.raises(RunDirError, match="belongs to another"):
            RunDir(given, FACTS.model_copy(update={"fingerprint": "other"})).__enter__()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_a_run_can_be_resumed_in_its_directory(tmp_path: Path) -> None:
    for _ in range(2):
        with RunDir(tmp_path, FACTS) as opened:
            (opened.path / "checkpoints").mkdir(exist_ok=True)
    moved = FACTS.model_copy(update={"job": "elsewhere/job.py:job"})  # the file may be moved
    with RunDir(tmp_path, moved):
        assert read_facts(tmp_path) == FACTS


def test_a_directory_that_another_process_holds_is_refused_with_its_number(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run"), FACTS.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirError, match=f"is in use by process {holder.pid}"), RunDir(tmp_path / "run", FACTS):
            pass
        holder.kill()  # a killed manager leaves no lock
        holder.wait(BOUND_S)
        with RunDir(tmp_path / "run", FACTS):
            pass
    finally:
        holder.kill()
        holder.communicate(timeout=BOUND_S)


def test_a_directory_is_refused_to_a_second_opener_of_the_same_process(tmp_path: Path) -> None:
    with RunDir(tmp_path, FACTS):
        with pytest.raises(RunDirError, match="is in use by process"), RunDir(tmp_path, FACTS):
            pass
        with pytest.raises(RunDirError, match=f"process {os.getpid()}"), RunDir(tmp_path, FACTS):
            pass  # the refused opener has changed neither the lock nor the number


@pytest.mark.parametrize(
    ("field", "value"), [("fingerprint", "g"), ("micro_batch_size", 3), ("batch_size", 24), ("num_sections", 4)]
)
def test_a_directory_of_another_job_is_refused_and_left_alone(tmp_path: Path, field: str, value: object) -> None:
    with RunDir(tmp_path, FACTS):
        pass
    before = (tmp_path / "run.json").read_text()
    other = FACTS.model_copy(update={field: value})
    with pytest.raises(RunDirError, match=rf"run\.json: {field}: belongs to another job"), RunDir(tmp_path, other):
        pass
    assert (tmp_path / "run.json").read_text() == before
    with RunDir(tmp_path, FACTS):  # and the lock is free again
        pass


def test_a_directory_with_other_things_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(RunDirError, match="is not empty and is not a run directory"), RunDir(tmp_path, FACTS):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_that_is_just_being_claimed_is_not_foreign(tmp_path: Path) -> None:
    """Another manager may have got as far as this, or may have died at this point."""
    (tmp_path / "run.lock").touch()
    (tmp_path / ".run.json.4711.partial").write_text("{")
    with RunDir(tmp_path, FACTS):
        assert read_facts(tmp_path) == FACTS


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("")
    for place in (path, path / "below"):
        with pytest.raises(RunDirError, match="is not a directory"), RunDir(place, FACTS):
            pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_writable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o500)
    with monkeypatch.context() as of_another_user:
        of_another_user.setattr(Path, "chmod", Mock(side_effect=PermissionError))
        with pytest.raises(RunDirError, match="is not writable"), RunDir(path, FACTS):
            pass
        with pytest.raises(RunDirError, match="cannot be made"), RunDir(path / "below", FACTS):
            pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_directory_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o000)
    try:
        with pytest.raises(RunDirError, match="cannot be read"), RunDir(path, FACTS):
            pass
    finally:
        path.chmod(0o700)


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_dir, "write_whole", fail)
    with pytest.raises(RunDirError, match="is not writable: No space left"), RunDir(tmp_path, FACTS):
        pass
    monkeypatch.undo()
    with RunDir(tmp_path, FACTS):  # it is neither locked nor half claimed
        pass


def test_reading_facts_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="there is no such run directory"):
        read_facts(tmp_path / "none")
    with pytest.raises(RunDirError, match=r"it has no run\.json"):
        read_facts(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunDirError, match=r"run\.json: is not JSON"):
        read_facts(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(FACTS.model_dump() | {"batch_size": 0}))
    with pytest.raises(RunDirError, match=r"run\.json: batch_size: .*\(got 0\)"):
        read_facts(tmp_path)


def test_on_a_full_disk_a_run_is_held_with_its_files_intact(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        path = disk.path / "run"
        with RunDir(path, FACTS):
            write_in_run_dir(path / "name.json", "before")
        disk.fill()
        with RunDir(path, FACTS) as again:
            with pytest.raises(RunDirError, match="is in use by process"), RunDir(path, FACTS):
                pass
            with pytest.raises(RunDirStuck, match=f"{path}: is not writable: No space left"):
                write_in_run_dir(path / "name.json", "x" * 10_000)
            assert (path / "name.json").read_text() == "before"
            assert sorted(entry.name for entry in path.iterdir()) == ["name.json", "run.json", "run.lock"]
            disk.free()
            again.begin_with(FACTS.model_copy(update={"code_sha256": "c"}))
        assert read_facts(path).code_sha256 == "c"
