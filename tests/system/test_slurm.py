"""A run on jobs of a real Slurm, started for it: owners' jobs preempt half of its nodes, twice.

Skipped where Slurm cannot be started; `make test-slurm` installs it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from manager.report.journal_reader import read_report
from morph.checkpoint.manifest import complete_versions
from morph.cli.reading.errors import EXIT_GOES_ON
from tests.providers.real_slurm import CPUS, GRACE_S, RealSlurm, why_none
from tests.system.commands import RunningMorph, morph
from tests.system.harness import uninterrupted
from tests.system.held import BEAT_S, ORDER_S, HeldJob
from tests.system.test_provided_vms import NUM_SECTIONS, digests
from tests.waiting import START_S, poll_until

KEPT = 4
STEP_S = 0.2
ADDRESS = next(
    (
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family.name == "AF_INET" and not address.address.startswith("127.") and name != "docker0"
    ),
    "",
)
WHY_NONE = why_none() or ("" if ADDRESS else "this machine has no address but loopback ones")

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE),
]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealSlurm]:
    cluster = RealSlurm(tmp_path / "slurm")
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def job_file(directory: Path, profile: Path) -> Path:
    job = HeldJob(directory / "code", directory / "gate", 1, step_s=STEP_S)
    job.let_go()
    cloud = {"partition": "spot", "cpus": CPUS // KEPT, "logs": "logs", "usd_per_h": 0.5, "time_limit": "50"}
    (directory / "cloud.yaml").write_text(json.dumps(cloud), encoding="utf-8")  # JSON is YAML
    described = {
        "job": {"code": job.path, "profile": str(profile), "steps": 100_000, "run_dir": "run"},
        "vms": {
            "kind": "slurm",
            "cloud": "cloud.yaml",
            "keep": KEPT,
            "memory_bytes": 2_000_000_000,
            "device": "cpu",
            "address": ADDRESS,
            "shared_storage": True,
            "environment": {"python": sys.executable, "files": ["neighbour.py"]},
        },
        "policy": {
            "checkpoint_every_steps": 10,
            "start_patience_s": START_S,
            "heartbeat_timeout_s": BEAT_S,
            "order_timeout_s": ORDER_S,
        },
    }
    path = directory / "job.yaml"
    path.write_text(json.dumps(described), encoding="utf-8")
    return path


def test_preempting_half_of_the_nodes_twice_changes_no_bit(
    cluster: RealSlurm, calibrated: Path, tmp_path: Path
) -> None:
    path, run_dir = job_file(tmp_path, calibrated), tmp_path / "run"
    with RunningMorph("run", path, "--verbose", "--no-page") as run:
        run.wait_for_line(f"on {KEPT} of {KEPT} ready workers")
        name = json.loads((run_dir / "vms.json").read_text())["run"]
        strange = f"{name}-1-1-0"  # a node of a job that does not belong to the run
        cluster.call("sbatch", "--hold", f"--job-name={strange}-x", given="#!/bin/sh\nsleep 1\n")
        noticed: set[str] = set()
        for _ in range(2):
            owner = cluster.owner(CPUS // 2)
            taken: set[str] = set()
            while len(taken) < KEPT // 2:
                found = re.search(r"(\S+) will be taken in ([\d.]+) s", run.wait_for_line(" will be taken in "))
                assert found is not None
                assert 0 < float(found[2]) <= GRACE_S
                taken.add(found[1])
            assert not taken & noticed
            noticed |= taken
            poll_until(lambda taken=taken: not taken & cluster.states().keys(), "the end of the jobs that were taken")
            cluster.call("scancel", owner)
            for _ in taken:  # fewer workers than are ready may train, where that is as fast
                run.wait_for_line(" is ready")
        told, before = run.output, read_report(run_dir).version
        cluster.stop_controller()
        run.wait_for_line("the provider gives no answer; no VM counts as lost, and training goes on: squeue: ")
        poll_until(lambda: read_report(run_dir).version > before + 1, "training while Slurm's controller is down")
        cluster.start_controller()
        run.wait_for_line("the provider answers again")
        assert list(cluster.states().values()).count("RUNNING") == KEPT
        assert not re.search(r" (was|were) lost: ", run.output.removeprefix(told))
        morph("stop", run_dir)
        assert run.wait_for_end() == EXIT_GOES_ON, run.output
    version = complete_versions(str(run_dir / "checkpoints"))[-1]
    assert "waits in the queue" in run.output
    report = read_report(run_dir)
    assert (report.outcome, report.version) == ("stopped", version)
    assert report.account.total_ns == sum(report.account.parts_ns.values())
    assert digests(run_dir) == uninterrupted(version, tmp_path / "undisturbed", NUM_SECTIONS)
    poll_until(
        lambda: cluster.states() == {f"{strange}-x": "PENDING"}, "an end of all jobs but the one that is not ours"
    )
    assert list(Path("/tmp").glob(f"morph-{name}-*")) == []
