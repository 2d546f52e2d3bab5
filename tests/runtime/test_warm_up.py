"""A change of shape, for which all workers wait, imports nothing, because a worker's setup has loaded everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.system.harness import JOB, cut_for_workers, load_tiny_job, setup_of_tiny_job
from tests.waiting import BOUND_S

EXPORTERS = ("torch.export._trace", "torch._dynamo", "sympy")
WORKER = f"""
import json, sys
from morph.contract.messages import HandedCut, WorkerSetup
from morph.cutting.cache.cut_job import load_and_cut
from morph.runtime.process.worker import Worker
from morph.runtime.workloads.job_workload import JobWorkload

setup = WorkerSetup.model_validate_json(sys.stdin.read())
load_and_cut(
    setup.job_path, num_sections=setup.num_sections, micro_batch_size=setup.micro_batch_size, handed=setup.cut
)
exporters = [name for name in {EXPORTERS} if name in sys.modules]
workload = JobWorkload(setup)
before = set(sys.modules)
for unit in workload.units:
    workload.make_unit(unit.id, 1)
print(json.dumps([exporters, "torch.export._trace" in before, sorted(set(sys.modules) - before)]))
"""


@pytest.mark.slow
def test_a_worker_with_a_handed_cut_imports_nothing_for_its_first_shape() -> None:
    setup = setup_of_tiny_job(load_tiny_job().fingerprint, cut=cut_for_workers(JOB))
    command, environment = [sys.executable, "-c", WORKER], {**os.environ, "MORPH_CACHE_DIR": "/dev/null"}
    given = setup.model_dump_json()
    run = subprocess.run(command, env=environment, input=given, capture_output=True, text=True, timeout=2 * BOUND_S)
    assert run.returncode == 0, run
    assert json.loads(run.stdout.splitlines()[-1]) == [[], False, []]
