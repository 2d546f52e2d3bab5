"""Storage that refuses a new run: it is told before the job is looked at, and the run directory stays free."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from typer.testing import CliRunner

from morph.cli.main import app
from tests.cli.given import Given, without_phases


class Refusing(MemoryFileSystem):
    """Storage to which this user has no key."""

    protocol = "refusing"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        raise PermissionError("the key is wrong\nAsk whoever has the right one.")

    find = walk = info = cat_file = open = ls


def test_a_wrong_key_is_told_before_the_job_is_looked_at_and_leaves_no_run_directory(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a run directory left, the same command with the right storage would be refused: it was another run's."""
    monkeypatch.setitem(_registry, "refusing", Refusing)
    url = "refusing://bucket/run"
    arguments = ("run", f"{given.folder / 'jobs.py'}:failing", "--profile", given.folder / "profile.json")
    options = ("--cluster", given.folder / "cluster.yaml", "--run-dir", given.run_dir, "--checkpoint-url", url)
    result = CliRunner().invoke(app, [str(one) for one in (*arguments, *options)], prog_name="morph")
    assert (result.exit_code, without_phases(result.stderr)) == (1, [f"error: {url}: cannot be read: the key is wrong"])
    assert not given.run_dir.exists()


def test_what_a_library_says_again_and_again_is_shown_once() -> None:
    code = (
        "import logging, sys\n"
        "from morph.cli.main import main\n"
        "sys.argv = ['morph', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "for word in ('wrong', 'wrong', 'other', 'wrong'):\n    logging.getLogger('azure').warning('the key: %s', word)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "the key: wrong\nthe key: other\n"
