"""Managers are repeatedly killed; another one continues with the same workers, and the final bits are equal."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import EVENT, Event, NodesGranted, RequestRefused, WorkerAnswered, WorkerLost
from manager.controller.state.state import Phase
from manager.host.processes import runs
from manager.journal.journal import Journal
from manager.journal.records import DecisionRecord, Fact
from manager.report.journal_reader import read_report
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.cluster import Limits, LocalVms, Policy
from morph.contract.messages import WorkerReady
from tests.system import commands
from tests.system.conftest import REFERENCE_STEPS
from tests.system.harness import JOB, MICRO_BATCH_SIZE, NUM_SECTIONS, TinyJob, constant_vms, cut_for_workers
from tests.system.held import BEAT_S, ORDER_S, HeldJob
from tests.system.one_manager import Death, Orders
from tests.waiting import PATIENCE, START_S, poll_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

SHAPES = {4: "2x2", 3: "3x1", 2: "2x1", 1: "1x1"}
MANAGER_S = 300.0 * PATIENCE
HELD_AFTER = 7
"""Steps that are held until a checkpoint is complete, or the store or the VMs' owner is known to be dead."""


EventT = TypeVar("EventT", bound=Event)


class Managed:
    """One run directory, and the managers that work on it one after another."""

    def __init__(
        self,
        job: TinyJob,
        directory: Path,
        kind: str,
        patience_s: float = 200.0,
        num_vms: int = 4,
        shapes: Mapping[int, str] = SHAPES,
        vms: LocalVms = LocalVms(),  # noqa: B008 (frozen)
        held: bool = False,
    ) -> None:
        self.directory, self._orders_path = directory / "run", directory / "orders.json"
        self._environment = {**os.environ, "PYTHONPATH": str(commands.ROOT), "PYTHONWARNINGS": "default"}
        self.held = HeldJob(directory / "code", directory / "gate", HELD_AFTER) if held else None
        policy = Policy(
            checkpoint_every_steps=4,
            start_patience_s=START_S,
            takeover_patience_s=patience_s,
            heartbeat_timeout_s=BEAT_S,
            order_timeout_s=ORDER_S if held else None,
        )
        self._orders = Orders(
            run_dir=self.directory,
            job=self.held.path if self.held else JOB,
            cut=cut_for_workers(self.held.path if self.held else JOB),
            num_sections=NUM_SECTIONS,
            micro_batch_size=MICRO_BATCH_SIZE,
            batch_size=job.batch_size,
            config=ControllerConfig(
                fingerprint=job.fingerprint,
                plans={count: job.plan(shape) for count, shape in shapes.items() if count <= num_vms},
                units=job.units,
                unit_bytes=dict.fromkeys(job.units, 1),
                num_steps=REFERENCE_STEPS,
                policy=policy,
                expected_nodes=num_vms,
                target_nodes=vms.keep or 0,
            ),
            trace=constant_vms(0 if vms.keep else num_vms),
            vms=vms.model_copy(update={"launcher": kind}),
            gate=directory / "gate",
        )

    def manage(self, *deaths: Death) -> str:
        """Run a manager to its ordered death, or else to the end; return its output."""
        pids = self.pids() if self.directory.exists() else {}
        orders = self._orders.model_copy(update={"deaths": deaths, "pids": pids})
        self._orders_path.write_text(orders.model_dump_json(), encoding="utf-8")
        assert commands.NURSERY is not None
        done = commands.NURSERY.run(
            [sys.executable, "-m", "tests.system.one_manager", str(self._orders_path)],
            cwd=commands.ROOT,
            env=self._environment,
            timeout=MANAGER_S,
            forks_hosts=True,
        )
        dies = any(not death.manager_lives for death in deaths)
        assert done.returncode == (-signal.SIGKILL if dies else 0), (deaths, done.stdout, done.stderr, self.history())
        return done.stdout

    def start_from_newest(self) -> None:
        """Let the next manager begin with the newest checkpoint."""
        url = str(self.directory / "checkpoints")
        manifest = read_manifest(url, complete_versions(url)[-1])
        update = {"initial_version": manifest.version, "initial_checkpoint": manifest}
        self._orders = self._orders.model_copy(update={"config": self._orders.config.model_copy(update=update)})

    def pids(self) -> dict[str, int]:
        """The process of every worker that was ever set up; a worker's process never changes."""
        pids: dict[str, int] = {}
        for event in self._events():
            if isinstance(event, WorkerAnswered) and isinstance(event.answer, WorkerReady):
                assert pids.setdefault(event.worker, event.answer.pid) == event.answer.pid
        return pids

    def generations(self) -> int:
        return max(
            DecisionRecord.model_validate_json(entry.payload_json).generation
            for entry in self._entries()
            if entry.kind == "decision"
        )

    def digests(self) -> dict[str, str]:
        """Return the sha256 of every unit of the newest checkpoint."""
        url = str(self.directory / "checkpoints")
        return {entry.unit: entry.sha256 for entry in read_manifest(url, complete_versions(url)[-1]).units}

    def facts(self, *names: str) -> list[str]:
        """Return the names of those facts of the journal that have one of these names, in order."""
        facts = [Fact.model_validate_json(entry.payload_json) for entry in self._entries() if entry.kind == "fact"]
        return [fact.name for fact in facts if fact.name in names]

    def events(self, kind: type[EventT]) -> list[EventT]:
        return [event for event in self._events() if isinstance(event, kind)]

    def history(self) -> str:
        """Return every decision's sentence, for a failed test."""
        if not (self.directory / "journal.sqlite").exists():
            return "no journal"
        records = [
            DecisionRecord.model_validate_json(entry.payload_json)
            for entry in self._entries()
            if entry.kind == "decision"
        ]
        return "\n".join(f"{record.phase} v{record.version} {record.reason.sentence}" for record in records)

    def control_socket(self) -> Path:
        """The socket on which the VMs' owner listens."""
        attachment = json.loads((self.directory / "attach.json").read_text(encoding="utf-8"))
        return Path(attachment["control_socket"])

    def _entries(self) -> tuple:  # type: ignore[type-arg]
        with Journal.open(self.directory / "journal.sqlite", read_only=True) as journal:
            return journal.read()

    def _events(self) -> list[Event]:
        return [EVENT.validate_json(entry.payload_json) for entry in self._entries() if entry.kind == "event"]


def wait_until_gone(pids: list[int], directory: Path) -> None:
    poll_until(lambda: not any(map(runs, pids)) and not directory.exists(), f"the end of {pids} and {directory}")


HISTORIES = {
    "processes": (
        Death(phase=Phase.STARTING),
        Death(unwritten=True),
        Death(phase=Phase.RESHAPING),
        Death(phase=Phase.TRAINING, version=3, worker="vm1"),
        Death(taking_over=True),
        Death(phase=Phase.TRAINING, version=8),
        Death(phase=Phase.COMMITTING),
        Death(phase=Phase.SEALING),
    ),
    "ray": (
        Death(unwritten=True),
        Death(phase=Phase.TRAINING, version=4),
    ),
}
"""Under Ray: before and after its actors' workers are known. Later orders use the same link."""
LAST = {
    "processes": (),
    "ray": (
        Death(phase=Phase.TRAINING, version=7, process="store", manager_lives=True),
        Death(phase=Phase.TRAINING, version=7, worker="vm1", manager_lives=True),
    ),
}
"""What dies under the last manager, which itself lives."""
VMS = {"processes": {4: "2x2", 3: "3x1", 2: "2x1", 1: "1x1"}, "ray": {2: "1x2", 1: "1x1"}}
"""The number of VMs, and the shapes of those that are left: a worker is lost, but no step."""


@pytest.mark.parametrize("kind", HISTORIES)
def test_managers_die_in_every_phase_and_nothing_is_lost(
    kind: str, tiny_job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    run = Managed(tiny_job, tmp_path, kind, num_vms=max(VMS[kind]), shapes=VMS[kind], held=kind == "ray")
    lost = {death.worker for death in (*HISTORIES[kind], *LAST[kind])} - {None}
    stores = sum(death.process == "store" for death in LAST[kind])
    for number, death in enumerate(HISTORIES[kind]):
        output = run.manage(death)
        assert ("found nothing" in output) == (number == 0), output
        pids = run.pids()
        alive = {worker for worker, pid in pids.items() if runs(pid)}
        assert alive >= set(pids) - lost, run.history()
    assert (run.directory / "attach.json").stat().st_mode & 0o077 == 0
    control_socket = run.control_socket()
    assert "finished" in run.manage(*LAST[kind])
    print(run.history())
    assert run.digests() == reference
    # taking over forms no generation; one that is being formed while the store is down is formed again
    assert 1 + len(lost) <= run.generations() <= 1 + len(lost) + stores
    assert run.facts("store_lost", "store_started_again") == ["store_lost", "store_started_again"][: 2 * stores]
    assert {worker for event in run.events(WorkerLost) for worker in event.workers} <= lost, run.history()
    report = read_report(run.directory)
    assert [record.step for record in report.steps] == list(range(REFERENCE_STEPS))
    assert not any(record.redone_later for record in report.steps)
    wait_until_gone(list(run.pids().values()), control_socket.parent)


def test_a_worker_that_dies_without_a_manager_costs_no_bit(
    tiny_job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    run = Managed(tiny_job, tmp_path, "processes")
    run.manage(Death(phase=Phase.TRAINING, version=5))
    os.kill(run.pids()["vm2"], signal.SIGKILL)
    assert "found 3" in run.manage()
    assert "vm2 was lost: it was gone when the new manager took over" in run.history()
    assert run.digests() == reference


def test_after_its_patience_all_ends_and_the_newest_checkpoint_is_resumed(
    tiny_job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    run = Managed(tiny_job, tmp_path, "processes", patience_s=0.5, num_vms=2, held=True)
    assert run.held is not None
    run.manage(Death(phase=Phase.TRAINING, version=6, saved=True))
    wait_until_gone(list(run.pids().values()), run.control_socket().parent)
    with pytest.raises(AssertionError, match="the process that owned its VMs is gone"):
        run.manage()
    run.start_from_newest()
    run.held.let_go()
    assert "found nothing" in run.manage()
    assert run.digests() == reference


def test_requested_vms_are_kept_by_the_next_manager_and_replaced_within_limits(
    tiny_job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    vms = LocalVms(keep=2, usd_per_h=0.5, limits=Limits(max_vms=2, usd_per_h=1.0, budget_usd=5.0))
    run = Managed(tiny_job, tmp_path, "processes", num_vms=2, shapes={2: "1x2"}, vms=vms)
    run.manage(Death(phase=Phase.STARTING))  # requested, but perhaps not granted
    run.manage(Death(phase=Phase.TRAINING, version=2))
    run.manage(Death(phase=Phase.TRAINING, version=4, worker="job-1-1"))  # one VM is lost while there is no manager
    run.manage(Death(phase=Phase.TRAINING, version=7, worker="job-1-0", manager_lives=True))
    granted = {event.request: event.nodes for event in run.events(NodesGranted)}
    assert granted == {"job-1": ("job-1-0", "job-1-1"), "job-2": ("job-2-0",), "job-3": ("job-3-0",)}, run.history()
    assert run.events(RequestRefused) == []
    assert set(run.pids()) == {"job-1-0", "job-1-1", "job-2-0", "job-3-0"}  # no other worker was ever set up
    assert max(count.num_vms for count in read_report(run.directory).vms) == 2
    assert run.digests() == reference


def test_a_dead_store_is_restarted_at_its_address_for_the_next_generation(
    tiny_job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    """Under Ray the store dies in the last part of ``test_managers_die_in_every_phase_and_nothing_is_lost``."""
    run = Managed(tiny_job, tmp_path, "processes", num_vms=3)
    store = Death(phase=Phase.TRAINING, version=5, process="store", manager_lives=True)
    loss = Death(phase=Phase.TRAINING, version=5, worker="vm1", manager_lives=True)
    assert "finished" in run.manage(store, loss)
    assert run.facts("store_lost", "store_started_again") == ["store_lost", "store_started_again"]
    assert run.generations() <= 3, run.history()  # at most one more than was needed
    assert {"vm1"} < set(run.pids()) <= {"vm0", "vm1", "vm2"}  # each set up once; one that boots slowly comes too late
    assert run.digests() == reference


def test_a_run_that_lost_its_vms_owner_continues_from_its_newest_checkpoint(
    tiny_job: TinyJob, reference: dict[str, str], tmp_path: Path
) -> None:
    """Under Ray the VMs are lost with its head node: see ``test_interrupt``."""
    run = Managed(tiny_job, tmp_path, "processes", num_vms=2, held=True)
    output = run.manage(Death(phase=Phase.TRAINING, version=6, saved=True, process="host", manager_lives=True))
    assert "the process that owns the VMs is gone" in output
    assert "and every VM with it; the run goes on from its newest checkpoint at once" in output
    assert "finished" in output
    assert run.facts("cluster_lost") == ["cluster_lost"]
    report = read_report(run.directory)
    assert (report.outcome, report.num_sessions) == ("finished", 2)
    assert run.digests() == reference
