"""A change of shape, for which every worker waits, loads nothing: what it needs was loaded when a worker was set up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from morph.cutting.cache.cut_job import load_and_cut
from morph.jobs.files import imported_once
from tests.system.harness import JOB, MICRO_BATCH_SIZE, NUM_SECTIONS

EXPORTER = "torch.export._trace"
WORKER = f"""
import json, sys
from morph.contract.messages import WorkerSetup
from morph.cutting.cache.cut_job import load_and_cut
from morph.jobs.files import imported_once
from morph.runtime.process.worker import Worker
from morph.runtime.workloads.job_workload import JobWorkload

with imported_once({JOB!r}):
    cut = load_and_cut({JOB!r}, num_sections={NUM_SECTIONS}, micro_batch_size={MICRO_BATCH_SIZE})
    exported = "{EXPORTER}" in sys.modules
    workload = JobWorkload(WorkerSetup(
        worker="w", job_path={JOB!r}, fingerprint=cut.model.fingerprint, num_sections={NUM_SECTIONS},
        micro_batch_size={MICRO_BATCH_SIZE}, checkpoint_url="", store_host="", store_port=1, listen_host="",
    ))
    before = set(sys.modules)
    for unit in workload.units:
        workload.make_unit(unit.id, 1)
    print(json.dumps([exported, sorted(set(sys.modules) - before)]))
"""


@pytest.mark.slow
def test_a_worker_that_reads_a_kept_cut_loads_nothing_for_its_first_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORPH_CACHE_DIR", str(tmp_path))
    with imported_once(JOB):
        load_and_cut(JOB, num_sections=NUM_SECTIONS, micro_batch_size=MICRO_BATCH_SIZE)
    assert EXPORTER in sys.modules
    run = subprocess.run([sys.executable, "-c", WORKER], env=os.environ, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run
    exported_again, loaded = json.loads(run.stdout.splitlines()[-1])
    assert not exported_again
    assert loaded == []
