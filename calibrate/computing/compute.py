"""Measures a job's compute times F_i(m) and B_i(m) for growing m, its sections' memory, and the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from calibrate.computing.contention import Neighbours, measure_contention
from calibrate.computing.meter import Meter, meter_of
from calibrate.computing.optimizer import UnitMeasurement, measure_units
from calibrate.computing.sections import SectionMeasurement
from calibrate.computing.subject import Subject
from calibrate.timing.bench import one_of_each
from calibrate.timing.clocks import devices_of
from calibrate.timing.samples import ROUGHLY_WITHIN, Sampling, mean_of
from morph.contract.errors import ClusterError, JobError
from morph.contract.profile import Contention
from morph.cutting import CutModel
from morph.data.loader import mix_of
from morph.jobs.job import Job
from morph.machine import available_bytes

MIN_GAIN = 0.03
_SECONDS_PER_SIZE = 6.0
_SECONDS_PER_UNIT = 1.0
_SIZES_TO, _UNITS_TO = 0.45, 0.5
_OUT_OF_MEMORY = ("OutOfMemoryError", "DefaultCPUAllocator")
Progress = Callable[[str, float], None]
"""Called with a description of what begins now and the share of the work that is done (0 to 1)."""


def growing_sizes(batch_size: int) -> tuple[int, ...]:
    """Return divisors of M from 1, each at least twice the one before."""
    sizes = [1]
    for candidate in range(2, batch_size + 1):
        if batch_size % candidate == 0 and candidate >= 2 * sizes[-1]:
            sizes.append(candidate)
    return tuple(sizes)


def checked_sizes(sizes: Sequence[int], batch_size: int) -> tuple[int, ...]:
    """Return the sizes in ascending order; JobError: a size does not divide M, or there is none."""
    for size in sizes:
        if size <= 0 or batch_size % size:
            raise JobError(
                "does not divide the global batch",
                field="micro_batch_size",
                value=size,
                allowed=f"divisors of {batch_size}",
            )
    if not sizes:
        raise JobError("is empty", field="micro_batch_sizes", allowed="at least one size")
    return tuple(sorted(set(sizes)))


def still_improves(seconds_per_sample: Sequence[float]) -> bool:
    """Whether the newest size computes a sample at least 3 % faster than the best before it."""
    if len(seconds_per_sample) < 2:
        return True
    return seconds_per_sample[-1] < (1 - MIN_GAIN) * min(seconds_per_sample[:-1])


@dataclass(frozen=True)
class MeasuredSize:
    """The measurements at one micro-batch size, for which ``model`` is cut (with lengths, its longest bucket).

    ``sections``: by their kind's signature; times are means over all lengths, and memory is the longest's.
    """

    model: CutModel
    sections: dict[str, SectionMeasurement]
    mix: Mapping[int | None, float] = field(default_factory=lambda: {None: 1.0})

    def of(self, index: int) -> SectionMeasurement:
        """Return the measurement of section ``index``."""
        return self.sections[self.model.sections[index].signature]

    def forward_s_per_sample(self) -> float:
        """F(m)/m of the whole model."""
        total = sum(self.of(section.index).forward.median_s for section in self.model.sections)
        return total / self.model.micro_batch_size

    def heaviest(self) -> str:
        """Return the signature of the kind that takes longest."""
        return max(self.sections, key=lambda kind: _task_s(self.sections[kind]))


@dataclass(frozen=True)
class Compute:
    """All measurements that depend on a node's device."""

    sizes: tuple[MeasuredSize, ...]
    units: dict[str, UnitMeasurement]
    contention: tuple[Contention, ...]

    @property
    def model(self) -> CutModel:
        """Return the model cut for the largest m."""
        return self.sizes[-1].model


def measure_compute(
    subject: Subject,
    sizes: Sequence[int],
    neighbours: Neighbours | None,
    *,
    stop_early: bool,
    num_samples: int,
    progress: Progress,
) -> Compute:
    """Measure sections, optimizer steps, and the slowdown by busy ``neighbours``, which rest until then.

    ``stop_early``: at a size that gains nothing, or at the end of memory. Raises JobError if the first size does not
    fit into memory, ClusterError or WaitTimeout if helper processes failed.
    """
    if neighbours is not None:
        neighbours.wait()
    with meter_of(subject, devices_of(subject.device.type)) as meter:
        free_bytes = partial(free_bytes_of, subject.device)
        measured = measure_sizes(
            subject, meter, sizes, free_bytes=free_bytes, stop_early=stop_early, most=num_samples, progress=progress
        )
    progress("stepping the optimizer", _SIZES_TO)
    newest = measured[-1]
    units = measure_units(
        subject, newest.model, Sampling(budget_s=_SECONDS_PER_UNIT, most=num_samples, within=ROUGHLY_WITHIN)
    )
    progress("computing with busy neighbours", _UNITS_TO)
    contention: tuple[Contention, ...] = ()
    if neighbours is not None:
        contention = measure_contention(subject, newest.heaviest(), newest.model.micro_batch_size, neighbours)
    return Compute(tuple(measured), units, contention)


def measure_sizes(
    subject: Subject,
    meter: Meter,
    sizes: Sequence[int],
    *,
    free_bytes: Callable[[], float],
    stop_early: bool,
    most: int,
    progress: Progress,
) -> list[MeasuredSize]:
    """Measure sections at each size; arguments and errors as of ``measure_compute``, with ``most`` samples."""
    measured: list[MeasuredSize] = []
    for position, m in enumerate(sizes):
        if stop_early and measured and fills_memory(measured[-1], m, free_bytes()):
            break
        share = 0.2 + (_SIZES_TO - 0.2) * position / len(sizes)
        progress(f"running every kind of section on micro-batches of {m}", share)
        try:
            measured.append(measure_size(subject.job, meter, subject.cut(m), most))
        except (MemoryError, RuntimeError, ClusterError) as error:
            if not _is_out_of_memory(error):
                raise
            if stop_early and measured:
                break
            raise JobError(
                "micro-batches of this size do not fit into the device's memory",
                field="micro_batch_size",
                value=m,
                allowed="smaller micro-batches, or more sections",
            ) from error
        if stop_early and not still_improves([entry.forward_s_per_sample() for entry in measured]):
            break
    return measured


def measure_size(job: Job, meter: Meter, model: CutModel, most: int) -> MeasuredSize:
    """Measure the sections of a model cut for one m, for each length if lengths vary."""
    mix = mix_of(job, model.micro_batch_size)
    lengths = {**mix, model.length: 0.0}
    sampling = Sampling(budget_s=_SECONDS_PER_SIZE / len(lengths), most=most)
    by_length = {length: meter(model.at(length), sampling) for length in lengths}
    return MeasuredSize(model, _mixed(model, by_length, mix), mix)


def _mixed(
    model: CutModel, by_length: Mapping[int | None, Mapping[str, SectionMeasurement]], mix: Mapping[int | None, float]
) -> dict[str, SectionMeasurement]:
    sections: dict[str, SectionMeasurement] = {}
    for section in one_of_each(model):
        parts = [
            (share, by_length[length][model.at(length).sections[section.index].signature])
            for length, share in mix.items()
        ]
        sections[section.signature] = by_length[model.length][section.signature].model_copy(
            update={
                "forward": mean_of([(share, part.forward) for share, part in parts]),
                "backward": mean_of([(share, part.backward) for share, part in parts]),
            }
        )
    return sections


def fills_memory(measured: MeasuredSize, next_size: int, free_bytes: float) -> bool:
    """Whether one section of the next size would take half of a device's free memory, in proportion to this one."""
    per_sample = max(section.peak_bytes for section in measured.sections.values()) / measured.model.micro_batch_size
    return per_sample * next_size > free_bytes / 2


def free_bytes_of(device: torch.device) -> int:
    """Return the free memory of a device; of the CPU: that of this machine, within its container's limit."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()


def _is_out_of_memory(error: Exception) -> bool:
    named = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return named or any(word in str(error) for word in _OUT_OF_MEMORY)


def _task_s(measured: SectionMeasurement) -> float:
    return measured.forward.median_s + measured.backward.median_s
