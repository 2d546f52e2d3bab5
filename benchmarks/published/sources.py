"""Where each value of a published profile comes from: dotted field (without list numbers) -> source or derivation.

Three kinds: a paper and its place; "derived: ..." with the rule; "assumed: ..." where no paper says anything.
"""

from __future__ import annotations

from benchmarks.published import hardware
from benchmarks.published.shapes import MODELS
from benchmarks.published.speeds import ANCHOR_OF, ANCHORS, flops_per_s, speed_of

_STATED = "what calibration states for CUDA (docs/how-it-works/calibration.md)"
_NOBODY = "derived: constant; nobody ran anything for this profile"
_NAMES = "derived: from the model's name"
_FEEDS_EMBEDDING = "8 bytes per token into the embedding"


def sources_of(model: str, slower_network: float = 1.0) -> dict[str, str]:
    """Return the sources of one model's profile."""
    slower = f"; bandwidth divided by {slower_network:g}" if slower_network != 1 else ""
    return {
        "schema_version": "docs/reference/profile.schema.json",
        **_job(model),
        **_environment(),
        **_sections(model),
        "units": (
            "derived: as sections.parameter_bytes; the word embedding is one unit of the first and the last section"
        ),
        "intra_node": (
            "Varuna 3.1, observation 4: PCIe between the four GPUs of an NC24_v3; derived: PCIe 3.0 x16, "
            f"15.75 GB/s; assumed: {hardware.PCIE_LATENCY_S * 1e6:g} us latency"
        ),
        "inter_node": _ethernet() + slower,
        "all_reduce": (
            "derived: 2 (D - 1) messages of S / D bytes (Patarasuk and Yuan 2009) over inter_node's bandwidth, with "
            "its median latency; in_flight 4: four rings share the link of a 4-GPU VM (Varuna 4.3)" + slower
        ),
        "optimizer_in_host_memory": "derived: no; the paper offloads no optimizer of these models",
        "accumulator_bytes_per_parameter": "derived: Morph with accumulation: fast; Varuna's systems may send 2",
        "commit": "derived: two messages without a size over inter_node, at its median",
        "checkpoint_write_bytes_per_s": "assumed: 500 MB/s for the local SSD of Varuna 4.5, which names no speed",
        "checkpoint_upload_bytes_per_s": "not published",
        "host_copy_bytes_per_s": "derived: PCIe 3.0 x16, 15.75 GB/s",
        "contention": "not published",
        "between_zones": "not published",
        "links": "derived: staged; intra_node is the path by way of the host",
        "rings": "derived: gloo; all_reduce is over inter_node, from host to host",
        "node_types": "derived: NC6_v3 and NC24_v3 have the same GPU, so one set of times",
        "sources": "this table",
    }


def _job(model: str) -> dict[str, str]:
    shape = MODELS[model]
    given = "; ".join(f"{name}: {source}" for name, source in shape.sources.items() if name != "batch_size")
    return {
        "job.name": _NAMES,
        "job.fingerprint": _NAMES,
        "job.batch_size": shape.sources["batch_size"],
        "job.micro_batch_size": "not published: the planner picks",
        "job.num_parameters": (
            f"derived: L (12 h^2 + 13 h) + V h + s h + 2 h with L={shape.num_layers}, h={shape.hidden}, "
            f"s={shape.sequence}, V={shape.vocabulary}, heads={shape.num_heads}. {given}"
        ),
    }


def _environment() -> dict[str, str]:
    return {
        "environment.python": _NOBODY,
        "environment.estimated": _NOBODY,
        "environment.torch": _NOBODY,
        "environment.platform": "Varuna 7: spot VMs of type NC24_v3 (4-GPU) or NC6_v3 (1-GPU) in Azure",
        "environment.device": "Varuna 7: Nvidia Volta-100 GPU with 16GB memory",
        "environment.device_memory_bytes": "Varuna 7: Nvidia Volta-100 GPU with 16GB memory",
        "environment.host_memory_bytes": "assumed: 112 GiB for each GPU, as Azure lists for NC6s_v3 and NC24s_v3",
        "environment.context_bytes": f"assumed: {_STATED}",
        "environment.allocator_permille": f"assumed: {_STATED}",
        "environment.process_bytes": f"assumed: {_STATED}",
        "environment.ring_bytes": "not published",
        "environment.num_cores": "Varuna 7: 6 Xeon cores",
        "environment.threads_per_worker": "derived: one GPU per VM has all its cores",
        "environment.created": _NOBODY,
        "environment.zone": "derived: all VMs in one zone",
    }


def _sections(model: str) -> dict[str, str]:
    state = "Varuna 2: 16 bytes per parameter for parameters and optimizer state"
    return {
        "sections.index": "Varuna 4.3: one cut-point per layer; embedding and head are sections of their own",
        "sections.label": _NAMES,
        "sections.forward": _forward(model),
        "sections.backward": "Varuna figure 4: B takes twice as long as F",
        "sections.parameter_bytes": f"{state}, of which 2 are the 16-bit parameter",
        "sections.optimizer_bytes": f"{state}, of which 12 are the 32-bit copy and two moments",
        "sections.gradient_bytes": f"{state}, of which 2 are the gradient; derived: 4, as Morph accumulates in 32 bits",
        "sections.input_bytes_per_sample": (
            "derived: s h 16-bit floats, which for 2.5B is the 3.75 MB per input example of Varuna 3.1; "
            + _FEEDS_EMBEDDING
        ),
        "sections.activation_bytes_per_sample": (
            "derived: s h (34 + 5 heads s / h) per layer (Korthikanti et al. 2022, equation 1); "
            "head: norm, 16-bit logits and 32-bit softmax; embedding: output and its dropout"
        ),
        "sections.output_bytes_per_sample": "derived: s h 16-bit floats, as input_bytes_per_sample; 0 behind the head",
        "sections.optimizer_step": "derived: 30 bytes per parameter at the 900 GB/s of NVIDIA's V100 data sheet",
        "sections.peak_bytes": "not published",
        "sections.reduced_bytes": "not published: as many bytes as the parameters",
        "sections.finish_bytes": "not published",
        "sections.constant_bytes": "derived: 0; nothing of these models is frozen",
        "sections.step_bytes": "not published",
    }


def _forward(model: str) -> str:
    anchored = ANCHOR_OF.get(model, model)
    anchor, speed = ANCHORS[anchored], speed_of(model)
    whose = "" if anchored == model else f" (of {MODELS[anchored].title}, whose layers are as wide)"
    return (
        f"derived: operations over speed. Layer: s (24 h^2 + 4 s h), head: 2 s h V. Speed{whose}: {anchor.source}, "
        f"= {anchor.useful_flops_per_s / 1e12:.1f} TFLOPS per GPU as the paper counts, and with recompute, attention, "
        f"pipeline filling and all-reduces allowed for {flops_per_s(anchor) / 1e12:.1f} TFLOPS while computing. "
        f"With m: {speed.fixed_s * 1e3:.2f} ms of each layer's forward are fixed, from Varuna 4.1 (BERT-large is 26 % "
        f"faster at m=8 than at m=4), so {speed.efficiency(1):.0%} of 112 TFLOPS at m=1 and "
        f"{speed.efficiency(8):.0%} at m=8. Embedding: three passes over its output at 900 GB/s"
    )


def _ethernet() -> str:
    return (
        "Varuna 7: 10 Gbps ethernet between VMs without locality; assumed: "
        f"{hardware.ETHERNET_LATENCY_S * 1e3:g} ms latency. Quantiles derived: Varuna 3.1 (observation 3) and 7 speak "
        "of high latency, jitter and bottleneck switches without a number; the simulator that its authors published "
        "draws an extra of sigma 10 ms for each message, activations and gradients, of the positive half of a normal "
        "distribution; here too (its normal extra of sigma 2 ms for each task is left out)"
    )
