from __future__ import annotations

from pathlib import Path

import pytest

from manager.run.session import SessionSpec
from morph.contract.profile import Profile
from simulator import synthetic_profile
from tests.cli.given import JOBS, Begun, Given


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Return a profile of the job ``good`` that was not measured."""
    from morph.cutting import cut, export_job
    from morph.jobs.job import load_job

    path = tmp_path_factory.mktemp("jobs") / "jobs.py"
    path.write_text(JOBS, encoding="utf-8")
    model = cut(export_job(load_job(f"{path}:good")), num_sections=2, micro_batch_size=1)
    profile = synthetic_profile(num_sections=2, batch_size=8, micro_batch_sizes=(1, 2, 3))
    units = [{"id": unit.id, "sections": unit.sections, "parameter_bytes": 80} for unit in model.units]
    job = profile.job.model_copy(update={"name": "small", "fingerprint": model.fingerprint, "micro_batch_size": 2})
    return Profile.model_validate({**profile.model_dump(), "job": job.model_dump(), "units": units})


@pytest.fixture
def given(measured: Profile, tmp_path: Path) -> Given:
    made = Given(tmp_path, measured)
    made.file("jobs.py", JOBS)
    made.file("profile.json", measured.model_dump_json())
    made.file("cluster.yaml", "vms: {num_vms: 2}\n")
    return made


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[SessionSpec]:
    """Return the descriptions of all sessions, of which none is started."""
    begun: list[SessionSpec] = []

    def session(spec: SessionSpec, *_: object, **__: object) -> None:
        begun.append(spec)
        raise Begun

    monkeypatch.setattr("manager.run.train.run_session", session)
    return begun
