"""The job's files, packed on one machine and unpacked on another."""

from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path

import pytest

from manager.engine import job_code
from manager.engine.job_code import pack
from morph.contract.errors import ConfigError, JobError
from morph.contract.messages import JobCode, WorkerSetup
from morph.runtime.job_code import unpack
from tests.worker_setup import SETUP


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "train.py": "job = 1",
        "help.py": "x = 2",
        "parts/one.py": "1",
        "parts/deep/two.txt": "2",
        "parts/__pycache__/one.pyc": "old",
        "left_out.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "job"


def packed(folder: Path, *files: str) -> JobCode:
    return pack(f"{folder / 'train.py'}:job", files, "cluster.yaml")


def test_what_is_packed_is_unpacked_in_a_folder_for_this_user_alone(folder: Path) -> None:
    path, _, name = unpack(packed(folder, "help.py", "parts")).rpartition(":")
    place = Path(path).parent
    assert (Path(path).name, name) == ("train.py", "job")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    found = {str(file.relative_to(place)): file.read_text() for file in place.rglob("*") if file.is_file()}
    assert found == {"train.py": "job = 1", "help.py": "x = 2", "parts/one.py": "1", "parts/deep/two.txt": "2"}


def test_the_same_files_give_the_same_bytes_which_a_setup_can_carry(folder: Path) -> None:
    code = packed(folder, "parts", "help.py")
    assert code == packed(folder, "help.py", "parts")
    setup = SETUP.model_copy(update={"code": code})
    assert WorkerSetup.model_validate_json(setup.model_dump_json()) == setup
    assert "archive" not in repr(setup)


@pytest.mark.parametrize(
    ("given", "told"),
    [("nowhere.py", "no such file"), ("link.py", "is a link"), ("links", "holds a link"), ("linked/x.py", "is a link")],
)
def test_what_cannot_be_brought_is_refused_by_name(folder: Path, given: str, told: str) -> None:
    (folder / "link.py").symlink_to("/etc/passwd")
    (folder / "links").mkdir()
    (folder / "links" / "inside.py").symlink_to(folder / "help.py")
    (folder / "linked").symlink_to(folder / "parts")
    with pytest.raises(ConfigError, match=told) as caught:
        packed(folder, given)
    assert "cluster.yaml: vms.environment.files: " in str(caught.value)
    assert given in str(caught.value)


def test_too_much_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_code, "MAX_BYTES", 100)
    (folder / "data.bin").write_bytes(b"x" * 101)
    with pytest.raises(ConfigError, match="too long together"):
        packed(folder, "data.bin")


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "a/../../outside.py"])
def test_an_archive_that_would_write_elsewhere_is_refused(name: str) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "x")
    with pytest.raises(JobError, match="outside"):
        unpack(JobCode(job_path="train.py:job", archive=buffer.getvalue()))
