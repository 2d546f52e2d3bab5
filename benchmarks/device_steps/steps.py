"""One worker's step of a real job, with the real executor, stage, sums, state and links, on shapes alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.device_steps.accelerator import ShapeDevice
from benchmarks.device_steps.counting import Counting, Counts, Numbers
from morph.contract.decided import Decided
from morph.contract.messages import ReshapeOrder, Slot, Source, StepOrder, WorkerSetup
from morph.contract.plan import Expectation, Plan, StagePlan
from morph.cutting.cache.cut_job import load_and_cut
from morph.runtime.device.staging import Staging
from morph.runtime.device.task_clock import HostClock
from morph.runtime.groups.channels import GroupSet, Ring
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.topology import topology, units_of_stage
from morph.runtime.process.worker import Worker
from morph.runtime.state.accumulators import Accumulator
from morph.runtime.state.reducing import Reduction
from morph.runtime.step.generation import Generation
from morph.runtime.workloads.job_workload import JobWorkload


@dataclass(frozen=True)
class Shape:
    """P x D, m and whether stages recompute."""

    pipeline_depth: int
    num_replicas: int
    micro_batch_size: int
    recompute: bool = False
    num_sections: int | None = None


class ArrivedWork:
    """What a collective returns that is over."""

    def get_future(self) -> torch.futures.Future[object]:
        """A future that is done."""
        future: torch.futures.Future[object] = torch.futures.Future()
        future.set_result(None)
        return future

    def wait(self, *_: object) -> bool:
        """At once."""
        return True


class ShapeGroup:
    """Stands for a process group: everything is there at once, and its bytes are counted by collective."""

    def __init__(self, counts: Counts, name: str, num_members: int) -> None:
        self._counts, self._name, self._num_members = counts, name, num_members

    def size(self) -> int:
        """How many members it has."""
        return self._num_members

    def rank(self) -> int:
        """The first."""
        return 0

    def __getattr__(self, collective: str) -> Any:
        return partial(self._run, collective)

    def _run(self, collective: str, *args: Any, **_: Any) -> ArrivedWork:
        """The first argument holds the tensors."""
        tensors = [entry for entry in _flat(args[:1]) if isinstance(entry, Tensor)]
        self._counts.wire_bytes[f"{self._name} {collective}"] += sum(tensor.nbytes for tensor in tensors)
        return ArrivedWork()


def _one_pass(counting: Counting, totals: Tensor, _exponent: int, _divisor: int, into: Tensor) -> None:
    """Count what the compiled loop in ``from_fixed`` reads and writes on the host, where it runs on real numbers."""
    assert not counting.is_on_device(totals), "means of a ring are worked out on the host"
    counting.counts.host_touched_bytes["reduce"] += totals.nbytes + into.nbytes


def _one_kernel(counting: Counting, total: Tensor, gradient: Tensor, _exponent: int, _largest: Tensor) -> None:
    """Count what the fused kernel behind ``add_fixed`` reads and writes: the gradient once, the sums twice."""
    counting.kernel(gradient.detach().reshape(-1).nbytes + 2 * total.nbytes)


def _flat(value: Any) -> list[Any]:
    return [leaf for entry in value for leaf in _flat(entry)] if isinstance(value, list | tuple) else [value]


class ShapeLoader:
    """Gives the same micro-batch each time, read from the data set before."""

    def __init__(self, mode: FakeTensorMode, batch: Mapping[str, Tensor]) -> None:
        self._batch = {key: mode.from_tensor(value) for key, value in batch.items()}

    def load(self, step: int, micro_batch: int, keys: Sequence[str]) -> dict[str, Tensor]:  # noqa: ARG002
        """See ``MicroBatchLoader.load``."""
        return {key: self._batch[key] for key in keys}


class _AtOnce:
    """In place of a staging's thread: a fake mode belongs to one thread."""

    def after(self, _event: object, then: Callable[[], None], _failed: object, _kept: object) -> None:
        then()


class _ReducedAtTheEnd(Reduction):
    """Reduces in the calling thread, to which a fake mode belongs."""

    def put(self, accumulator: Accumulator, ring: Ring | None) -> None:
        """See ``Reduction.put``."""
        with mock.patch("morph.runtime.state.reducing.threading.Thread"):
            super().put(accumulator, ring)

    def finish(self) -> None:
        """See ``Reduction.finish``."""
        self._is_complete = True
        self._run()
        super().finish()


class _NoFollowers:
    def share(self, *_: object) -> bool:
        return False

    def offer_sums(self, *_: object) -> None:
        pass

    def settle(self, *_: object) -> None:
        pass


class ShapeJob:
    """A job as its workers have it, on a device of shapes."""

    def __init__(self, job_path: str, shape: Shape) -> None:
        self.shape, self.device = shape, ShapeDevice()
        found = load_and_cut(job_path, num_sections=shape.num_sections, micro_batch_size=shape.micro_batch_size)
        self.model, self.job = found.model, found.job
        self._setup = WorkerSetup(
            worker="0/0",
            job_path=job_path,
            fingerprint=found.model.fingerprint,
            num_sections=len(found.model.sections),
            micro_batch_size=shape.micro_batch_size,
            checkpoint_url="nowhere",
            store_host="127.0.0.1",
            store_port=1,
            listen_host="127.0.0.1",
            device="cuda",
        )
        with mock.patch("morph.runtime.workloads.job_workload.prepare"):  # there is nothing to prepare
            self._workload = JobWorkload(self._setup)
        self._workload._device = self.device.kind  # a setup knows no other devices than real ones
        self._workload._clock = HostClock()  # shapes take no time
        keys = sorted({key for section in found.model.sections for key in section.batch_keys})
        self._batch = self._workload._loader.load(0, 0, keys)

    def stage_sections(self) -> list[range]:
        """The sections of each stage: as many of them each."""
        num, depth = len(self.model.sections), self.shape.pipeline_depth
        starts = [round(index * num / depth) for index in range(depth + 1)]
        return [range(start, end) for start, end in pairwise(starts)]

    def count(self, stage: int, num_micro_batches: int) -> Counts:
        """Count the second step of the first replica's worker on a stage; the first one makes what is kept."""
        shape, stages = self.shape, self.stage_sections()
        total = num_micro_batches * shape.num_replicas
        order = self._reshape_order(stages, num_micro_batches, total)
        staging, interrupt = Staging(self.device), Interrupt(1)
        staging._events = _AtOnce()  # type: ignore[assignment]
        worker = Worker()
        me = f"{stage}/0"
        worker._setup = self._setup.model_copy(update={"worker": me})
        worker._faults, worker._workload = FaultPlan(()), self._workload
        worker._following = _NoFollowers()  # type: ignore[assignment]
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        counting = Counting(self.device.kind, self.device.pinned_tensors)
        for section in self.model.sections:
            section._on_device.clear()
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of torch, that a number is asked of a tensor with a gradient
            for module in ("device.links", "device.staging"):
                enter(mock.patch(f"morph.runtime.{module}.staging_of", return_value=staging))
            enter(mock.patch("morph.runtime.state.reducing.Reduction", _ReducedAtTheEnd))
            enter(mock.patch("morph.runtime.step.sums.Reduction", _ReducedAtTheEnd))
            enter(mock.patch("morph.runtime.state.fixed_point._on_processor", return_value=False))  # compiled loops
            enter(mock.patch("morph.runtime.state.accumulators.add_fixed", partial(_one_kernel, counting)))
            enter(mock.patch("morph.runtime.state.accumulators.from_fixed", partial(_one_pass, counting)))
            enter(mock.patch.object(self._workload, "_loader", ShapeLoader(mode, self._batch)))
            enter(mode)
            enter(counting)
            enter(Numbers(counting))
            units = units_of_stage(order.plan, stage, self.model.units)
            held = {unit.id: self._workload.make_unit(unit.id, total, empty=True) for unit in units}
            layout = topology(order, self.model.units)
            slot = next(slot for slot in order.slots if slot.worker == me)
            for step in range(2):
                counting.counts = counts = Counts()
                groups = GroupSet(interrupt)
                groups._groups = {
                    spec.name: (spec, ShapeGroup(counts, _kind_of(spec.name), len(spec.members)))
                    for spec in layout.groups
                    if me in spec.members and len(spec.members) > 1
                }
                current = Generation(order, slot, layout, groups, interrupt, held)
                self._step(worker, current, counting, step)
        return counts

    def _step(self, worker: Worker, current: Generation, counting: Counting, step: int) -> None:
        scale = next((state.loss_scale for state in current.units.values()), None)
        with _phases(counting):
            worker._run_step(current, StepOrder(generation=1, step=step, loss_scale=scale))
            with counting.phase("update"):
                for state in current.units.values():
                    norm = 1.0 if self.job.clip_grad_norm is not None else None
                    state.apply(Decided(version=step + 1, gradient_norm=norm))

    def _reshape_order(self, stages: list[range], num_micro_batches: int, total: int) -> ReshapeOrder:
        shape = self.shape
        tasks = "FRB" if shape.recompute else "FB"
        nothing = Expectation(mini_batch_s=0, examples_per_s=0, lower_bound_s=0, peak_memory_bytes=0, parts_s={})
        plan = Plan(
            fingerprint=self.model.fingerprint,
            schedule="varuna",
            micro_batch_size=shape.micro_batch_size,
            num_micro_batches=total,
            num_replicas=shape.num_replicas,
            stages=tuple(
                StagePlan(first_section=entry.start, end_section=entry.stop, window=1, recompute=shape.recompute)
                for entry in stages
            ),
            orders={num_micro_batches: (tasks * num_micro_batches,) * len(stages)},
            expected=nothing,
        )
        slots = tuple(
            Slot(worker=f"{stage}/{replica}", stage=stage, replica=replica)
            for stage in range(len(stages))
            for replica in range(shape.num_replicas)
        )
        sources = tuple(
            Source(worker=slot.worker, unit=unit.id, kind="initial")
            for slot in slots
            for unit in units_of_stage(plan, slot.stage, self.model.units)
        )
        return ReshapeOrder(generation=1, version=0, plan=plan, slots=slots, sources=sources)


def _phases(counting: Counting) -> ExitStack:
    """Tell the parts of a step apart by the product's own functions."""
    stack = ExitStack()
    for where, name in {
        "morph.runtime.step.sums.StepSums._add": "accumulate",
        "morph.runtime.workloads.job_workload.JobWorkload.reduce": "reduce",
        "morph.runtime.state.accumulators.ExactAccumulator.finish": "mean",
        "morph.runtime.state.accumulators.FastAccumulator.finish": "mean",
        "morph.runtime.state.unit_state.UnitState.norm_sq": "norm",
        "morph.runtime.step.links.Sender.send": "transport",
        "morph.runtime.step.links.Receiver.take": "transport",
    }.items():
        owner_name, _, function = where.rpartition(".")
        module, _, owner = owner_name.rpartition(".")
        holder = getattr(__import__(module, fromlist=[owner]), owner)
        stack.enter_context(mock.patch.object(holder, function, _counted(getattr(holder, function), counting, name)))
    return stack


def _counted(function: Any, counting: Counting, name: str) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with counting.phase(name):
            return function(*args, **kwargs)

    return run


def _kind_of(group: str) -> str:
    return "ring" if "/ring/" in group else group.rpartition("/")[2]
