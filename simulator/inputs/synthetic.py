"""Profiles made from a few numbers instead of measurements, for tests, examples and what-if questions."""

from __future__ import annotations

from collections.abc import Sequence

from morph.contract.profile import (
    AllReduceTime,
    Environment,
    JobFacts,
    LinkProfile,
    NodeTypeProfile,
    Profile,
    SectionProfile,
    SendTime,
    Timing,
    UnitProfile,
)

_MESSAGE_BYTES = (1_000, 100_000, 10_000_000)
_REDUCE_BYTES = (1_000, 1_000_000, 100_000_000)
_RING_SIZES = (2, 4, 8)
_ENVIRONMENT = Environment(
    python="3.11",
    torch="none",
    platform="synthetic",
    device="synthetic",
    num_cores=1,
    threads_per_worker=1,
    created="1970-01-01T00:00:00Z",
)


def synthetic_profile(  # noqa: PLR0913 (every argument has a default)
    *,
    num_sections: int = 8,
    forward_s: float | Sequence[float] = 0.002,
    backward_ratio: float = 2.0,
    overhead_s: float = 0.0005,
    batch_size: int = 64,
    micro_batch_sizes: Sequence[int] = (1, 2, 4, 8, 16),
    micro_batch_size: int | None = None,
    latency_s: float = 0.0002,
    bandwidth_bytes_per_s: float = 1e9,
    parameter_bytes: int | Sequence[int] = 4_000_000,
    boundary_bytes_per_sample: int = 65_536,
    activation_bytes_per_sample: int = 1_000_000,
    optimizer_step_s: float = 0.001,
    commit_s: float = 0.002,
    accumulator_bytes_per_parameter: int = 8,
    tied: bool = False,
    jitter: float = 0.0,
) -> Profile:
    """Build a profile of a made-up job. Times are in seconds.

    Args:
        forward_s: Forward seconds per sample of a section; one number for all, or K numbers.
        overhead_s: Fixed seconds added to each forward, so that F(m) = overhead_s + m * forward_s.
        micro_batch_size: m fixed by the user, or None to leave it to the planner.
        latency_s: One-way latency between nodes; a quarter of it inside a node.
        bandwidth_bytes_per_s: Bandwidth of links and rings between nodes; four times as much inside a node.
        parameter_bytes: Bytes of a section's float32 parameters; one number for all, or K numbers.
        boundary_bytes_per_sample: Bytes that cross a cut-point, and are stored for the recompute.
        activation_bytes_per_sample: Bytes that a section keeps between forward and backward.
        commit_s: Round trip of the commit barrier.
        accumulator_bytes_per_parameter: 8 (exact) or 4 (fast).
        tied: Whether the first and the last section also share a tied unit of ``parameter_bytes[0]``.
        jitter: Times of tasks and messages are uniform within this share of them to both sides; below 1.
    """
    forwards = [forward_s] * num_sections if isinstance(forward_s, float | int) else list(forward_s)
    parameters = [parameter_bytes] * num_sections if isinstance(parameter_bytes, int) else list(parameter_bytes)
    if len(forwards) != num_sections or len(parameters) != num_sections:
        raise ValueError(f"forward_s and parameter_bytes need one number, or {num_sections}")
    units = [UnitProfile(id=f"s{i}", sections=(i,), parameter_bytes=parameters[i]) for i in range(num_sections)]
    held = list(parameters)
    if tied and num_sections > 1:
        last = num_sections - 1
        units.append(UnitProfile(id=f"s0+s{last}", sections=(0, last), parameter_bytes=parameters[0]))
        held[0] += parameters[0]
        held[last] += parameters[0]

    def section(index: int) -> SectionProfile:
        forward = {m: overhead_s + m * forwards[index] for m in micro_batch_sizes}
        return SectionProfile(
            index=index,
            label=f"layer {index}",
            forward={m: _timing(time_s, jitter) for m, time_s in forward.items()},
            backward={m: _timing(time_s * backward_ratio, jitter) for m, time_s in forward.items()},
            parameter_bytes=held[index],
            optimizer_bytes=2 * held[index],
            gradient_bytes=held[index] // 4 * accumulator_bytes_per_parameter,
            input_bytes_per_sample=boundary_bytes_per_sample,
            activation_bytes_per_sample=activation_bytes_per_sample,
            output_bytes_per_sample=boundary_bytes_per_sample if index < num_sections - 1 else 0,
            optimizer_step=_timing(optimizer_step_s),
        )

    return Profile.model_validate(
        {
            "job": JobFacts(
                name="synthetic",
                fingerprint=f"synthetic-{num_sections}",
                batch_size=batch_size,
                micro_batch_size=micro_batch_size,
                num_parameters=sum(unit.parameter_bytes for unit in units) // 4,
            ),
            "environment": _ENVIRONMENT,
            "sections": tuple(section(index) for index in range(num_sections)),
            "units": tuple(units),
            "intra_node": _link(latency_s / 4, bandwidth_bytes_per_s * 4, jitter),
            "inter_node": _link(latency_s, bandwidth_bytes_per_s, jitter),
            "all_reduce": tuple(
                AllReduceTime(
                    ring_size=ring,
                    size_bytes=size,
                    time=_timing(2 * (ring - 1) * (latency_s + size / ring / bandwidth_bytes_per_s)),
                )
                for ring in _RING_SIZES
                for size in _REDUCE_BYTES
            ),
            "accumulator_bytes_per_parameter": accumulator_bytes_per_parameter,
            "commit": _timing(commit_s),
            "checkpoint_write_bytes_per_s": 1e9,
        }
    )


def with_type(profile: Profile, name: str, slower: float, memory_bytes: int | None = None) -> Profile:
    """Add a type of node on which the tasks of every section take ``slower`` times as long, with the profile's links.

    ``slower`` is for example the published speed of the profile's device over that of the type. ``memory_bytes`` are
    those of one device; None: no limit.
    """
    estimated = f"the profile's times, {slower:.3g} times as long"
    environment = profile.environment.model_copy(
        update={"device": f"{name}, scaled", "device_memory_bytes": memory_bytes, "estimated": estimated}
    )
    added = NodeTypeProfile(
        name=name,
        environment=environment,
        forward=tuple({m: t.longer(slower) for m, t in each.forward.items()} for each in profile.sections),
        backward=tuple({m: t.longer(slower) for m, t in each.backward.items()} for each in profile.sections),
        optimizer_step=tuple(each.optimizer_step.longer(slower) for each in profile.sections),
    )
    return profile.model_copy(update={"node_types": (*profile.node_types, added)})


def _timing(median_s: float, jitter: float = 0.0) -> Timing:
    quantiles_s = tuple(median_s * (1 + jitter * step) for step in (-1.0, -0.5, 0.0, 0.5, 1.0)) if jitter else ()
    return Timing(median_s=median_s, mad_s=median_s * jitter / 2, num_samples=1, quantiles_s=quantiles_s)


def _link(latency_s: float, bandwidth_bytes_per_s: float, jitter: float) -> LinkProfile:
    times = tuple(
        SendTime(size_bytes=size, time=_timing(latency_s + size / bandwidth_bytes_per_s, jitter))
        for size in _MESSAGE_BYTES
    )
    return LinkProfile(activation=times, gradient=times)
