"""Assembles a profile from measurements. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from calibrate.computing.compute import Compute, MeasuredSize
from calibrate.computing.optimizer import UnitMeasurement
from calibrate.links.network import NetworkMeasurement
from calibrate.timing.samples import sum_of
from calibrate.writing.storage import StorageSpeeds
from morph.contract.profile import (
    Environment,
    JobFacts,
    NodeTypeProfile,
    Profile,
    SectionProfile,
    Timing,
    UnitProfile,
)
from morph.cutting import CutModel, Section
from morph.jobs.job import Job

_ONE_MACHINE = "repeats intra_node: measured on one machine, over loopback"
_STAND_IN = "stand-in: a barrier between {}, not the manager's round with its workers"


@dataclass(frozen=True)
class MeasuredLinks:
    """Measurements within this node and, if there are any, between two nodes, which ``nodes`` names."""

    inside: NetworkMeasurement
    between: NetworkMeasurement | None = None
    nodes: str | None = None


def accumulator_bytes(job: Job) -> int:
    """Return the bytes per element of a gradient accumulator."""
    return 8 if job.accumulation == "exact" else 4


def parameter_bytes(model: CutModel, names: Sequence[str]) -> int:
    """Return the bytes of some parameters and buffers."""
    specs = model.specs
    return sum(prod(specs[name][0]) * specs[name][1].itemsize for name in names)


def state_bytes(compute: Compute) -> int:
    """Return the bytes of a whole checkpoint: parameters and optimizer state."""
    model, units = compute.model, compute.units
    parameters = sum(parameter_bytes(model, unit.names) for unit in model.units)
    return parameters + sum(unit.optimizer_bytes for unit in units.values())


def assemble_profile(
    job: Job,
    environment: Environment,
    compute: Compute,
    network: MeasuredLinks,
    storage: StorageSpeeds,
) -> Profile:
    """Assemble a profile; ``network``: measured within this node and, if there was a second one, between the two."""
    model = compute.model
    links = network.between or network.inside
    if links.ring_bytes is not None:
        environment = environment.model_copy(update={"ring_bytes": links.ring_bytes})
    return Profile(
        job=JobFacts(
            name=job.name,
            fingerprint=model.fingerprint,
            batch_size=job.batch_size,
            micro_batch_size=job.micro_batch_size,
            num_parameters=sum(
                prod(shape) * (2 if dtype.is_complex else 1)  # a complex number is summed as two
                for shape, dtype in model.parameter_specs.values()
            ),
        ),
        environment=environment,
        sections=tuple(_section_profile(job, compute, section) for section in model.sections),
        units=tuple(
            UnitProfile(
                id=unit.id,
                sections=unit.sections,
                parameter_bytes=parameter_bytes(model, unit.names),
                optimizer_bytes=compute.units[unit.id].optimizer_bytes,
            )
            for unit in model.units
        ),
        intra_node=network.inside.link,
        inter_node=links.link,
        all_reduce=links.all_reduce,
        links=network.inside.links,
        rings=links.rings,
        accumulator_bytes_per_parameter=8 if accumulator_bytes(job) == 8 else 4,
        optimizer_in_host_memory=job.optimizer_device == "cpu" and environment.host_memory_bytes is not None,
        commit=links.barrier,
        checkpoint_write_bytes_per_s=storage.write_bytes_per_s,
        checkpoint_upload_bytes_per_s=storage.upload_bytes_per_s,
        host_copy_bytes_per_s=storage.host_copy_bytes_per_s,
        contention=compute.contention,
        sources=_sources(network) | _sources_of_times(compute.sizes[-1]),
    )


def _sources(network: MeasuredLinks) -> dict[str, str]:
    links, rings = network.inside.notes.get("links"), (network.between or network.inside).notes.get("rings")
    notes = {field: note for field, note in (("links", links), ("rings", rings)) if note is not None}
    if network.nodes is None:
        return notes | {"inter_node": _ONE_MACHINE, "commit": _STAND_IN.format("two processes over loopback")}
    measured = f"measured between {network.nodes}"
    return notes | {
        "inter_node": measured,
        "all_reduce": f"{measured}: half of each ring on either node, one crossing each way",
        "commit": _STAND_IN.format(f"processes on {network.nodes}"),
    }


def _sources_of_times(size: MeasuredSize) -> dict[str, str]:
    if size.model.length is None:
        return {}
    shares = ", ".join(f"{length} ({share:.0%})" for length, share in size.mix.items())
    return {
        "sections": f"times and messages are means over micro-batches of these lengths: {shares}; memory: the longest"
    }


def assemble_node_type(name: str, environment: Environment, compute: Compute) -> NodeTypeProfile:
    """Assemble the part of a profile that differs on another type of node, without links."""
    sections = compute.model.sections
    return NodeTypeProfile(
        name=name,
        environment=environment,
        forward=tuple(_times(compute.sizes, section, "forward") for section in sections),
        backward=tuple(_times(compute.sizes, section, "backward") for section in sections),
        optimizer_step=tuple(_optimizer_step(compute, section) for section in sections),
        contention=compute.contention,
    )


def _times(sizes: Sequence[MeasuredSize], section: Section, task: Literal["forward", "backward"]) -> dict[int, Timing]:
    return {entry.model.micro_batch_size: getattr(entry.of(section.index), task) for entry in sizes}


def _own_units(compute: Compute, section: Section) -> list[UnitMeasurement]:
    return [compute.units[unit.id] for unit in compute.model.units if section.index in unit.sections]


def _optimizer_step(compute: Compute, section: Section) -> Timing:
    return sum_of([unit.step for unit in _own_units(compute, section)])


def _mean_message_bytes(size: MeasuredSize, index: int) -> int:
    """Return the mean bytes of the messages after a section, over micro-batches of all lengths."""
    sent = {length: size.model.at(length).sections[index].outputs for length in size.mix}
    return round(sum(share * sum(spec.num_bytes for spec in sent[length]) for length, share in size.mix.items()))


def _section_profile(job: Job, compute: Compute, section: Section) -> SectionProfile:
    model, newest = compute.model, compute.sizes[-1].of(section.index)
    names, units = (*section.parameters, *section.buffers), _own_units(compute, section)
    summed = sum(prod(model.specs[name][0]) for name in names)
    is_last = section.index == len(model.sections) - 1
    out_bytes = 0 if is_last else _mean_message_bytes(compute.sizes[-1], section.index)
    return SectionProfile(
        index=section.index,
        label=section.label,
        forward=_times(compute.sizes, section, "forward"),
        backward=_times(compute.sizes, section, "backward"),
        parameter_bytes=parameter_bytes(model, names),
        optimizer_bytes=sum(unit.optimizer_bytes for unit in units),
        gradient_bytes=summed * accumulator_bytes(job),
        input_bytes_per_sample=newest.input_bytes_per_sample,
        activation_bytes_per_sample=newest.activation_bytes_per_sample,
        output_bytes_per_sample=-(-out_bytes // model.micro_batch_size),
        optimizer_step=_optimizer_step(compute, section),
        peak_bytes={entry.model.micro_batch_size: entry.of(section.index).peak_bytes for entry in compute.sizes},
        reduced_bytes=sum(unit.reduced_bytes for unit in units),
        constant_bytes=sum(section.constant_values.num_bytes(name) for name in section.constants),
        finish_bytes=max((unit.finish_bytes for unit in units), default=0),
        step_bytes=max((unit.step_bytes for unit in units), default=0),
    )
