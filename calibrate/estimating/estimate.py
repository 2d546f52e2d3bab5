"""Makes a job's profile from data sheets: as in calibration, but operations are counted, and times computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from calibrate.computing.compute import Compute, MeasuredSize, Progress, measure_size, measure_sizes
from calibrate.computing.meter import Measured
from calibrate.computing.optimizer import UnitMeasurement, bytes_of
from calibrate.computing.peak import held_bytes, peak_bytes
from calibrate.computing.sections import SectionMeasurement
from calibrate.computing.subject import Subject, load_subject
from calibrate.estimating.data_sheets import DataSheet, Reached, sheet_of
from calibrate.estimating.roofline import Operation, counted, total_s
from calibrate.links.network import NetworkMeasurement
from calibrate.timing.bench import Bench, make_bench, one_of_each
from calibrate.timing.environment import ALLOCATOR_PERMILLE, CONTEXT_BYTES, PROCESS_BYTES, RING_BYTES
from calibrate.timing.samples import Sampling, timing
from calibrate.writing.assemble import MeasuredLinks, accumulator_bytes, assemble_node_type, assemble_profile
from calibrate.writing.measure import one_thread, silent, sizes_of
from calibrate.writing.storage import StorageSpeeds
from morph.contract import ranges
from morph.contract.decided import Decided
from morph.contract.errors import JobError
from morph.contract.profile import Environment, LinkProfile, Profile
from morph.cutting import CutModel, ParameterUnit, Section
from morph.data import MicroBatchLoader
from morph.jobs.files import imported_once
from morph.jobs.job import Job
from morph.runtime.state.accumulators import Reduced
from morph.runtime.state.unit_state import UnitState, update_rules

DISK_BYTES_PER_S = 1e9
"""Of checkpoints, to the VM's own disk. Assumed: no data sheet of a GPU states it."""
_META = torch.device("meta")
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def estimate_profile(
    job_path: str,
    devices: Sequence[str],
    *,
    reached: Reached = Reached(),  # noqa: B008 (frozen)
    gbit_per_s: float | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Estimate a job's profile; no GPU is needed, and no weights are read.

    ``devices``: of data sheets; the first is the profile's own type, others are further types of node. ``gbit_per_s``:
    between nodes, of each GPU. Raises ConfigError for an unknown device or a bandwidth out of range; JobError or
    ExportError if the job cannot be cut, reads values of tensors, or a device lacks its precision.
    """
    progress = progress or silent
    sheets = {name: sheet_of(name) for name in devices}
    if gbit_per_s is not None:
        replace(ranges.GBIT_PER_S, low=0.01).check("--gbit-per-s", gbit_per_s)  # a hundredth of it may be reached
        sheets = {name: replace(sheet, network_bytes_per_s=gbit_per_s * 1e9 / 8) for name, sheet in sheets.items()}
    progress("exporting the model", 0.0)
    with one_thread(), imported_once(job_path):
        subject = load_subject(job_path, torch.device("cpu"))
        job, counts = subject.job, _Counts(subject)
        own, *others = (_Timed(sheet, reached, counts) for sheet in sheets.values())
        sizes, stop_early = sizes_of(job, micro_batch_sizes)
        measured = measure_sizes(
            subject, own.measure, sizes, free_bytes=own.free_bytes, stop_early=stop_early, most=1, progress=progress
        )
        progress("counting the optimizer's operations", 0.5)
        profile = assemble_profile(
            job, own.environment(), own.compute(job, measured), MeasuredLinks(own.network()), own.disk()
        )
        types = tuple(
            assemble_node_type(name, estimate.environment(), estimate.compute(job, measured)).model_copy(
                update={"intra_node": estimate.network().link, "inter_node": estimate.between_nodes()}
            )
            for name, estimate in zip(tuple(sheets)[1:], others, strict=True)
        )
    progress("done", 1.0)
    update = {"node_types": types, "inter_node": own.between_nodes(), "sources": _sources(reached)}
    return profile.model_copy(update=update)


def _sources(reached: Reached) -> dict[str, str]:
    memory = "counted on tensors without contents, as calibration on a CPU counts"
    return {
        "sections": f"estimated: {reached}; at least {reached.launch_s * 1e6:g} us an operation. Memory: {memory}",
        "intra_node": f"estimated: NVLink or PCIe, {reached.link_latency_s * 1e6:g} us latency",
        "inter_node": f"estimated: one GPU's share of its VM's network, {reached.network_latency_s * 1e6:g} us latency",
        "commit": "estimated: two messages between nodes",
        "checkpoint_write_bytes_per_s": "assumed",
        "host_copy_bytes_per_s": "estimated: PCIe or NVLink to the host",
    }


@dataclass(frozen=True)
class _CountedSection:
    """A section's operations at one m, and its memory as in ``SectionMeasurement``, without peaks of sums."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    given_bytes: int
    held_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class _CountedUnit:
    step: tuple[Operation, ...]
    measured: UnitMeasurement


class _Counts:
    """Counts operations of sections and units; those of one kind are counted once."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self._mode = subject, FakeTensorMode(allow_non_fake_inputs=True)
        self._sections: dict[tuple[str, int, int | None], _CountedSection] = {}
        self._units: dict[object, _CountedUnit] = {}

    def section(self, model: CutModel, section: Section) -> _CountedSection:
        """Count one forward and backward of a section."""
        key = section.signature, model.micro_batch_size, model.length
        if key not in self._sections:
            with _explained(section), self._mode:
                self._sections[key] = self._count(model, section)
        return self._sections[key]

    def _count(self, model: CutModel, section: Section) -> _CountedSection:
        job, device = self._subject.job, torch.device("cpu")
        section = replace(section, finish=None, _on_device={})
        section.constant_values.take(_Empty(section.constant_values.specs))
        load = MicroBatchLoader.of(job, model.micro_batch_size).example
        operations: list[Operation] = []
        sum_bytes = accumulator_bytes(job)

        def add(_name: str, gradient: Tensor) -> None:
            """Count what a device reads and writes to add a gradient to its sum, in one kernel."""
            operations.append(Operation(gradient.numel() * (gradient.element_size() + 2 * sum_bytes)))

        bench = make_bench(job, section, _Empty(model.specs), partial(load, model.length), device, add)
        bench.both()  # tensors that are made once and for all do not belong to a micro-batch
        operations.clear()
        with counted() as forward:
            run = bench.forward(0)
        with counted() as backward:
            bench.backward(run)
        del run
        return _CountedSection(
            forward=tuple(forward),
            backward=(*backward, *operations),
            given_bytes=bench.given_bytes(),
            held_bytes=held_bytes(partial(_forward, bench), device),
            peak_bytes=peak_bytes(partial(_both, bench), device),
        )

    def unit(self, model: CutModel, unit: ParameterUnit) -> _CountedUnit:
        """Count the end of a step for one unit, from its sums to new parameters, and new sums."""
        shapes = tuple(model.specs[name] for name in unit.names)
        if shapes not in self._units:
            self._units[shapes] = _count_unit(self._subject.job, model, unit)
        return self._units[shapes]


def _forward(bench: Bench) -> object:
    with counted():
        return bench.forward(0)


def _both(bench: Bench) -> None:
    with counted():
        bench.both()


class _Empty(dict[str, Tensor]):
    """Tensors of these shapes, made on request."""

    def __init__(self, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: str = "cpu") -> None:
        super().__init__()
        self._specs, self._device = specs, device

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __missing__(self, name: str) -> Tensor:
        shape, dtype = self._specs[name]
        return self.setdefault(name, torch.empty(shape, dtype=dtype, device=self._device))


def _count_unit(job: Job, model: CutModel, unit: ParameterUnit) -> _CountedUnit:
    rules = replace(update_rules(job, _META), optimizer_in_host_memory=False)
    empty, num, exact = _Empty(model.specs, "meta"), job.batch_size, job.accumulation == "exact"
    state = UnitState(unit, empty, job.optimizer, num_micro_batches=num, exact=exact, rules=rules)
    means = {name: torch.empty_like(value) for name, value in state.values.items()}
    reduced = Reduced(gradients=means, exponents=state.exponents, overflowed=False)
    decided = Decided(version=1, gradient_norm=None if job.clip_grad_norm is None else 1.0)
    num_elements = sum(mean.numel() for mean in means.values())
    sum_bytes, mean_bytes = accumulator_bytes(job), bytes_of(means.values())

    def apply() -> None:
        state.reduced = reduced
        state.apply(decided)

    apply()  # which creates the optimizer's state
    with counted() as operations:
        apply()
    norm = [] if job.clip_grad_norm is None else [Operation(mean_bytes)]
    ends = [Operation(num_elements * sum_bytes + mean_bytes), Operation(num_elements * sum_bytes)]
    return _CountedUnit(
        step=(*operations, *norm, *ends),
        measured=UnitMeasurement(
            step=timing([0.0]),
            optimizer_bytes=bytes_of(value for kept in state.optimizer.state.values() for value in kept.values())
            + state.master_bytes,
            reduced_bytes=mean_bytes,
            finish_bytes=0,  # one kernel makes the means
            step_bytes=peak_bytes(apply, _META),
        ),
    )


@contextmanager
def _explained(section: Section) -> Iterator[None]:
    """Raise a JobError if a section reads values, which the tensors do not have."""
    try:
        yield
    except _NEEDS_VALUES as error:
        raise JobError(
            f"section {section.index} reads the values of tensors, so its operations cannot be counted: {error}",
            source=section.source or section.label,
            allowed="a job whose operations depend on shapes alone, or `morph calibrate`",
        ) from error


@dataclass(frozen=True)
class _Timed:
    """Times what was counted by one data sheet; ``measure`` is a ``Meter`` of sections."""

    sheet: DataSheet
    reached: Reached
    counts: _Counts

    def measure(self, model: CutModel, sampling: Sampling) -> Measured:
        del sampling
        return {section.signature: self._section(model, section) for section in one_of_each(model)}

    def _section(self, model: CutModel, section: Section) -> SectionMeasurement:
        counts, m = self.counts.section(model, section), model.micro_batch_size
        return SectionMeasurement(
            forward=timing([total_s(counts.forward, self.sheet, self.reached)]),
            backward=timing([total_s(counts.backward, self.sheet, self.reached)]),
            input_bytes_per_sample=ceil(counts.given_bytes / m),
            activation_bytes_per_sample=ceil(counts.held_bytes / m),
            peak_bytes=counts.peak_bytes,
        )

    def free_bytes(self) -> float:
        """Return the memory of a device without its context."""
        return self.sheet.memory_bytes - CONTEXT_BYTES

    def compute(self, job: Job, sizes: Sequence[MeasuredSize]) -> Compute:
        """Time sections and units of a model cut for these sizes."""
        model, sheet = sizes[-1].model, self.sheet
        if job.optimizer_device == "cpu":  # all that its optimizer reads and writes is taken to cross the host's link
            sheet = replace(sheet, memory_bytes_per_s=sheet.host_link_bytes_per_s)
        units = {}
        for unit in model.units:
            counts = self.counts.unit(model, unit)
            step = timing([total_s(counts.step, sheet, self.reached)])
            units[unit.id] = replace(counts.measured, step=step)
        return Compute(tuple(measure_size(job, self.measure, size.model, 1) for size in sizes), units, ())

    def environment(self) -> Environment:
        """Return the device; nobody measured, as the date says too."""
        return Environment(
            python="none",
            torch="none",
            platform=self.sheet.source,
            device=self.sheet.device,
            num_cores=1,
            threads_per_worker=1,
            device_memory_bytes=self.sheet.memory_bytes,
            host_memory_bytes=self.sheet.host_memory_bytes,
            context_bytes=CONTEXT_BYTES,
            allocator_permille=ALLOCATOR_PERMILLE,
            ring_bytes=RING_BYTES,
            process_bytes=PROCESS_BYTES,
            estimated=f"from the data sheet, if programs reach {self.reached}",
            created="1970-01-01T00:00:00Z",
        )

    def network(self) -> NetworkMeasurement:
        """Return links within a node, and the barrier between nodes."""
        link = LinkProfile.of(self.reached.link_latency_s, self.reached.links * self.sheet.link_bytes_per_s)
        return NetworkMeasurement(
            link=link, all_reduce=(), barrier=timing([2 * self.reached.network_latency_s]), links="ipc", rings="nccl"
        )

    def between_nodes(self) -> LinkProfile:
        """Return the link of one GPU to a GPU of another node."""
        return LinkProfile.of(self.reached.network_latency_s, self.reached.network * self.sheet.network_bytes_per_s)

    def disk(self) -> StorageSpeeds:
        """Return the speeds of checkpoints."""
        host = self.reached.links * self.sheet.host_link_bytes_per_s
        return StorageSpeeds(write_bytes_per_s=DISK_BYTES_PER_S, upload_bytes_per_s=None, host_copy_bytes_per_s=host)
