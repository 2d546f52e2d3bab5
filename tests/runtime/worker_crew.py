"""Workers in processes of their own, given orders over pipes: what a manager does, without Ray and step by step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from manager.controller.shape.placement import choose_sources, place, share_units
from manager.controller.state.config import units_by_stage
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.cluster import LinkSetting, RingSetting
from morph.contract.faults import Fault
from morph.contract.messages import (
    CommitOrder,
    Committed,
    Failed,
    Prepared,
    Reshaped,
    ReshapeOrder,
    Slot,
    StepOrder,
    UnitWritten,
    WorkerReady,
    WorkerSetup,
)
from morph.contract.plan import Plan
from morph.contract.salvage import counted_in
from morph.jobs.snapshot import collect, pack
from morph.runtime.groups.store import StoreHost
from morph.runtime.pre_copy.lane import PreCopyLane
from morph.runtime.pre_copy.wire import Frame
from tests.device.worker_device import HERE, use_fake_device
from tests.system.harness import TinyJob
from tests.waiting import ANSWER_S, poll_until

FORKS = multiprocessing.get_context("forkserver")
"""Imports what a worker needs once: a member is there at once, where a process of its own would import for seconds."""
FORKS.set_forkserver_preload(["tests.runtime.ready_to_fork"])
LOOPBACK = "127.0.0.1"
SETUP_S = 300.0
END_S = 60.0


@dataclass(frozen=True)
class Footprint:
    """What a worker's process holds of the kernel."""

    num_threads: int
    num_descriptors: int


def _fixed(exponent: int, _num_contributions: int) -> int:
    return exponent


def _arm(worker: Any, faults: tuple[Fault, ...], slow_s: float) -> None:
    """Add faults to a worker's. From now on it computes nothing while a copy of its sums is on its way.

    ``slow_s``: instead, for so long each unit's state is on its way to a follower.
    """
    plan, computes = worker._faults, threading.main_thread()

    def reach(phase: str, step: int | None = None) -> None:
        stream = worker._following._outgoing
        if slow_s and phase in ("send_ahead", "receive_ahead"):
            time.sleep(slow_s)
        elif not slow_s and stream is not None and threading.current_thread() is computes:
            if stream._connection is not None:  # what came before is taken in when this arrives, not when it has left
                stream._put(Frame({"kind": "follows"}, {}), 0)
            deadline_s = time.monotonic() + END_S
            while stream.error is None and (stream._queue or stream._sending) and time.monotonic() < deadline_s:
                time.sleep(0.001)
        type(plan).reach(plan, phase, step)

    plan._faults += faults
    plan.reach = reach


def _num_copied(worker: Any, sender: str, step: int) -> int:
    """How many micro-batches of a step are in the copy of another worker's sums that a worker has."""
    of, parts = worker._following._copies.get(sender, (-1, []))
    return max(
        (mask.bit_count() for part in parts for mask in counted_in(part.total).values() if of == step), default=0
    )


def _data_workers(worker: Any) -> tuple[tuple[int, ...], int]:
    """Wait until a worker's data workers can read; returns their ids, and how many micro-batches it has read itself."""
    workload = worker._workload
    found, loader = workload._data_workers, workload._loader
    if found is None:
        return (), 0
    poll_until(lambda: found._hear(0.0) or all(reader.ready for reader in found._readers), "data workers")
    if not hasattr(loader, "num_own"):
        loader.num_own, samples_of = 0, loader._load_samples

        def counted(place: tuple[int, int]) -> Any:
            loader.num_own += 1
            return samples_of(place)

        loader._load_samples = counted
    return found.pids, loader.num_own


def _serve(orders: Connection, control: Connection) -> None:
    """Body of a worker's process: orders in this thread, control in another."""
    from morph.runtime.process.worker import Worker, set_up
    from morph.runtime.state import unit_state

    workers: list[Worker] = []
    first_exponent = unit_state.first_exponent

    def footprint() -> Footprint:
        return Footprint(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))  # noqa: PTH208

    def serve_control() -> None:
        commands: dict[str, Callable[..., Any]] = {
            "abort": lambda generation: workers[-1].abort(generation),
            "heartbeat": lambda wait_s: workers[-1].heartbeat(wait_s),
            "ahead": lambda order: workers[-1].ahead(order),
            "footprint": footprint,
            "arm": lambda faults, slow_s: _arm(workers[-1], faults, slow_s),
            "counted": lambda: getattr(workers[-1]._sums._running, "_num_counted", 0),
            "copied": lambda sender, step: _num_copied(workers[-1], sender, step),
            "ends": lambda: [type(one).__name__ for one in workers[-1]._generation.mailboxes.values()],  # type: ignore[union-attr]
            "staged_bytes": lambda: 0 if HERE.device is None else HERE.device.copied_bytes,
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
        if name == "setup":  # a worker is set up once in its life
            for before in workers:
                if before._generation is not None:  # else the collector of garbage waits for what its groups still do
                    before._reaper.reap(before._generation.groups)
                if beside := getattr(before._workload, "_data_workers", None):
                    beside.close()
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
        """Give an order; ``answer`` has its result."""
        self.orders.send((method, arguments))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """The answer to the order given last, within ``timeout_s``."""
        return _receive(self.orders, f"an answer of {self.name}", timeout_s)

    @property
    def has_answered(self) -> bool:
        """Whether ``answer`` has something to return."""
        return self.orders.poll()

    def control(self, command: str, *arguments: object) -> Any:
        """Run a command on the control lane."""
        with self._in_use:
            self._control.send((command, arguments))
            return _receive(self._control, f"{self.name}'s control lane", ANSWER_S)

    def stop(self) -> None:
        """Stop the process, as a machine that hangs: its connections stay open."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a stopped process go on."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join(END_S)
        self.process.close()
        self.orders.close()
        self._control.close()


def _receive(connection: Connection, what: str, timeout_s: float) -> Any:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"waited {timeout_s:g} s for {what}")
    return connection.recv()


def wait_for_updates(lane: PreCopyLane, most: int) -> None:
    """Wait until no more updates than so many are still to leave: a stream that falls behind by more is given up."""
    poll_until(lambda: all(stream._unsent_updates <= most for stream in lane._outgoing), "updates to leave")


class Crew:
    """Some workers and what a controller knows of them: generation, decided version, who holds which unit."""

    def __init__(self, job: TinyJob, names: Sequence[str]) -> None:
        self.job = job
        self.members = {name: Member(name) for name in names}
        self.store = StoreHost(LOOPBACK)
        self.generation = 0
        self.version = 0
        self.plan: Plan | None = None
        self.formed: ReshapeOrder | None = None
        self.slots: tuple[Slot, ...] = ()
        self.held: dict[str, frozenset[str]] = {}
        self.losses: list[float] = []
        self._directory = Path()

    def set_up(
        self,
        job_path: str,
        fingerprint: str,
        directory: Path,
        faults: tuple[Fault, ...] = (),
        device: Literal["cpu", "cuda"] = "cpu",
        rings: RingSetting = "gloo",
        links: LinkSetting = "staged",
    ) -> None:
        """Begin anew with this job and checkpoint directory: no state, version 0."""
        code = pack(job_path, collect(job_path))
        for member in self.members.values():
            setup = WorkerSetup(
                worker=member.name,
                job_path=job_path,
                fingerprint=fingerprint,
                num_sections=self.job.num_sections,
                micro_batch_size=self.job.micro_batch_size,
                checkpoint_url=str(directory),
                store_host=LOOPBACK,
                store_port=self.store.port(),
                listen_host=LOOPBACK,
                secret="of the run",
                faults=faults,
                device=device,
                rings=rings,
                links=links,
                code=code,
            )
            member.send("setup", setup)
        for member in self.members.values():
            answer = member.answer(SETUP_S)
            assert isinstance(answer, WorkerReady), answer
        self._directory = directory
        self.begin()

    def begin(self) -> None:
        """Forget every state: the next reshape makes it anew from the job's seed."""
        self.version, self.held, self.losses = 0, {}, []

    def order(
        self, shape: str, workers: Sequence[str], restore: str = "initial", version: int | None = None
    ) -> ReshapeOrder:
        """The order that forms the next generation of ``workers``; ``version``: not the decided one."""
        self.generation += 1
        self.version = self.version if version is None else version
        self.plan = self.job.plan(shape)
        held = {name: units for name, units in self.held.items() if name in self.members}
        needed = units_by_stage(self.plan, self.job.units)
        sizes = dict.fromkeys(self.job.units, 1)
        self.slots = place(self.plan, list(workers), held, needed, sizes)
        sources = choose_sources(self.slots, needed, held, sizes, restore)
        return ReshapeOrder(
            generation=self.generation, version=self.version, plan=self.plan, slots=self.slots, sources=sources
        )

    def reshape(
        self, shape: str, workers: Sequence[str], restore: str = "initial", version: int | None = None
    ) -> list[Reshaped]:
        """Form a generation, and return the answers of all who took part."""
        order = self.order(shape, workers, restore, version)
        taking_part = dict.fromkeys([slot.worker for slot in order.slots])
        taking_part |= dict.fromkeys(source.peer for source in order.sources if source.peer)
        answers = self.ask(taking_part, "reshape", order)
        assert all(isinstance(answer, Reshaped) for answer in answers), answers
        self.hold()
        return answers

    def hold(self) -> None:
        """Everybody of the present generation holds the units of its stage, and nobody else anything."""
        assert self.plan is not None
        needed = units_by_stage(self.plan, self.job.units)
        self.held = {slot.worker: frozenset(needed[slot.stage]) for slot in self.slots}

    def ask(self, workers: Iterable[str], method: str, order: object) -> list[Any]:
        """Give several workers the same order, and collect their answers."""
        asked = [self.members[name] for name in workers]
        for member in asked:
            member.send(method, order)
        return [member.answer() for member in asked]

    @property
    def present(self) -> list[str]:
        """The workers of the present generation."""
        return [slot.worker for slot in self.slots]

    def prepare(self) -> int:
        """Run the next step up to its reduced gradients, with as many attempts as it needs; returns their number."""
        for attempt in range(8):
            order = StepOrder(generation=self.generation, step=self.version, attempt=attempt)
            answers = self.ask(self.present, "step", order)
            assert all(isinstance(answer, Prepared) for answer in answers), answers
            if not any(answer.overflowed for answer in answers):
                losses = {entry.micro_batch: entry.loss for answer in answers for entry in answer.losses}
                assert self.plan is not None
                assert sorted(losses) == list(range(self.plan.num_micro_batches))
                self.losses.append(sum(losses[index] for index in sorted(losses)) / len(losses))
                return attempt + 1
        raise AssertionError(f"step {self.version} overflowed 8 times")

    def train(self, until: int) -> None:
        """Run and decide steps until the decided version is ``until``."""
        while self.version < until:
            self.prepare()
            self.version += 1

    def save(self, *, held: bool = False) -> Manifest:
        """Commit the decided version, and write every unit of it once; ``held``: whatever became of the generation."""
        assert self.plan is not None
        self.generation += held
        needed = units_by_stage(self.plan, self.job.units)
        writers = share_units(self.slots, needed, dict.fromkeys(self.job.units, 1))
        for name in self.present:
            mine = tuple(unit for unit, writer in writers.items() if writer == name)
            order = CommitOrder(generation=self.generation, version=self.version, checkpoint_units=mine, held=held)
            self.members[name].send("commit", order)
        for name in self.present:
            answer = self.members[name].answer()
            assert isinstance(answer, Committed), answer
        written: dict[str, UnitWritten] = {}
        deadline_s = time.monotonic() + ANSWER_S
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
        """sha256 of every unit at the decided version."""
        return {entry.unit: entry.sha256 for entry in self.save(held=held).units}

    def close(self) -> None:
        """End every process."""
        for member in self.members.values():
            member.end()
