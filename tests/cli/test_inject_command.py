"""``morph inject``: what it refuses, in one line each, before any VM is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.run_dir import RunDir, RunFacts
from morph.cli.runs.inject import seconds_of
from morph.contract import ranges
from morph.contract.errors import InputError
from tests.cli.given import Given

FACTS = RunFacts(job="jobs.py:good", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=2)
BY_LIFETIMES = ("--mttp", "3h")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("10m", 600),
        ("3h", 10_800),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2d", 172_800),
        ("45", 45),
        ("0s", 0),
    ],
)
def test_durations_are_read_as_users_write_them(text: str, seconds: float) -> None:
    assert seconds_of("--mttp", text, ranges.PATIENCE_S) == seconds


@pytest.mark.parametrize("text", ["", "h", "3 h", "-3h", "3x", "nan", "inf", "1e3", "3h5", "٣h", "0x10"])
def test_what_is_no_duration_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(InputError) as raised:
        seconds_of("--notice", text, ranges.SECONDS)
    assert str(raised.value) == (f"--notice: is not a duration (got {text!r}); allowed: such as 30s, 10m, 3h or 1h30m")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "who is taken when is said by one option; allowed: --mttp, --trace or --vm"),
        ((*BY_LIFETIMES, "--vm", "a"), "said by one option (got '--mttp --vm'); allowed: --mttp, --trace or --vm"),
        (
            ("--vm", "a", "--dry-run"),
            "--vm: takes a VM now, so that there is nothing to foretell; allowed: no --dry-run",
        ),
        (("--mttp", "3x"), "--mttp: is not a duration (got '3x')"),
        (
            ("--mttp", "0.5s"),
            "--mttp: is out of range (got '0.5s'); allowed: a number from 1 to 1000000000, in seconds",
        ),
        (
            (*BY_LIFETIMES, "--notice", "2d"),
            "--notice: is out of range (got '2d'); allowed: a number from 0 to 86400, in",
        ),
        ((*BY_LIFETIMES, "--seed", "-1"), "--seed: is out of range (got -1)"),
        ((*BY_LIFETIMES, "--count", "0"), "--count: Input should be greater than or equal to 1"),
        (("--trace", "absent.csv"), "absent.csv: cannot be read: No such file or directory"),
    ],
)
def test_wrong_options_are_refused(given: Given, options: tuple[str, ...], problem: str) -> None:
    assert problem in given.refused("inject", given.run_dir, *options)


def test_a_run_that_is_not_there_or_has_ended_is_refused(given: Given) -> None:
    assert given.refused("inject", given.run_dir, *BY_LIFETIMES) == f"{given.run_dir}: there is no such run directory"
    assert given.refused("inject", given.job, *BY_LIFETIMES).endswith("there is no such run directory")
    assert given.refused("inject", given.folder, "--vm", "vm0").endswith("is not a run directory: it has no run.json")
    with RunDir(given.run_dir, FACTS):
        pass
    for options in (BY_LIFETIMES, ("--vm", "vm0"), (*BY_LIFETIMES, "--dry-run")):
        line = given.refused("inject", given.run_dir, *options)
        assert line == f"{given.run_dir}: is not running: no process manages it"


def test_a_file_that_is_somebody_elses_is_refused_by_name(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDir(given.run_dir, FACTS):
        path = given.file("run/attach.json", "years of work")
        assert given.refused("inject", given.run_dir, *BY_LIFETIMES).startswith(f"{path}: Invalid JSON")
        read_text = Path.read_text

        def read(self: Path, **options: str) -> str:
            if self == path:
                raise PermissionError(13, "Permission denied", str(path))
            return read_text(self, **options)

        monkeypatch.setattr(Path, "read_text", read)
        line = given.refused("inject", given.run_dir, *BY_LIFETIMES)
        assert line == f"{path}: cannot be read: Permission denied"
