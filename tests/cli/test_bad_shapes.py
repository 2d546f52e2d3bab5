"""Shapes that cannot be, memory that does not do, outputs that cannot be written: refused in one line."""

from __future__ import annotations

import pytest

from tests.cli.given import Given


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("plan", "--gpus", 0), "--gpus: is out of range (got 0); allowed: a whole number from 1 to 100000"),
        (("plan", "--gpus", 2, "--m", 3), "--m: does not divide the batch of 8 samples (got 3); allowed: 1, 2"),
        (("plan", "--gpus", 2, "--m", 5), "--m: was not measured (got 5); allowed: 1, 2"),
        (
            ("plan", "--gpus", 2, "--memory-gib", 1e-9),
            "--memory-gib, in bytes: the job does not fit in the memory of 2",
        ),
        (("simulate", "-P", 3), "-P: the model cannot be cut so (got 3); allowed: 1 to 2 (its sections)"),
        (("simulate", "-P", 0), "-P: the model cannot be cut so (got 0); allowed: 1 to 2 (its sections)"),
        (("simulate", "-P", 2, "-D", 5), "-D: replicas cannot share the micro-batches (got 5); allowed: 1 to 4"),
        (("simulate", "-P", 2, "--m", 3), "--m: does not divide the batch of 8 samples (got 3); allowed: 1, 2"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(given: Given, arguments: tuple[object, ...], problem: str) -> None:
    path = given.folder / "profile.json"
    assert f"{path}: {problem}" in given.refused(arguments[0], path, *arguments[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("-P", 3), "-P: is not possible (got 3); allowed: 1 to 2"),
        (("-D", 3), "-D: is not possible (got 3); allowed: 1 to 2"),
        (("-P", 2, "-D", 2), "-P: is not possible (got 2); allowed: 1 to 1"),
        (("-P", 0), "-P: Input should be greater than or equal to 1 (got '0')"),
    ],
)
def test_a_run_in_a_shape_that_its_vms_can_never_form_is_refused(
    given: Given, options: tuple[object, ...], problem: str
) -> None:
    given.file("cluster.yaml", "vms: {num_vms: 2}\n")
    assert given.run_refused(*options).startswith(problem)


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_a_memory_size_that_is_none_is_refused(given: Given, value: str) -> None:
    line = given.refused("plan", given.folder / "profile.json", "--gpus", 2, "--memory-gib", value)
    assert line == f"--memory-gib: is out of range (got {float(value)}); allowed: a number above 0, at most 1048576"


def test_a_job_that_does_not_fit_is_refused_with_the_least_memory_that_would_do(given: Given) -> None:
    path = given.file("cluster.yaml", "vms: {num_vms: 2, memory_bytes: 100}\n")
    line = given.run_refused()
    start = f"{path}: vms.memory_bytes: the job does not fit in the memory of 2 devices: while the shape changes, "
    assert line.startswith(start)
    least = int(line.removesuffix(" bytes per device").rpartition(" (got 100); allowed: at least ")[2])
    given.file("cluster.yaml", f"vms: {{num_vms: 2, memory_bytes: {least - 1}}}\n")
    assert f"allowed: at least {least} bytes" in given.run_refused()


@pytest.mark.parametrize(
    ("option", "name"), [("--png", "nowhere/x.png"), ("--png", "."), ("-o", "nowhere/x.json"), ("-o", ".")]
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(given: Given, option: str, name: str) -> None:
    command = ("simulate", given.folder / "absent.json", "-P", 1) if option == "--png" else ("plan", "no", "--gpus", 1)
    line = given.refused(*command, option, given.folder / name)
    assert f"{given.folder / name}: cannot be written: it" in line
