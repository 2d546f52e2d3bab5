"""Runs on hosts that a provider brings: the user's command, real nodes and agents; hosts die, and a manager does."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.report.reading import read_report
from morph.checkpoint.manifest import complete_versions, read_manifest
from tests.system.commands import RunningMorph, morph
from tests.system.harness import uninterrupted
from tests.system.hosts import Hosts

pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]

STEPS = 40
NUM_SECTIONS = 6
TOO_SMALL_ALONE_BYTES = 700_000


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    world = Hosts(tmp_path / "hosts", number=3)
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    yield world
    world.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return uninterrupted(STEPS, tmp_path_factory.mktemp("undisturbed"), NUM_SECTIONS)


def job_file(directory: Path, hosts: Hosts, profile: Path, memory_bytes: int = 2_000_000_000) -> Path:
    """The tiny job in a folder of its own, with a neighbour that it imports: the VMs must get both."""
    (directory / "code").mkdir()
    shutil.copy(Path(__file__).resolve().parents[2] / "configs/jobs/tiny_gpt.py", directory / "code" / "neighbour.py")
    code = "from neighbour import CountingText, TinyGPT, job, loss, optimizer\n"
    (directory / "code" / "train.py").write_text(code, encoding="utf-8")
    described = {
        "job": {"code": "code/train.py:job", "profile": str(profile), "steps": STEPS, "run_dir": "run"},
        "vms": {
            "kind": "static",
            "cloud": str(hosts.file),
            "keep": 2,
            "memory_bytes": memory_bytes,
            "device": "cpu",
            "address": "127.0.0.2",
            "shared_storage": True,
            "environment": {"python": sys.executable, "files": ["neighbour.py"]},
        },
        "policy": {"checkpoint_every_steps": 10},
    }
    path = directory / "job.yaml"
    path.write_text(json.dumps(described), encoding="utf-8")  # JSON is YAML
    return path


def digests(run_dir: Path) -> dict[str, str]:
    url = str(run_dir / "checkpoints")
    return {entry.unit: entry.sha256 for entry in read_manifest(url, complete_versions(url)[-1]).units}


def check_end(hosts: Hosts, run_dir: Path, weights: dict[str, str]) -> None:
    report = read_report(run_dir)
    assert (report.outcome, report.version) == ("finished", STEPS)
    assert digests(run_dir) == weights
    assert hosts.wait_until_empty() == []
    assert hosts.nodes() == {}
    assert json.loads((hosts.directory / "leases.json").read_text()) == {}


def test_a_host_that_dies_is_replaced_and_nothing_is_left_at_the_end(
    hosts: Hosts, calibrated: Path, tmp_path: Path, weights: dict[str, str]
) -> None:
    path = job_file(tmp_path, hosts, calibrated, memory_bytes=TOO_SMALL_ALONE_BYTES)
    assert "with 2 VMs in shape 2x1, with 2 at least" in morph("config", "check", path)
    with RunningMorph("run", path, "--plain", "--no-page") as run:
        run.wait_for_line("generation 1 is formed")
        run.wait_for_line("the checkpoint of version 10")
        first = hosts.note()
        hosts.kill(sorted(first)[0])
        lost = run.wait_for_line(f"{sorted(first)[0]} was lost")
        assert "connection closed" in lost or "left the cluster" in lost or "is gone" in lost
        assert "generation 2 is formed" in run.wait_for_line("-2-0 is ready")
        hosts.note()
        assert run.wait_for_end() == 0, run.output
    check_end(hosts, tmp_path / "run", weights)
    account = read_report(tmp_path / "run").account
    assert account.total_ns == sum(account.parts_ns.values())


def test_another_manager_goes_on_with_the_hosts_of_one_that_was_killed(
    hosts: Hosts, calibrated: Path, tmp_path: Path, weights: dict[str, str]
) -> None:
    path = job_file(tmp_path, hosts, calibrated)
    with RunningMorph("run", path, "--plain", "--no-page") as first:
        first.wait_for_line("the checkpoint of version 10")
        before = hosts.note()
        first.kill()
        first.wait_for_exit()
        with RunningMorph("run", path, "--plain", "--no-page") as second:
            assert "2 VMs of this run live" in second.wait_for_line("VMs of this run live")
            assert hosts.note() == before
            second.wait_for_line(f"all {STEPS} steps are committed")
            assert second.wait_for_exit() == 0, second.output
    check_end(hosts, tmp_path / "run", weights)


def test_ctrl_c_gives_every_host_back(hosts: Hosts, calibrated: Path, tmp_path: Path) -> None:
    path = job_file(tmp_path, hosts, calibrated)
    with RunningMorph("run", path, "--plain", "--no-page") as run:
        run.wait_for_line("generation 1 is formed")
        hosts.note()
        run.press_ctrl_c()
        assert run.wait_for_end() == 130, run.output
    assert hosts.wait_until_empty() == []
    assert hosts.nodes() == {}
