"""The live loop with a pool that answers at once: what is written down before it is done, and how a run ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from manager.controller.actions import ProbeWorker, RequestNodes
from manager.controller.config import ControllerConfig
from manager.controller.events import (
    MANIFEST_WRITER,
    ComputeTimesSeen,
    NodeAppeared,
    Tick,
    UnitsWritten,
    WorkerAnswered,
    WorkerLost,
)
from manager.controller.state import initial_state
from manager.engine import driver as driver_module
from manager.engine import manifest_writer
from manager.engine.driver import Driver, Observed
from manager.engine.inbox import Inbox
from manager.engine.provisioning import Provisioning
from manager.engine.spending import Spending
from manager.engine.vm_fleet import VmFleet
from manager.journal.journal import Journal
from manager.journal.records import DecisionRecord, Fact
from manager.journal.replay import replay
from manager.providers.local import LocalProvider
from morph.checkpoint.manifest import complete_versions, read_manifest
from morph.contract.cluster import Limits, Policy
from morph.contract.messages import (
    Committed,
    ComputeTimes,
    Failed,
    MicroBatchLoss,
    MicroBatchTimes,
    Prepared,
    ProbeOrder,
    Reshaped,
    ReshapeOrder,
    StepOrder,
    UnitWritten,
    WorkerReady,
)
from simulator import plan_table, synthetic_profile

NO_TIME = ComputeTimes(forward_s=0, recompute_s=0, backward_s=0, reduce_s=0, wait_s=0, step_s=0)
PROFILE = synthetic_profile(num_sections=2, batch_size=8, micro_batch_size=2)


class FakePool:
    """Workers that answer at once. ``lose`` maps (worker, step) to a death in that step."""

    def __init__(self, inbox: Inbox, journal: Journal) -> None:
        self.inbox = inbox
        self.journal = journal
        self.calls: list[str] = []
        self.lose: set[tuple[str, int]] = set()
        self.fail: set[tuple[str, int]] = set()
        self.gone: set[str] = set()
        self.probes: list[tuple[str, ProbeOrder]] = []

    def last_decision(self) -> DecisionRecord:
        entry = self.journal.read()[-1]
        assert entry.kind == "decision"
        return DecisionRecord.model_validate_json(entry.payload_json)

    def written_down(self, kind: str, worker: str) -> None:
        """The journal must already end with the decision that asked for this."""
        record = self.last_decision()
        asked = {(action.kind, getattr(action, "worker", None)) for action in record.actions}
        asked |= {("send_reshape", receiver) for receiver in record.reshape_receivers}
        assert (kind, worker) in asked
        self.calls.append(f"{kind} {worker}")

    def answer(self, worker: str, answer: WorkerReady | Reshaped | Prepared | Committed | Failed) -> None:
        if worker not in self.gone:
            self.inbox.put(WorkerAnswered(worker=worker, answer=answer))

    def start(self, worker: str, vm: str) -> None:
        assert worker == vm
        self.written_down("start_worker", worker)
        self.answer(worker, WorkerReady(worker=worker, pid=1, setup_s=0))

    def reshape(self, worker: str, order: ReshapeOrder) -> None:
        self.written_down("send_reshape", worker)
        self.answer(
            worker, Reshaped(worker=worker, generation=order.generation, groups_s=0, state_s=0, received_bytes=0)
        )

    def step(self, worker: str, order: StepOrder) -> None:
        self.written_down("send_step", worker)
        if (worker, order.step) in self.lose:
            self.gone.add(worker)
            self.inbox.put(WorkerLost(worker=worker, cause="killed"))
            return
        if (worker, order.step) in self.fail:
            error = f"step {order.step}: the gradient of w is NaN or infinite"
            self.answer(worker, Failed(worker=worker, generation=order.generation, error=error))
            return
        losses = (MicroBatchLoss(micro_batch=0, loss=1.0),)
        prepared = Prepared(worker=worker, generation=order.generation, step=order.step, losses=losses, times=NO_TIME)
        self.answer(worker, prepared)
        self._write(worker, order.step, order.checkpoint_units)

    def commit(self, worker: str, order: object) -> None:
        self.written_down("send_commit", worker)
        generation, version = order.generation, order.version  # type: ignore[attr-defined]
        self.answer(worker, Committed(worker=worker, generation=generation, version=version))
        self._write(worker, version, order.checkpoint_units)  # type: ignore[attr-defined]

    def _write(self, worker: str, version: int, units: tuple[str, ...]) -> None:
        written = tuple(
            UnitWritten(worker=worker, version=version, unit=unit, file=f"{unit}.x", size_bytes=1, sha256="0" * 64)
            for unit in units
        )
        if written and worker not in self.gone:
            self.inbox.put(UnitsWritten(worker=worker, written=written))

    def probe(self, worker: str, order: ProbeOrder) -> None:
        self.probes.append((worker, order))

    def abort(self, worker: str, generation: int) -> None:
        self.written_down("abort", worker)

    def ahead(self, worker: str, order: object) -> None:
        raise AssertionError("nothing is sent ahead here")

    def end(self, worker: str) -> None:
        self.written_down("end_worker", worker)
        self.gone.add(worker)

    def watch(self) -> None:
        pass


class FakeHost:
    """VMs that are names."""

    def __init__(self) -> None:
        self.up: list[str] = []
        self.ended: list[str] = []

    def add_vm(self, name: str) -> None:
        self.up.append(name)

    def prepare_kill(self, names: Sequence[str]) -> Callable[[], None]:
        return lambda: self.ended.extend(names)


class Run:
    """A driver on a job of two sections, with its fakes."""

    def __init__(
        self, directory: Path, num_steps: int, num_nodes: int, limits: Limits | None = None, fewest: int = 1
    ) -> None:
        self.inbox = Inbox()
        self.journal = Journal.open(directory / "journal.sqlite")
        self.url = str(directory / "checkpoints")
        self.config = ControllerConfig(
            fingerprint=PROFILE.job.fingerprint,
            plans={count: plan for count, plan in plan_table(PROFILE, 2).items() if count >= fewest},
            units={unit.id: unit.sections for unit in PROFILE.units},
            unit_bytes={unit.id: 1 for unit in PROFILE.units},
            num_steps=num_steps,
            policy=Policy(checkpoint_every_steps=2, order_timeout_s=30, start_patience_s=60 if limits is None else 0.5),
            expected_nodes=num_nodes,
            target_nodes=num_nodes if limits is not None else 0,
        )
        self.pool = FakePool(self.inbox, self.journal)
        self.observed: list[Observed] = []
        self.react: Callable[[Observed], None] = lambda _observed: None
        self.host = FakeHost()
        self.fleet = VmFleet(self.host, self.inbox)
        asked_for = limits is not None
        self.provisioning = Provisioning(
            LocalProvider(self.fleet, max_vms=8, usd_per_h=0.5), self.inbox, Spending(limits or Limits())
        )
        self.driver = Driver(
            initial_state(self.config),
            self.inbox,
            self.pool,
            self.journal,
            self.url,
            [self.observed.append, lambda observed: self.react(observed)],
            self.provisioning if asked_for else None,
        )
        self.journal.append_config(0.0, self.config)
        if asked_for:
            self.inbox.put(Tick())
        for index in range(0 if asked_for else num_nodes):
            self.inbox.put(NodeAppeared(node=f"vm{index}"))


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(num_steps: int = 6, num_nodes: int = 2, limits: Limits | None = None, fewest: int = 1) -> Run:
        runs.append(Run(tmp_path, num_steps, num_nodes, limits, fewest))
        return runs[-1]

    yield make
    for run in runs:
        run.provisioning.close()
        run.fleet.close()
        run.journal.close()


def test_a_run_goes_from_its_first_vm_to_its_last_checkpoint(make_run: Callable[..., Run]) -> None:
    run = make_run()
    finish = run.driver.run()
    assert finish.outcome == "finished"
    assert run.driver.state.version == 6
    assert complete_versions(run.url)[-1] == 6
    assert {entry.unit for entry in read_manifest(run.url, 6).units} == set(run.config.units)
    assert [call for call in run.pool.calls if call.startswith("start")] == ["start_worker vm0", "start_worker vm1"]


def test_only_the_newest_checkpoints_are_kept(make_run: Callable[..., Run]) -> None:
    run = make_run(num_steps=9)
    run.driver.run()
    assert len(complete_versions(run.url)) == manifest_writer.KEEP_CHECKPOINTS
    assert complete_versions(run.url)[-1] == 9


def test_the_journal_gives_back_the_state_in_which_the_run_ended(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.driver.run()
    assert replay(run.journal) == run.driver.state


def test_a_run_that_keeps_vms_asks_for_all_of_them_and_for_another_when_one_is_lost(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(limits=Limits(max_vms=2, usd_per_h=1.0), fewest=2)
    run.pool.lose = {("job-1-1", 3)}
    assert run.driver.run().outcome == "finished"
    assert {slot.worker for slot in run.driver.state.slots} == {"job-1-0", "job-2-0"}
    asked = [action for seen in run.observed for action in seen.decision.actions if isinstance(action, RequestNodes)]
    assert asked == [RequestNodes(request="job-1", count=2), RequestNodes(request="job-2", count=1)]
    assert run.host.up == ["job-1-0", "job-1-1", "job-2-0"]
    assert run.host.ended == ["job-1-1"]
    run.provisioning.close()
    assert set(run.host.ended) == set(run.host.up)


def test_what_the_users_limits_forbid_is_refused_with_a_reason_in_the_journal(make_run: Callable[..., Run]) -> None:
    run = make_run(limits=Limits(usd_per_h=0.5))
    assert run.driver.run().outcome == "finished"
    told = [seen.decision.reason.sentence for seen in run.observed if seen.event.kind == "nodes_granted"]
    assert any("granted in part" in sentence or "boot" in sentence for sentence in told)
    assert run.host.up[:1] == ["job-1-0"]
    assert len(set(run.host.up) - set(run.host.ended)) <= 1
    facts = [Fact.model_validate_json(entry.payload_json) for entry in run.journal.read() if entry.kind == "fact"]
    assert any(fact.name == "request_reduced" and "vms.limits.usd_per_h is 0.5" in fact.detail for fact in facts)


def test_every_observer_sees_every_decision(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.driver.run()
    assert len(run.observed) == sum(entry.kind == "decision" for entry in run.journal.read())
    assert run.observed[-1].decision.state == run.driver.state


def test_a_lost_worker_is_left_behind_and_its_step_done_again(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.pool.lose = {("vm1", 3)}
    finish = run.driver.run()
    assert finish.outcome == "finished"
    assert complete_versions(run.url)[-1] == 6
    assert set(run.driver.state.workers) == {"vm0"}


def test_a_failed_worker_ends_the_run_and_says_why(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.pool.fail = {(run_worker, 2) for run_worker in ("vm0", "vm1")}
    finish = run.driver.run()
    assert finish.outcome == "failed"
    assert "the gradient of w is NaN or infinite" in finish.sentence


def test_a_requested_stop_saves_the_decided_version_and_ends(make_run: Callable[..., Run]) -> None:
    run = make_run(num_steps=10_000)

    def stop_at_five(observed: Observed) -> None:
        if observed.decision.state.version == 5 and observed.decision.state.stop_reason is None:
            observed.request_stop("enough")

    run.react = stop_at_five
    finish = run.driver.run()
    assert finish.outcome == "stopped"
    assert "enough" in finish.sentence
    assert run.driver.state.version < 10
    assert complete_versions(run.url)[-1] == run.driver.state.version


def test_facts_are_written_down_and_decide_nothing(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.inbox.put(Fact(name="vm_killed", worker="vm9"))
    run.driver.run()
    facts = [Fact.model_validate_json(entry.payload_json) for entry in run.journal.read() if entry.kind == "fact"]
    assert facts == [Fact(name="vm_killed", worker="vm9")]


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("403 from the cloud")])
def test_a_manifest_that_cannot_be_written_is_told_to_the_controller(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run, failures = make_run(), [error]

    def fail_once(url: str, manifest: object) -> None:
        if failures:
            raise failures.pop()
        write(url, manifest)

    write = manifest_writer.write_manifest
    monkeypatch.setattr(manifest_writer, "write_manifest", fail_once)
    assert run.driver.run().outcome == "finished"
    told = [observed.event for observed in run.observed if observed.event.kind == "checkpoint_failed"]
    assert len(told) == 1
    assert told[0].worker == MANIFEST_WRITER
    assert str(error) in told[0].error
    assert complete_versions(run.url)[-1] == 6


def test_training_goes_on_while_a_manifest_is_on_its_way_to_slow_storage(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, trained_on = make_run(num_steps=20), threading.Event()

    def write_late(url: str, manifest: object) -> None:
        if not trained_on.wait(20):
            raise OSError("nothing was decided meanwhile")
        write(url, manifest)

    def look(observed: Observed) -> None:
        if observed.decision.state.version >= 10:
            trained_on.set()

    write = manifest_writer.write_manifest
    monkeypatch.setattr(manifest_writer, "write_manifest", write_late)
    run.react = look
    assert run.driver.run().outcome == "finished"
    assert not any(observed.event.kind == "checkpoint_failed" for observed in run.observed)
    assert complete_versions(run.url)[-1] == 20


def test_old_checkpoints_that_cannot_be_deleted_are_noted_and_the_new_one_counts(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tried = make_run(num_steps=20), threading.Semaphore(0)

    def fail(url: str, keep: int) -> None:
        tried.release()
        raise OSError("busy")

    def wait_for_the_storage(observed: Observed) -> None:
        if any(action.kind == "write_manifest" for action in observed.decision.actions):
            assert tried.acquire(timeout=20)

    run.react = wait_for_the_storage

    monkeypatch.setattr(manifest_writer, "drop_versions", fail)
    assert run.driver.run().outcome == "finished"
    kept = complete_versions(run.url)
    assert kept[0] == 2
    assert kept[-1] == 20
    assert len(kept) > manifest_writer.KEEP_CHECKPOINTS
    assert not any(observed.event.kind == "checkpoint_failed" for observed in run.observed)
    facts = [Fact.model_validate_json(entry.payload_json) for entry in run.journal.read() if entry.kind == "fact"]
    assert facts
    assert facts[0].detail == "OSError: busy"


def test_an_observer_that_raises_ends_the_loop(make_run: Callable[..., Run]) -> None:
    """As Ctrl-C does: whoever drives must clean up, nothing is swallowed."""
    run = make_run()

    def interrupt(_observed: Observed) -> None:
        raise KeyboardInterrupt

    run.react = interrupt
    with pytest.raises(KeyboardInterrupt):
        run.driver.run()
    assert run.journal.read()[-1].kind == "decision"


def seconds(generation: int) -> MicroBatchTimes:
    return MicroBatchTimes(generation=generation, forward_s=(1.0,), recompute_s=(0.0,), backward_s=(2.0,))


def note_times(run: Run) -> None:
    """Heartbeats of both workers bring times whenever a step is decided."""

    def react(observed: Observed) -> None:
        if isinstance(observed.event, WorkerAnswered):
            for worker in ("vm0", "vm1"):
                run.inbox.paces.add(worker, seconds(observed.decision.state.generation))

    run.react = react


def test_compute_times_reach_the_controller_as_one_event_an_interval(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "TIMES_EVERY_S", 0.0)
    monkeypatch.setattr(driver_module, "TIMES_PATIENCE_S", 0.0)
    run = make_run(num_steps=100)
    note_times(run)
    run.driver.run()
    seen = [observed.event for observed in run.observed if isinstance(observed.event, ComputeTimesSeen)]
    assert len(seen) > 2
    assert all([times.worker for times in event.times] == ["vm0", "vm1"] for event in seen)
    assert replay(run.journal) == run.driver.state


def test_compute_times_wait_while_anything_else_does(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "TIMES_EVERY_S", 0.0)
    run = make_run()
    run.inbox.paces.add("vm0", seconds(1))
    run.driver._hand_on_times()
    assert run.observed == []
    while run.inbox.get(0.0):
        pass
    run.driver._hand_on_times()
    assert [type(observed.event) for observed in run.observed] == [ComputeTimesSeen]


def test_a_probe_is_handed_to_the_pool_as_it_was_decided(make_run: Callable[..., Run]) -> None:
    run = make_run()
    action = ProbeWorker(worker="vm1", probe=2, step=5, first_section=0, end_section=1, healthy_s=0.25)
    run.driver._act(action)
    assert run.pool.probes == [
        ("vm1", ProbeOrder(probe=2, step=5, first_section=0, end_section=1, healthy_s=0.25)),
    ]


def test_compute_times_of_many_workers_come_rarer_where_taking_them_in_is_slow(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    run = make_run()
    while run.inbox.get(0.0):
        pass
    monkeypatch.setattr(driver_module.time, "monotonic", lambda: clock[0])
    run.driver._times_at_s = clock[0]

    def be_slow(_: Observed) -> None:
        clock[0] += 0.5

    run.react = be_slow
    for wait_s, num_told in ((0.0, 1), (9.0, 1), (1.0, 2)):
        clock[0] += wait_s
        run.inbox.paces.add("vm0", seconds(1))
        run.driver._hand_on_times()
        assert len(run.observed) == num_told
