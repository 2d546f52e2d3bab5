"""The benchmark of slow links runs through: every contender, every link, on a tiny mini-batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.grids import IS_LONG

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--stages", "2", "--micro-batches", "2", "--rounds", "1", "--unit-ms", "5", "--message-bytes", "4096")


@pytest.mark.slow
@pytest.mark.skipif(not IS_LONG, reason="of make test-long")
def test_every_contender_finishes_on_every_link() -> None:
    command = [sys.executable, "-m", "benchmarks", "emulated_links", *TINY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| Morph") == 5
    assert done.stdout.count("| torch") == 2
