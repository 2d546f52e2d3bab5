"""Runs on hosts that a provider brings: the user's command, real nodes and agents; hosts die, and a manager does."""

from __future__ import annotations

import json
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager.engine.joining.certificates import Tls, certificates_of, make_certificates
from manager.enrolment.files import Certificates
from manager.journal.journal import FILE_NAME as JOURNAL
from manager.journal.journal import Journal
from manager.journal.records import Fact
from manager.notices.agent import Agent
from manager.notices.source import Standing
from manager.report.reading import read_report
from morph.checkpoint.manifest import complete_versions, read_manifest
from tests.system.commands import RunningMorph, morph
from tests.system.encrypted import answered, keys_in, visitors
from tests.system.exposure import files_below, files_with, holds, recorded, shown_by, with_secrets
from tests.system.harness import uninterrupted
from tests.system.hosts import Hosts

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STEPS = 40
LONG_STEPS = 160
NUM_SECTIONS = 6
TOO_SMALL_ALONE_BYTES = 700_000
CODE = """
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

from neighbour import CountingText, TinyGPT, job, loss, optimizer

class HeldText(CountingText):
    # nobody comes far beyond the checkpoint of version 10 until the test lets it, whatever the machine's speed
    num_read = 0

    def __getitem__(self, index):
        HeldText.num_read += 1
        until_s = monotonic() + 120
        while HeldText.num_read > 16 * job.batch_size and not Path({gate!r}).exists() and monotonic() < until_s:
            sleep(0.02)
        return super().__getitem__(index)

job = replace(job, dataset=HeldText)
"""


@pytest.fixture(params=[1])
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    world = Hosts(tmp_path / "hosts", number=3, num_gpus=request.param)
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    yield world
    world.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return uninterrupted(STEPS, tmp_path_factory.mktemp("undisturbed"), NUM_SECTIONS)


def job_file(
    directory: Path,
    hosts: Hosts,
    profile: Path,
    memory_bytes: int = 2_000_000_000,
    steps: int = STEPS,
    takeover_patience_s: float = 60,
    **vms: object,
) -> Path:
    """The tiny job in a folder of its own, with a neighbour that it imports: the VMs must get both.

    Every worker stops at its 16th step until ``let_go``.
    """
    (directory / "code").mkdir()
    shutil.copy(Path(__file__).resolve().parents[2] / "configs/jobs/tiny_gpt.py", directory / "code" / "neighbour.py")
    (directory / "code" / "train.py").write_text(CODE.format(gate=str(directory / "gate")), encoding="utf-8")
    described = {
        "job": {"code": "code/train.py:job", "profile": str(profile), "steps": steps, "run_dir": "run"},
        "vms": {
            "kind": "static",
            "cloud": str(hosts.file),
            "keep": 2,
            "memory_bytes": memory_bytes,
            "device": "cpu",
            "address": "127.0.0.2",
            "shared_storage": True,
            "environment": {"python": sys.executable, "files": ["neighbour.py"]},
            **vms,
        },
        "policy": {"checkpoint_every_steps": 10, "takeover_patience_s": takeover_patience_s},
    }
    path = directory / "job.yaml"
    path.write_text(json.dumps(described), encoding="utf-8")  # JSON is YAML
    return path


def let_go(directory: Path) -> None:
    """Let the workers of ``job_file`` train on."""
    (directory / "gate").touch()


def digests(run_dir: Path) -> dict[str, str]:
    url = str(run_dir / "checkpoints")
    return {entry.unit: entry.sha256 for entry in read_manifest(url, complete_versions(url)[-1]).units}


def named(directory: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path in it."""
    return {str(path.relative_to(directory)): data for path, data in files_below(directory)}


def check_exposure(hosts: Hosts, run: RunningMorph, run_dir: Path, secrets: list[str]) -> None:
    """Where both sides listen, and that secrets stand in the files of docs/safety.md alone."""
    assert len(secrets) >= 4
    sides = {"127.0.0.2": run.family()}
    of_nodes = set()
    for node in hosts.nodes():
        (place,) = hosts.directory.glob(f"h*/.morph/nodes/{node}")
        host = place.parents[2]
        sides[f"127.0.0.{11 + int(host.name[1:])}"] = hosts.processes(node)
        of_nodes |= {f"{host.name}/.morph/nodes/{node}/{name}" for name in ("ray-token", "node-secret")}
    for address, processes in sides.items():
        shown = shown_by(processes)
        assert with_secrets(shown, secrets) == []
        assert {found.address for found in shown.listening} <= {address, "::"}, address
        inside = {found.process for found in shown.listening if found.address == address}
        assert inside >= {"ray::RuntimeEnvAgent"}, address  # it was looked at the right processes
    assert files_with(named(hosts.directory), secrets) == of_nodes
    assert {stat.S_IMODE((hosts.directory / name).stat().st_mode) for name in of_nodes} == {0o600}
    assert [folder for folder in hosts.temporary() if files_with(named(folder), secrets)] == []
    assert files_with(named(run_dir), secrets) == {"attach.json"}


def facts_of(run_dir: Path) -> list[Fact]:
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        return [Fact.model_validate_json(entry.payload_json) for entry in journal.read() if entry.kind == "fact"]


def check_encrypted(run: RunningMorph, hosts: Hosts, node: str, directory: Path) -> None:
    """Ray on both sides takes nobody without a certificate; keys are their owner's alone, and nobody shows one."""
    kept = Path(json.loads((directory / "run" / "attach.json").read_text())["control_socket"]).parent.parent
    manager = certificates_of(kept)
    (folder,) = hosts.directory.glob(f"h*/.morph/nodes/{node}")
    vm = Certificates.below(folder / "tls")
    other = directory / "other"
    other.mkdir()
    certificates = {
        "manager": manager,
        "VM": vm,
        "another run": make_certificates(other, Tls()),
        "no certificate": None,
    }
    coming = visitors(manager.authority, certificates)
    sides = {"127.0.0.2": run.family(), f"127.0.0.{11 + int(folder.parts[-4][1:])}": hosts.processes(node)}
    shown = {address: shown_by(processes) for address, processes in sides.items()}
    for address, side in shown.items():
        ports = {found.port for found in side.listening if found.process in ("gcs_server", "raylet")}
        assert ports
        assert [port for port in ports if answered(address, port, coming) != {"manager", "VM"}] == []
    files = dict(found for place in (kept, directory, *hosts.temporary()) for found in files_below(place))
    keys = {path: key for path, key in keys_in(files).items() if other not in path.parents}
    assert {manager.key, manager.authority_key, vm.key} <= set(keys)
    for path in keys:
        assert path.parent.name == "tls"
        assert [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent)] == [0o600, 0o700]
    known = {str(path): data for path, data in files.items() if path not in keys}
    assert files_with(known, keys.values()) == set()
    assert [name for side in shown.values() for name in with_secrets(side, keys.values())] == []


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
    path = job_file(tmp_path, hosts, calibrated, memory_bytes=TOO_SMALL_ALONE_BYTES, tls=True)
    assert "with 2 workers in shape 2x1, with 2 at least" in morph("config", "check", path)
    made = tmp_path / "made"
    with RunningMorph("run", path, "--verbose", "--no-page", secrets_path=made) as run:
        run.wait_for_line("generation 1 is formed")
        run.wait_for_line("the checkpoint of version 10")
        first = hosts.note()
        check_exposure(hosts, run, tmp_path / "run", recorded(made))
        hosts.kill(sorted(first)[0])
        let_go(tmp_path)
        lost = run.wait_for_line(f"{sorted(first)[0]} was lost")
        assert "connection closed" in lost or "left the cluster" in lost or "is gone" in lost
        check_encrypted(run, hosts, sorted(first)[1], tmp_path)  # one VM alone cannot train: the run waits for the next
        assert "generation 2 is formed" in run.wait_for_line("-2-0 is ready")
        hosts.note()
        assert run.wait_for_end() == 0, run.output
        assert not any(holds(run.output.encode(), secret) for secret in recorded(made))
    assert files_with(named(tmp_path / "run"), recorded(made)) == set()
    check_end(hosts, tmp_path / "run", weights)
    enrolled = [fact.detail.split(" at ") for fact in facts_of(tmp_path / "run") if fact.name == "node_enrolled"]
    assert len({node for node, _ in enrolled}) == 3
    assert {address for _, address in enrolled} <= {"127.0.0.11", "127.0.0.12", "127.0.0.13"}
    account = read_report(tmp_path / "run").account
    assert account.total_ns == sum(account.parts_ns.values())


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_both_devices_of_a_host_train_and_a_host_that_dies_with_both_is_replaced(
    hosts: Hosts, calibrated: Path, tmp_path: Path, weights: dict[str, str]
) -> None:
    path = job_file(tmp_path, hosts, calibrated, memory_bytes=TOO_SMALL_ALONE_BYTES)
    with RunningMorph("run", path, "--verbose", "--no-page") as run:
        assert "2x1 on 2 of 2 ready workers" in run.wait_for_line("generation 1 is formed")
        run.wait_for_line("the checkpoint of version 10")
        (host,) = hosts.note()
        hosts.kill(host)
        let_go(tmp_path)
        assert f"{host}.d" in run.wait_for_line(" lost: ")
        assert "2x1 on 2 of 2 ready workers" in run.wait_for_line("generation 2 is formed")
        hosts.note()
        assert run.wait_for_end() == 0, run.output
    check_end(hosts, tmp_path / "run", weights)
    report = read_report(tmp_path / "run")
    assert [sorted(change.lost_workers) for change in report.morphs] == [[f"{host}.d0", f"{host}.d1"]]


def test_another_manager_goes_on_with_the_hosts_of_one_that_was_killed(
    hosts: Hosts, calibrated: Path, tmp_path: Path, weights: dict[str, str]
) -> None:
    path = job_file(tmp_path, hosts, calibrated, tls=True)
    with RunningMorph("run", path, "--verbose", "--no-page") as first:
        first.wait_for_line("the checkpoint of version 10")
        before = hosts.note()
        first.kill()
        let_go(tmp_path)
        first.wait_for_exit()
        with RunningMorph("run", path, "--verbose", "--no-page") as second:
            assert "2 VMs of this run live" in second.wait_for_line("VMs of this run live")
            assert hosts.note() == before
            second.wait_for_line(f"all {STEPS} steps are committed")
            assert second.wait_for_exit() == 0, second.output
    check_end(hosts, tmp_path / "run", weights)


class OneNotice:
    """A metadata service with a notice that stands; it knows when it was acknowledged."""

    name = "test"

    def __init__(self) -> None:
        self.acknowledged = threading.Event()

    def standing(self) -> tuple[Standing, ...]:
        return (Standing(notice="preempt-1", lead_s=60.0),)

    def acknowledge(self, notice: str) -> None:
        assert notice == "preempt-1"
        self.acknowledged.set()


def test_a_noticed_host_is_left_out_and_let_go_and_no_step_is_lost(
    hosts: Hosts, calibrated: Path, tmp_path: Path
) -> None:
    path = job_file(tmp_path, hosts, calibrated, steps=LONG_STEPS)
    with RunningMorph("run", path, "--verbose", "--no-page") as run:
        run.wait_for_line("the checkpoint of version 10")
        node = sorted(hosts.note())[0]
        secret = next(hosts.directory.glob(f"h*/.morph/nodes/{node}/node-secret")).read_text().strip()
        port = json.loads((tmp_path / "run" / "attach.json").read_text())["notice_port"]
        notice = OneNotice()
        agent = Agent(("127.0.0.2", port), node, secret, [notice], lonely_s=600, end=lambda: None, every_s=0.1)
        thread = threading.Thread(target=agent.run)
        thread.start()
        let_go(tmp_path)
        try:
            assert f"{node} will be taken in" in run.wait_for_line("will be taken in")
            assert f"nothing of value is left on {node}" in run.wait_for_line("nothing of value is left")
            assert notice.acknowledged.wait(20), run.output
        finally:
            agent.close()
            thread.join(20)
        hosts.kill(node)  # what a cloud does then
        run.wait_for_line(f"all {LONG_STEPS} steps are committed")
        hosts.note()
        assert run.wait_for_end() == 0, run.output
    report = read_report(tmp_path / "run")
    assert (report.version, sum(step.redone_later for step in report.steps)) == (LONG_STEPS, 0)
    assert [morph.planned for morph in report.morphs[:1]] == [True]
    assert digests(tmp_path / "run") == uninterrupted(LONG_STEPS, tmp_path / "undisturbed", NUM_SECTIONS)
    assert hosts.wait_until_empty() == []


def test_a_run_that_is_resumed_takes_back_the_hosts_of_a_manager_that_was_given_up_and_ctrl_c_gives_all_back(
    hosts: Hosts, calibrated: Path, tmp_path: Path
) -> None:
    path = job_file(tmp_path, hosts, calibrated, steps=LONG_STEPS, takeover_patience_s=0)
    with RunningMorph("run", path, "--verbose", "--no-page") as first:
        first.wait_for_line("the checkpoint of version 10")
        before = hosts.note()
        first.kill()
        first.wait_for_exit()
        with RunningMorph("resume", tmp_path / "run", "--verbose", "--no-page") as second:
            second.wait_for_line("going on from its newest checkpoint")
            second.wait_for_line("generation 1 is formed")
            assert not set(hosts.note()) & set(before)
            let_go(tmp_path)
            second.press_ctrl_c()
            assert second.wait_for_end() == 130, second.output
    assert hosts.wait_until_empty() == []
    assert hosts.nodes() == {}
    assert json.loads((hosts.directory / "leases.json").read_text()) == {}
    assert json.loads((tmp_path / "run" / "vms.json").read_text())["num_starts"] == 2
    version = read_report(tmp_path / "run").version
    assert digests(tmp_path / "run") == uninterrupted(version, tmp_path / "undisturbed", NUM_SECTIONS)


def test_hosts_without_a_manager_end_by_themselves_and_leave_nothing_but_a_lease_that_reconcile_gives_back(
    hosts: Hosts, calibrated: Path, tmp_path: Path
) -> None:
    path = job_file(tmp_path, hosts, calibrated, steps=LONG_STEPS, takeover_patience_s=0, lonely_s=0.5)
    with RunningMorph("run", path, "--verbose", "--no-page") as run:
        run.wait_for_line("the checkpoint of version 10")
        nodes = hosts.note()
        assert len(nodes) == 2
        assert len(hosts.temporary()) == 2
        run.kill()
        run.wait_for_exit()
        assert hosts.wait_until_empty() == []
    assert hosts.temporary() == []
    left = {path.parent.name: path.name for path in hosts.directory.glob("h*/.morph/nodes/*/*")}
    assert left == dict.fromkeys(nodes, "log")
    name = json.loads((tmp_path / "run" / "vms.json").read_text())
    told = morph("cloud", "reconcile", hosts.file, "--run", name["run"], "--job", name["job"])
    assert "2 VMs of" in told
    assert json.loads((hosts.directory / "leases.json").read_text()) == {}
    assert list(hosts.directory.glob("h*/.morph/nodes/*")) == []
