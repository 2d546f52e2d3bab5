"""Count what a step asks of its device.

    python -m tests.device.step_counts [--job NAME ...] [--write docs/how-it-works/gpu.md]

Runs the real step of each job's first, a middle and the last stage on tensors that have shapes and no numbers
(torch's fake tensors, on a device that is not the CPU), so it needs no GPU and no memory, and it stops where an
operation mixes devices. Prints the tables of docs/how-it-works/gpu.md; ``--write`` replaces them there.

The device takes torch's slot for backends that others bring (PrivateUse1), because a build without CUDA refuses a
backward of CUDA tensors, fake ones too. Operators, autograd and optimizers treat it as a device other than the CPU:
what mixes devices is refused, and what a number is asked of has none.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from morph.contract.decided import Decided
from morph.contract.messages import ReshapeOrder, Slot, Source, StepOrder
from morph.contract.plan import Expectation, Plan, StagePlan
from morph.cutting.cache.cut_job import load_and_cut
from morph.runtime.device.devices import Event, Passed
from morph.runtime.device.staging import Staging
from morph.runtime.device.task_clock import HostClock
from morph.runtime.groups.channels import GroupSet, Ring
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.groups.topology import topology, units_of_stage
from morph.runtime.process.worker import Worker, set_up
from morph.runtime.state.accumulators import Accumulator
from morph.runtime.state.reduction import Reduction
from morph.runtime.state.unit_state import apply_all
from morph.runtime.step.generation import Generation
from morph.runtime.workloads.job_workload import JobWorkload
from tests.worker_setup import SETUP

ROOT = Path(__file__).resolve().parents[2]
_PRODUCT = f"{ROOT}/morph/"
BEGIN, END = "<!-- counts: begin -->", "<!-- counts: end -->"
NAME = "gpu"


class _Module(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        """No: torch then computes no constants there."""
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@cache
def accelerator() -> torch.device:
    """The device; registers it with this process, once and for good."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    _register_autocast()
    return torch.device(NAME, 0)


_LIBRARIES: list[torch.library.Library] = []
"""Keeps registrations alive."""


def _register_autocast() -> None:
    """Autocast as on CUDA for what makes up nearly all of a step: matrix products and attention."""
    everything, products = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _LIBRARIES.extend((everything, products))
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "scaled_dot_product_attention"):
        operation = getattr(torch.ops.aten, name).default

        def run(*args: Any, operation: Any = operation, **kwargs: Any) -> Any:
            wanted = torch.get_autocast_dtype(NAME)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                args, kwargs = tree_map(lambda value: _cast(value, wanted), (args, kwargs))
                return operation(*args, **kwargs)

        products.impl(name, run, "AutocastPrivateUse1")


def _cast(value: Any, wanted: torch.dtype) -> Any:
    is_wide = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.to(wanted) if is_wide else value


class ShapeStream:
    """See ``morph.runtime.device.devices.Stream``: there is nothing to wait for."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source, non_blocking=True)

    def wait(self, event: Event) -> None:
        """See ``Stream.wait``."""

    def record(self) -> Event:
        return Passed()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=accelerator())

    def use(self, tensor: Tensor) -> None:
        """See ``Stream.use``."""

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()


class ShapeDevice:
    """See ``morph.runtime.device.devices.Device``."""

    def __init__(self) -> None:
        self.kind = accelerator()
        self.current = ShapeStream()
        self.pinned_tensors: set[int] = set()
        self._kept: list[Tensor] = []

    def stream(self) -> ShapeStream:
        return self.current

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(tuple(shape), dtype=dtype)
        self._kept.append(made)
        self.pinned_tensors.add(id(made))
        return made


Kind = Literal["operation", "to device", "to host", "sync"]
aten = torch.ops.aten
_NO_KERNEL = {aten.detach.default, aten._unsafe_view.default, aten.lift_fresh.default, aten._local_scalar_dense.default}
_NO_KERNEL_NAMES = ("empty", "new_empty", "_reshape_alias", "is_", "sym_")
NUMBER = 0.5
"""The assumed value of a number that a fake tensor does not have."""
_ASKS_THE_DEVICE = {aten.nonzero.default, aten.equal.default, aten._unique2.default, aten.masked_select.default}


@dataclass(frozen=True, order=True)
class Site:
    """The place of a call to the device: a file below the repository's root, and a function in it."""

    kind: Kind
    pinned: bool
    file: str
    function: str


@dataclass
class Counts:
    """Counts of one step."""

    sites: Counter[Site] = field(default_factory=Counter)
    site_bytes: Counter[Site] = field(default_factory=Counter)


class Counting(TorchDispatchMode):
    """Counts operations on fake tensors; entered within a ``FakeTensorMode``."""

    def __init__(self, device: torch.device, pinned: set[int]) -> None:
        super().__init__()
        self.counts = Counts()
        self._device, self._pinned = device, pinned

    def asked(self, kind: Kind, num_bytes: int, *, pinned: bool = False) -> None:
        site = Site(kind, pinned, *_caller())
        self.counts.sites[site] += 1
        self.counts.site_bytes[site] += num_bytes

    def is_on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            if self.is_on_device(args[0]):
                self.asked("sync", args[0].element_size())
            return _number(args[0].dtype)
        if func in _ASKS_THE_DEVICE and self.is_on_device(args[0]):
            self.asked("sync", args[0].nbytes)
        found = func(*args, **kwargs)
        self._count(func, args, found)
        if self._has_kernel(func) and any(
            isinstance(one, Tensor) and self.is_on_device(one) for one in tree_leaves((args, found))
        ):
            self.asked("operation", 0)
        return found

    def _has_kernel(self, func: Any) -> bool:
        namespace, _, name = func._schema.name.partition("::")
        is_question = namespace == "prim"  # as a look at a fake tensor's ``device``
        return not (is_question or func.is_view or func in _NO_KERNEL or name.startswith(_NO_KERNEL_NAMES))

    def _count(self, func: Any, args: Any, found: Any) -> None:
        if func in (aten._to_copy.default, aten.copy_.default):
            source, into = (args[1], args[0]) if func is aten.copy_.default else (args[0], found)
            if self.is_on_device(source) != self.is_on_device(into):
                kind: Kind = "to host" if self.is_on_device(source) else "to device"
                pinned = id(into if kind == "to host" else source) in self._pinned
                self.asked(kind, into.nbytes, pinned=pinned)


class Numbers(TorchFunctionMode):
    """Gives numbers where code asks a fake tensor for all of its numbers at once."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting
        self._patch = mock.patch.object(
            FakeTensor, "tolist", lambda tensor: self._tolist(tensor)
        )  # its own asks for one number at a time

    def __enter__(self) -> Numbers:
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def _tolist(self, tensor: Tensor) -> Any:
        self._ask(tensor)
        return np.full(tuple(tensor.shape), _number(tensor.dtype)).tolist()

    def _ask(self, tensor: Tensor) -> None:
        if self._counting.is_on_device(tensor):
            self._counting.asked("sync", tensor.nbytes)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy:  # no elements, so that loops over them end at once
            self._ask(args[0])
            return np.empty(0, dtype=str(args[0].dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


def _number(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return NUMBER if dtype.is_floating_point else 0


def _caller() -> tuple[str, str]:
    """File and function of the product's innermost frame."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PRODUCT):
            name = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
            return name, frame.f_code.co_qualname.partition(".<locals>")[0]
        frame = frame.f_back  # type: ignore[assignment]
    return "the job or torch", "?"


@dataclass(frozen=True)
class Shape:
    """P x D, m and whether stages recompute."""

    pipeline_depth: int
    num_replicas: int
    micro_batch_size: int
    recompute: bool = False
    num_sections: int | None = None


class ArrivedWork:
    """The handle of a finished collective."""

    def get_future(self) -> torch.futures.Future[object]:
        future: torch.futures.Future[object] = torch.futures.Future()
        future.set_result(None)
        return future

    def wait(self, *_: object) -> bool:
        return True


class ShapeGroup:
    """A stand-in for a process group, in which everything arrives at once."""

    def __init__(self, num_members: int) -> None:
        self._num_members = num_members

    def size(self) -> int:
        return self._num_members

    def rank(self) -> int:
        return 0

    def __getattr__(self, _collective: str) -> Any:
        return lambda *_args, **_kwargs: ArrivedWork()


class FusedKernels:
    """In place of ``morph.runtime.state.fused_sums``: each call of one of its functions is one operation."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting

    def of(self, device: torch.device) -> FusedKernels | None:
        return self if device.type == NAME else None

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: self._counting.asked("operation", 0)


class ShapeLoader:
    """Gives the same micro-batch each time, read from the data set before."""

    def __init__(self, mode: FakeTensorMode, batch: Mapping[str, Tensor]) -> None:
        self._batch = {key: mode.from_tensor(value) for key, value in batch.items()}

    def load(self, step: int, micro_batch: int, keys: Sequence[str]) -> dict[str, Tensor]:
        return {key: self._batch[key] for key in keys}

    def length(self, step: int, micro_batch: int) -> None:
        """Lengths do not vary."""


class _AtOnce:
    """In place of a staging's thread: a fake mode belongs to one thread."""

    def after(self, _event: object, then: Callable[[], None], _failed: object, _kept: object) -> None:
        then()


class _ReducedAtTheEnd(Reduction):
    """Reduces in the calling thread, to which a fake mode belongs."""

    def put(self, accumulator: Accumulator, ring: Ring | None) -> None:
        with mock.patch("morph.runtime.state.reduction.threading.Thread"):
            super().put(accumulator, ring)

    def finish(self) -> None:
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
        sizes = {"num_sections": len(found.model.sections), "micro_batch_size": shape.micro_batch_size}
        job = {"job_path": job_path, "fingerprint": found.model.fingerprint, "device": "cuda"}
        self._setup = SETUP.model_copy(update=sizes | job)
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
        staging._events = staging._events_beside = _AtOnce()  # type: ignore[assignment]
        me = f"{stage}/0"
        with (
            mock.patch("morph.runtime.process.worker.load_workload", return_value=self._workload),
            mock.patch("morph.runtime.process.worker.check_kernels"),  # there is no CUDA here
        ):
            worker = set_up(self._setup.model_copy(update={"worker": me}))
        assert isinstance(worker, Worker), worker
        worker._followers = _NoFollowers()  # type: ignore[assignment]
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
            enter(mock.patch("morph.runtime.state.reduction.Reduction", _ReducedAtTheEnd))
            enter(mock.patch("morph.runtime.step.sums.Reduction", _ReducedAtTheEnd))
            enter(mock.patch("morph.runtime.state.fixed_point._on_processor", return_value=False))  # compiled loops
            enter(mock.patch("morph.runtime.state.fixed_point._fused", FusedKernels(counting).of))
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
                    spec.name: (spec, ShapeGroup(len(spec.members)))
                    for spec in layout.groups
                    if me in spec.members and len(spec.members) > 1
                }
                current = Generation(order, slot, layout, groups, interrupt, held)
                self._step(worker, current, step)
        return counts

    def _step(self, worker: Worker, current: Generation, step: int) -> None:
        scale = next((state.loss_scale for state in current.units.values()), None)
        worker._run_step(current, StepOrder(generation=1, step=step, loss_scale=scale))
        norm = 1.0 if self.job.clip_grad_norm is not None else None
        apply_all(current.units.values(), Decided(version=step + 1, gradient_norm=norm))

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


_JOBS = ROOT / "configs/jobs"
_TRAINING = ROOT / "tests/training/training_jobs.py"


@dataclass(frozen=True)
class Case:
    """A job in one shape."""

    name: str
    job_path: str
    shape: Shape

    @property
    def title(self) -> str:
        shape = self.shape
        how = ", recomputed" if shape.recompute else ""
        return f"{self.name}, {shape.pipeline_depth}x{shape.num_replicas}, m = {shape.micro_batch_size}{how}"


CASES = (
    Case("tiny_gpt", f"{_JOBS / 'tiny_gpt.py'}:job", Shape(2, 2, 2)),
    Case("gpt2_stdlib", f"{_JOBS / 'gpt2_stdlib.py'}:job", Shape(4, 2, 8, recompute=True)),
    Case("four layers, bf16, clipped", f"{_TRAINING}:bf16", Shape(2, 2, 2, num_sections=4)),
    Case("batch norm, fp16", f"{_TRAINING}:normed_fp16", Shape(2, 2, 2, num_sections=4)),
    Case("four layers, fast sums", f"{_TRAINING}:scaled_fast", Shape(2, 2, 2, num_sections=4)),
    Case("gpt2_2_5b", f"{_JOBS / 'gpt2_big.py'}:gpt2_2_5b", Shape(9, 4, 4, recompute=True)),  # minutes
)


HEAD = (
    "| job | stage | each micro-batch: operations; copies in, out (bytes); pageable; syncs | each step: the same |",
    "|---|---|---|---|",
)
SITES_HEAD = ("| what | where | jobs |", "|---|---|---|")


@dataclass(frozen=True)
class Both:
    """Calls of one stage: per micro-batch, and additionally per step."""

    each_micro_batch: Mapping[Site, int]
    each_step: Mapping[Site, int]
    micro_batch_bytes: Mapping[Site, int]
    step_bytes: Mapping[Site, int]


def split(one: Counts, two: Counts) -> Both:
    """Tell a micro-batch's part from a step's by counts with one and with two micro-batches."""

    def parts(first: Counter[Site], second: Counter[Site]) -> tuple[dict[Site, int], dict[Site, int]]:
        every = sorted({*first, *second})
        each = {site: second[site] - first[site] for site in every}
        return each, {site: first[site] - each[site] for site in every}

    counted, sized = parts(one.sites, two.sites), parts(one.site_bytes, two.site_bytes)
    return Both(counted[0], counted[1], sized[0], sized[1])


def count_case(case: Case) -> tuple[list[str], set[Site]]:
    """Count a case; its rows, and all sites."""
    job = ShapeJob(case.job_path, case.shape)
    last = case.shape.pipeline_depth - 1
    rows, sites = [], set()
    for stage in sorted({0, min(1, last), last}):
        both = split(job.count(stage, 1), job.count(stage, 2))
        asked = {site for site in both.each_micro_batch if both.each_micro_batch[site] or both.each_step[site]}
        sites |= {site for site in asked if site.kind != "operation"}
        name = "first" if stage == 0 else "last" if stage == last else "middle"
        cells = _cell(both.each_micro_batch, both.micro_batch_bytes), _cell(both.each_step, both.step_bytes)
        rows.append(f"| {case.title} | {name} | {cells[0]} | {cells[1]} |")
    return rows, sites


def _cell(counted: Mapping[Site, int], sized: Mapping[Site, int]) -> str:
    def total(numbers: Mapping[Site, int], kind: str) -> int:
        return sum(number for site, number in numbers.items() if site.kind == kind)

    copied = ("to device", "to host")
    pageable = sum(number for site, number in counted.items() if site.kind in copied and not site.pinned)
    copies = ", ".join(f"{total(counted, kind)} ({total(sized, kind):,})" for kind in copied)
    return f"{total(counted, 'operation')}; {copies}; {pageable}; {total(counted, 'sync')}"


def site_rows(found: Mapping[Site, set[str]]) -> list[str]:
    """One row for each place that asks the device for something."""
    rows = []
    for site, names in sorted(found.items()):
        what = "sync" if site.kind == "sync" else f"{site.kind}, {'pinned' if site.pinned else 'pageable'}"
        rows.append(f"| {what} | `{site.file}`, `{site.function}` | {', '.join(sorted(names))} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--write", type=Path, help="replace the tables of this file")
    options = parser.parse_args()
    lines, found = list(HEAD), dict[Site, set[str]]()
    for case in CASES:
        if options.job and case.name not in options.job:
            continue
        rows, sites = count_case(case)
        lines += rows
        for site in sites:
            found.setdefault(site, set()).add(case.name)
    text = "\n".join([*lines, "", *SITES_HEAD, *site_rows(found)])
    if options.write is None:
        print(text)
        return
    before, _, rest = options.write.read_text().partition(BEGIN)
    options.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
