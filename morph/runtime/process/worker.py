"""The worker: one long-lived process that drives one device and carries out the manager's orders.

It knows nothing of Ray. ``set_up`` makes it. Then the manager calls ``reshape``, ``step`` and ``commit`` one at a
time (the order lane), and ``abort`` and ``heartbeat`` in parallel (the control lane).

After an aborted generation, a worker keeps every unit it held until the first step or commit
of a *later* generation arrives, so a failed reshape loses nothing. A worker keeps everything when its manager
ends; orders and setups that the successor repeats are answered again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Store

from morph.contract.decided import Decided
from morph.contract.errors import (
    ClusterError,
    GenerationAborted,
    JobError,
    NonFiniteGradient,
    PeerLost,
    WaitTimeout,
)
from morph.contract.messages import (
    Aborted,
    CommitOrder,
    Committed,
    Failed,
    Heartbeat,
    NamedSamples,
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
from morph.runtime.device.devices import check_kernels
from morph.runtime.device.link_choice import form_on_devices
from morph.runtime.device.staging import staging_for
from morph.runtime.followers.known_sums import KnownSums
from morph.runtime.followers.lane import FollowerLane
from morph.runtime.groups.channels import Carrier, GroupSet, KeptConnections, connect_store
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.reaper import Reaper
from morph.runtime.groups.topology import Topology, move_name, slot_of, topology
from morph.runtime.pre_copy.lane import PreCopyLane
from morph.runtime.pre_copy.state_moves import MoveContext, send_in_background, take_sums, take_units
from morph.runtime.process.blame import failed
from morph.runtime.process.order_memory import OrderMemory, order_key
from morph.runtime.state.accumulators import finish_all
from morph.runtime.state.checkpoint_writer import CheckpointWriter
from morph.runtime.state.unit_state import UnitState, apply_all, norms_sq
from morph.runtime.step.generation import Generation
from morph.runtime.step.pace import Pace, Prober
from morph.runtime.workloads.workload import load_workload
from morph.words import numbers_told

_WAIT_S = 30.0
_LOOK_S = 0.1


def take_slot(slots: Sequence[str], wait_s: float = _WAIT_S) -> int | None:
    """Lock one of these files and let this process see only that device; the lock ends with the process.

    The files are tried in this order, and each is named after its device; without files, nothing is taken. The process
    must not have used CUDA before. A process that just died may still hold a lock, so this waits up to ``wait_s``.
    Returns the descriptor of the locked file, which a worker never closes.
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
            raise ClusterError(f"waited {wait_s:g} s for a share of a device: all {len(slots)} are taken")
        time.sleep(_LOOK_S)
    return None


log = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT")


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
    """A worker that is set up; see the module's docstring.

    ``setup`` comes without the parts that are used once: variables and the code's archive. ``folders``: the folder of
    the job's files here, and the user's folder. ``start_s``: when its setup began, by ``time.perf_counter``.
    """

    def __init__(self, setup: WorkerSetup, folders: tuple[str, str], start_s: float) -> None:
        self._setup, self._folders = setup, folders
        self._interrupt = Interrupt(0)
        self._aborted_generation = 0
        self._generation: Generation | None = None
        self._held: dict[str, UnitState] = {}
        self._reaper = Reaper()
        self._pace = Pace()
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
        self._followers = FollowerLane(setup, self._workload, self._faults, self._borrow_store)
        self._sums = KnownSums(setup.worker, self._followers, self._faults)
        self._pre_copy = PreCopyLane(setup, self._workload, self._faults, self._borrow_store, self._writer.wake)
        took_s = time.perf_counter() - start_s
        evaluation, epochs = self._workload.evaluation, self._workload.epochs
        self.ready = WorkerReady(
            worker=setup.worker, pid=os.getpid(), setup_s=took_s, evaluation=evaluation, epochs=epochs
        )

    # ---- order lane ----

    def setup(self, setup: WorkerSetup) -> WorkerReady | Failed:
        """Answer a manager that took over and sets up every worker: this worker is ready if it has the same code."""
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
        return self._once(order, lambda: self._step(order))

    def commit(self, order: CommitOrder) -> Committed | Aborted | Failed:
        """Apply the decided step and hand the requested units to the checkpoint writer."""
        return self._once(order, lambda: self._commit(order))

    def probe(self, order: ProbeOrder) -> Probed:
        """Time some work on sections that the worker need not hold; its state does not change."""
        try:
            self._faults.begin(order.step)
            sections = range(order.first_section, order.end_section)
            return self._prober.run(order, self._workload.probe(sections, self._held, self._faults))
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
                "times": self._pace.collect(),
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
        """Carry out an order; a repeated one is answered again, and its units are written if they were not."""
        key = order_key(order)
        if self._orders.is_late(key):
            detail = "a later order came before this one"
            return self._aborted(order.generation, detail, peer_lost=False)
        current = self._generation
        is_known = self._orders.is_known(key) and current is not None and current.order.generation == key.generation
        if is_known and current is not None and not isinstance(order, ReshapeOrder):
            at_version = (unit for unit in order.checkpoint_units if current.units[unit].version == key.version)
            missing = tuple(unit for unit in at_version if not self._writer.has(key.version, unit))
            self._hand_over(current.units, missing, order.earlier_checkpoints)
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
            self._sums.drop()  # a micro-batch may be in some of the sums but not in others
            return self._failed(generation, error)

    def _aborted(self, generation: int, detail: str, *, peer_lost: bool) -> Aborted:
        return Aborted(
            worker=self._setup.worker,
            generation=generation,
            peer_lost=peer_lost,
            detail=detail,
            kept=self._sums.told(),
        )

    def _failed(self, generation: int, error: Exception) -> Failed:
        return _failed(self._setup.worker, generation, error, self._folders)

    def _reshape(self, order: ReshapeOrder) -> Reshaped:
        start_s = time.perf_counter()
        self._faults.begin(order.version)
        if self._generation is not None:
            self._reaper.reap(self._generation.groups)
            self._generation = None
        if order.keep_sums:
            self._sums.keep(order.version)
        else:  # the new shape has no room for them
            self._sums.drop()
        like = order.version if order.decided is None or order.decided.state_of is None else order.decided.state_of
        self._held = {**self._followers.in_step(like), **self._held}
        self._followers.end()
        self._pre_copy.keep(order)
        self._writer.forget_after(order.version)
        self._roll_forward(self._held, order.version, order.decided)
        for state in self._held.values():
            state.drop_step()  # it was not decided
            if state.version == like:
                state.version = order.version
        interrupt = self._interrupt = Interrupt(order.generation, order.limit_s)
        if order.generation <= self._aborted_generation:
            interrupt.abort()  # the abort came between the check and the new interrupt
        self._faults.reach("reshape")
        self._release()  # memory of the previous shape, which another process may need for its part of this one
        layout = topology(order, self._workload.units)
        groups = GroupSet(interrupt)
        try:
            return self._join(order, layout, groups, start_s)
        except Exception:
            self._reaper.reap(groups)
            raise
        finally:
            self._pre_copy.end()

    def _join(self, order: ReshapeOrder, layout: Topology, groups: GroupSet, start_s: float) -> Reshaped:
        setup, interrupt = self._setup, self._interrupt
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
            held={name: self._workload.adopt(state) for name, state in self._held.items()},
            make_unit=lambda unit, empty: self._workload.make_unit(unit, order.plan.num_micro_batches, empty=empty),
            channel=lambda sender, receiver: self._move_channel(groups, order.generation, sender, receiver),
            adopt=lambda unit: self._pre_copy.adopt(unit, order.version, interrupt),
            interrupt=interrupt,
            host_copy=self._writer.copy,
            salvage=order.salvage,
            sums=self._sums.parts,
            rules=setup.checkpoints,
        )
        sent = send_in_background(order.sources, context, interrupt)
        units, received_bytes = take_units(order.sources, context)
        received, sums_bytes = take_sums(context)
        sent()
        self._sums.add(received)
        self._pre_copy.flush(interrupt)
        at_version = {name: state for name, state in self._held.items() if state.version == order.version}
        self._held = {**at_version, **units}
        self._followers.begin(order, at_version)
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

    def _release(self) -> None:
        """Return unused device and pinned memory of this process to other processes."""
        staging = staging_for(torch.device(self._setup.device))
        if staging is not None:
            self._interrupt.call(staging.device.release, "the device to return memory")

    def _move_channel(self, groups: GroupSet, generation: int, sender: str, receiver: str) -> Carrier:
        channel = groups.channel(move_name(generation, sender, receiver), sender)
        return self._workload.incoming_state(channel, self._interrupt) if receiver == self._setup.worker else channel

    def _roll_forward(self, units: dict[str, UnitState], version: int, decided: Decided | None) -> None:
        """Apply the held gradients of the step before ``version`` as decided, if that step was decided."""
        assert decided is None or decided.version == version
        due = {
            name: state for name, state in units.items() if state.version == version - 1 and state.reduced is not None
        }
        self._pre_copy.pass_on(due, decided)
        self._followers.pass_on(due, decided)
        apply_all(due.values(), decided)

    def _enter(self, generation: int, version: int, decided: Decided | None) -> Generation:
        """Return the current generation with every unit at ``version``; release state that it does not use."""
        current = self._generation
        assert current is not None
        assert current.order.generation == generation
        self._sums.forget_before(version)
        before, self._held = set(self._held), {**self._followers.in_step(version), **current.units}
        if before - self._held.keys():  # other workers have these units now
            self._release()
        self._roll_forward(self._held, version, decided)
        for name, state in current.units.items():
            assert state.version == version, f"unit {name} is at version {state.version}, not {version}"
        return current

    def _step(self, order: StepOrder) -> Prepared:
        self._faults.begin(order.step)
        self._faults.reach("after_commit")
        current = self._enter(order.generation, order.step, order.decided)
        self._faults.reach("applied")
        self._hand_over(current.units, order.checkpoint_units, order.earlier_checkpoints)
        self._pre_copy.begin_step(self._held)
        self._followers.begin_step(current.units)
        for state in current.units.values():
            if state.reduced is not None and state.reduced.overflowed:
                state.rescale(state.reduced)
            state.reduced = None
        if order.attempt:
            for name in self._held.keys() - current.units.keys():
                self._held[name].reduced = None  # the previous attempt's gradients, even if the next attempt has none
        finished = None if order.evaluated is None else self._workload.finish(order.evaluated)
        evaluation = self._workload.evaluate(current, order.step)
        beside: dict[str, object] = {"evaluation": evaluation, "finished": finished}
        if order.samples_of is not None:
            samples = self._workload.samples_of(order.samples_of)
            beside["named"] = NamedSamples(step=order.samples_of, samples=samples)
        return self._run_step(current, order).model_copy(update=beside)

    def _run_step(self, current: Generation, order: StepOrder) -> Prepared:
        assert current.slot is not None
        units = current.units
        sums = self._sums.begin(current, order)
        executor = self._workload.executor(current, order, self._faults)
        assert all(state.loss_scale == order.loss_scale for state in units.values()), "another loss scale is ordered"
        executor.stopwatch.finished = partial(self._pace.note, order.generation)
        executor.run(sums, 1.0 if order.loss_scale is None else order.loss_scale.factor)
        self._workload.reduce(current, sums, executor)
        executor.finish()
        try:
            means = finish_all(sums.accumulators, current.num_micro_batches(order), order.step)
        except NonFiniteGradient as error:
            raise NonFiniteGradient(f"{error}{_of_samples(self._workload.samples_of(order.step))}") from error
        for name, reduced in means.items():
            units[name].reduced = reduced
        norms = norms_sq(units)
        rates = [rate for state in units.values() for rate in state.learning_rates]
        followed = self._followers.share(units, current.interrupt)
        self._faults.reach("before_commit")
        answer = Prepared(
            worker=self._setup.worker,
            generation=order.generation,
            step=order.step,
            attempt=order.attempt,
            overflowed=any(state.reduced.overflowed for state in units.values() if state.reduced),
            unit_norms_sq=norms,
            non_finite=any(state.reduced.non_finite for state in units.values() if state.reduced),
            followed=followed,
            losses=tuple(sums.losses.values()),
            learning_rates=(min(rates), max(rates)) if rates else None,
            times=executor.stopwatch.times(),
            timeline=current.timeline(order.step, executor) if order.record_timeline else None,
        )
        self._followers.settle(order.step, current.interrupt)
        return answer

    def _commit(self, order: CommitOrder) -> Committed:
        self._faults.begin(order.version)
        if order.held:
            return self._commit_held(order)
        current = self._enter(order.generation, order.version, order.decided)
        self._hand_over(current.units, order.checkpoint_units, order.earlier_checkpoints)
        evaluated = order.evaluated
        again = evaluated is not None and evaluated.version == order.version
        return Committed(
            worker=self._setup.worker,
            generation=order.generation,
            version=order.version,
            evaluation=None if again else self._workload.evaluate(current, order.version),
            finished=None if evaluated is None else self._workload.finish(evaluated),
        )

    def _commit_held(self, order: CommitOrder) -> Committed:
        """Write the state that this worker holds, even if the generation in which it got that state has ended."""
        self._held = {**self._followers.in_step(order.version), **self._held}
        self._followers.end()
        self._roll_forward(self._held, order.version, order.decided)
        for state in self._held.values():
            state.drop_step()  # it was not decided
        for name in order.checkpoint_units:
            assert self._held[name].version == order.version, f"unit {name} is at version {self._held[name].version}"
        self._hand_over(self._held, order.checkpoint_units, order.earlier_checkpoints)
        return Committed(worker=self._setup.worker, generation=order.generation, version=order.version)

    def _hand_over(self, units: dict[str, UnitState], names: tuple[str, ...], earlier: tuple[int, ...]) -> None:
        for name in names:
            self._writer.hand_over(units[name].version, name, units[name].copy_later(), earlier)


def _of_samples(samples: Sequence[int]) -> str:
    return f"; the samples of the step: {numbers_told(samples)}" if samples else ""


def _failed(worker: str, generation: int, error: Exception, folders: tuple[str, str]) -> Failed:
    log.exception("order failed")
    return failed(worker, generation, error, folders)
