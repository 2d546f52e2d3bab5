"""Workers on this machine, managed order by order by ``Crew``, or by the live driver in ``ManagedCrew``.

A worker lives in a process that is forked here, or in a thread of this one; there is no Ray and there are no VMs.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
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
    Failed,
    HandedCut,
    Heartbeat,
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
from morph.contract.salvage import counted_in
from morph.jobs.snapshot import collect, pack
from morph.runtime.attendants.pre_copies import PreCopyLane
from morph.runtime.attendants.wire import Frame
from morph.runtime.groups.store import StoreHost
from tests.device.worker_device import HERE, use_fake_device
from tests.system.harness import JOB, TinyJob
from tests.waiting import BOUND_S, PATIENCE, START_S, poll_until

FORKS = multiprocessing.get_context("forkserver")
"""Imports a worker's modules once, so that members start without delay; separate processes would import for seconds."""
FORKS.set_forkserver_preload(["tests.runtime.ready_to_fork"])
if len(tempfile.gettempdir()) > 60:  # the server's socket has no room below it
    tempfile.tempdir = "/tmp"
    multiprocessing.util.get_temp_dir()  # which is kept
    tempfile.tempdir = None
LOOPBACK = "127.0.0.1"
SETUP_S = 300.0 * PATIENCE
BEATS_EVERY_S = 0.05


@dataclass(frozen=True)
class Footprint:
    """The kernel resources of a worker's process."""

    num_threads: int
    num_descriptors: int


def _fixed(exponent: int, _num_contributions: int) -> int:
    return exponent


def _arm(worker: Any, faults: tuple[Fault, ...], slow_s: float) -> None:
    """Add faults to a worker, and let it compute only while no copy of its sums is under way.

    ``slow_s``: instead of that, transferring each unit's state to a follower takes this time.
    """
    plan, computes = worker._faults, threading.main_thread()

    def reach(phase: str, step: int | None = None) -> None:
        stream = worker._followers._outgoing
        if slow_s and phase in ("send_ahead", "receive_ahead"):
            time.sleep(slow_s)
        elif not slow_s and stream is not None and threading.current_thread() is computes:
            if stream._connection is not None:  # when this has arrived, everything before it has been handled
                stream._put(Frame({"kind": "follows"}, {}))
            deadline_s = time.monotonic() + BOUND_S
            while stream.error is None and (stream._queue or stream._sending) and time.monotonic() < deadline_s:
                time.sleep(0.001)
        type(plan).reach(plan, phase, step)

    plan._faults += faults
    plan.reach = reach


def _num_copied(worker: Any, sender: str, step: int) -> int:
    """Return the number of micro-batches in a worker's copy of another worker's sums."""
    of, parts = worker._followers._copies.get(sender, (-1, []))
    return max(
        (mask.bit_count() for part in parts for mask in counted_in(part.total).values() if of == step), default=0
    )


def _data_workers(worker: Any) -> tuple[tuple[int, ...], int]:
    """Wait until a worker's data workers can read; return their ids and the number of micro-batches it read itself."""
    workload = worker._workload
    found, loader = workload._data_workers, workload._loader
    if found is None:
        return (), 0
    poll_until(lambda: found._hear(0.0) or all(reader.ready for reader in found._readers), "data workers")
    if not hasattr(loader, "num_own"):
        loader.num_own, made = 0, loader._made

        def counted(place: tuple[int, int], keys: list[str]) -> Any:
            loader.num_own += place not in loader._samples
            return made(place, keys)

        loader._made = counted
    return found.pids, loader.num_own


def _heartbeat_of_none(wait_s: float) -> Heartbeat:
    """Answer a heartbeat of a worker that is not set up yet."""
    time.sleep(min(wait_s, 0.2))
    return Heartbeat(worker="")


def _serve(orders: Connection, control: Connection) -> None:
    """Run a worker's process: orders in this thread, control messages in another."""
    from morph.runtime.process.worker import Worker, set_up
    from morph.runtime.state import unit_state

    workers: list[Worker] = []
    first_exponent = unit_state.first_exponent

    def footprint() -> Footprint:
        return Footprint(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))  # noqa: PTH208

    def serve_control() -> None:
        commands: dict[str, Callable[..., Any]] = {
            "abort": lambda generation: workers[-1].abort(generation) if workers else None,
            "heartbeat": lambda wait_s: workers[-1].heartbeat(wait_s) if workers else _heartbeat_of_none(wait_s),
            "ahead": lambda order: workers[-1].ahead(order),
            "footprint": footprint,
            "arm": lambda faults, slow_s: _arm(workers[-1], faults, slow_s),
            "counted": lambda: getattr(workers[-1]._training.sums._running, "_num_counted", 0),
            "copied": lambda sender, step: _num_copied(workers[-1], sender, step),
            "ends": lambda: [type(one).__name__ for one in workers[-1]._generation.mailboxes.values()],  # type: ignore[union-attr]
            "staged_bytes": lambda: 0 if HERE.device is None else HERE.device.copied_bytes,
            "live_at_release": lambda: [] if HERE.device is None else HERE.device.live_at_release,
            "launches": lambda: [] if HERE.nccl is None else HERE.nccl.launches,
            "waiting": lambda: bool(workers[-1]._interrupt._condition._waiters),  # type: ignore[attr-defined]
        }
        while True:
            name, arguments = control.recv()
            control.send(commands[name](*arguments))

    threading.Thread(target=serve_control, daemon=True).start()
    while True:
        name, arguments = orders.recv()
        if name == "first_exponent":
            (wanted,) = arguments
            unit_state.first_exponent = partial(_fixed, wanted) if wanted is not None else first_exponent
            orders.send(None)
            continue
        if name == "fake_device":
            use_fake_device(*arguments)
            orders.send(None)
            continue
        if name == "data_workers":
            orders.send(_data_workers(workers[-1]))
            continue
        if name == "setup":  # a worker is set up only once
            for before in workers:
                # otherwise garbage collection waits for operations of the worker's groups
                if before._generation is not None:
                    before._reaper.reap(before._generation.groups)
                if beside := getattr(before._workload, "_data_workers", None):
                    beside.close()
            if HERE.device is not None:  # a setup cannot name this device
                arguments = (arguments[0].model_copy(update={"device": HERE.device.kind.type}),)
            made = set_up(*arguments)
            if isinstance(made, Failed):
                orders.send(made)
                continue
            workers[:] = [made]
        orders.send(getattr(workers[-1], name)(*arguments))


class Member:
    """One worker's process, as its manager sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.orders, orders = FORKS.Pipe()
        self._control, control = FORKS.Pipe()
        self._in_use = threading.Lock()
        self.process = FORKS.Process(target=_serve, args=(orders, control), name=name, daemon=True)
        self.process.start()
        orders.close()
        control.close()

    def send(self, method: str, *arguments: object) -> None:
        """Send an order; ``answer`` returns the result."""
        self.orders.send((method, arguments))

    def answer(self, timeout_s: float = BOUND_S) -> Any:
        """Return the answer to the last order, within ``timeout_s``."""
        return _receive(self.orders, f"an answer of {self.name}", timeout_s)

    @property
    def has_answered(self) -> bool:
        return self.orders.poll()

    def control(self, command: str, *arguments: object) -> Any:
        """Run a command on the control lane."""
        with self._in_use:
            self._control.send((command, arguments))
            return _receive(self._control, f"{self.name}'s control lane", BOUND_S)

    def stop(self) -> None:
        """Stop the process as if its machine hung: its connections stay open."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.join(BOUND_S)
        self.process.close()
        self.orders.close()
        self._control.close()


class ThreadMember:
    """One worker in a thread of this process, as its manager sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread = ThreadPoolExecutor(1, name)
        self._answer: Future[Any]

    def send(self, method: str, *arguments: object) -> None:
        self._answer = self._thread.submit(self.carry_out, method, *arguments)
        if method == "setup":  # a process imports and cuts one job at a time
            wait_for_futures([self._answer], SETUP_S)

    def carry_out(self, method: str, *arguments: object) -> Any:
        from morph.runtime.process.worker import set_up

        if method == "setup":  # a worker is set up only once; files on disk, as others in this process import them, too
            arguments = (arguments[0].model_copy(update={"code": None}),)  # type: ignore[attr-defined]
            made = set_up(*arguments)
            if isinstance(made, Failed):
                return made
            self.worker: Any = made
        return getattr(self.worker, method)(*arguments)

    def answer(self, timeout_s: float = BOUND_S) -> Any:
        return self._answer.result(timeout_s)

    def control(self, command: str, *arguments: object) -> Any:
        """Run a command on the control lane."""
        return getattr(self.worker, command)(*arguments)

    def end(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def _receive(connection: Connection, what: str, timeout_s: float) -> Any:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"waited {timeout_s:g} s for {what}")
    return connection.recv()


def wait_for_updates(lane: PreCopyLane, most: int) -> None:
    """Wait until at most ``most`` updates remain to be sent, because a stream that falls further behind is given up."""
    poll_until(lambda: all(stream._unsent_updates <= most for stream in lane._outgoing), "updates to leave")


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
