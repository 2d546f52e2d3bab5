"""Derives the emulated device of a job at one micro-batch size from its profile. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from morph.contract.base import Value
from morph.contract.emulation import (
    HEADER_NUMBERS,
    Curve,
    Duration,
    EmulatedDevice,
    EmulatedLinks,
    EmulatedSection,
    EmulatedUnit,
    Message,
    Slowdown,
)
from morph.contract.profile import LinkProfile, Profile, SendTime, Timing, UnitProfile
from simulator.costs.stage_costs import LinkCosts
from simulator.engine.times import Ints
from simulator.inputs.jitter import message_quantiles_ns
from simulator.inputs.layout import slowdown
from simulator.inputs.transfer import AllReduce, Floats, bandwidth_bytes_per_s

FLOAT_BYTES = 4
HEADER_BYTES = 8 * HEADER_NUMBERS
FORGIVEN_S = 0.025
_FAR_BYTES = 1e15


@dataclass(frozen=True, kw_only=True)
class EmulationOptions:
    """How a profile is emulated.

    ``message_scale`` and ``state_scale`` shrink the messages and state that are really sent and held; times and counted
    memory stay. ``all_reduces_at_once``: the number that share a node's link. ``workers_per_node``: the number that
    share its caches and memory. ``forgiven_s``: see ``EmulatedDevice``.
    """

    message_scale: float = 1.0
    state_scale: float = 1.0
    jitter_seed: int | None = None
    slow: tuple[Slowdown, ...] = ()
    all_reduces_at_once: int = 1
    workers_per_node: int = 1
    memory_bytes: int | None = None
    forgiven_s: float = FORGIVEN_S


def stretched(profile: Profile, factor: float) -> Profile:
    """Return the profile with every measured time multiplied by ``factor``."""
    longer = _stretched(profile, factor)
    assert isinstance(longer, Profile)
    return longer


def _stretched(value: object, factor: float) -> object:
    if isinstance(value, Timing):
        times = {"median_s": value.median_s * factor, "mad_s": value.mad_s * factor}
        mean_s = None if value.mean_s is None else value.mean_s * factor
        quantiles_s = tuple(time_s * factor for time_s in value.quantiles_s)
        return value.model_copy(update={**times, "mean_s": mean_s, "quantiles_s": quantiles_s})
    if isinstance(value, Value):
        return value.model_copy(update={name: _stretched(entry, factor) for name, entry in value})
    if isinstance(value, dict):
        return {key: _stretched(entry, factor) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_stretched(entry, factor) for entry in value)
    return value


def emulated_device(
    profile: Profile, micro_batch_size: int, ring_sizes: Sequence[int], options: EmulationOptions
) -> EmulatedDevice:
    """Return the description from which a worker emulates one device of the profile's kind, with unstretched times.

    ``micro_batch_size`` (m) must be measured. ``ring_sizes``: the numbers of members that all-reduces may have.
    """
    m = micro_batch_size
    reduce = AllReduce(profile, options.all_reduces_at_once)
    rings = [ring for ring in sorted(set(ring_sizes)) if ring > 1]
    return EmulatedDevice(
        sections=tuple(
            EmulatedSection(
                forward=_duration(section.forward[m]),
                backward=_duration(section.backward[m]),
                real_message_bytes=max(
                    HEADER_BYTES, round(m * section.output_bytes_per_sample * options.message_scale)
                ),
                held_bytes=section.parameter_bytes + section.optimizer_bytes + section.gradient_bytes,
                input_bytes=m * section.input_bytes_per_sample,
                activation_bytes=m * section.activation_bytes_per_sample,
                extra_bytes=max(0, section.peak_bytes.get(m, 0) - m * section.activation_bytes_per_sample),
            )
            for section in profile.sections
        ),
        units=_units(profile, options.state_scale),
        intra_node=_links(profile, profile.intra_node, m),
        inter_node=_links(profile, profile.inter_node, m),
        between_zones=None if profile.between_zones is None else _links(profile, profile.between_zones, m),
        all_reduce={ring: _reduce_curve(profile, reduce.times_ns, ring) for ring in rings},
        all_reduce_over_zones={
            ring: _reduce_curve(profile, reduce.over_zones, ring) for ring in rings if profile.between_zones is not None
        },
        state_s_per_byte=1 / (options.state_scale * bandwidth_bytes_per_s(profile.inter_node)),
        exact=profile.accumulator_bytes_per_parameter == 8,
        optimizer="adam" if any(section.optimizer_bytes for section in profile.sections) else "sgd",
        jitter_seed=options.jitter_seed,
        slow=options.slow,
        contention={
            busy: factor
            for busy in range(2, options.workers_per_node + 1)
            if (factor := slowdown(profile.contention, busy)) != 1.0
        },
        memory_bytes=options.memory_bytes,
        forgiven_s=options.forgiven_s,
    )


def known_units(profile: Profile) -> tuple[UnitProfile, ...]:
    """Return the profile's units; one per section if it names none."""
    return profile.units or tuple(
        UnitProfile(id=f"s{section.index}", sections=(section.index,), parameter_bytes=section.parameter_bytes)
        for section in profile.sections
    )


def _duration(timing: Timing) -> Duration:
    return Duration(median_s=timing.median_s, quantiles_s=timing.quantiles_s)


def _units(profile: Profile, state_scale: float) -> tuple[EmulatedUnit, ...]:
    """Return units with their share of the sections' optimizer steps: a section's first own unit takes it all."""
    units = known_units(profile)
    optimizer_s = dict.fromkeys((unit.id for unit in units), 0.0)
    for section in profile.sections:
        using = [unit for unit in units if section.index in unit.sections]
        if using:
            taker = min(using, key=lambda unit: len(unit.sections))
            optimizer_s[taker.id] += section.optimizer_step.median_s
    total_bytes = sum(unit.parameter_bytes for unit in units)
    known = total_bytes and profile.job.num_parameters
    per_byte = profile.job.num_parameters / total_bytes if known else 1 / FLOAT_BYTES
    reduced = per_byte * profile.accumulator_bytes_per_parameter
    return tuple(
        EmulatedUnit(
            id=unit.id,
            sections=unit.sections,
            real_values=max(1, round(unit.parameter_bytes * per_byte * state_scale)),
            reduced_bytes=round(unit.parameter_bytes * reduced),
            optimizer_s=optimizer_s[unit.id],
        )
        for unit in units
    )


def _links(profile: Profile, link: LinkProfile, m: int) -> EmulatedLinks:
    sizes = [float(m * section.output_bytes_per_sample) for section in profile.sections[:-1]]
    costs = LinkCosts(link, np.array(sizes))
    activation = zip(sizes, costs.activation_ns, costs.activation_wire_ns, strict=True)
    gradient = zip(sizes, costs.gradient_ns, costs.gradient_wire_ns, strict=True)
    return EmulatedLinks(
        activation=tuple(_message(link.activation, *entry) for entry in activation),
        gradient=tuple(_message(link.gradient, *entry) for entry in gradient),
    )


def _message(times: Sequence[SendTime], size_bytes: float, total_ns: int, wire_ns: int) -> Message:
    quantiles_s: tuple[float, ...] = ()
    if any(entry.time.quantiles_s for entry in times):
        quantiles_s = tuple(float(time_ns) / 1e9 for time_ns in message_quantiles_ns(times, size_bytes))
    return Message(median_s=total_ns / 1e9, quantiles_s=quantiles_s, wire_s=wire_ns / 1e9)


def _reduce_curve(profile: Profile, times_ns: Callable[[int, Floats], Ints], ring_size: int) -> Curve:
    """Return AR(D) at every size at which its slope can change."""
    links = (profile.inter_node, profile.between_zones or profile.inter_node)
    sent = [entry for link in links for entry in (*link.activation, *link.gradient)]
    bends = {float(entry.size_bytes) for entry in profile.all_reduce}
    bends |= {float(entry.size_bytes * ring_size) for entry in sent}
    sizes = sorted({1.0, *(size for size in bends if size > 0), _FAR_BYTES})
    measured_ns = times_ns(ring_size, np.array(sizes))
    return Curve(sizes_bytes=tuple(sizes), times_s=tuple(float(time_ns) / 1e9 for time_ns in measured_ns))
