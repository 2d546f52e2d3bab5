"""Measure one job and put its profile together (Varuna 4.3; docs/calibration.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import psutil
import torch
from torch import Tensor

from calibrate.environment import describe_environment
from calibrate.micro_batches import checked_sizes, growing_sizes, still_improves
from calibrate.network import NetworkMeasurement, measure_network
from calibrate.optimizer import UnitMeasurement, measure_units
from calibrate.sections import SectionMeasurement, measure_sections
from calibrate.storage import measure_checkpoint_speed
from morph.contract.profile import JobFacts, Profile, SectionProfile, Timing, UnitProfile
from morph.cutting import CutModel, ExportedJob, Section, cut, export_job
from morph.data import MicroBatchLoader
from morph.job import Job, load_job

Progress = Callable[[str, float], None]
"""Told what begins now, and the share of the work that is behind (0 to 1)."""

RING_SIZES = (2, 3, 4)
IN_FLIGHT = (1, 2)
_SECONDS_PER_SIZE = 6.0
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_REDUCED_BYTES = 64 << 20


@dataclass(frozen=True)
class _Measured:
    """One micro-batch size."""

    model: CutModel
    sections: dict[str, SectionMeasurement]

    def of(self, index: int) -> SectionMeasurement:
        """The measurement of section ``index``."""
        return self.sections[self.model.sections[index].signature]

    def forward_s_per_sample(self) -> float:
        """F(m)/m of the whole model."""
        total = sum(self.of(section.index).forward.median_s for section in self.model.sections)
        return total / self.model.micro_batch_size

    def activation_bytes_per_sample(self) -> int:
        """Of the whole model."""
        return sum(self.of(section.index).activation_bytes_per_sample for section in self.model.sections)


def calibrate(
    job_path: str,
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    num_samples: int = 20,
    progress: Progress | None = None,
) -> Profile:
    """Measure a job on this machine, with one thread; nothing depends on the number of GPUs it will get.

    Args:
        job_path: ``path/to/file.py:name``.
        micro_batch_sizes: Sizes m to measure. None: the job's own m if it is fixed, else 1, 2, 4, ... until
            F(m)/m improves by less than 3 % or the activations would fill half of the free memory.
        num_samples: Samples of each time; fewer where they take long, at least 5.
        progress: Called at the start of each part.

    Raises:
        JobError, ExportError: the job cannot be measured.
        ClusterError, WaitTimeout: processes for the network measurements failed.
    """
    progress = progress or _silent
    progress("exporting the model", 0.0)
    job = load_job(job_path)
    sizes, stop_early = _sizes(job, micro_batch_sizes)
    with _one_thread():
        exported = export_job(job)
        measured = _measure_sizes(job, exported, sizes, stop_early, num_samples, progress)
        model = measured[-1].model
        progress("stepping the optimizer", 0.6)
        units = measure_units(job, model, exported.initial_parameters, num_samples=num_samples)
        progress("sending messages and reducing gradients between processes", 0.7)
        network = _measure_network(job, measured, num_samples)
        progress("writing a checkpoint", 0.95)
        state_bytes = sum(_parameter_bytes(model, unit.parameters) for unit in model.units) + sum(
            unit.optimizer_bytes for unit in units.values()
        )
        speed = measure_checkpoint_speed(state_bytes)
        profile = _profile(job, measured, units, network, speed)
    progress("done", 1.0)
    return profile


def _silent(what: str, share: float) -> None:
    del what, share


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _sizes(job: Job, wanted: Sequence[int] | None) -> tuple[tuple[int, ...], bool]:
    if wanted is not None:
        return checked_sizes(wanted, job.batch_size), False
    if job.micro_batch_size is not None:
        return (job.micro_batch_size,), False
    return growing_sizes(job.batch_size), True


def _measure_sizes(
    job: Job, exported: ExportedJob, sizes: Sequence[int], stop_early: bool, num_samples: int, progress: Progress
) -> list[_Measured]:
    dataset = job.dataset()
    measured: list[_Measured] = []
    for position, m in enumerate(sizes):
        if stop_early and measured and _fills_memory(measured[-1], m):
            break
        progress(f"running every kind of section on micro-batches of {m}", 0.2 + 0.4 * position / len(sizes))
        model = cut(exported, num_sections=job.num_sections, micro_batch_size=m)
        loader = MicroBatchLoader(dataset, job.seed, job.batch_size, m)
        initial: Mapping[str, Tensor] = exported.initial_parameters
        sections = measure_sections(job, model, initial, loader, num_samples=num_samples, budget_s=_SECONDS_PER_SIZE)
        measured.append(_Measured(model, sections))
        if stop_early and not still_improves([entry.forward_s_per_sample() for entry in measured]):
            break
    return measured


def _fills_memory(measured: _Measured, next_size: int) -> bool:
    return measured.activation_bytes_per_sample() * next_size > psutil.virtual_memory().available / 2


def _measure_network(job: Job, measured: Sequence[_Measured], num_samples: int) -> NetworkMeasurement:
    sent = {
        sum(spec.num_bytes for spec in section.outputs) for entry in measured for section in entry.model.sections[:-1]
    }
    largest = max(sent, default=1 << 16)
    messages = sorted({1024, *sent, min(4 * largest, max(largest, _MAX_MESSAGE_BYTES))})
    model = measured[-1].model
    wide = _accumulator_bytes(job) // 4
    reduced = [wide * _parameter_bytes(model, unit.parameters) for unit in model.units]
    sizes = {4096, max(reduced), sum(reduced)}
    return measure_network(
        messages,
        sorted(min(size, _MAX_REDUCED_BYTES) // 8 * 8 for size in sizes),
        ring_sizes=RING_SIZES,
        in_flight=IN_FLIGHT,
        num_samples=num_samples,
        element="int64" if job.accumulation == "exact" else "float32",
    )


def _profile(
    job: Job,
    measured: Sequence[_Measured],
    units: dict[str, UnitMeasurement],
    network: NetworkMeasurement,
    checkpoint_bytes_per_s: float,
) -> Profile:
    model = measured[-1].model
    return Profile(
        job=JobFacts(
            name=job.name,
            fingerprint=model.fingerprint,
            batch_size=job.batch_size,
            micro_batch_size=job.micro_batch_size,
            num_parameters=sum(prod(shape) for shape, _ in model.parameter_specs.values()),
        ),
        environment=describe_environment(),
        sections=tuple(_section_profile(job, measured, units, section) for section in model.sections),
        units=tuple(
            UnitProfile(id=unit.id, sections=unit.sections, parameter_bytes=_parameter_bytes(model, unit.parameters))
            for unit in model.units
        ),
        intra_node=network.link,
        inter_node=network.link,
        all_reduce=network.all_reduce,
        accumulator_bytes_per_parameter=_accumulator_bytes(job),
        commit=network.barrier,
        checkpoint_write_bytes_per_s=checkpoint_bytes_per_s,
    )


def _section_profile(
    job: Job, measured: Sequence[_Measured], units: dict[str, UnitMeasurement], section: Section
) -> SectionProfile:
    model, newest = measured[-1].model, measured[-1].of(section.index)
    own = [units[unit.id] for unit in model.units if section.index in unit.sections]
    steps = [unit.step for unit in own]
    parameters = sum(prod(model.parameter_specs[name][0]) for name in section.parameters)
    is_last = section.index == len(model.sections) - 1
    out_bytes = 0 if is_last else sum(spec.num_bytes for spec in section.outputs)
    return SectionProfile(
        index=section.index,
        label=section.label,
        forward={entry.model.micro_batch_size: entry.of(section.index).forward for entry in measured},
        backward={entry.model.micro_batch_size: entry.of(section.index).backward for entry in measured},
        parameter_bytes=_parameter_bytes(model, section.parameters),
        optimizer_bytes=sum(unit.optimizer_bytes for unit in own),
        gradient_bytes=parameters * _accumulator_bytes(job),
        input_bytes_per_sample=newest.input_bytes_per_sample,
        activation_bytes_per_sample=newest.activation_bytes_per_sample,
        output_bytes_per_sample=-(-out_bytes // model.micro_batch_size),
        optimizer_step=_sum_of(steps),
    )


def _sum_of(steps: Sequence[Timing]) -> Timing:
    """Steps one after the other; spreads add as for independent measurements."""
    return Timing(
        median_s=sum(step.median_s for step in steps),
        mad_s=sum(step.mad_s**2 for step in steps) ** 0.5,
        num_samples=min((step.num_samples for step in steps), default=1),
    )


def _parameter_bytes(model: CutModel, names: Sequence[str]) -> int:
    return sum(prod(model.parameter_specs[name][0]) * model.parameter_specs[name][1].itemsize for name in names)


def _accumulator_bytes(job: Job) -> int:
    return 8 if job.accumulation == "exact" else 4
