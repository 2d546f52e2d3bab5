"""Mistakes in a job: each is one line that says what is wrong; nothing is started or written."""

from __future__ import annotations

import pytest

from tests.cli.given import JOBS, Given, without_phases
from tests.forked_modules import run_python


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.py:good", "missing.py: no such file; allowed: path/to/file.py:name"),
        ("jobs.py", "jobs.py: names no job; allowed: path/to/file.py:name"),
        ("cluster.yaml:good", "cluster.yaml: is not a Python file"),
        ("jobs.py:number", "jobs.py: number: is not a Job (got 'int'); allowed: a morph.Job"),
        ("jobs.py:failing", "failing: calling it failed: ValueError: not today"),
        (
            "jobs.py:indivisible",
            "micro_batch_size: is not right (got 3); allowed: a divisor of batch_size 8: 1, 2, 4, 8",
        ),
        ("jobs.py:lists", "dataset()[0]: is not a sample (got 'list'); allowed: a dict from names to dense tensors"),
        ("jobs.py:numbers", """dataset()[0]: is not a sample (got "'x': float"); allowed: a dict"""),
        ("jobs.py:extreme", "the forward changes buffer largest in a way that depends on"),
    ],
)
@pytest.mark.parametrize("command", ["run", "calibrate"])
def test_a_wrong_job_is_refused(given: Given, name: str, problem: str, command: str) -> None:
    job = f"{given.folder}/{name}"
    if command == "run":
        assert problem in given.run_refused(job=job)
    else:
        assert problem in given.refused("calibrate", job, "-o", given.folder / "new.json")


@pytest.mark.parametrize("command", ["run", "calibrate", "cut"])
def test_data_that_is_another_when_it_is_read_again_is_refused_by_every_command_that_reads_it(
    given: Given, command: str
) -> None:
    job = f"{given.folder}/jobs.py:drifting"
    commands = {"calibrate": ("calibrate", job, "-o", given.folder / "new.json"), "cut": ("cut", job)}
    line = given.run_refused(job=job) if command == "run" else given.refused(*commands[command])
    assert "jobs.py:" in line
    assert "dataset()[0]['x']: is another value when the sample is read again; allowed: random numbers from" in line


def test_a_name_that_the_job_file_lacks_is_answered_with_those_it_has(given: Given) -> None:
    line = given.run_refused(job=f"{given.folder}/jobs.py:absent")
    have = "branching, drifting, extreme, good, half, lists, normed, numbers, wide"
    assert line.endswith(f"jobs.py: defines no 'absent'; allowed: {have}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\nimport nowhere_at_all\n", "wrong.py:2: cannot be imported: ModuleNotFoundError: No module named"),
        ("x = (\n", "wrong.py:1: cannot be imported: SyntaxError"),
        ("raise SystemExit(3)\n", "wrong.py:good: its code ends the process (got 'exit(3)')"),
    ],
)
@pytest.mark.parametrize("command", ["run", "calibrate"])
def test_a_job_file_that_cannot_be_imported_is_refused(given: Given, text: str, problem: str, command: str) -> None:
    job = f"{given.file('wrong.py', text)}:good"
    line = given.run_refused(job=job) if command == "run" else given.refused("calibrate", job, "-o", given.folder / "p")
    assert problem in line


BOTH_COMMANDS = """
import sys
from morph.cli.main import main

for command, *options in (
    ["run", "--profile", "profile.json", "--cluster", "cluster.yaml", "--run-dir", "run"],
    ["calibrate", "-o", "new.json"],
):
    sys.argv = ["morph", command, "jobs.py:branching", *options]
    try:
        main()
    except SystemExit as end:
        print(end.code)
"""


@pytest.mark.slow
def test_a_model_that_branches_on_its_data_is_refused_in_one_line_that_names_the_branch(given: Given) -> None:
    """In a process of its own: torch writes whole graphs to the real standard error, past what a test replaces."""
    number = next(index for index, line in enumerate(JOBS.splitlines(), 1) if "HERE" in line)
    _, codes, errors = run_python("-c", BOTH_COMMANDS, cwd=given.folder)
    assert codes.split() == ["2", "2"], errors
    said = without_phases(errors)
    assert len(said) == 2, errors
    for line in said:
        assert line.startswith("error: ")
        assert f"jobs.py:{number}: Branching cannot be exported" in line
    assert not given.run_dir.exists()
    assert not (given.folder / "new.json").exists()
