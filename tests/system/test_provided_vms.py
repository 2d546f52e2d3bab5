"""Runs on a provider's hosts: the user's command, real nodes and agents; hosts die, and so does a manager."""

from __future__ import annotations

import json
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manager.engine.joining.certificates import Tls, certificates_of, make_certificates
from manager.enrolment.files import Certificates
from manager.journal.journal import Journal
from manager.journal.records import Fact
from manager.notices.agent import Agent
from manager.notices.source import Standing
from manager.report.journal_reader import read_report
from manager.run_dir import JOURNAL
from morph.checkpoint.manifest import complete_versions, read_manifest
from tests.system.commands import RunningMorph, morph
from tests.system.encrypted import answered, keys_in, visitors
from tests.system.exposure import files_below, files_with, holds, recorded, shown_by, with_secrets
from tests.system.harness import uninterrupted
from tests.system.held import BEAT_S, ORDER_S, HeldJob
from tests.system.hosts import Hosts
from tests.waiting import BOUND_S, START_S, poll_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

STEPS = 70
STEP_S = 0.2
"""The least time of a step while a host has a notice, before the run is over."""
NUM_SECTIONS = 6
TOO_SMALL_ALONE_BYTES = 1_540_000


@pytest.fixture
def hosts(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Hosts]:
    """Make hosts with this many devices each in one folder, and put them into the commands' environment."""
    number, num_gpus = request.param
    world = Hosts(tmp_path_factory.getbasetemp() / "hosts", number, num_gpus)
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    yield world
    world.close()
    shutil.rmtree(world.directory)


def job_file(
    directory: Path,
    hosts: Hosts,
    profile: Path,
    memory_bytes: int = 2_000_000_000,
    steps: int = STEPS,
    takeover_patience_s: float = 200,
    step_s: float = 0.0,
    **vms: object,
) -> HeldJob:
    """Write the tiny job in a folder of its own, with an imported neighbour; the VMs must get both files.

    Every worker stops at its 16th step until it may continue. The job file is ``job.yaml``.
    """
    job = HeldJob(directory / "code", directory / "gate", 16, step_s=step_s)
    described = {
        "job": {"code": job.path, "profile": str(profile), "steps": steps, "run_dir": "run"},
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
        "policy": {
            "checkpoint_every_steps": 10,
            "takeover_patience_s": takeover_patience_s,
            "start_patience_s": START_S,
            "heartbeat_timeout_s": BEAT_S,
            "order_timeout_s": ORDER_S,
        },
    }
    (directory / "job.yaml").write_text(json.dumps(described), encoding="utf-8")  # JSON is YAML
    return job


def digests(run_dir: Path) -> dict[str, str]:
    url = str(run_dir / "checkpoints")
    return {entry.unit: entry.sha256 for entry in read_manifest(url, complete_versions(url)[-1]).units}


def named(directory: Path) -> dict[str, bytes]:
    """Return every file of a folder by its relative path."""
    return {str(path.relative_to(directory)): data for path, data in files_below(directory)}


def check_exposure(hosts: Hosts, run: RunningMorph, run_dir: Path, secrets: list[str]) -> None:
    """Check the listeners of both sides, and that only files named in docs/how-it-works/safety.md hold secrets."""
    assert len(secrets) >= 4
    sides = {"127.0.0.2": run.family()}
    of_nodes = set()
    for node in hosts.nodes():
        (place,) = hosts.directory.glob(f"h*/.morph/nodes/{node}")
        host = place.parents[2]
        sides[f"127.0.0.{11 + int(host.name[1:])}"] = hosts.processes(node)
        of_nodes |= {f"{host.name}/.morph/nodes/{node}/{name}" for name in ("ray-token", "node-secret")}
    credentials = [(hosts.directory / name).read_text() for name in of_nodes if name.endswith("node-secret")]
    assert credentials
    told = [*secrets, *map(str.strip, credentials)]
    for address, processes in sides.items():
        shown = shown_by(processes)
        assert with_secrets(shown, told) == []
        assert {found.address for found in shown.listening} <= {address, "::"}, address
        inside = {found.process.partition(".")[0] for found in shown.listening if found.address == address}
        one = "ray::RuntimeEnvAgent" if address == "127.0.0.2" else "ray::WorkerActor"
        assert one in inside, address  # the right processes were examined
    assert files_with(named(hosts.directory), told) == of_nodes
    assert {stat.S_IMODE((hosts.directory / name).stat().st_mode) for name in of_nodes} == {0o600}
    assert [folder for folder in hosts.temporary() if files_with(named(folder), told)] == []
    assert files_with(named(run_dir), told) == {"attach.json"}


def facts_of(run_dir: Path) -> list[Fact]:
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        return [Fact.model_validate_json(entry.payload_json) for entry in journal.read() if entry.kind == "fact"]


def check_encrypted(run: RunningMorph, hosts: Hosts, node: str, directory: Path) -> None:
    """Check that Ray requires certificates on both sides, and that keys are readable by owners only and never shown."""
    kept = Path(json.loads((directory / "run" / "attach.json").read_text())["control_socket"]).parent
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
    files = dict(
        found for place in (kept, directory, hosts.directory, *hosts.temporary()) for found in files_below(place)
    )
    keys = {path: key for path, key in keys_in(files).items() if other not in path.parents}
    assert {manager.key, manager.authority_key, vm.key} <= set(keys)
    for path in keys:
        assert path.parent.name == "tls"
        assert [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent)] == [0o600, 0o700]
    known = {str(path): data for path, data in files.items() if path not in keys}
    assert files_with(known, keys.values()) == set()
    assert [name for side in shown.values() for name in with_secrets(side, keys.values())] == []


def check_end(hosts: Hosts, run_dir: Path, weights: dict[str, str], steps: int) -> None:
    report = read_report(run_dir)
    assert (report.outcome, report.version) == ("finished", steps)
    assert report.account.total_ns == sum(report.account.parts_ns.values())
    assert digests(run_dir) == weights
    assert hosts.wait_until_empty() == []
    assert hosts.nodes() == {}
    assert json.loads((hosts.directory / "leases.json").read_text()) == {}


@pytest.mark.parametrize("hosts", [(1, 2)], ids=["1 host of 2 devices"], indirect=True)
def test_a_dead_host_is_replaced_and_one_without_a_manager_ends(hosts: Hosts, calibrated: Path, tmp_path: Path) -> None:
    """Only one host exists, so it must be used again; Ctrl-C gives it back before it trains again."""
    told = {"takeover_patience_s": 0, "lonely_s": 0.5, "tls": True}
    held = job_file(tmp_path, hosts, calibrated, TOO_SMALL_ALONE_BYTES, **told)
    path, leases = tmp_path / "job.yaml", hosts.directory / "leases.json"
    checked = morph("config", "check", path)  # not in this process, whose samples are held like a worker's
    assert "with 2 workers in shape 2x1, at least 2 needed" in checked
    made = tmp_path / "made"
    with RunningMorph("run", path, "--verbose", "--no-page", secrets_path=made) as run:
        assert "2x1 on 2 of 2 ready workers" in run.wait_for_line("generation 1 is formed")
        run.wait_for_line("the checkpoint of version 10")
        (first,) = hosts.note()
        check_exposure(hosts, run, tmp_path / "run", recorded(made))
        check_encrypted(run, hosts, first, tmp_path)
        hosts.kill(first)
        assert f"{first}.d" in run.wait_for_line(" lost: ")
        assert "2x1 on 2 of 2 ready workers" in run.wait_for_line("generation 2 is formed")
        run.wait_for_line("the checkpoint of version 20")
        (second,) = set(hosts.note()) - {first}
        (temporary,) = hosts.temporary_of(second)
        assert temporary.exists()
        run.kill()
        run.wait_for_exit()
        assert hosts.wait_until_empty() == []
    assert not temporary.exists()
    left = {path.parent.name: path.name for path in hosts.directory.glob(f"h*/.morph/nodes/{second}/*")}
    assert left == {second: "log"}
    report = read_report(tmp_path / "run")
    assert [sorted(change.lost_workers) for change in report.morphs] == [[f"{first}.d0", f"{first}.d1"]]
    newest = complete_versions(str(tmp_path / "run" / "checkpoints"))[-1]
    assert newest >= 20
    assert digests(tmp_path / "run") == uninterrupted(newest, tmp_path / "undisturbed", NUM_SECTIONS)
    assert second in leases.read_text()
    with RunningMorph("resume", tmp_path / "run", "--verbose", "--no-page") as again:
        again.wait_for_line("going on from its newest checkpoint")
        poll_until(lambda: hosts.note().keys() - {first, second}, "a node on the host")
        poll_until(lambda: second not in leases.read_text(), "the lease of the node before to end")
        assert again.family()
        again.press_ctrl_c()
        assert again.wait_for_end() == 130, again.output
    held.let_go()
    assert hosts.wait_until_empty() == []
    assert hosts.nodes() == {}
    assert json.loads(leases.read_text()) == {}
    assert list(hosts.directory.glob("h*/.morph/nodes/*")) == []
    assert json.loads((tmp_path / "run" / "vms.json").read_text())["num_starts"] == 2
    assert read_report(tmp_path / "run").version == newest


LEAD_S = 3.0
"""Longer than a change takes, but short: a VM trains for as long as its notice surely allows."""


class OneNotice:
    """A metadata service with a standing notice; it records when the notice was acknowledged."""

    name = "test"

    def __init__(self) -> None:
        self.acknowledged = threading.Event()

    def standing(self) -> tuple[Standing, ...]:
        return (Standing(notice="preempt-1", lead_s=LEAD_S),)

    def acknowledge(self, notice: str) -> None:
        assert notice == "preempt-1"
        self.acknowledged.set()


@contextmanager
def noticed(hosts: Hosts, node: str, directory: Path) -> Iterator[OneNotice]:
    """During the block, a node's agent reports a notice to the run in ``directory``."""
    secret = next(hosts.directory.glob(f"h*/.morph/nodes/{node}/node-secret")).read_text().strip()
    port = json.loads((directory / "run" / "attach.json").read_text())["notice_port"]
    notice = OneNotice()
    agent = Agent(("127.0.0.2", port), node, secret, [notice], lonely_s=600, end=lambda: None, every_s=0.1)
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        yield notice
    finally:
        agent.close()
        thread.join(BOUND_S)


@pytest.mark.parametrize("hosts", [(3, 1)], ids=["3 hosts"], indirect=True)
def test_another_manager_adopts_a_killed_ones_hosts_and_drains_a_noticed_one(
    hosts: Hosts, calibrated: Path, tmp_path: Path
) -> None:
    held, path = job_file(tmp_path, hosts, calibrated, step_s=STEP_S, tls=True), tmp_path / "job.yaml"
    made, made_later = tmp_path / "made", tmp_path / "made-later"
    with RunningMorph("run", path, "--verbose", "--no-page", secrets_path=made) as first:
        first.wait_for_line("the checkpoint of version 10")
        before = hosts.note()
        first.kill()
        first.wait_for_exit()
        with RunningMorph("run", path, "--verbose", "--no-page", secrets_path=made_later) as second:
            assert "2 VMs of this run live" in second.wait_for_line("VMs of this run live")
            second.wait_for_line("a new manager took over")
            assert hosts.note() == before
            node = sorted(before)[0]
            held.let_go()
            while int(second.wait_for_line("the checkpoint of version").split("version ")[1].split()[0]) < 30:
                # by then the run knows how short a step is; versions are skipped while another one is being written
                pass
            with noticed(hosts, node, tmp_path) as notice:
                assert f"{node} will be taken in" in second.wait_for_line("will be taken in")
                assert f"nothing of value is left on {node}" in second.wait_for_line("nothing of value is left")
                assert notice.acknowledged.wait(BOUND_S), second.output
            hosts.kill(node)  # as a cloud does then
            second.wait_for_line(f"all {STEPS} steps are done and saved")
            hosts.note()
            assert second.wait_for_exit() == 0, second.output
    secrets = [*recorded(made), *(recorded(made_later) if made_later.exists() else ())]
    assert len(secrets) >= 4
    assert files_with(named(tmp_path / "run"), secrets) == set()
    assert not any(holds(command.output.encode(), secret) for secret in secrets for command in (first, second))
    enrolled = [fact.detail.split(" at ") for fact in facts_of(tmp_path / "run") if fact.name == "node_enrolled"]
    assert {address for _, address in enrolled} <= {"127.0.0.11", "127.0.0.12", "127.0.0.13"}
    assert {node for node, _ in enrolled} >= set(before)
    report = read_report(tmp_path / "run")
    assert [record.step for record in report.steps] == list(range(STEPS))  # no step is repeated
    assert [morph.planned for morph in report.morphs[:1]] == [True]
    check_end(hosts, tmp_path / "run", uninterrupted(STEPS, tmp_path / "undisturbed", NUM_SECTIONS), STEPS)
