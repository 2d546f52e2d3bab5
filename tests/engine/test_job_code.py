"""The job's files are found and packed on one machine, and imported on another or kept for the next manager."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manager.engine.on_processes import forking
from manager.run.job_code import keep, kept
from morph.contract.errors import ConfigError, JobError, RunDirError
from morph.contract.messages import Failed, JobCode, WorkerSetup
from morph.jobs import snapshot
from morph.jobs.files import JobFiles
from morph.jobs.snapshot import changed, collect, digests, files_of, from_elsewhere, pack, use
from tests.worker_setup import SETUP


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "train.py": "job = 1",
        "help.py": "x = 2",
        "parts/one.py": "1",
        "parts/deep/two.txt": "2",
        "parts/__pycache__/one.pyc": "old",
        "parts/.env": "TOKEN=secret",
        "left_out.py": "",
    }
    return written(tmp_path / "job", files)


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def importing() -> Iterator[None]:
    """Undo the changes of a worker's process to its imports."""
    finders, search, modules = list(sys.meta_path), list(sys.path), set(sys.modules)
    yield
    sys.meta_path[:], sys.path[:] = finders, search
    for name in set(sys.modules) - modules:
        if "site-packages" not in str(getattr(sys.modules[name], "__file__", "site-packages")) and not name.startswith(
            "morph."
        ):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("asks", "ends_it"),
    [("torch.cuda.init()", True), ("torch.cuda.is_available()", False)],
)
def test_a_job_ends_forking_only_if_it_opens_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str, ends_it: bool
) -> None:
    """This is how torch treats CUDA: after a call of the driver, children of this process cannot begin to use CUDA."""
    pid, called = os.getpid(), []

    def init() -> None:
        if os.getpid() != pid and called:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")
        called.append("init")

    def is_available() -> bool:
        if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1":
            called.append("is_available")
        return True

    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(forking, "has_threads", lambda: False)
    (tmp_path / "train.py").write_text(f"import torch\n{asks}\njob = None\n")
    assert forking.imported_for_forks(f"{tmp_path / 'train.py'}:job") is not ends_it


def packed(folder: Path, *files: str, unpack: bool = False) -> JobCode:
    job_path = f"{folder / 'train.py'}:job"
    return pack(job_path, collect(job_path, files, "cluster.yaml"), unpack=unpack)


@pytest.mark.usefixtures("importing")
def test_packed_code_is_unpacked_in_a_folder_for_this_user_alone(folder: Path) -> None:
    path, _, name = use(packed(folder, "help.py", "parts", unpack=True)).rpartition(":")
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
def test_files_that_cannot_be_packed_are_refused_by_name(folder: Path, given: str, told: str) -> None:
    (folder / "link.py").symlink_to("/etc/passwd")
    (folder / "links").mkdir()
    (folder / "links" / "inside.py").symlink_to(folder / "help.py")
    (folder / "linked").symlink_to(folder / "parts")
    with pytest.raises(ConfigError, match=told) as caught:
        packed(folder, given)
    assert "cluster.yaml: vms.environment.files: " in str(caught.value)
    assert given in str(caught.value)


def test_too_much_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_BYTES", 100)
    (folder / "data.bin").write_bytes(b"x" * 101)
    with pytest.raises(ConfigError, match="too long together"):
        packed(folder, "data.bin")


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "a/../../outside.py"])
def test_an_archive_that_would_write_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "x")
    with pytest.raises(JobError, match="outside"):
        use(code_of(buffer.getvalue(), tmp_path))


def code_of(archive: bytes, folder: Path) -> JobCode:
    sha256 = hashlib.sha256(archive).hexdigest()
    return JobCode(job_path="train.py:job", folder=str(folder), sha256=sha256, archive=archive, unpack=True)


def test_an_archive_that_is_not_what_its_digest_says_is_refused(folder: Path) -> None:
    other = packed(folder, "help.py").archive
    with pytest.raises(JobError, match="is not the code that the run began with"):
        use(packed(folder).model_copy(update={"archive": other}))


@pytest.mark.usefixtures("importing")
def test_a_worker_refuses_damaged_code_and_names_unpacked_files(folder: Path) -> None:
    from morph.runtime.process.worker import set_up

    good = packed(folder, unpack=True)
    damaged = good.model_copy(update={"archive": good.archive + b"x"})
    answer = set_up(SETUP.model_copy(update={"code": damaged}))
    assert isinstance(answer, Failed)
    assert answer.error.startswith("train.py:job: is not the code that the run began with")
    answer = set_up(SETUP.model_copy(update={"code": good}))
    assert isinstance(answer, Failed)
    assert answer.error.startswith(f"{folder}/train.py: job: is not a Job (got 'int')")


IMPORTING = {
    "train.py": """
import json, numpy, random
import direct
from package import member, part
from package.inner.deep import thing
try:
    import missing
except ImportError:
    pass


def later():
    from lazily import x
""",
    "direct.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import only_types\n",
    "only_types.py": "",
    "lazily.py": "import of_lazy\nimport direct\n",
    "of_lazy.py": "def broken(:",
    "package/__init__.py": "from . import sibling\nfrom .inner import deep",
    "package/sibling.py": "from ..beyond import x",
    "package/part.py": "",
    "package/unused.py": "",
    "package/inner/__init__.py": "",
    "package/inner/deep.py": "from ..relative import y",
    "package/relative.py": "",
    "json.py": "neither this, for Python has its own",
    "numpy/__init__.py": "nor this, for it is installed",
    "unused.py": "",
    "data.bin": "",
}


def test_exactly_the_imported_files_of_the_jobs_folder_are_found(tmp_path: Path) -> None:
    folder = written(tmp_path / "job", IMPORTING)
    unused = {"package/unused.py", "json.py", "numpy/__init__.py", "unused.py", "data.bin"}
    assert set(collect(f"{folder / 'train.py'}:job").files) == set(IMPORTING) - unused


def test_changed_new_and_removed_files_are_named(folder: Path) -> None:
    job = f"{folder / 'train.py'}:job"
    written(folder, {"train.py": "import help\ntry:\n    import new\nexcept ImportError:\n    pass\n"})
    began = JobFiles(folder, files_of(pack(job, collect(job))))
    began.files["made_up.py"] = b"was imported under a name that only running it tells"
    written(folder, {"made_up.py": began.files["made_up.py"].decode(), "left_out.py": "changed, and not imported"})
    assert changed(digests(began.files), collect(job)) == []
    written(folder, {"help.py": "x = 3", "new.py": ""})
    (folder / "made_up.py").unlink()
    assert changed(digests(began.files), collect(job)) == ["help.py", "made_up.py", "new.py"]


def test_code_is_kept_for_the_user_alone_and_refused_when_it_is_damaged(folder: Path, tmp_path: Path) -> None:
    code, job = packed(folder), f"{folder / 'train.py'}:job"
    keep(tmp_path, code)
    (path,) = (tmp_path / "code").iterdir()
    assert path.name == f"{code.sha256}.zip"
    assert [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent)] == [0o600, 0o700]
    assert kept(tmp_path, code.sha256, job) == code
    path.write_bytes(code.archive[:-1])
    with pytest.raises(RunDirError, match="is damaged"):
        kept(tmp_path, code.sha256, job)
    path.unlink()
    with pytest.raises(RunDirError, match=r"cannot be read: No such file"):
        kept(tmp_path, code.sha256, job)


def test_code_from_outside_of_the_folder_is_named_unless_it_is_installed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(
        tmp_path / "library", {"shared_code/__init__.py": "from shared_code import more", "shared_code/more.py": ""}
    )
    written(tmp_path / "venv/lib/site-packages", {"bought.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path / "library"))
    monkeypatch.syspath_prepend(str(tmp_path / "venv/lib/site-packages"))
    monkeypatch.syspath_prepend(str(folder))
    files, before = JobFiles(folder, {}, growing=True), set(sys.modules)
    with files.in_use():
        import bought  # noqa: F401
        import help as helper  # noqa: F401
        import shared_code  # noqa: F401

        assert from_elsewhere(files, before) == [str(tmp_path / "library/shared_code/__init__.py")]
    assert set(files.files) == {"help.py"}
    for name in ("bought", "shared_code", "shared_code.more"):
        del sys.modules[name]


@pytest.mark.usefixtures("importing")
def test_a_worker_knows_the_digest_of_its_code_and_gives_up_the_archive(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from morph.runtime.process.worker import set_up

    code = packed(folder, unpack=True)
    seen: list[WorkerSetup] = []

    def load(setup: WorkerSetup) -> None:
        seen.append(setup)
        raise JobError("is not loaded here")

    monkeypatch.setattr("morph.runtime.process.worker.load_workload", load)
    answer = set_up(SETUP.model_copy(update={"code": code}))
    assert isinstance(answer, Failed)
    assert answer.error == "is not loaded here"
    assert [setup.code and (setup.code.sha256, setup.code.archive) for setup in seen] == [(code.sha256, b"")]
