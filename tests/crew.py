"""Workers that are managed order by order by ``Crew``, or by the live driver in ``ManagedCrew``; no Ray, and no VMs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait as wait_for_connections
from pathlib import Path
from typing import Any

from manager.controller.shape.placement import choose_sources, place, share_units
from manager.controller.state.actions import Finish
from manager.controller.state.config import ControllerConfig, units_by_stage
from manager.controller.state.events import NodeAppeared, NodeFacts, WorkerAnswered, WorkerLost
from manager.controller.state.state import initial_state
from manager.engine.loop.driver import Driver, Observed, Observer, Requests
from manager.engine.loop.event_queue import EventQueue
from manager.journal.journal import Journal
from manager.report.journal_reader import read_report
from manager.report.values import RunReport
from manager.run_dir import RunDir, RunFacts
from morph.contract.base import Value
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.cluster import Policy
from morph.contract.decided import Decided, LossScale, decided_step
from morph.contract.faults import Fault
from morph.contract.messages import (
    CommitOrder,
    Committed,
    HandedCut,
    PreCopyOrder,
    Prepared,
    Reshaped,
    ReshapeOrder,
    Slot,
    StepOrder,
    UnitWritten,
    WorkerReady,
    WorkerSetup,
    weights_of,
)
from morph.contract.plan import Plan
from morph.contract.rules import Rules
from morph.jobs.snapshot import collect, pack
from morph.runtime.groups.store import StoreHost
from tests.members import SETUP_S, Footprint, Member
from tests.system.harness import JOB, TinyJob
from tests.waiting import BOUND_S, START_S, poll_until

LOOPBACK = "127.0.0.1"
BEATS_EVERY_S = 0.05


class Crew:
    """Some workers, and what a controller knows of them: generation, decided version, and the units that each holds."""

    def __init__(self, job: TinyJob, names: Sequence[str], make: Callable[[str], Any] = Member) -> None:
        self.job = job
        self.members = {name: make(name) for name in names}
        self.store = StoreHost(LOOPBACK)
        self.generation = 0
        self.plan: Plan | None = None
        self.formed: ReshapeOrder | None = None
        self.slots: tuple[Slot, ...] = ()
        self.directory = Path()
        self.begin()

    def set_up(
        self, job_path: str, fingerprint: str, directory: Path, names: Sequence[str] = (), **fields: object
    ) -> None:
        """Begin anew with this job and checkpoint directory at version 0, without any state.

        ``fields``: further fields of the setup. ``names``: the workers that are set up; by default all.
        """
        fields = {"code": pack(job_path, collect(job_path))} | fields if "code" not in fields else fields
        fields |= {"job_path": job_path, "fingerprint": fingerprint, "checkpoint_url": str(directory)}
        names = names or tuple(self.members)
        for name in names:
            self.members[name].send("setup", worker_setup(self.job, name, self.store, **fields))
        for name in names:
            answer = self.members[name].answer(SETUP_S)  # setting up may compile sections
            assert isinstance(answer, WorkerReady), answer
            self.epochs = answer.epochs
        self.directory = directory
        self.begin()

    def begin(self) -> None:
        """Forget every state: the next reshape initialises it from the job's seed."""
        self.version = 0
        self.held: dict[str, frozenset[str]] = {}
        self.losses: list[float] = []
        self.answers: list[Prepared] = []
        self.attempts: list[list[Prepared]] = []
        self.loss_scale: LossScale | None = None
        self._decided: Decided | None = None

    @property
    def decided(self) -> Decided | None:
        """The decision about the step before the decided version."""
        return self._decided if self._decided and self._decided.version == self.version else None

    def order(
        self, shape: str | Plan, workers: Sequence[str], restore: str | None = None, version: int | None = None
    ) -> ReshapeOrder:
        """Return the order for the next generation of ``workers``, at ``version`` or else the decided version."""
        self.generation += 1
        self.version = self.version if version is None else version
        self.plan = self.job.plan(shape) if isinstance(shape, str) else shape
        held = {name: units for name, units in self.held.items() if name in self.members}
        needed = units_by_stage(self.plan, self.job.units)
        sizes = dict.fromkeys(self.job.units, 1)
        self.slots = place(self.plan, list(workers), held, needed, sizes)
        if restore is None and not self.version:
            restore = "initial"
        sources = choose_sources(self.slots, needed, held, sizes, restore)
        return ReshapeOrder(
            generation=self.generation,
            version=self.version,
            decided=self.decided,
            plan=self.plan,
            slots=self.slots,
            sources=sources,
        )

    def reshape(
        self, shape: str | Plan, workers: Sequence[str], restore: str | None = None, version: int | None = None
    ) -> list[Reshaped]:
        """Form a generation; return the answers of all workers that took part."""
        return self.form(self.order(shape, workers, restore, version))

    def form(self, order: ReshapeOrder) -> list[Reshaped]:
        """Form the generation of this order; followers keep the units that they followed and still follow."""
        before = self.held
        answers = self.ask(taking_part(order), "reshape", order)
        assert all(isinstance(answer, Reshaped) for answer in answers), answers
        self.loss_scale = next((answer.loss_scale for answer in answers if answer.loss_scale), None)
        self.formed = order
        self.hold()
        for entry in order.follows:
            assert set(entry.known) <= before.get(entry.follower, set())
            self.held[entry.follower] |= set(entry.known)
        return answers

    def hold(self) -> None:
        """Record that members of the present generation hold the units of their stages, and other workers nothing."""
        assert self.plan is not None
        needed = units_by_stage(self.plan, self.job.units)
        self.held = {slot.worker: frozenset(needed[slot.stage]) for slot in self.slots}

    def ask(self, workers: Iterable[str], method: str, order: object) -> list[Any]:
        asked = [self.members[name] for name in workers]
        for member in asked:
            member.send(method, order)
        return [member.answer() for member in asked]

    @property
    def present(self) -> list[str]:
        return [slot.worker for slot in self.slots]

    def step_order(self, attempt: int = 0, *, record_timeline: bool = False) -> StepOrder:
        return StepOrder(
            generation=self.generation,
            step=self.version,
            attempt=attempt,
            decided=self.decided,
            loss_scale=self.loss_scale,
            record_timeline=record_timeline,
            num_micro_batches=self.num_micro_batches if self.epochs else None,
        )

    @property
    def num_micro_batches(self) -> int:
        assert self.plan is not None
        if self.epochs is None:
            return self.plan.num_micro_batches
        return self.epochs.num_micro_batches(self.version, self.plan.micro_batch_size)

    def prepare(self, *, record_timeline: bool = False) -> int:
        """Run the next step up to its reduced gradients, with as many attempts as it needs; return their number."""
        for attempt in range(8):
            order = self.step_order(attempt, record_timeline=record_timeline)
            self.answers = answers = self.ask(self.present, "step", order)
            assert all(isinstance(answer, Prepared) for answer in answers), answers
            self.attempts.append(answers)
            if any(answer.non_finite for answer in answers) or not any(answer.overflowed for answer in answers):
                losses = {entry.micro_batch: entry.loss for answer in answers for entry in answer.losses}
                assert sorted(losses) == list(range(self.num_micro_batches))
                self.losses.append(sum(losses[index] for index in sorted(losses)) / len(losses))
                return attempt + 1
        raise AssertionError(f"step {self.version} overflowed 8 times")

    def decide(self) -> Decided:
        """Decide the step that all workers have prepared."""
        self.version += 1
        norms = [answer.unit_norms_sq for answer in self.answers]
        non_finite = [answer.non_finite for answer in self.answers]
        weights = [weights_of(answer.losses) for answer in self.answers]
        self._decided = decided_step(self.version, norms, non_finite, self.job.units, weights)
        self.loss_scale = self._decided.next_scale(self.loss_scale)
        return self._decided

    def train(self, until: int) -> None:
        """Run and decide steps until the decided version is ``until``."""
        while self.version < until:
            self.prepare()
            self.decide()

    def save(self, *, held: bool = False) -> Manifest:
        """Commit the decided version, and write each unit once. ``held``: save as if the generation had ended."""
        assert self.plan is not None
        self.generation += held
        needed = units_by_stage(self.plan, self.job.units)
        writers = share_units(self.slots, needed, dict.fromkeys(self.job.units, 1))
        for name in self.present:
            order = CommitOrder(
                generation=self.generation,
                version=self.version,
                decided=self.decided,
                checkpoint_units=tuple(unit for unit, writer in writers.items() if writer == name),
                held=held,
            )
            self.members[name].send("commit", order)
        self.commits = [self.members[name].answer() for name in self.present]
        assert all(isinstance(answer, Committed) for answer in self.commits), self.commits
        written: dict[str, UnitWritten] = {}
        deadline_s = time.monotonic() + BOUND_S
        while len(written) < len(writers):
            assert time.monotonic() < deadline_s, "the checkpoint was not written"
            for name in self.present:
                beat = self.members[name].control("heartbeat", 0.05)
                assert beat.checkpoint_error is None
                written |= {entry.unit: entry for entry in beat.written if entry.version == self.version}
        files = [
            UnitFile(**written[unit].model_dump(exclude={"worker", "version", "stall_s"})) for unit in sorted(written)
        ]
        return Manifest(fingerprint=self.job.fingerprint, version=self.version, units=tuple(files))

    def digests(self, *, held: bool = False) -> dict[str, str]:
        """Return the sha256 of every unit at the decided version."""
        return {entry.unit: entry.sha256 for entry in self.save(held=held).units}

    def close(self) -> None:
        for member in self.members.values():
            member.end()


class ManagedCrew:
    """The ``Pool`` of a live driver; its processes are used again under other names after a run.

    ``cut``: the cut model that workers receive; None: each exports the model, or reads a cached cut.
    """

    def __init__(self, job: TinyJob, job_path: str = JOB, cut: HandedCut | None = None) -> None:
        self.job, self._job_path, self._cut = job, job_path, cut
        self._code = pack(job_path, collect(job_path))
        self._idle: list[Member] = []
        self._members: dict[str, Member] = {}
        self._lost: set[str] = set()
        self._event_queue = EventQueue()
        self._store: StoreHost
        self._checkpoint_url = ""
        self._ending = threading.Event()

    def run(
        self,
        config: ControllerConfig,
        run_dir: RunDir,
        observer: Callable[[ManagedCrew], Observer],
        market: Callable[[EventQueue], Requests] | None = None,
        types: Sequence[str] = (),
    ) -> Finish:
        """Run a session to its end on as many workers as it expects.

        ``market``: the run must request the workers from it; ``types``: the type of each worker's GPU.
        """
        self._event_queue, self._store = EventQueue(), StoreHost(LOOPBACK)
        self._checkpoint_url, self._members, self._lost = run_dir.checkpoint_url, {}, set()
        self._ending.clear()
        listening = threading.Thread(target=self._listen, daemon=True)
        listening.start()
        try:
            with Journal.open(run_dir.journal_path) as journal:
                journal.append_config(0.0, config)
                observers = [observer(self)]
                url = run_dir.checkpoint_url
                requests = market(self._event_queue) if market else None
                driver = Driver(initial_state(config), self._event_queue, self, journal, url, observers, requests)
                for index in range(config.expected_nodes if requests is None else 0):
                    of_type = types[index] if types else ""
                    self.put(NodeAppeared(node=f"w{index}", facts=NodeFacts(provider="local", node_type=of_type)))
                return driver.run()
        finally:
            self._ending.set()
            listening.join()
            for name, member in self._members.items():
                if name in self._lost:
                    member.end()
                else:
                    self._idle.append(member)

    def train(
        self,
        path: Path,
        shapes: Mapping[int, str],
        num_steps: int,
        watch: Callable[[ManagedCrew, Observed], None] = lambda crew, observed: None,
        rules: Rules | None = None,
        market: Callable[[EventQueue], Requests] | None = None,
    ) -> tuple[Finish, RunReport, str]:
        """Train the job to its end; return the outcome, the report, and the URL of the checkpoints.

        The run begins with the largest number of workers in ``shapes``, which gives ``"PxD"`` by number.
        """
        job = self.job
        plans = {
            num: plan.model_copy(
                update={
                    "expected": plan.expected.model_copy(update={"examples_per_s": float(num), "peak_memory_bytes": 0})
                }
            )
            for num, shape in shapes.items()
            for plan in (job.plan(shape),)
        }
        config = ControllerConfig(
            fingerprint=job.fingerprint,
            plans=plans,
            units=job.units,
            unit_bytes=dict.fromkeys(job.units, 1000),
            num_steps=num_steps,
            policy=Policy(checkpoint_every_steps=7, start_patience_s=START_S, rules=rules or Rules()),
            expected_nodes=max(shapes),
            target_nodes=max(shapes) if market else 0,
        )
        with RunDir(path, self.facts) as run_dir:
            finish = self.run(config, run_dir, lambda crew: lambda observed: watch(crew, observed), market)
            return finish, read_report(path), run_dir.checkpoint_url

    @property
    def facts(self) -> RunFacts:
        return RunFacts(
            job=self._job_path,
            fingerprint=self.job.fingerprint,
            micro_batch_size=self.job.micro_batch_size,
            batch_size=self.job.batch_size,
            num_sections=self.job.num_sections,
        )

    def fork(self, count: int) -> None:
        """Fork processes for this many workers, before other threads may hold locks that a child would need."""
        self._idle += [Member(f"spare-{index}") for index in range(count)]

    def close(self) -> None:
        for member in self._idle:
            member.end()

    def add(self, *workers: str) -> None:
        """Report that VMs are up, so that their workers are started."""
        for worker in workers:
            self._event_queue.put(NodeAppeared(node=worker))

    def kill_at(self, *versions: int) -> Callable[[ManagedCrew, Observed], None]:
        """Return a ``watch`` that kills the first and the last worker in turn, in the step after each version."""
        left = list(versions)

        def watch(crew: ManagedCrew, observed: Observed) -> None:
            state = observed.decision.state
            if left and state.version == left[0] and len(state.slots) > 1:
                left.pop(0)
                victim = state.slots[0 if len(left) % 2 else -1].worker
                crew.arm(Fault(worker=victim, phase="before_commit", step=state.version + 1))

        return watch

    def arm(self, *faults: Fault, slow_s: float = 0.0) -> None:
        """Schedule deaths of living workers; ``slow_s``: the time of state transfers to their followers."""
        for worker in dict.fromkeys(fault.worker for fault in faults):
            mine = tuple(fault for fault in faults if fault.worker == worker)
            self._members[worker].control("arm", mine, slow_s)

    def put(self, event: object) -> None:
        self._event_queue.put(event)  # type: ignore[arg-type]

    # ---- methods of ``Pool``, for the driver ----

    def start(self, worker: str, vm: str) -> None:
        member = self._members[worker] = self._idle.pop() if self._idle else Member(worker)
        url = self._checkpoint_url
        setup = worker_setup(
            self.job, worker, self._store, job_path=self._job_path, checkpoint_url=url, code=self._code, cut=self._cut
        )
        member.send("setup", setup)

    def send(self, worker: str, order: Value) -> None:
        if isinstance(order, PreCopyOrder):
            self._control(worker, "ahead", order)
            return
        methods = {ReshapeOrder: "reshape", StepOrder: "step", CommitOrder: "commit"}  # no worker is slow: no probe
        with suppress(OSError):  # the worker is dead, which its reader is about to notice
            self._members[worker].send(methods[type(order)], order)

    def abort(self, worker: str, generation: int) -> None:
        self._control(worker, "abort", generation)

    def end(self, worker: str) -> None:
        self._members[worker].process.kill()

    def watch(self) -> bool:
        return True

    # ---- private ----

    def _control(self, worker: str, command: str, *arguments: object) -> object:
        with suppress(OSError, EOFError):
            return self._members[worker].control(command, *arguments)
        return None

    def _listen(self) -> None:
        beats_at_s = time.monotonic()
        while not self._ending.is_set():
            living = {member.orders: name for name, member in tuple(self._members.items()) if name not in self._lost}
            for connection in wait_for_connections(list(living), BEATS_EVERY_S) if living else ():
                self._take(living[connection], connection)  # type: ignore[index]
            if not living:
                time.sleep(BEATS_EVERY_S)
            if time.monotonic() >= beats_at_s:
                beats_at_s = time.monotonic() + BEATS_EVERY_S
                for name in living.values():
                    beat = self._control(name, "heartbeat", 0.0)
                    if beat is not None:
                        self._event_queue.put_beat(name, beat)  # type: ignore[arg-type]

    def _take(self, worker: str, connection: object) -> None:
        try:
            answer = connection.recv()  # type: ignore[attr-defined]
        except (OSError, EOFError):
            self._lost.add(worker)
            self._event_queue.put(WorkerLost(worker=worker, cause="killed"))
            return
        self._event_queue.put(WorkerAnswered(worker=worker, answer=answer))


def taking_part(order: ReshapeOrder) -> list[str]:
    """Return all workers that get an order: those with a slot, and those that send units or sums."""
    names = dict.fromkeys(slot.worker for slot in order.slots)
    names |= dict.fromkeys(source.peer for source in order.sources if source.peer)
    if order.salvage is not None:
        names |= dict.fromkeys(entry.holder for entry in order.salvage.sums)
    return list(names)


def workers_of(shape: str, names: Sequence[str]) -> Sequence[str]:
    """Return as many of the names as the shape ``"PxD"`` needs."""
    depth, replicas = map(int, shape.split("x"))
    return names[: depth * replicas]


def check_that_morphs_leave_nothing(crew: Crew, names: Sequence[str]) -> None:
    """Check that eight more morphs of four workers leave no more threads and open files than the first four do."""
    shapes = ("2x2", "1x3", "4x1", "1x2")

    def footprints() -> list[Footprint]:
        return [member.control("footprint") for member in crew.members.values()]

    def morph(times: int) -> None:
        for shape in shapes * times:
            crew.reshape(shape, names)
            crew.train(crew.version + 1)

    def no_more_than(before: list[Footprint]) -> bool:
        return all(
            now.num_threads <= then.num_threads and now.num_descriptors <= then.num_descriptors
            for now, then in zip(footprints(), before, strict=True)
        )

    def let_go() -> None:
        for name in names:  # a generation of one worker has no groups, so the old ones are closed
            crew.begin()
            crew.reshape("1x1", [name])

    morph(1)
    let_go()
    settled: list[list[Footprint]] = []

    def settles() -> bool:
        settled.append(footprints())
        return len(settled) > 20 and all(entry == settled[-1] for entry in settled[-20:])

    poll_until(settles, "the groups of the first morphs to be closed")
    crew.begin()
    morph(2)
    let_go()
    poll_until(lambda: no_more_than(settled[-1]), f"threads and files to go down to {settled[-1]}")


def worker_setup(job: TinyJob, worker: str, store: StoreHost, **fields: object) -> WorkerSetup:
    values: dict[str, object] = {
        "worker": worker,
        "fingerprint": job.fingerprint,
        "num_sections": job.num_sections,
        "micro_batch_size": job.micro_batch_size,
        "store_host": LOOPBACK,
        "store_port": store.port(),
        "listen_host": LOOPBACK,
        "secret": "of the run",
    }
    return WorkerSetup.model_validate(values | fields)
