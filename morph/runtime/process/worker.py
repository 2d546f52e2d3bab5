"""The worker: one long-lived process that drives one device and carries out the manager's orders.

It knows nothing of Ray. ``set_up`` creates it. Then the manager calls ``reshape``, ``step`` and ``commit`` one at a
time (the order lane), and ``abort`` and ``heartbeat`` in parallel (the control lane).

After an aborted generation, a worker keeps every unit it held until the first step or commit of a *later* generation
arrives, so a failed reshape loses nothing. When its manager ends, a worker keeps everything; if the next manager
repeats an order or a setup, the worker gives its answer again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch._C._distributed_c10d import Store

from morph.contract.errors import (
    ClusterError,
    GenerationAborted,
    JobError,
    PeerLost,
    WaitTimeout,
)
from morph.contract.messages import (
    Aborted,
    CommitOrder,
    Committed,
    Failed,
    Heartbeat,
    PreCopyOrder,
    Prepared,
    Probed,
    ProbeOrder,
    Reshaped,
    ReshapeOrder,
    StepOrder,
    WorkerReady,
    WorkerSetup,
)
from morph.jobs.files import split_job
from morph.jobs.snapshot import use
from morph.runtime.attendants.checkpoint_writer import CheckpointWriter
from morph.runtime.attendants.followers import FollowerLane
from morph.runtime.attendants.pre_copies import PreCopyLane
from morph.runtime.attendants.wire import StreamContext
from morph.runtime.device.devices import check_kernels
from morph.runtime.device.link_choice import form_on_devices
from morph.runtime.device.staging import release_unused
from morph.runtime.groups.channels import Carrier, GroupSet, KeptConnections, connect_store
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.reaper import Reaper
from morph.runtime.groups.topology import Topology, move_name, slot_of, topology
from morph.runtime.process.blame import failed
from morph.runtime.process.prober import Prober
from morph.runtime.reshape.moves import MoveContext, send_in_background, take_sums, take_units
from morph.runtime.step.generation import Generation
from morph.runtime.step.training_step import Training
from morph.runtime.workloads.workload import load_workload

log = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT")
_WAIT_S = 30.0
_LOOK_S = 0.1


def take_slot(slots: Sequence[str], wait_s: float = _WAIT_S) -> int | None:
    """Lock one of these files, each named after a device, and let this process see that device alone; return the file.

    Without files, nothing is locked. The process must not have used CUDA before. The wait, of up to ``wait_s``, is for
    a process that is ending but still holds its lock.
    """
    deadline_s = time.monotonic() + wait_s
    while slots:
        for slot in map(Path, slots):
            slot.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(slot, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            os.environ["CUDA_VISIBLE_DEVICES"] = slot.name
            return file
        if time.monotonic() >= deadline_s:
            raise ClusterError(f"waited {wait_s:g} s for a share of a device: all {len(slots)} shares are taken")
        time.sleep(_LOOK_S)
    return None


class OrderKey(NamedTuple):
    """The identity of an order: equal for a repeated order, and larger for each new order of a worker."""

    generation: int
    version: int
    rank: int
    attempt: int


def order_key(order: ReshapeOrder | StepOrder | CommitOrder) -> OrderKey:
    """Return the identity of an order. A version may be committed before the step that starts from it."""
    match order:
        case ReshapeOrder():
            return OrderKey(order.generation, order.version, 0, 0)
        case CommitOrder():
            return OrderKey(order.generation, order.version, 1, order.evaluated.version if order.evaluated else 0)
        case StepOrder():
            return OrderKey(order.generation, order.step, 2, order.attempt)


class OrderMemory:
    """A worker's last order and its answer, for a manager that takes over and repeats the order.

    Orders are carried out one at a time, so a repeated order waits until the original is done.
    """

    def __init__(self) -> None:
        self._newest: OrderKey | None = None
        self._answer: object = None

    def is_late(self, key: OrderKey) -> bool:
        """Return whether a newer order has come already; if so, nobody waits for the answer to this one."""
        return self._newest is not None and key < self._newest

    def is_known(self, key: OrderKey) -> bool:
        """Return whether exactly this order was carried out."""
        return key == self._newest

    def carried_out(self, key: OrderKey, work: Callable[[], AnswerT]) -> AnswerT:
        """Return the answer to an order: the remembered one, or the result of carrying it out now."""
        if key != self._newest:
            self._answer, self._newest = work(), key
        return self._answer  # type: ignore[return-value]  # of the same kind of order


def set_up(setup: WorkerSetup) -> Worker | Failed:
    """Take a device, load the job and cut its model; this takes seconds, once in the life of a process."""
    start_s = time.perf_counter()
    folders = ("", "")
    try:
        torch.set_num_threads(setup.num_threads)
        os.environ.update(setup.variables)
        take_slot(setup.device_slots)
        check_kernels(torch.device(setup.device))
        setup = setup.model_copy(update={"variables": {}})
        if setup.code is not None:
            job_path = use(setup.code)
            folders = (str(Path(split_job(job_path)[0]).parent), setup.code.folder)
            known = setup.code.model_copy(update={"archive": b""})
            setup = setup.model_copy(update={"job_path": job_path, "code": known})
        return Worker(setup, folders, start_s)
    except Exception as error:
        return _failed(setup.worker, 0, error, folders)


class Worker:
    """A worker that is set up. ``start_s``: when setting up began, by ``time.perf_counter``.

    ``setup``: without its variables and the code's archive. ``folders``: the folder of the job's files on this machine,
    and on the user's.
    """

    def __init__(self, setup: WorkerSetup, folders: tuple[str, str], start_s: float) -> None:
        self._setup, self._folders = setup, folders
        self._interrupt = Interrupt(0)
        self._aborted_generation = 0
        self._generation: Generation | None = None
        self._reaper = Reaper()
        self._prober = Prober(setup.worker)
        self._orders = OrderMemory()
        self._faults = FaultPlan(
            [fault for fault in setup.faults if fault.worker == setup.worker],
            [spell for spell in setup.slow_spells if spell.worker == setup.worker],
        )
        self._workload = load_workload(setup)
        self._writer = CheckpointWriter(
            setup.worker, setup.checkpoint_url, self._faults, setup.checkpoints, on_processor=setup.device == "cpu"
        )
        self._writer.lease = setup.lease
        self._connections = KeptConnections(setup.store_host, setup.store_port, setup.secret)
        if setup.store_port:
            self._connections.prepare()
        streams = StreamContext(
            worker=setup.worker,
            secret=setup.secret,
            listen_host=setup.listen_host,
            open_store=self._borrow_store,
            faults=self._faults,
        )
        self._followers = FollowerLane(streams, self._workload)
        self._pre_copy = PreCopyLane(streams, self._workload, self._writer.wake)
        self._attendants = (self._writer, self._pre_copy, self._followers, *self._workload.attendants)
        self._training = Training(
            setup.worker, torch.device(setup.device), self._workload, self._attendants, self._faults
        )
        took_s = time.perf_counter() - start_s
        evaluation, epochs = self._workload.evaluation, self._workload.epochs
        self.ready = WorkerReady(
            worker=setup.worker, pid=os.getpid(), setup_s=took_s, evaluation=evaluation, epochs=epochs
        )

    # ---- order lane ----

    def setup(self, setup: WorkerSetup) -> WorkerReady | Failed:
        """Answer a manager that took over and sets up every worker again: ready, if this worker has the same code."""
        if setup.code is not None and (self._setup.code is None or setup.code.sha256 != self._setup.code.sha256):
            error = JobError("is not the code with which this worker was set up", source=setup.code.job_path)
            return self._failed(0, error)
        self._writer.lease = setup.lease
        return self.ready

    def reshape(self, order: ReshapeOrder) -> Reshaped | Aborted | Failed:
        """Join a new generation: form its groups and bring the slot's units to its version."""
        return self._once(order, lambda: self._reshape(order))

    def step(self, order: StepOrder) -> Prepared | Aborted | Failed:
        """Apply the decided step, then run one step up to its reduced gradients."""
        return self._once(order, lambda: self._training.step(self._current(order.generation), order))

    def commit(self, order: CommitOrder) -> Committed | Aborted | Failed:
        """Apply the decided step and hand the requested units to the checkpoint writer."""
        return self._once(order, lambda: self._commit(order))

    def probe(self, order: ProbeOrder) -> Probed:
        """Time some work on sections that the worker need not hold; its state does not change."""
        try:
            self._faults.begin(order.step)
            sections = range(order.first_section, order.end_section)
            return self._prober.run(order, self._workload.probe(sections, self._training.held, self._faults))
        except Exception as error:
            error_text = f"{type(error).__name__}: {error}"
            return Probed(worker=self._setup.worker, probe=order.probe, error=error_text)

    # ---- control lane ----

    def abort(self, generation: int) -> None:
        """Dissolve every generation up to this one: a running order returns ``Aborted`` soon."""
        self._aborted_generation = max(self._aborted_generation, generation)
        if self._interrupt.generation <= generation:
            self._interrupt.abort()

    def leave_probe(self, probe: int) -> None:
        """End this probe soon, because an order waits for it."""
        self._prober.leave(probe)

    def heartbeat(self, wait_s: float) -> Heartbeat:
        """Return a proof of life; blocks up to ``wait_s``, but returns early when a checkpoint unit was written."""
        return self._writer.collect(wait_s).model_copy(
            update={
                "times": self._training.pace.collect(),
                "ahead": self._pre_copy.report(),
                "notes": self._workload.collect_notes(),
            }
        )

    def ahead(self, order: PreCopyOrder) -> None:
        """Begin to send or receive pre-copies before a planned change; returns at once."""
        try:
            self._pre_copy.take(order)
        except Exception as error:  # no port to listen on, no thread, or an unexpected error
            log.warning("nothing is pre-copied: %s: %s", type(error).__name__, error)

    def tell_again(self) -> None:
        """Report checkpoint units again, because there may be another manager."""
        self._writer.tell_again()

    # ---- inside ----

    def _borrow_store(self) -> AbstractContextManager[Store]:
        return self._connections.borrow(self._interrupt.limit_s)

    def _open_store(self) -> Store:
        """Return a separate connection for device groups: libraries may keep it for a whole generation."""
        setup = self._setup
        return connect_store(setup.store_host, setup.store_port, setup.secret, self._interrupt.limit_s)

    def _once(
        self, order: ReshapeOrder | StepOrder | CommitOrder, work: Callable[[], AnswerT]
    ) -> AnswerT | Aborted | Failed:
        """Carry out an order; a repeated order gets the same answer, and its units are written if they were not."""
        key = order_key(order)
        if self._orders.is_late(key):
            detail = "a later order came before this one"
            return self._aborted(order.generation, detail, peer_lost=False)
        current = self._generation
        is_known = self._orders.is_known(key) and current is not None and current.order.generation == key.generation
        if is_known and current is not None and not isinstance(order, ReshapeOrder):
            at_version = (unit for unit in order.checkpoint_units if current.units[unit].version == key.version)
            missing = tuple(unit for unit in at_version if not self._writer.has(key.version, unit))
            self._writer.hand_over_units(current.units, missing, order.earlier_checkpoints)
        return self._orders.carried_out(key, lambda: self._carry_out(order.generation, work))

    def _carry_out(self, generation: int, work: Callable[[], AnswerT]) -> AnswerT | Aborted | Failed:
        try:
            if generation <= self._aborted_generation:
                raise GenerationAborted(f"generation {generation} was aborted before the order arrived")
            return work()
        except GenerationAborted as error:
            return self._aborted(generation, str(error), peer_lost=False)
        except (PeerLost, WaitTimeout) as error:
            self._interrupt.lose(str(error))  # the operation that timed out is still under way: its groups are broken
            return self._aborted(generation, str(error), peer_lost=True)
        except Exception as error:
            self._interrupt.lose(str(error))  # operations with peers are still under way
            self._training.sums.drop()  # a micro-batch may be in some of the sums but not in others
            return self._failed(generation, error)

    def _aborted(self, generation: int, detail: str, *, peer_lost: bool) -> Aborted:
        return Aborted(
            worker=self._setup.worker,
            generation=generation,
            peer_lost=peer_lost,
            detail=detail,
            kept=self._training.sums.told(),
        )

    def _failed(self, generation: int, error: Exception) -> Failed:
        return _failed(self._setup.worker, generation, error, self._folders)

    def _current(self, generation: int) -> Generation:
        assert self._generation is not None
        assert self._generation.order.generation == generation
        return self._generation

    def _reshape(self, order: ReshapeOrder) -> Reshaped:
        start_s = time.perf_counter()
        training = self._training
        self._faults.begin(order.version)
        if self._generation is not None:
            self._reaper.reap(self._generation.groups)
            self._generation = None
        if order.keep_sums:
            training.sums.keep(order.version)
        else:  # the new shape has no room for them
            training.sums.drop()
        like = order.version if order.decided is None or order.decided.state_of is None else order.decided.state_of
        training.hand_in(like)
        for attendant in self._attendants:
            attendant.before_reshape(order)
        training.roll_forward(order.version, order.decided)
        for state in training.held.values():
            state.drop_step()  # it was not decided
            if state.version == like:
                state.version = order.version
        interrupt = self._interrupt = Interrupt(order.generation, order.limit_s)
        if order.generation <= self._aborted_generation:
            interrupt.abort()  # the abort came between the check and the new interrupt
        self._faults.reach("reshape")
        # memory of the previous shape, which another process may need for its part of the new shape
        release_unused(torch.device(self._setup.device), interrupt)
        layout = topology(order, self._workload.units)
        groups = GroupSet(interrupt)
        try:
            return self._join(order, layout, groups, start_s)
        except Exception:
            self._reaper.reap(groups)
            raise
        finally:
            for attendant in self._attendants:
                attendant.end_reshape()

    def _join(self, order: ReshapeOrder, layout: Topology, groups: GroupSet, start_s: float) -> Reshaped:
        setup, interrupt, training = self._setup, self._interrupt, self._training
        connections = self._connections.lend(interrupt.limit_s)
        groups.form(layout.groups, setup.worker, setup.listen_host, connections.open)
        connections.give_back()
        links = form_on_devices(setup, layout, groups, interrupt, self._open_store)
        formed_s = time.perf_counter()
        self._faults.reach("transfer")
        context = MoveContext(
            worker=setup.worker,
            version=order.version,
            checkpoint_url=setup.checkpoint_url,
            held={name: self._workload.adopt(state) for name, state in training.held.items()},
            make_unit=lambda unit, empty: self._workload.make_unit(unit, order.plan.num_micro_batches, empty=empty),
            channel=lambda sender, receiver: self._move_channel(groups, order.generation, sender, receiver),
            adopt=lambda unit: self._pre_copy.adopt(unit, order.version, interrupt),
            interrupt=interrupt,
            host_copy=self._writer.copy,
            salvage=order.salvage,
            sums=training.sums.parts,
            rules=setup.checkpoints,
        )
        sent = send_in_background(order.sources, context, interrupt)
        units, received_bytes = take_units(order.sources, context)
        received, sums_bytes = take_sums(context)
        sent()
        training.sums.add(received)
        at_version = {name: state for name, state in training.held.items() if state.version == order.version}
        for attendant in self._attendants:
            attendant.after_reshape(order, at_version, interrupt)
        training.held = {**at_version, **units}
        self._generation = Generation(
            order, slot_of(order.slots, setup.worker), layout, groups, interrupt, units, links
        )
        self._workload.take_place(self._generation)
        return Reshaped(
            worker=setup.worker,
            generation=order.generation,
            groups_s=formed_s - start_s,
            state_s=time.perf_counter() - formed_s,
            received_bytes=received_bytes + sums_bytes,
            loss_scale=next((state.loss_scale for state in units.values()), None),
        )

    def _move_channel(self, groups: GroupSet, generation: int, sender: str, receiver: str) -> Carrier:
        channel = groups.channel(move_name(generation, sender, receiver), sender)
        return self._workload.incoming_state(channel, self._interrupt) if receiver == self._setup.worker else channel

    def _commit(self, order: CommitOrder) -> Committed:
        self._faults.begin(order.version)
        if order.held:
            return self._commit_held(order)
        return self._training.commit(self._current(order.generation), order)

    def _commit_held(self, order: CommitOrder) -> Committed:
        """Write the state that this worker holds, even if the generation in which it got that state has ended."""
        training = self._training
        training.hand_in(order.version)
        training.roll_forward(order.version, order.decided)
        for state in training.held.values():
            state.drop_step()  # it was not decided
        for name in order.checkpoint_units:
            version = training.held[name].version
            assert version == order.version, f"unit {name} is at version {version}"
        self._writer.hand_over_units(training.held, order.checkpoint_units, order.earlier_checkpoints)
        return Committed(worker=self._setup.worker, generation=order.generation, version=order.version)


def _failed(worker: str, generation: int, error: Exception, folders: tuple[str, str]) -> Failed:
    log.exception("order failed")
    return failed(worker, generation, error, folders)
