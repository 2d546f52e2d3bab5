"""A driver with a pool whose workers answer at once, and VMs that are only names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manager.controller.state.config import ControllerConfig
from manager.controller.state.events import NodeAppeared, Tick, UnitsWritten, WorkerAnswered, WorkerLost
from manager.controller.state.state import initial_state
from manager.engine.local_vms.vm_fleet import VmFleet
from manager.engine.loop.driver import Driver, Observed
from manager.engine.loop.event_queue import EventQueue
from manager.engine.loop.lease import Lease
from manager.engine.vms.budget import Spending
from manager.engine.vms.provisioning import Provisioner
from manager.journal.journal import Journal
from manager.journal.records import DecisionRecord
from manager.providers.local import LocalProvider
from morph.contract.cluster import Limits, Policy
from morph.contract.messages import (
    CommitOrder,
    Committed,
    Failed,
    MicroBatchLoss,
    Prepared,
    ProbeOrder,
    Reshaped,
    ReshapeOrder,
    StepOrder,
    UnitWritten,
    WorkerReady,
)
from morph.contract.rules import CheckpointRules, Rules
from morph.contract.timeline import ComputeTimes
from simulator import plan_table, synthetic_profile

NO_TIME = ComputeTimes(forward_s=0, recompute_s=0, backward_s=0, reduce_s=0, wait_s=0, step_s=0)
PROFILE = synthetic_profile(num_sections=2, batch_size=8, micro_batch_size=2)


def config_of(expected_nodes: int, **fields: Any) -> ControllerConfig:
    """Return the configuration of a run of the profile on at most two workers."""
    known: dict[str, Any] = {
        "fingerprint": PROFILE.job.fingerprint,
        "plans": plan_table(PROFILE, 2),
        "units": {unit.id: unit.sections for unit in PROFILE.units},
        "unit_bytes": {unit.id: 1 for unit in PROFILE.units},
        "num_steps": 10,
    }
    return ControllerConfig(**{**known, **fields}, expected_nodes=expected_nodes)


class FakePool:
    """Workers that answer at once; ``lose`` maps (worker, step) to a death in that step."""

    def __init__(self, event_queue: EventQueue, journal: Journal) -> None:
        self.event_queue = event_queue
        self.journal = journal
        self.calls: list[str] = []
        self.lose: set[tuple[str, int]] = set()
        self.fail: set[tuple[str, int]] = set()
        self.gone: set[str] = set()
        self.probes: list[tuple[str, ProbeOrder]] = []
        self.held: tuple[str, int] | None = None
        self.late: list[WorkerAnswered] = []
        self.turns_held = 0

    def last_decision(self) -> DecisionRecord:
        entry = self.journal.read()[-1]
        assert entry.kind == "decision"
        return DecisionRecord.model_validate_json(entry.payload_json)

    def written_down(self, kind: str, worker: str) -> None:
        """Check that the journal already ends with the decision that requested this."""
        record = self.last_decision()
        asked = {(action.kind, getattr(action, "worker", None)) for action in record.actions}
        asked |= {("send_reshape", receiver) for receiver in record.reshape_receivers}
        assert (kind, worker) in asked
        self.calls.append(f"{kind} {worker}")

    def hold_back(self, worker: str, step: int) -> list[WorkerAnswered]:
        self.held = (worker, step)
        return self.late

    def answer(self, worker: str, answer: WorkerReady | Reshaped | Prepared | Committed | Failed) -> None:
        if isinstance(answer, Prepared) and self.held == (worker, answer.step):
            self.held = None
            self.late.append(WorkerAnswered(worker=worker, answer=answer))
        elif worker not in self.gone:
            self.event_queue.put(WorkerAnswered(worker=worker, answer=answer))

    def start(self, worker: str, vm: str) -> None:
        assert worker == vm
        self.written_down("start_worker", worker)
        self.answer(worker, WorkerReady(worker=worker, pid=1, setup_s=0))

    def send(self, worker: str, order: Any) -> None:
        {ReshapeOrder: self.reshape, StepOrder: self.step, CommitOrder: self.commit, ProbeOrder: self.probe}[
            type(order)
        ](worker, order)

    def reshape(self, worker: str, order: ReshapeOrder) -> None:
        self.written_down("send_reshape", worker)
        self.answer(
            worker, Reshaped(worker=worker, generation=order.generation, groups_s=0, state_s=0, received_bytes=0)
        )

    def step(self, worker: str, order: StepOrder) -> None:
        self.written_down("send_step", worker)
        if (worker, order.step) in self.lose:
            self.gone.add(worker)
            self.event_queue.put(WorkerLost(worker=worker, cause="killed"))
            return
        if (worker, order.step) in self.fail:
            error = f"step {order.step}: the gradient of w is NaN or infinite"
            self.answer(worker, Failed(worker=worker, generation=order.generation, error=error))
            return
        losses = (MicroBatchLoss(micro_batch=0, loss=1.0),)
        prepared = Prepared(worker=worker, generation=order.generation, step=order.step, losses=losses, times=NO_TIME)
        self.answer(worker, prepared)
        self._write(worker, order.step, order.checkpoint_units)

    def commit(self, worker: str, order: CommitOrder) -> None:
        self.written_down("send_commit", worker)
        self.answer(worker, Committed(worker=worker, generation=order.generation, version=order.version))
        self._write(worker, order.version, order.checkpoint_units)

    def _write(self, worker: str, version: int, units: tuple[str, ...]) -> None:
        written = tuple(
            UnitWritten(worker=worker, version=version, unit=unit, file=f"{unit}.x", size_bytes=1, sha256="0" * 64)
            for unit in units
        )
        if written and worker not in self.gone:
            self.event_queue.put(UnitsWritten(worker=worker, written=written))

    def probe(self, worker: str, order: ProbeOrder) -> None:
        self.probes.append((worker, order))

    def abort(self, worker: str, generation: int) -> None:
        self.written_down("abort", worker)

    def end(self, worker: str) -> None:
        self.written_down("end_worker", worker)
        self.gone.add(worker)

    def watch(self) -> bool:
        return True


class FakeHost:
    """A host whose VMs are only names."""

    boots_at_once = 1

    def __init__(self) -> None:
        self.up: list[str] = []
        self.ended: list[str] = []

    def add_vm(self, name: str) -> None:
        self.up.append(name)

    def prepare_kill(self, names: Sequence[str]) -> Callable[[], None]:
        return lambda: self.ended.extend(names)


class Run:
    """A driver of a job of two sections, with its fakes."""

    def __init__(
        self,
        directory: Path,
        num_steps: int,
        num_nodes: int,
        limits: Limits | None = None,
        fewest: int = 1,
        checkpoints: CheckpointRules = CheckpointRules(),  # noqa: B008 (frozen)
        url: str | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.event_queue = EventQueue()
        self.journal = Journal.open(directory / "journal.sqlite")
        self.url = url or str(directory / "checkpoints")
        self.config = config_of(
            num_nodes,
            plans={count: plan for count, plan in plan_table(PROFILE, 2).items() if count >= fewest},
            num_steps=num_steps,
            policy=Policy(
                checkpoint_every_steps=2,
                order_timeout_s=30,
                start_patience_s=60 if limits is None else 0.5,
                rules=Rules(checkpoints=checkpoints),
            ),
            target_nodes=num_nodes if limits is not None else 0,
        )
        self.pool = FakePool(self.event_queue, self.journal)
        self.observed: list[Observed] = []
        self.react: Callable[[Observed], None] = lambda _observed: None
        self.host = FakeHost()
        self.fleet = VmFleet(self.host, self.event_queue)
        asked_for = limits is not None
        self.provisioning = Provisioner(
            LocalProvider(self.fleet, max_vms=8, usd_per_h=0.5), self.event_queue, Spending(limits or Limits())
        )
        self.let_go: list[tuple[str, str]] = []
        self.driver = Driver(
            initial_state(self.config),
            self.event_queue,
            self.pool,
            self.journal,
            self.url,
            [self.observed.append, lambda observed: self.react(observed)],
            self.provisioning if asked_for else None,
            lambda node, notice: self.let_go.append((node, notice)),
            lease,
        )
        self.journal.append_config(0.0, self.config)
        if asked_for:
            self.event_queue.put(Tick())
        for index in range(0 if asked_for else num_nodes):
            self.event_queue.put(NodeAppeared(node=f"vm{index}"))
