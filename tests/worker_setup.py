"""The setup of workers in tests that never run a job."""

from __future__ import annotations

from morph.contract.messages import WorkerSetup

SETUP = WorkerSetup(
    worker="vm0",
    job_path="none.py:job",
    fingerprint="none",
    num_sections=1,
    micro_batch_size=1,
    checkpoint_url="none",
    store_host="127.0.0.1",
    store_port=0,
    listen_host="127.0.0.1",
)
