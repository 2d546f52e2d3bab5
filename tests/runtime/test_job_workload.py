"""A job's units: with their initial numbers, or without where they are about to be loaded."""

from __future__ import annotations

import pytest
import torch

from morph.contract.messages import WorkerSetup
from morph.cutting.deferred_init.construct import LazyTensors
from morph.runtime.workloads.job_workload import JobWorkload
from tests.runtime.conftest import CutJob
from tests.system.harness import JOB, MICRO_BATCH_SIZE, NUM_SECTIONS


@pytest.fixture(scope="module")
def workload(tiny: CutJob) -> JobWorkload:
    setup = WorkerSetup(
        worker="w0",
        job_path=JOB,
        fingerprint=tiny.model.fingerprint,
        num_sections=NUM_SECTIONS,
        micro_batch_size=MICRO_BATCH_SIZE,
        checkpoint_url="unused",
        store_host="127.0.0.1",
        store_port=0,
        listen_host="127.0.0.1",
    )
    return JobWorkload(setup)


@pytest.mark.slow
def test_a_unit_about_to_be_loaded_draws_nothing(workload: JobWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {unit.id: workload.make_unit(unit.id, 4).tensors() for unit in workload.units}
    monkeypatch.setattr(LazyTensors, "__getitem__", lambda _, name: pytest.fail(f"{name} was drawn"))
    before = torch.get_rng_state()
    for unit, tensors in sent.items():
        for empty in (workload.make_unit(unit, 4, empty=True), workload.make_shadow(unit, 4)):
            empty.load(tensors)
            found = empty.tensors()
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert torch.equal(torch.get_rng_state(), before)
