"""A job is imported from the files with which its run began, whatever is on the disk now."""

from __future__ import annotations

import inspect
import pickle
import sys
import traceback
from pathlib import Path

import pytest

from morph.contract.errors import JobError
from morph.jobs.files import JobFiles
from morph.jobs.job import load_job
from morph.jobs.snapshot import collect

JOB = """
from pathlib import Path

import torch

from morph import Job
from package import part

NUMBER = 1


def failing(*given):
    return 1 / 0  # the line that is run


def job():
    size = int((Path(__file__).parent / "size.txt").read_text())
    return Job(name=part.NAME, model=failing, loss=failing, dataset=failing, optimizer=failing, batch_size=size)
"""
FILES = {
    "train.py": JOB,
    "package/__init__.py": "",
    "package/part.py": "import sys\nNAME = 'began'\n",
    "late.py": "x = 'began'",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {**FILES, "size.txt": "8"}.items():
        path = tmp_path / "job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "job"


def files(folder: Path, *, growing: bool = False) -> JobFiles:
    return JobFiles(folder, {name: text.encode() for name, text in FILES.items()}, growing=growing)


def test_a_job_is_imported_as_it_was_with_its_data_beside_it(folder: Path) -> None:
    (folder / "train.py").write_text("raise SystemExit", encoding="utf-8")
    (folder / "package/part.py").unlink()
    (folder / "late.py").write_text("x = 'edited'", encoding="utf-8")
    before = set(sys.modules)
    with files(folder).in_use():
        job = load_job(f"{folder / 'train.py'}:job")
        import late

        assert (job.name, job.batch_size, late.x) == ("began", 8, "began")
    assert not {name for name in set(sys.modules) - before if name.startswith(("late", "package", "morph_job"))}
    assert str(folder) not in sys.path
    assert not [finder for finder in sys.meta_path if isinstance(finder, JobFiles)]


def test_a_traceback_shows_the_users_file_and_line(folder: Path) -> None:
    (folder / "train.py").write_text("\n" * 40, encoding="utf-8")
    with files(folder).in_use():
        job = load_job(f"{folder / 'train.py'}:job")
        with pytest.raises(ZeroDivisionError) as caught:
            job.model()
        assert f'File "{folder}/train.py", line 13, in failing\n    return 1 / 0  # the line that is run' in "".join(
            traceback.format_exception(caught.value)
        )
        assert "the line that is run" in inspect.getsource(job.model)


def test_a_job_whose_files_are_gone_is_still_there(folder: Path) -> None:
    for name in FILES:
        (folder / name).unlink()
    with files(folder).in_use():
        assert load_job(f"{folder / 'train.py'}:job").name == "began"
    with pytest.raises(JobError, match="no such file"):
        load_job(f"{folder / 'train.py'}:job")


def test_foreign_files_are_refused_by_workers_and_accepted_by_managers(folder: Path) -> None:
    (folder / "other.py").write_text("y = 1", encoding="utf-8")
    sys.path.append(str(folder))
    with files(folder).in_use(), pytest.raises(ImportError, match=r"other\.py is not code with which the run began"):
        __import__("other")
    sys.path.append(str(folder))
    growing = files(folder, growing=True)
    with growing.in_use():
        assert __import__("other").y == 1
    assert growing.files["other.py"] == b"y = 1"
    sys.path.remove(str(folder))


def test_python_s_own_and_installed_modules_come_before_the_jobs(folder: Path) -> None:
    found = JobFiles(folder, {"json.py": b"raise SystemExit", "numpy/__init__.py": b"raise SystemExit"})
    sys.path.append(str(folder))
    try:
        assert found.find_spec("json") is None
        assert found.find_spec("numpy") is None
    finally:
        sys.path.remove(str(folder))


SHARED = {
    "train.py": """
        import manager.parts.inner as inner
        import simulator
        from calibrate.rules import RULE
        from simulator import Text
        from manager import parts, NAME

        from morph import Job


        def dataset():
            from simulator import Text as late

            return [late(), inner.DEEP]


        def failing(*given):
            raise AssertionError


        job = Job(name=NAME, model=Text, loss=failing, dataset=dataset, optimizer=failing, batch_size=simulator.SIZE)
    """,
    "simulator.py": "import manager\nSIZE = 8\nassert manager.NAME == 'own'\nclass Text:\n    pass\n",
    "manager/__init__.py": "NAME = 'own'\nfrom . import parts\n",
    "manager/parts/__init__.py": "from simulator import SIZE\n",
    "manager/parts/inner.py": "from ..parts import SIZE\nDEEP = SIZE + 1\n",
    "calibrate/rules.py": "RULE = 1\n",  # a folder without __init__.py
}


@pytest.mark.parametrize("growing", [True, False])
def test_a_jobs_own_modules_may_have_the_names_of_packages_of_morph(tmp_path: Path, growing: bool) -> None:
    import manager
    import simulator

    jobs_of_others = {name for name in sys.modules if name.startswith("morph_job_")}
    for name, text in SHARED.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(inspect.cleandoc(text), encoding="utf-8")
    collected = collect(f"{tmp_path / 'train.py'}:job").files
    assert set(collected) == set(SHARED)
    given = {"train.py": collected["train.py"]} if growing else collected
    with JobFiles(tmp_path, given, growing=growing).in_use():
        job = load_job(f"{tmp_path / 'train.py'}:job")
        text, deep = job.dataset()
        assert (job.name, job.batch_size, deep) == ("own", 8, 9)
        assert type(text) is job.model
        assert inspect.getsourcefile(job.model) == str(tmp_path / "simulator.py")
        assert type(pickle.loads(pickle.dumps(text))) is job.model
        assert sys.modules["simulator"] is simulator
        assert sys.modules["manager"] is manager
        from simulator import plan  # as Morph's own code does, in a function

        assert plan is simulator.plan
    assert {name for name in sys.modules if name.startswith("morph_job_")} <= jobs_of_others


def test_an_environment_in_the_jobs_folder_is_not_part_of_the_job(folder: Path) -> None:
    found = files(folder)
    assert found.inside(str(folder / ".venv/lib/python3.11/site-packages/bought/__init__.py")) is None
    assert found.inside(str(folder / "package")) == "package"
    assert found.inside(str(folder)) == ""
    assert found.inside(str(folder.parent)) is None


def test_a_link_into_the_folder_is_the_jobs_own_code(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "package").symlink_to(folder / "package")
    (installed / "another").mkdir()
    monkeypatch.setattr("morph.jobs.files._OF_PYTHON", (f"{installed}/",))
    found = files(folder)
    assert found.inside(str(installed / "package" / "part.py")) == "package/part.py"
    assert found.inside(str(installed / "another" / "part.py")) is None
