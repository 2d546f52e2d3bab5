from __future__ import annotations

import pytest

from tests.system.harness import TinyJob, load_tiny_job, uninterrupted

REFERENCE_STEPS = 14


@pytest.fixture(scope="session")
def tiny_job() -> TinyJob:
    return load_tiny_job()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of every unit after ``REFERENCE_STEPS`` uninterrupted steps on one worker."""
    return uninterrupted(REFERENCE_STEPS, tmp_path_factory.mktemp("reference"))
