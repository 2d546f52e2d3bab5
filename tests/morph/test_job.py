from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from morph.contract.errors import JobError
from morph.jobs.files import split_job
from morph.jobs.job import Job, load_job
from tests.forked_modules import run_python
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[2]
HEADER = "from morph import Job\nnothing = lambda *_: None\n"
MAKE = "Job(model=nothing, loss=nothing, dataset=nothing, optimizer=nothing, batch_size=4, name='a')\n"


def make(**fields: Any) -> Job:
    def nothing(*_: Any) -> Any:
        return None

    values: dict[str, Any] = {
        "model": nothing,
        "loss": nothing,
        "dataset": nothing,
        "optimizer": nothing,
        "batch_size": 12,
        "name": "a",
    }
    return Job(**{**values, **fields})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch_size", 0, "batch_size: is not right (got 0); allowed: a whole number from 1"),
        ("batch_size", True, "batch_size: is not right (got True)"),
        ("micro_batch_size", 5, "(got 5); allowed: a divisor of batch_size 12: 1, 2, 3, 4, 6, 12"),
        ("micro_batch_size", -1, "micro_batch_size: is not right (got -1)"),
        ("num_sections", 0, "num_sections: is not right (got 0)"),
        ("seed", -3, "seed: is not right (got -3)"),
        ("accumulation", "double", "(got 'double'); allowed: 'exact' or 'fast'"),
        ("name", "a/b", "name: is not right (got 'a/b')"),
        ("name", "", "name: is not right (got '')"),
        ("loss", 3, "loss: is not a function (got 3); allowed: a function, such as loss(model, batch)"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(JobError) as caught:
        make(**{field: value})
    assert message in str(caught.value)


def test_divisors_of_the_batch_are_taken() -> None:
    assert [make(micro_batch_size=m).micro_batch_size for m in (1, 3, 12)] == [1, 3, 12]
    assert make().accumulation == "exact"


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "user_job.py"
    path.write_text(HEADER + text, encoding="utf-8")
    return str(path)


def test_a_job_is_loaded_by_name_or_from_a_function(tmp_path: Path) -> None:
    path = write(tmp_path, f"job = {MAKE}def build():\n    return {MAKE}")
    assert load_job(f"{path}:job").name == "a"
    assert load_job(f"{path}:build").batch_size == 4


def test_a_function_gets_the_arguments_behind_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, f"job = {MAKE}def build(name='b', **given):\n    made = {MAKE}    return made, name, given")
    text = f"{path}:build(name='x:f(1).py:y', rate=1e-3, on=True, sizes=[1, 2])"
    assert split_job(text)[0] == path
    with pytest.raises(JobError, match="build: is not a Job"):
        load_job(text)
    path = write(tmp_path, f"def build(size):\n    assert size == 'a:b'\n    return {MAKE}")
    assert load_job(f"{path}:build(size='a:b')").name == "a"
    with pytest.raises(JobError, match=r"build: calling it failed: TypeError: .*'width'"):
        load_job(f"{path}:build(width=3)")


SCRIPT = """
import argparse
import sys
def build():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--on", action="store_true")
    parser.add_argument("--more", default="kept")
    found = vars(parser.parse_args())
    assert found == {"rate": 1e-3, "sizes": [1, 2], "on": True, "more": "kept"}, found
    assert sys.argv[0].endswith("user_job.py")
"""


def test_a_function_without_parameters_finds_its_arguments_on_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", before := ["morph", "run"])
    path = write(tmp_path, f"{SCRIPT}    return {MAKE}")
    assert load_job(f"{path}:build(rate=1e-3, sizes=[1, 2], on=True, more=None)").name == "a"
    with pytest.raises(JobError, match=r"build: calling it ended the process with 2: .*\(got '--width 3'\)"):
        load_job(f"{path}:build(width=3)")
    assert "unrecognized arguments: --width 3" in capsys.readouterr().err
    assert sys.argv is before
    path = write(tmp_path, f"def build():\n    return {MAKE}")
    with pytest.raises(JobError, match=r"build: takes no arguments \(got 'width'\); allowed: build\(\)"):
        load_job(f"{path}:build(width=3)")


@pytest.mark.parametrize("call", ["build(3)", "build(size=open)", "build(**{})", "build(size)", "build(size=1"])
def test_arguments_that_are_not_plain_values_are_refused(tmp_path: Path, call: str) -> None:
    path = write(tmp_path, f"job = {MAKE}def build(size):\n    return {MAKE}")
    with pytest.raises(JobError, match=r"arguments: cannot be read|names no job"):
        load_job(f"{path}:{call}")
    with pytest.raises(JobError, match=r"job: takes no arguments \(got 'job\(size=1\)'\)"):
        load_job(f"{path}:job(size=1)")


def test_a_job_file_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_job.py").write_text("SIZE = 4\n", encoding="utf-8")
    path = write(tmp_path, f"from neighbour_of_job import SIZE\njob = {MAKE}")
    assert load_job(f"{path}:job").batch_size == 4


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("import torch\nmissing_name\n", "job", "user_job.py:4: cannot be imported: NameError: name 'missing_name'"),
        ("def f(:\n", "job", "user_job.py:3: cannot be imported: SyntaxError"),
        (
            "def f():\n    import json\n    json.loads('x')\nf()\n",
            "job",
            "user_job.py:5: cannot be imported: JSONDecode",
        ),
        (f"first = {MAKE}other = {MAKE}", "job", "defines no 'job'; allowed: first, other"),
        ("", "job", "defines no 'job'; allowed: the file defines no Job at all"),
        ("job = 3\n", "job", "user_job.py: job: is not a Job (got 'int')"),
        ("def job():\n    return None\n", "job", "user_job.py: job: is not a Job (got 'NoneType')"),
        (
            "def job():\n    raise OSError('no disk')\n",
            "job",
            "user_job.py:4: job: calling it failed: OSError: no disk",
        ),
        (f"job = {MAKE}".replace("batch_size=4", "batch_size=-4"), "job", "batch_size: is not right (got -4)"),
    ],
)
def test_a_wrong_job_file_gets_one_clear_line(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(f"{write(tmp_path, text)}:{name}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("job.py", "job.py: names no job; allowed: path/to/file.py:name"),
        ("job.py:", "names no job"),
        (":job", "names no job"),
        ("nowhere/job.py:job", "nowhere/job.py: no such file"),
    ],
)
def test_a_spec_that_names_no_file_is_refused(spec: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(spec)
    assert message in str(caught.value)


def test_importing_morph_and_its_job_module_loads_no_torch() -> None:
    script = "import sys, morph, morph.jobs.job; morph.Job; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=BOUND_S).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf", "lightning"])
def test_a_bridge_is_an_importable_module_and_an_attribute(name: str) -> None:
    """``import morph`` alone loads neither it nor torch; a fresh process shows that."""
    script = f"""
import sys, morph
assert not {{"torch", "transformers", "lightning", "morph.{name}"}} & {{*sys.modules}}
import morph.{name}
from morph.{name} import job
assert sys.modules["morph.{name}"] is morph.{name} and morph.{name}.job is job
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=BOUND_S)


@pytest.mark.parametrize("name", ["tiny_gpt"])
def test_the_examples_load(name: str) -> None:
    assert load_job(f"{ROOT}/configs/jobs/{name}.py:job").num_sections


@pytest.mark.slow
def test_the_standard_library_text_is_the_same_in_every_process() -> None:
    load = "from morph.jobs.job import load_job; import hashlib, sys; data = load_job(sys.argv[1]).dataset()"
    script = f"{load}; print(len(data), data[7]['input_ids'].tolist(), hashlib.sha256(data.text).hexdigest())"
    job = f"{ROOT}/configs/jobs/gpt2_stdlib.py:job"
    _, other, errors = run_python("-c", script, job)
    assert errors == ""
    data = load_job(job).dataset()
    assert other == f"{len(data)} {data[7]['input_ids'].tolist()} {hashlib.sha256(data.text).hexdigest()}\n"
    assert len(data) > 10_000
