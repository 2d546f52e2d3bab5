from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.commands import morph
from tests.system.harness import JOB, TinyJob, load_tiny_job, uninterrupted

REFERENCE_STEPS = 14


@pytest.fixture(scope="session")
def tiny_job() -> TinyJob:
    return load_tiny_job()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of every unit after ``REFERENCE_STEPS`` uninterrupted steps on one worker."""
    return uninterrupted(REFERENCE_STEPS, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny job's profile, as the command line writes it."""
    path = tmp_path_factory.mktemp("calibrated") / "profile.json"
    output = morph("calibrate", JOB, "-o", path, "--samples", 5, "-m", 2)
    assert f"written: {path}" in output.replace("\n", "")
    return path
