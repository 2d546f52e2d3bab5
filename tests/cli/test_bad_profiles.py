"""Mistakes in a profile: each is one line that says what is wrong; nothing is started or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.given import Given


def test_a_profile_of_another_model_is_refused(given: Given) -> None:
    line = given.run_refused(job=f"{given.folder}/jobs.py:wide")
    assert (
        "jobs.py:wide: --profile: the profile is of another model; allowed: a profile of this job, as it is now: "
        in line
    )


def test_a_profile_of_another_batch_size_is_refused(given: Given) -> None:
    line = given.run_refused(job=f"{given.folder}/jobs.py:half")
    assert (
        "--profile: the profile is of another batch_size (got 4); allowed: batch_size=8; or a profile of this" in line
    )
    assert line.endswith(f"morph calibrate {given.folder}/jobs.py:half -o FILE")


def test_a_profile_of_another_job_is_refused_with_both_names(given: Given) -> None:
    other = given.edited(lambda data: data["job"].update(name="other", batch_size=16))
    line = given.run_refused(profile=other)
    assert (
        "jobs.py:good: --profile: the profile is of another job, 'other' (got 'small'); allowed: a profile of" in line
    )


def test_a_profile_without_the_models_units_is_refused(given: Given) -> None:
    line = given.run_refused(profile=given.edited(lambda data: data.update(units=[])))
    assert "--profile: the profile is of other parameter units" in line


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (
            lambda data: data.update(schema_version=2),
            "schema_version: written by a newer Morph: schema_version 2; this one reads 1",
        ),
        (
            lambda data: data["sections"][0]["forward"]["2"].update(median_s=-1.0),
            "sections.0.forward.2.median_s: Input should be greater than or equal to 0 (got -1.0)",
        ),
        (
            lambda data: data["sections"][1]["backward"]["1"].update(median_s=float("nan")),
            "sections.1.backward.1.median_s: Input should be a finite number (got nan)",
        ),
        (lambda data: data.update(surprise=1), "surprise: Extra inputs are not permitted (got 1)"),
        (lambda data: data["commit"].update(median_s="fast"), "commit.median_s: Input should be a valid number"),
        (lambda data: data.pop("commit"), "commit: Field required"),
    ],
)
def test_a_wrong_profile_is_refused_by_every_command_that_reads_it(
    given: Given, edit: Callable[[dict[str, Any]], object], problem: str
) -> None:
    path = given.edited(edit)
    for line in (
        given.run_refused(profile=path),
        given.refused("plan", path, "--gpus", 2),
        given.refused("simulate", path, "-P", 1),
    ):
        assert f"{path}: {problem}" in line


@pytest.mark.parametrize(
    ("name", "problem"),
    [("absent.json", "cannot be read: No such file"), ("jobs.py", "Invalid JSON"), ("", "cannot be read: Is a dir")],
)
def test_a_file_that_is_no_profile_is_refused(given: Given, name: str, problem: str) -> None:
    assert f"{given.folder / name}: {problem}" in given.run_refused(profile=given.folder / name)
