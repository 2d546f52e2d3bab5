"""The gain of three further ways to split a job, by simulation (decision 0048).

    python -m benchmarks next_split --only 70B

- ZeRO-1: optimizer state is split over the replicas of a stage, each share on one of them or on two.
- Tensor parallelism: several GPUs of a node share every layer, and are one worker to all others.
- Halves: each layer is two sections, its attention and its MLP.

Each is a change of the profile, for which the unchanged planner then finds the best plan: for the shipped profiles on
64 V100s in VMs of four, and for Llama 3 8B and 70B on 64 H100s in nodes of eight, from data sheets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from benchmarks.harness import PROFILES, head, option, row
from benchmarks.published.hardware import (
    ETHERNET_BYTES_PER_S,
    GPUS_PER_LARGE_VM,
    PCIE_BYTES_PER_S,
    PCIE_LATENCY_S,
    exact,
    link,
    message_s,
)
from morph.contract.errors import PlanError
from morph.contract.profile import AllReduceTime, Profile, SectionProfile, Timing, UnitProfile, load_profile
from simulator import plan, synthetic_profile

NUM_GPUS = 64
PART_OF_KERNEL = 1.06
"""A kernel on a t-th of a layer, over a t-th of its time: Sailor's profile of Llama 3 8B on GH200s less its all-reduces
(2 GPUs: 1.056, 4 GPUs: 1.07)."""
SHARED_CALLS = 2
"""All-reduces of tensor parallelism in a layer's forward, behind its attention and its MLP; as many in its backward."""
HALF_BYTES = 2


@dataclass(frozen=True)
class Cluster:
    """Nodes; rates are those of one GPU inside its node, and of a NIC; a node has one NIC, or one for each GPU."""

    gpus_per_node: int
    inside_s: float
    inside_bytes_per_s: float
    nic_s: float
    nic_bytes_per_s: float
    one_nic: bool

    def ring_s(self, num_gpus: int, size_bytes: float) -> float:
        """Return the time of an all-reduce over GPUs of one node."""
        return 2 * (num_gpus - 1) * (self.inside_s + size_bytes / num_gpus / self.inside_bytes_per_s)

    def rings(self, shared: int) -> Iterator[AllReduceTime]:
        """Yield all-reduces over workers on different nodes, of one GPU's bytes: a ring for each of ``shared`` GPUs."""
        for at_once in sorted({1, self.gpus_per_node // shared}):
            slower = shared * at_once if self.one_nic else 1
            for ring in (2, 4, 8, 16, 32, 64):
                for size in (10**6, 10**9):
                    time_s = 2 * (ring - 1) * (self.nic_s + size / ring * slower / self.nic_bytes_per_s)
                    yield AllReduceTime(ring_size=ring, size_bytes=size, in_flight=at_once, time=exact(time_s))


V100S = Cluster(GPUS_PER_LARGE_VM, PCIE_LATENCY_S, PCIE_BYTES_PER_S, message_s(), ETHERNET_BYTES_PER_S, one_nic=True)
H100S = Cluster(8, 5e-6, 450e9, 10e-6, 50e9, one_nic=False)
"""NVLink, and 400 Gbit/s for each GPU (NVIDIA, DGX H100); latencies are assumed."""
H100_FLOPS_PER_S, H100_BYTES_PER_S = 0.5 * 989e12, 3.35e12
"""Half of the peak of bfloat16, and the memory's bandwidth, of the data sheet."""
SEQUENCE, VOCABULARY, BATCH_SIZE = 8192, 128_256, 512


def llama(num_layers: int, hidden: int, inner: int) -> tuple[Profile, float]:
    """A Llama 3 (Llama Team 2024, table 3; 8 key-value heads of 128) with exact sums, and attention's share of a layer.

    Sections: the embedding, each layer, the head.
    """
    attention, mlp, word = 2 * hidden * (hidden + 1024), 3 * hidden * inner, VOCABULARY * hidden
    boundary = HALF_BYTES * SEQUENCE * hidden
    layer_flops = 2 * SEQUENCE * (attention + mlp + SEQUENCE * hidden)  # of the scores only those before each token
    flops = [0, *[layer_flops] * num_layers, 2 * SEQUENCE * word]
    parameters = [word, *[attention + mlp] * num_layers, word]
    activations = [2 * boundary, *[17 * boundary] * num_layers, boundary + 6 * SEQUENCE * VOCABULARY]
    made = synthetic_profile(
        num_sections=num_layers + 2,
        forward_s=[each / H100_FLOPS_PER_S for each in flops],
        overhead_s=1e-5,
        batch_size=BATCH_SIZE,
        micro_batch_sizes=(1, 2, 4),
        parameter_bytes=[HALF_BYTES * each for each in parameters],
        boundary_bytes_per_sample=boundary,
        commit_s=1e-3,
    )
    sections = [
        section.model_copy(
            update={
                "label": ("layer" if 0 < section.index <= num_layers else "end"),
                "optimizer_bytes": 12 * count,
                "gradient_bytes": 8 * count,
                "activation_bytes_per_sample": kept,
                "optimizer_step": exact(30 * count / H100_BYTES_PER_S),  # bytes that Adam reads and writes
            }
        )
        for section, count, kept in zip(made.sections, parameters, activations, strict=True)
    ]
    limits = {"device_memory_bytes": 80 * 2**30, "host_memory_bytes": 256 * 2**30, "allocator_permille": 60}
    profile = made.model_copy(
        update={
            "job": made.job.model_copy(update={"num_parameters": sum(parameters)}),
            "sections": tuple(sections),
            "environment": made.environment.model_copy(update=limits),
            "intra_node": link(H100S.inside_s, H100S.inside_bytes_per_s, 0.0),
            "inter_node": link(H100S.nic_s, H100S.nic_bytes_per_s, 0.0),
            "all_reduce": tuple(H100S.rings(1)),
        }
    )
    return profile, attention / (attention + mlp)


def part(section: SectionProfile, share: float) -> SectionProfile:
    """Return this share of a section, in everything but what crosses its borders."""
    sizes = ("parameter_bytes", "optimizer_bytes", "gradient_bytes", "activation_bytes_per_sample")
    update: dict[str, object] = {name: round(share * getattr(section, name)) for name in sizes}
    for name in ("forward", "backward"):
        update[name] = {m: time.longer(share) for m, time in getattr(section, name).items()}
    return section.model_copy(update=update | {"optimizer_step": section.optimizer_step.longer(share)})


def in_halves(profile: Profile, attention: float) -> Profile:
    """Return the profile with each layer as two sections; ``attention``: its share of a layer."""
    sections: list[SectionProfile] = []
    first: list[int] = []
    units = [unit for unit in profile.units if len(unit.sections) > 1]
    own = {unit.sections[0]: unit.parameter_bytes for unit in profile.units if len(unit.sections) == 1}
    for section in profile.sections:
        first.append(len(sections))
        for share in (attention, 1 - attention) if section.label.startswith("layer") else (1.0,):
            size, index = round(share * own[section.index]), len(sections)
            units.append(UnitProfile(id=f"half {index}", sections=(index,), parameter_bytes=size))
            sections.append(part(section, share).model_copy(update={"index": index}))
    moved = tuple(
        unit.model_copy(update={"sections": tuple(first[each] for each in unit.sections)})
        if len(unit.sections) > 1
        else unit
        for unit in units
    )
    return profile.model_copy(update={"sections": tuple(sections), "units": moved})


def shared(profile: Profile, cluster: Cluster, num_gpus: int) -> Profile:
    """Return the profile with every layer on so many GPUs of a node, with sequence parallelism between layers."""

    def of_one(section: SectionProfile) -> SectionProfile:
        calls, message = SHARED_CALLS * section.label.startswith("layer"), section.input_bytes_per_sample

        def longer(times: dict[int, Timing]) -> dict[int, Timing]:
            inner_s = {m: calls * cluster.ring_s(num_gpus, m * message) for m in times}
            return {m: exact(PART_OF_KERNEL * time.median_s / num_gpus + inner_s[m]) for m, time in times.items()}

        update: dict[str, object] = {name: longer(getattr(section, name)) for name in ("forward", "backward")}
        update["input_bytes_per_sample"] = message // num_gpus
        if not cluster.one_nic:
            update["output_bytes_per_sample"] = section.output_bytes_per_sample // num_gpus
        return part(section, 1 / num_gpus).model_copy(update=update)

    units = [unit.model_copy(update={"parameter_bytes": unit.parameter_bytes // num_gpus}) for unit in profile.units]
    host_bytes = (profile.environment.host_memory_bytes or 0) * num_gpus
    num_parameters = profile.job.num_parameters // num_gpus
    return profile.model_copy(
        update={
            "job": profile.job.model_copy(update={"num_parameters": num_parameters}),
            "sections": tuple(map(of_one, profile.sections)),
            "units": tuple(units),
            "all_reduce": tuple(cluster.rings(num_gpus)),
            "environment": profile.environment.model_copy(update={"host_memory_bytes": host_bytes}),
        }
    )


def zero_1(profile: Profile, num_replicas: int, num_holders: int) -> Profile:
    """Return the profile with optimizer state split over replicas: reduce-scatter of sums, all-gather in 16 bits."""
    share, sums = min(1.0, num_holders / num_replicas), profile.accumulator_bytes_per_parameter
    sections = [
        section.model_copy(
            update={
                "optimizer_bytes": round(section.optimizer_bytes * share),
                "optimizer_step": section.optimizer_step.longer(share),
            }
        )
        for section in profile.sections
    ]
    less = (sums + HALF_BYTES) / (2 * sums) if num_holders < num_replicas else 1.0
    rings = [entry.model_copy(update={"time": entry.time.longer(less)}) for entry in profile.all_reduce]
    return profile.model_copy(update={"sections": tuple(sections), "all_reduce": tuple(rings)})


@dataclass(frozen=True)
class Variant:
    """A way to split a job; ``num_holders``: holders of each share of optimizer state; 0: it is not split."""

    label: str
    profile: Profile
    num_gpus: int = 1
    num_holders: int = 0

    def best(self, cluster: Cluster) -> tuple[float, str]:
        """Return examples per second of the best plan for all GPUs, and its shape, m and bubble; 0: nothing fits."""
        workers, found = NUM_GPUS // self.num_gpus, [(0.0, "")]
        counts = {workers // depth for depth in range(1, workers + 1)} - set(range(self.num_holders + 1))
        for replicas in sorted(counts) if self.num_holders else (None,):
            changed = zero_1(self.profile, replicas, self.num_holders) if replicas else self.profile
            try:
                simulated = plan(
                    changed,
                    num_gpus=workers,
                    num_gpus_per_node=cluster.gpus_per_node // self.num_gpus,
                    num_replicas=replicas,
                    share_links=cluster.one_nic,
                    schedule="varuna",
                ).best_simulation
            except PlanError:
                continue
            chosen, expected = simulated.plan, simulated.expected
            bubble = expected.parts_s["bubble"] / expected.mini_batch_s
            shape = f"{chosen.pipeline_depth}x{chosen.num_replicas}, m {chosen.micro_batch_size}, bubble {bubble:.0%}"
            found.append((expected.examples_per_s, shape))
        return max(found)


def main(only: Annotated[str, option("jobs with this in their name")] = "") -> None:
    jobs = {
        name: (load_profile(PROFILES / f"{name}.json"), 0.37, V100S)
        for name in ("gpt2-2.5b", "gpt2-8.3b", "bert-large")
    }
    jobs |= {"Llama 3 8B": (*llama(32, 4096, 14_336), H100S), "Llama 3 70B": (*llama(80, 8192, 28_672), H100S)}
    for name, (profile, attention, cluster) in jobs.items():
        if only not in name:
            continue
        head(f"{name} | optimizer state on every replica | ZeRO-1 | ZeRO-1, each share on two replicas")
        rows = [Variant("as it is", profile), Variant("halves of layers", in_halves(profile, attention))]
        sizes = [size for size in (2, 4, 8) if size <= cluster.gpus_per_node]
        rows += [Variant(f"{size} GPUs share a layer", shared(profile, cluster, size), size) for size in sizes]
        today = 0.0
        for variant in rows:
            plain = variant.best(cluster)
            today, cells = today or plain[0], [plain]
            if variant.profile.num_sections == profile.num_sections:
                cells += [max(plain, replace(variant, num_holders=each).best(cluster)) for each in (1, 2)]
            texts = [f"{rate:.4g} ({rate / today - 1:+.0%}): {shape}" for rate, shape in cells]
            row(variant.label, *texts, *["not tried"] * (3 - len(texts)))
