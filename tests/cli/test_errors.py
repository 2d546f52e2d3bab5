from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner

from morph.cli.reading.errors import MorphGroup
from morph.contract.errors import ClusterError, InputError, PeerLost, PlanError, WaitTimeout


def app_raising(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=MorphGroup, rich_markup_mode=None)

    @app.callback()
    def root() -> None:
        """Root."""

    @app.command()
    def work() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("is empty", source="job.py", field="data"), 2, "error: job.py: data: is empty\n"),
        (
            PlanError("too many GPUs", source="--gpus", value=64, allowed="at most 8"),
            2,
            "error: --gpus: too many GPUs (got 64); allowed: at most 8\n",
        ),
        (InputError("first line\n    second line"), 2, "error: first line second line\n"),
        (WaitTimeout("no answer in 5 s"), 1, "error: no answer in 5 s\n"),
        (ClusterError("cannot start"), 1, "error: cannot start\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device", "a.png"), 1, "error: a.png: No space left on device\n"),
        (OSError(errno.EROFS, "Read-only file system"), 1, "error: Read-only file system\n"),
    ],
)
def test_an_expected_error_is_one_line_and_a_code(error: BaseException, code: int, line: str) -> None:
    result = CliRunner().invoke(app_raising(error), ["work"])
    assert result.exit_code == code
    assert (result.stderr, result.stdout) == (line, "")


@pytest.mark.parametrize(
    "make",
    [lambda: ZeroDivisionError("bug"), lambda: OSError(errno.EBADF, "bug"), lambda: PeerLost("leaked out of its loop")],
)
def test_an_unexpected_error_keeps_its_traceback(make: Callable[[], Exception]) -> None:
    error = make()
    result = CliRunner().invoke(app_raising(error), ["work"])
    assert result.exception is error
    assert result.stderr == ""
