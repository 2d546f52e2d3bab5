"""One profile from a model's shape, its published speed, and the published VMs. Plain arithmetic, no randomness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.published import hardware
from benchmarks.published.shapes import HALF_BYTES, MODELS, Transformer
from benchmarks.published.sources import sources_of
from benchmarks.published.speeds import ACCUMULATOR_BYTES, Speed, speed_of
from morph.contract.profile import JobFacts, Profile, SectionProfile, UnitProfile

SHIPPED = ("gpt2-2.5b", "gpt2-8.3b", "bert-large")
"""Models whose profiles are files in ``configs/profiles``."""
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
BACKWARD_OVER_FORWARD = 2
"""Varuna, figure 4: B takes twice as long as F."""
OPTIMIZER_BYTES = 12
"""Per parameter: 32-bit copy and two moments of Adam."""
STEP_BYTES = 30
"""Read and written per parameter in one step: gradient, copy and moments read, copy, moments and 16 bits written."""
TOKEN_BYTES = 8
_EMBEDDING_PASSES = 3


@dataclass(frozen=True)
class _Part:
    """One kind of section; ``activation_bytes`` per sample."""

    label: str
    forward_s: Callable[[int], float]
    activation_bytes: int


def published_profile(model: str, *, slower_network: float = 1.0) -> Profile:
    """The profile of one published model on V100s and 10 Gbps ethernet.

    Sections: 0 is the embedding, 1 to L are the layers, L + 1 is the head; the word embedding is tied between the
    first and the last.

    Args:
        model: A key of ``MODELS``.
        slower_network: Divides the bandwidth between VMs; latency and jitter stay.

    Raises:
        ValueError: no such model, or a network that is not slower by a positive factor.
    """
    if model not in MODELS:
        raise ValueError(f"model {model!r} is not published; allowed: {', '.join(MODELS)}")
    if not slower_network > 0:
        raise ValueError(f"slower_network is {slower_network}; allowed: more than 0")
    shape = MODELS[model]
    last = shape.num_layers + 1
    tied = UnitProfile(id=f"s0+s{last}", sections=(0, last), parameter_bytes=HALF_BYTES * shape.tied_parameters)
    own = [HALF_BYTES * parameters for parameters in _own_parameters(shape)]
    return Profile(
        schema_version=1,
        job=JobFacts(
            name=model,
            fingerprint=f"published-{model}",
            batch_size=shape.batch_size,
            num_parameters=shape.num_parameters,
        ),
        environment=hardware.ENVIRONMENT,
        sections=_sections(shape, speed_of(model)),
        units=(*(UnitProfile(id=f"s{i}", sections=(i,), parameter_bytes=size) for i, size in enumerate(own)), tied),
        intra_node=hardware.pcie(),
        inter_node=hardware.ethernet(slower_network),
        all_reduce=hardware.rings(slower_network),
        accumulator_bytes_per_parameter=ACCUMULATOR_BYTES,
        commit=hardware.exact(2 * hardware.message_s()),
        checkpoint_write_bytes_per_s=hardware.DISK_BYTES_PER_S,
        host_copy_bytes_per_s=hardware.PCIE_BYTES_PER_S,
        sources=sources_of(model, slower_network),
    )


def _own_parameters(shape: Transformer) -> tuple[int, ...]:
    """Return the parameters of each section, without the tied word embedding."""
    return (shape.position_parameters, *(shape.layer_parameters,) * shape.num_layers, shape.norm_parameters)


def _sections(shape: Transformer, speed: Speed) -> tuple[SectionProfile, ...]:
    last = shape.num_layers + 1
    moved_s = _EMBEDDING_PASSES * shape.boundary_bytes / hardware.GPU_MEMORY_BYTES_PER_S
    embedding = _Part("embedding", lambda m: m * moved_s, 2 * shape.boundary_bytes)
    layer = _Part("layer", lambda m: speed.forward_s(shape.layer_flops, m), shape.layer_activation_bytes)
    head = _Part("head", lambda m: speed.forward_s(shape.head_flops, m), shape.head_activation_bytes)
    ends = {0: embedding, last: head}
    sections = []
    for index, own in enumerate(_own_parameters(shape)):
        part = ends.get(index, layer)
        parameters = own + (shape.tied_parameters if index in ends else 0)
        sections.append(
            SectionProfile(
                index=index,
                label=part.label if index in ends else f"{part.label} {index - 1}",
                forward={m: hardware.exact(part.forward_s(m)) for m in MICRO_BATCH_SIZES},
                backward={m: hardware.exact(BACKWARD_OVER_FORWARD * part.forward_s(m)) for m in MICRO_BATCH_SIZES},
                parameter_bytes=HALF_BYTES * parameters,
                optimizer_bytes=OPTIMIZER_BYTES * parameters,
                gradient_bytes=ACCUMULATOR_BYTES * parameters,
                input_bytes_per_sample=shape.boundary_bytes if index else TOKEN_BYTES * shape.sequence,
                activation_bytes_per_sample=part.activation_bytes,
                output_bytes_per_sample=shape.boundary_bytes if index < last else 0,
                optimizer_step=hardware.exact(STEP_BYTES * parameters / hardware.GPU_MEMORY_BYTES_PER_S),
            )
        )
    return tuple(sections)
