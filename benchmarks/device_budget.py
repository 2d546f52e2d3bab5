"""A step's time by part on a device: ``python -m benchmarks.device_budget a|b|JOB [--shape 9x4 ...]``.

Arithmetic, not a measurement: what the real executor asks of a device, counted on shapes alone
(``benchmarks/device_steps``), over a device's published rates. ``a`` is GPT-2 2.5B, 9x4 on V100s with 10 Gb/s, ``b``
Llama 8B, 4x4 on 16 H100s in two nodes. Compute is the profile's where ``--profile`` gives one, else matrix products at
``--share`` of the device's peak.

For the slowest of the first, a middle and the last stage; pipeline bubbles are left out, as they are of compute alone:

- passes: what kernels outside the sections read and write, over the memory's bandwidth;
- host copies: pageable ones, for which the host waits; host passes: what single-threaded loops read and write, as far
  as it outlasts the wire that the next unit's sums take meanwhile;
- syncs: each drains the queue of launches, and costs that;
- boundary wire: what activations and gradients take longer than everything else of a micro-batch, which they go beside;
- reduction: what each worker's rings carry, as far as the last micro-batch's backward, beside which it begins, is
  shorter: a section's sums go when that has passed the section.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.device_steps.cases import CASES
from benchmarks.device_steps.counting import Counts
from benchmarks.device_steps.steps import Shape, ShapeJob
from morph.contract.profile import load_profile

HERE = Path(__file__).resolve().parent
PAGEABLE_SHARE = 0.5
"""Assumed: of what pinned memory gives; the driver copies every byte once more, on one core."""
HOST_PASS_BYTES_PER_S = 10e9
"""Assumed, of one thread's loop over memory."""
SYNC_S = 50e-6
"""Assumed: the launches that the device does without until the host has caught up."""
GLOO_BYTES_PER_S = 2.9e9
"""Measured: one connection over loopback, docs/benchmarks.md. No faster link makes gloo faster."""


@dataclass(frozen=True)
class Rates:
    """Published: NVIDIA's data sheets. ``pcie`` and ``wire``: bytes a second in one direction."""

    peak_flops_per_s: float
    memory_bytes_per_s: float
    pcie_bytes_per_s: float
    wire_bytes_per_s: float
    share: float
    """Assumed where no profile tells: of the peak that a section's matrix products reach."""


DEVICES = {
    "v100": Rates(112e12, 900e9, 15.75e9, 10e9 / 8, 0.4),
    "a100": Rates(312e12, 2039e9, 31.5e9, 200e9 / 8, 0.45),
    "h100": Rates(989e12, 3350e9, 63e9, 400e9 / 8, 0.4),
}
"""V100 PCIe 16 GB in VMs with 10 Gb/s; A100 SXM 80 GB with 200 Gb/s, H100 SXM with 400 Gb/s a device."""


@dataclass(frozen=True)
class Budget:
    """Seconds by part, of a worker's step; ``compute_s`` is in it."""

    stage: str
    parts_s: Mapping[str, float]

    @property
    def step_s(self) -> float:
        """All of it."""
        return sum(self.parts_s.values())

    @property
    def ratio(self) -> float:
        """To compute alone."""
        return self.step_s / self.parts_s["compute"]


def asked_s(counts: Counts, rates: Rates) -> Counter[str]:
    """Seconds of everything but compute and wires that counts tell of."""
    found: Counter[str] = Counter()
    found["passes"] = (
        sum(touched for phase, touched in counts.touched_bytes.items() if phase != "compute") / rates.memory_bytes_per_s
    )
    found["host passes"] = (
        sum(
            touched for phase, touched in counts.host_touched_bytes.items() if phase in ("accumulate", "reduce", "mean")
        )
        / HOST_PASS_BYTES_PER_S
    )
    for site, num_bytes in counts.site_bytes.items():
        if site.kind == "sync":
            found["syncs"] += counts.sites[site] * SYNC_S
        elif not site.pinned:
            found["host copies"] += num_bytes / (rates.pcie_bytes_per_s * PAGEABLE_SHARE)
    return found


def ring_s(counts: Counts, rates: Rates, ring_size: int) -> float:
    """Seconds of the reductions: twice all but a share for an all-reduce, once for half of one."""
    share = (ring_size - 1) / ring_size
    carried = sum(
        num_bytes * share * (2 if "allreduce" in name else 1)
        for name, num_bytes in counts.wire_bytes.items()
        if name.startswith("ring")
    )
    return carried / min(rates.wire_bytes_per_s, GLOO_BYTES_PER_S)


def boundary_s(counts: Counts, rates: Rates) -> float:
    """Seconds of the busier direction's activations and gradients."""
    carried = max((num for name, num in counts.wire_bytes.items() if name.startswith(("act", "grad"))), default=0)
    return carried / min(rates.wire_bytes_per_s, GLOO_BYTES_PER_S)


def budget(job: ShapeJob, stage: int, name: str, num: int, rates: Rates, compute_s: float | None) -> Budget:
    """One worker's step of ``num`` micro-batches; ``compute_s`` of each, if that is known."""
    one, two = job.count(stage, 1), job.count(stage, 2)
    first, second = asked_s(one, rates), asked_s(two, rates)
    each = {part: second[part] - first[part] for part in sorted({*first, *second})}
    once = {part: first[part] - each[part] for part in each}
    flops = two.matmul_flops["compute"] - one.matmul_flops["compute"]
    compute_s = flops / (rates.peak_flops_per_s * rates.share) if compute_s is None else compute_s
    wire_s = boundary_s(two, rates) - boundary_s(one, rates)
    parts = {"compute": num * compute_s} | {part: num * each[part] + once[part] for part in each}
    parts["boundary wire"] = num * max(0.0, wire_s - compute_s - sum(each.values()))
    sections, wire_s = len(job.stage_sections()[stage]), ring_s(one, rates, job.shape.num_replicas)
    backward_s = compute_s * (1 / 2 if job.shape.recompute else 2 / 3)
    parts["reduction"] = exposed_s(wire_s, backward_s, sections)
    if "host passes" in parts:
        parts["host passes"] = exposed_s(parts["host passes"], wire_s, sections)
    return Budget(name, parts)


def exposed_s(work_s: float, beside_s: float, num_parts: int) -> float:
    """What is left of work that goes part by part beside something, each behind an equal part of that."""
    return work_s / num_parts + max(0.0, work_s - beside_s) * (num_parts - 1) / num_parts


def profile_s(path: Path, sections: int, shape: Shape) -> list[float]:
    """Seconds of a micro-batch's compute in each stage of a profile's sections, as many in each."""
    profile = load_profile(path)
    num, depth, m = len(profile.sections), shape.pipeline_depth, shape.micro_batch_size
    assert abs(num - sections) <= 2, f"{path} has {num} sections, the job {sections}"
    starts = [round(index * num / depth) for index in range(depth + 1)]
    took = [
        entry.forward[m].median_s * (2 if shape.recompute else 1) + entry.backward[m].median_s
        for entry in profile.sections
    ]
    return [sum(took[start:end]) for start, end in pairwise(starts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", help="a, b or path/to/job.py:name")
    parser.add_argument("--shape", default="2x2", help="PxD")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--device", choices=sorted(DEVICES), default="h100")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--profile", type=Path, help="where compute is taken from")
    options = parser.parse_args()
    profile = options.profile
    if options.job == "a":
        case = next(case for case in CASES if case.name == "gpt2_2_5b")
        path, shape, device = case.job_path, case.shape, "v100"
    elif options.job == "b":
        path, device = f"{HERE / 'device_steps/llama_job.py'}:job", "h100"
        shape = Shape(4, 4, 1, recompute=True, num_sections=32)
    else:
        depth, replicas = map(int, options.shape.split("x"))
        shape = Shape(depth, replicas, options.micro_batch, recompute=options.recompute)
        path, device = options.job, options.device
    job, rates = ShapeJob(path, shape), DEVICES[device]
    num = job.job.batch_size // shape.micro_batch_size // shape.num_replicas
    known = profile_s(profile, len(job.model.sections), shape) if profile else None
    last = shape.pipeline_depth - 1
    names = {0: "first", min(1, last): "middle", last: "last"}
    found = [
        budget(job, stage, name, num, rates, known[stage] if known else None) for stage, name in sorted(names.items())
    ]
    title = f"{job.job.name}, {shape.pipeline_depth}x{shape.num_replicas} on {device}, m = {shape.micro_batch_size}"
    print(f"{title}, {num} micro-batches a replica; seconds of a worker's step")
    every = list(dict.fromkeys(part for entry in found for part in entry.parts_s))
    print("| stage | " + " | ".join(every) + " | step | over compute |")
    print("|---" * (len(every) + 3) + "|")
    for entry in found:
        cells = " | ".join(f"{entry.parts_s.get(part, 0.0):.3f}" for part in every)
        print(f"| {entry.stage} | {cells} | {entry.step_s:.3f} | {entry.ratio:.2f} |")


if __name__ == "__main__":
    main()
