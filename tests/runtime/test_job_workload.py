"""A job's units: with their initial values, or without values if they will be loaded."""

from __future__ import annotations

import pytest
import torch

from morph.cutting.deferred_init.construct import LazyTensors
from morph.runtime.workloads.job_workload import JobWorkload
from tests.runtime.conftest import CutJob
from tests.system.harness import setup_of_tiny_job


@pytest.fixture(scope="module")
def workload(tiny: CutJob) -> JobWorkload:
    return JobWorkload(setup_of_tiny_job(tiny.model.fingerprint))


@pytest.mark.slow
def test_a_unit_about_to_be_loaded_draws_nothing(workload: JobWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {unit.id: workload.make_unit(unit.id, 4).tensors() for unit in workload.units}
    monkeypatch.setattr(LazyTensors, "__getitem__", lambda _, name: pytest.fail(f"{name} was drawn"))
    before = torch.get_rng_state()
    for unit, tensors in sent.items():
        for empty in (workload.make_unit(unit, 4, empty=True), workload.make_unit_copy(unit, 4)):
            empty.load(tensors)
            found = empty.tensors()
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert torch.equal(torch.get_rng_state(), before)
