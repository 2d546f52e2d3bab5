from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.engine.local_vms import host_line
from tests.forked_scripts import ForkedHosts, Nursery
from tests.system import commands
from tests.system.commands import calibrated_once, of_all_workers
from tests.system.harness import JOB, TinyJob, load_tiny_job, uninterrupted

REFERENCE_STEPS = 14


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Fork managers and hosts of processes, each of which would otherwise load torch for two seconds."""
    nursery = Nursery.with_modules(
        "manager.engine.on_processes.forking",
        "morph.cli.main",
        "morph.preflight.job_check",
        "manager.commands.carry_out",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "tests.system.one_manager",
    )
    yield nursery
    nursery.close()


@pytest.fixture(autouse=True)
def _begin_there(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_line, "subprocess", ForkedHosts(nursery))
    monkeypatch.setattr(commands, "NURSERY", nursery)


@pytest.fixture(scope="session")
def tiny_job() -> TinyJob:
    return load_tiny_job()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return digests of every unit after ``REFERENCE_STEPS`` uninterrupted steps on one worker."""
    return uninterrupted(REFERENCE_STEPS, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny job's profile, as the command line writes it."""
    return calibrated_once(of_all_workers(tmp_path_factory) / "calibrated", JOB, "--samples", 5, "-m", 2)
