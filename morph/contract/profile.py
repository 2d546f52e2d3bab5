"""The profile: the measurements of one job, independent of the number of GPUs that the job will get.

Varuna, section 4.3 and Table 2. Times are seconds, sizes bytes. One section's ``forward[m]`` is
F_i(m), ``backward[m]`` is B_i(m) without the recompute (which costs F_i(m) again).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, model_validator

from morph.contract import ranges
from morph.contract.base import Value, read_json
from morph.contract.cluster import LinkSetting, RingSetting
from morph.contract.errors import ProfileError
from morph.contract.files import write_output

SCHEMA_VERSION = 1

PositiveInt = Annotated[int, ranges.COUNT.field]
MicroBatchSize = Annotated[int, ranges.MICRO_BATCH.field]
MicroBatchKey = Annotated[int, Field(ge=ranges.MICRO_BATCH.low, le=ranges.MICRO_BATCH.high)]
"""A number as a key; it is converted, because JSON has only text for keys."""
Gpus = Annotated[int, Field(strict=True, ge=2, le=ranges.GPUS.high)]
Index = Annotated[int, Field(strict=True, ge=0, lt=ranges.SECTIONS)]
Bytes = Annotated[int, ranges.BYTES.field]
Seconds = Annotated[float, ranges.SECONDS.field]
BytesPerSecond = Annotated[float, ranges.BYTES_PER_S.field]
MEASURED = "a JSON file that `morph calibrate JOB -o FILE` wrote"


class Timing(Value):
    """A measured duration: robust centre and spread over ``num_samples`` samples.

    No sample is discarded: outliers are in ``quantiles_s``, from which the simulator draws jitter.
    """

    median_s: Seconds
    mad_s: Seconds = Field(description="median absolute deviation")
    num_samples: PositiveInt
    mean_s: Seconds | None = Field(default=None, description="mean of all samples; None: not kept")
    quantiles_s: tuple[Seconds, ...] = Field(
        default=(), description="evenly spaced quantiles, the least sample first and the largest last; empty: not kept"
    )

    @model_validator(mode="after")
    def _ascending(self) -> Timing:
        if len(self.quantiles_s) == 1 or list(self.quantiles_s) != sorted(self.quantiles_s):
            raise ValueError("quantiles_s are none, or at least two, ascending")
        return self

    def longer(self, factor: float) -> Timing:
        """Return the same duration, longer by a factor."""
        return Timing(
            median_s=self.median_s * factor,
            mad_s=self.mad_s * factor,
            num_samples=self.num_samples,
            mean_s=None if self.mean_s is None else self.mean_s * factor,
            quantiles_s=tuple(time_s * factor for time_s in self.quantiles_s),
        )


class SectionProfile(Value):
    """One section C_i (Varuna, Table 2)."""

    index: Index
    label: str = Field(description="where in the user's model the section begins")
    forward: dict[MicroBatchKey, Timing] = Field(description="F_i(m) by micro-batch size m")
    backward: dict[MicroBatchKey, Timing] = Field(description="B_i(m) by micro-batch size m, without recompute")
    parameter_bytes: Bytes
    optimizer_bytes: Bytes = Field(description="optimizer state of this section's parameters")
    gradient_bytes: Bytes = Field(description="accumulated gradient held until the commit")
    input_bytes_per_sample: Bytes = Field(description="input that must be kept to recompute the section")
    activation_bytes_per_sample: Bytes = Field(
        description="held between forward and backward without recompute: tensors that autograd keeps, and outputs"
    )
    output_bytes_per_sample: Bytes = Field(description="bytes that cross the next cut-point; 0 for the last section")
    optimizer_step: Timing
    peak_bytes: dict[MicroBatchKey, Bytes] = Field(
        default={}, description="by m: peak memory of one forward and backward, beyond the memory held between tasks"
    )
    reduced_bytes: Bytes | None = Field(
        default=None, description="mean gradients held from the reduction to the update; None: as parameter_bytes"
    )
    finish_bytes: Bytes = Field(
        default=0, description="peak beyond sums and mean gradients while one unit's sums become mean gradients"
    )
    constant_bytes: Bytes = Field(default=0, description="frozen weights and other constants, which every worker reads")
    step_bytes: Bytes = Field(
        default=0, description="peak beyond state and mean gradients while one unit's optimizer steps"
    )


class UnitProfile(Value):
    """A parameter unit: the parameters used by exactly these sections (several = tied weights)."""

    id: str
    sections: tuple[Index, ...] = Field(min_length=1, max_length=ranges.SECTIONS)
    parameter_bytes: Bytes
    optimizer_bytes: Bytes | None = Field(
        default=None, description="optimizer state; None: in proportion to that of the first section"
    )


class SendTime(Value):
    """One-way time of one message of ``size_bytes``, send call to receipt."""

    size_bytes: Bytes
    time: Timing


class LinkProfile(Value):
    """Send times by growing size over one kind of link."""

    activation: tuple[SendTime, ...] = Field(min_length=1, description="downstream direction")
    gradient: tuple[SendTime, ...] = Field(min_length=1, description="upstream direction")

    @classmethod
    def of(cls, latency_s: float, bytes_per_s: float) -> LinkProfile:
        """Make a link, alike in both directions, from its latency and bandwidth."""
        times = tuple(
            SendTime(size_bytes=size, time=Timing(median_s=latency_s + size / bytes_per_s, mad_s=0.0, num_samples=1))
            for size in (0, 2**30)
        )
        return cls(activation=times, gradient=times)


class AllReduceTime(Value):
    """AR(D): time of one all-reduce of ``size_bytes`` over a ring of ``ring_size``, ``in_flight`` at once."""

    ring_size: Gpus
    size_bytes: PositiveInt
    in_flight: PositiveInt = 1
    time: Timing


class Contention(Value):
    """The slowdown when several workers of one node compute at once (shared caches and clock)."""

    num_busy: Gpus
    factor: Annotated[
        float,
        Field(strict=True, ge=1, le=ranges.FACTOR.high, description="time of a task over its time without neighbours"),
    ]


class JobFacts(Value):
    """Facts about the job; ``fingerprint`` changes when the cut model changes."""

    name: str
    fingerprint: str
    batch_size: Annotated[int, ranges.BATCH.field] = Field(description="global batch M, samples")
    micro_batch_size: MicroBatchSize | None = Field(
        default=None, description="m fixed by the user; None: the planner picks"
    )
    num_parameters: Bytes


class Environment(Value):
    """The machine on which the profile was measured."""

    python: str
    torch: str
    platform: str
    device: str = Field(description="cuda device name, or cpu model")
    num_cores: PositiveInt
    threads_per_worker: PositiveInt
    device_memory_bytes: Annotated[int, ranges.MEMORY_BYTES.field] | None = Field(
        default=None,
        description="memory of one device; for a CPU, one core's share of the machine's memory; None: no limit known",
    )
    host_memory_bytes: Annotated[int, ranges.MEMORY_BYTES.field] | None = Field(
        default=None,
        description="host memory for each device that has its own memory; None: the device uses host memory",
    )
    context_bytes: Bytes = Field(default=0, description="device memory that the driver takes for a process")
    allocator_permille: Annotated[int, Field(strict=True, ge=0, le=1000)] = Field(
        default=0, description="overhead of the device's allocator, in thousandths of the tensors' memory"
    )
    ring_bytes: Bytes = Field(default=0, description="device memory that NCCL takes for each ring of a worker")
    process_bytes: Bytes = Field(default=0, description="host memory of a worker before it holds any state")
    zone: str = Field(default="", description="zone of the GPUs, where a plan tells zones apart")
    estimated: str = Field(
        default="", description="how times were computed that were not measured on such a device; empty: measured"
    )
    created: str = Field(description="ISO 8601, UTC")


class NodeTypeProfile(Value):
    """The differences on another type of node; everything else is as in the profile that holds it.

    The sections are those of the profile, in order, with the same micro-batch sizes.
    """

    name: str = Field(min_length=1)
    environment: Environment
    forward: tuple[dict[MicroBatchKey, Timing], ...] = Field(description="F_i(m) by section")
    backward: tuple[dict[MicroBatchKey, Timing], ...] = Field(description="B_i(m) by section")
    optimizer_step: tuple[Timing, ...] = Field(description="of each section")
    intra_node: LinkProfile | None = Field(default=None, description="None: as in the profile")
    inter_node: LinkProfile | None = Field(default=None, description="None: as in the profile")
    contention: tuple[Contention, ...] = ()


class Profile(Value):
    """One versioned profile of one job."""

    schema_version: Literal[1] = 1
    job: JobFacts
    environment: Environment
    sections: tuple[SectionProfile, ...] = Field(min_length=1, max_length=ranges.SECTIONS)
    units: tuple[UnitProfile, ...] = ()
    intra_node: LinkProfile
    inter_node: LinkProfile
    between_zones: LinkProfile | None = Field(default=None, description="between nodes of two zones; None: inter_node")
    all_reduce: tuple[AllReduceTime, ...] = ()
    links: Literal["staged", "ipc"] = Field(
        default="staged", description="value of vms.links while messages within a node were measured"
    )
    rings: Literal["gloo", "nccl"] = Field(
        default="gloo", description="value of vms.rings while reductions were measured"
    )
    accumulator_bytes_per_parameter: Literal[4, 8] = Field(description="8: exact accumulation, 4: fast")
    optimizer_in_host_memory: bool = Field(
        default=False, description="optimizer state is in host memory, with a copy of the parameters"
    )
    commit: Timing = Field(description="commit barrier: manager round trip")
    checkpoint_write_bytes_per_s: BytesPerSecond
    checkpoint_upload_bytes_per_s: BytesPerSecond | None = Field(
        default=None, description="upload speed to the job's checkpoint storage; None: not measured"
    )
    host_copy_bytes_per_s: BytesPerSecond | None = Field(
        default=None, description="speed from device to host memory; None: not measured"
    )
    contention: tuple[Contention, ...] = Field(
        default=(), description="slowdowns by growing num_busy; empty: none was measured"
    )
    node_types: tuple[NodeTypeProfile, ...] = Field(default=(), description="other types of node, measured later")
    sources: dict[str, str] = Field(
        default={},
        description="sources of values that were not measured here: dotted field -> source, or derivation",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        for position, section in enumerate(self.sections):
            if section.index != position:
                raise ValueError(
                    f"sections[{position}].index is {section.index}; sections are numbered 0..K-1 in order"
                )
            if not section.forward or set(section.forward) != set(section.backward):
                raise ValueError(
                    f"sections[{position}] needs forward and backward for the same micro-batch sizes, at least one"
                )
            if set(section.forward) != set(self.sections[0].forward):
                raise ValueError(f"sections[{position}].forward has other micro-batch sizes than sections[0]")
        num_sections = len(self.sections)
        for unit in self.units:
            if any(not 0 <= section < num_sections for section in unit.sections):
                raise ValueError(f"unit {unit.id!r} names a section outside 0..{num_sections - 1}")
        _check_contention("contention", self.contention)
        self._check_node_types()
        return self

    def _check_node_types(self) -> None:
        for position, node_type in enumerate(self.node_types):
            place = f"node_types[{position}]"
            if any(other.name == node_type.name for other in self.node_types[:position]):
                raise ValueError(f"{place}.name is {node_type.name!r}, as that of a node type before it")
            _check_contention(f"{place}.contention", node_type.contention)
            for field in ("forward", "backward", "optimizer_step"):
                count = len(getattr(node_type, field))
                if count != self.num_sections:
                    raise ValueError(f"{place}.{field} has {count} entries; allowed: {self.num_sections}, the sections")
            for section, times in enumerate(zip(node_type.forward, node_type.backward, strict=True)):
                if any(tuple(sorted(by_size)) != self.micro_batch_sizes for by_size in times):
                    allowed = ", ".join(map(str, self.micro_batch_sizes))
                    raise ValueError(
                        f"{place} has other micro-batch sizes for section {section} than the profile; "
                        f"allowed: {allowed}, forward and backward"
                    )

    @property
    def num_sections(self) -> int:
        """K."""
        return len(self.sections)

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """All measured values of m, ascending."""
        return tuple(sorted(self.sections[0].forward))

    def section_compute_s(self, micro_batch_size: int) -> tuple[float, ...]:
        """Return the seconds of forward and backward of one micro-batch on each section."""
        m = micro_batch_size
        return tuple(section.forward[m].median_s + section.backward[m].median_s for section in self.sections)

    def corrected(
        self, factors: tuple[float, ...], types: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    ) -> Profile:
        """Return the profile with forward and backward of each section times a factor; ``types``: by node type."""
        sections = tuple(
            section.model_copy(
                update={"forward": _longer(section.forward, factor), "backward": _longer(section.backward, factor)}
            )
            for section, factor in zip(self.sections, factors, strict=True)
        )
        node_types = tuple(
            known
            if known.name not in types
            else known.model_copy(
                update={
                    "forward": tuple(map(_longer, known.forward, types[known.name])),
                    "backward": tuple(map(_longer, known.backward, types[known.name])),
                }
            )
            for known in self.node_types
        )
        return self.model_copy(update={"sections": sections, "node_types": node_types})

    def for_node_type(self, name: str) -> Profile:
        """Return the profile for another type of node that was measured for it."""
        measured = next((node_type for node_type in self.node_types if node_type.name == name), None)
        if measured is None:
            known = ", ".join(node_type.name for node_type in self.node_types)
            raise ProfileError(
                "is not among the profile's node types",
                field="node_types",
                value=name,
                allowed=known or "none yet; morph calibrate --add-node-type adds one",
            )
        sections = tuple(
            section.model_copy(update={"forward": forward, "backward": backward, "optimizer_step": step})
            for section, forward, backward, step in zip(
                self.sections, measured.forward, measured.backward, measured.optimizer_step, strict=True
            )
        )
        return self.model_copy(
            update={
                "environment": measured.environment,
                "sections": sections,
                "intra_node": measured.intra_node or self.intra_node,
                "inter_node": measured.inter_node or self.inter_node,
                "contention": measured.contention,
            }
        )


def _longer(times: dict[int, Timing], factor: float) -> dict[int, Timing]:
    return {m: timing.longer(factor) for m, timing in times.items()}


def estimates(profile: Profile, types: Iterable[str] = ()) -> tuple[str, ...]:
    """Return a sentence for each of these types of node whose times were not measured; none: the profile's own type."""
    known = {each.name: each.environment for each in profile.node_types}
    asked = {name: known.get(name, profile.environment).estimated for name in dict.fromkeys(types or ("",))}
    return tuple(
        f"the times of {name or 'this profile'} were not measured, but estimated: {how}"
        for name, how in asked.items()
        if how
    )


def other_device(profile: Profile, device: str) -> tuple[str, ...]:
    """Return a sentence if workers compute on GPUs (``vms.device``), and the profile has only times of a CPU."""
    environments = (profile.environment, *(known.environment for known in profile.node_types))
    if device != "cuda" or any(each.host_memory_bytes is not None for each in environments):
        return ()
    return (
        f"the profile has the times of a CPU ({profile.environment.device}), but vms.device is cuda: plans expect "
        "these times; calibrate on such a GPU with --device cuda",
    )


def other_links(profile: Profile, links: LinkSetting, rings: RingSetting) -> tuple[str, ...]:
    """Return a sentence for each difference between a run's links or rings and the measured ones of devices."""
    if profile.environment.host_memory_bytes is None:
        return ()
    sentence = (
        "{what} were measured over {measured}, but {setting} is {chosen}: plans assume that they are {how} "
        "than in fact; "
        "calibrate with --{name} {chosen}"
    )
    sentences = []
    for name, what, measured, chosen, slow in (
        ("links", "messages within a node", profile.links, links, "staged"),
        ("rings", "reductions", profile.rings, rings, "gloo"),
    ):
        if measured != chosen and (chosen != "auto" or measured == slow):
            how = "slower" if measured == slow else "faster"
            sentences.append(
                sentence.format(what=what, measured=measured, setting=f"vms.{name}", chosen=chosen, how=how, name=name)
            )
    return tuple(sentences)


def _check_contention(place: str, entries: tuple[Contention, ...]) -> None:
    counts = [entry.num_busy for entry in entries]
    if counts != sorted(set(counts)):
        raise ValueError(f"{place} has num_busy {counts}; allowed: each more than the one before")


def load_profile(path: Path) -> Profile:
    """Read a profile file."""
    if re.search(r"\.(ya?ml|py(:\w+)?)$", path.name):
        measured = MEASURED.replace("JOB -o FILE", f"{path} -o profile.json") if ":" in path.name else MEASURED
        raise ProfileError("is a job, not a profile", source=str(path), allowed=measured)
    try:
        return read_json(path, Profile, ProfileError, MEASURED)
    except ProfileError as error:
        version = error.value
        if error.field == "schema_version" and isinstance(version, int | float) and version > SCHEMA_VERSION:
            raise ProfileError(
                f"written by a newer Morph: schema_version {version}; this one reads {SCHEMA_VERSION}",
                source=str(path),
                field="schema_version",
            ) from error
        raise


def write_profile(profile: Profile, path: Path, *, as_read: bool = False) -> None:
    """Replace ``path`` with the profile, atomically; ``as_read``: without defaults for fields absent in its file."""
    write_output(path, profile.model_dump_json(indent=2, exclude_unset=as_read) + "\n", ProfileError)
