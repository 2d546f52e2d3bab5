"""BERT-large and ResNet-152 as in Bamboo's section 6, on its VMs: what the paper states, and what follows from shapes.

Stated: four pipelines of eight stages on V100s without redundancy (table 1, where 12 is 1.5 x 8), so many samples in a
mini-batch of a pipeline, 1F1B, half precision, layers placed so that "memory [is] evenly distributed across stages"
(appendix C.1), and samples/s on demand (table 2, Demand-S). The last gives the speed: all computing takes that long
that this is met. Not stated: the micro-batch size, the links (10 Gbps here, a p3.2xlarge's), how fast host memory is
copied to (PCIe 3.0). Operations of one sample take time in proportion, whatever they are: one speed for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.published import hardware
from benchmarks.published.build import BACKWARD_OVER_FORWARD, OPTIMIZER_BYTES, STEP_BYTES
from benchmarks.published.shapes import HALF_BYTES, MODELS
from morph.contract.profile import JobFacts, Profile, SectionProfile, UnitProfile

STAGES, REPLICAS = 8, 4
SGD_BYTES = 0
"""Per parameter: "a vanilla SGD optimizer" for the vision models (section 6)."""
BERT_SEQUENCE = 128
"""Assumed, as BERT's own first phase: the paper gives none. Times are anchored; it is in messages and memory alone."""


@dataclass(frozen=True)
class Layer:
    """One section of one sample: operations of its forward, parameters, and bytes that it keeps and hands on."""

    label: str
    flops: float
    parameters: int
    activation_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Published:
    """A model of table 4: overheads over no redundancy of LFLB, EFLB and EFEB, and samples/s on demand."""

    name: str
    pipeline_batch: int
    samples_per_s: float
    overheads: tuple[float, float, float]
    optimizer_bytes: int
    layers: tuple[Layer, ...]


def bert_layers() -> Iterator[Layer]:
    """24 layers between an embedding and a head."""
    shape, tokens = MODELS["bert-large"], BERT_SEQUENCE
    hidden, words = shape.hidden, shape.vocabulary
    border = tokens * hidden * HALF_BYTES
    yield Layer("embedding", tokens * hidden, words * hidden, 2 * border, border)
    flops = tokens * (24 * hidden**2 + 4 * tokens * hidden)
    kept = 34 * tokens * hidden + 5 * shape.num_heads * tokens**2
    for index in range(shape.num_layers):
        yield Layer(f"layer {index}", flops, shape.layer_parameters, kept, border)
    yield Layer("head", tokens * 2 * hidden * words, words * hidden, border + tokens * words * (HALF_BYTES + 4), 0)


def resnet_layers() -> Iterator[Layer]:
    """ResNet-152 (He et al. 2015, table 1): a stem, 3 + 8 + 36 + 3 bottlenecks, a classifier; images of 224 x 224.

    Kept of each convolution: what it gives, and that normalised.
    """
    stem = 64 * 112**2
    yield Layer("stem", 2 * 9 * 49 * 64 * 112**2 / 3, 3 * 49 * 64, HALF_BYTES * 2 * stem, HALF_BYTES * 64 * 56**2)
    given, size = 64, 56
    for stage, (blocks, width) in enumerate(((3, 64), (8, 128), (36, 256), (3, 512))):
        for block in range(blocks):
            entry = size
            size = size // 2 if block == 0 and stage > 0 else size
            weights = [given * width, 9 * width**2, 4 * width**2]
            areas, widths = [entry**2, size**2, size**2], [width, width, 4 * width]
            if block == 0:
                weights, areas, widths = [*weights, 4 * given * width], [*areas, size**2], [*widths, 4 * width]
            elements = sum(area * channels for area, channels in zip(areas, widths, strict=True))
            yield Layer(
                f"block {stage + 2}.{block}",
                sum(2 * weight * area for weight, area in zip(weights, areas, strict=True)),
                sum(weights) + 2 * sum(widths),
                HALF_BYTES * 2 * elements,
                HALF_BYTES * 4 * width * size**2,
            )
            given = 4 * width
    yield Layer("classifier", 2 * given * 1000, given * 1000 + 1000, HALF_BYTES * given, 0)


MODELS_OF_TABLE_4 = (
    Published("BERT", 256, 108.0, (0.0701, 0.1977, 0.7151), OPTIMIZER_BYTES, tuple(bert_layers())),
    Published("ResNet", 2048, 32.0, (0.0765, 0.0951, 0.6424), SGD_BYTES, tuple(resnet_layers())),
)


def profile_of(model: Published, micro_batch_size: int, flops_per_s: float, latency_s: float) -> Profile:
    """The profile of one model at one micro-batch size and speed, with this latency of messages."""
    m = micro_batch_size
    sections = []
    for index, layer in enumerate(model.layers):
        forward_s = m * layer.flops / flops_per_s
        sections.append(
            SectionProfile(
                index=index,
                label=layer.label,
                forward={m: hardware.exact(forward_s)},
                backward={m: hardware.exact(BACKWARD_OVER_FORWARD * forward_s)},
                parameter_bytes=HALF_BYTES * layer.parameters,
                optimizer_bytes=model.optimizer_bytes * layer.parameters,
                gradient_bytes=HALF_BYTES * layer.parameters,
                input_bytes_per_sample=model.layers[index - 1].output_bytes if index else 0,
                activation_bytes_per_sample=layer.activation_bytes,
                output_bytes_per_sample=layer.output_bytes,
                optimizer_step=hardware.exact(STEP_BYTES * layer.parameters / hardware.GPU_MEMORY_BYTES_PER_S),
            )
        )
    return Profile(
        schema_version=1,
        job=JobFacts(
            name=model.name,
            fingerprint=f"bamboo-{model.name}",
            batch_size=model.pipeline_batch * REPLICAS,
            num_parameters=sum(layer.parameters for layer in model.layers),
        ),
        environment=hardware.ENVIRONMENT,
        sections=tuple(sections),
        units=tuple(
            UnitProfile(id=f"s{index}", sections=(index,), parameter_bytes=HALF_BYTES * layer.parameters)
            for index, layer in enumerate(model.layers)
        ),
        intra_node=hardware.pcie(),
        inter_node=hardware.link(latency_s, hardware.ETHERNET_BYTES_PER_S, 0.0),
        all_reduce=hardware.rings(),
        accumulator_bytes_per_parameter=4,
        commit=hardware.exact(2 * hardware.message_s()),
        checkpoint_write_bytes_per_s=hardware.DISK_BYTES_PER_S,
        host_copy_bytes_per_s=hardware.PCIE_BYTES_PER_S,
    )
