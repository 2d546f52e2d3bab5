from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.commands import calibrated_once, of_all_workers
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
    return calibrated_once(of_all_workers(tmp_path_factory) / "calibrated", JOB, "--samples", 5, "-m", 2)
