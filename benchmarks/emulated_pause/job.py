"""The job of one shape, emulated or real: plans for every number of workers, and the machines that run them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import TINY_JOB
from benchmarks.runs import Subject, specify, steady_vms, subject_of_job, subject_of_profile
from manager.controller.state.config import ExpectedLosses
from manager.engine.machines.machines import Processes
from manager.rehearsal.device import FLOAT_BYTES, EmulationOptions, emulated_device, stretched
from manager.run.session import SessionSpec
from morph.contract.cluster import Policy
from morph.contract.emulation import EmulatedDevice
from morph.contract.plan import Plan
from morph.contract.profile import Profile, load_profile
from simulator import plan, synthetic_profile

NUM_SECTIONS = 16
FORWARD_S = 0.0005
PARAMETER_BYTES = 1_000_000
REAL_STATE_BYTES = 128 * 1024
CHECKPOINT_EVERY_STEPS = 20
FASTER = 0.05
"""Factor on all times of a profile's file, because its steps would take too long."""
MANY_MICRO_BATCHES = 64
M_OF_FILES = 4


@dataclass(frozen=True)
class Shape:
    """P x D, with all workers present."""

    depth: int
    replicas: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read "4x4".

        Raises:
            ValueError: it is not a shape.
        """
        depth, _, replicas = text.partition("x")
        if not (depth.isdecimal() and replicas.isdecimal() and 1 <= int(depth) <= NUM_SECTIONS and int(replicas) >= 1):
            raise ValueError(f"{text!r} is not PxD with P from 1 to {NUM_SECTIONS}")
        return cls(int(depth), int(replicas))

    @property
    def num_workers(self) -> int:
        """P * D."""
        return self.depth * self.replicas

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of a step: two for each replica, one if P = 1, and at least four."""
        return max(4, self.replicas if self.depth == 1 else 2 * self.replicas)

    def __str__(self) -> str:
        return f"{self.depth}x{self.replicas}"


@dataclass(frozen=True)
class Job:
    """A profile, its m, and the share of the state that is really held and sent; times are those of the profile."""

    profile: Profile
    micro_batch_size: int
    state_scale: float
    losses_per_vm_h: float | None = None
    """Expected losses; None: as in published traces."""
    real: Subject | None = None
    """The job if real workers compute it; None: emulated."""


def make_job(shape: Shape, source: str, slower: float = 1.0) -> Job:
    """Return the job of a shape; ``slower``: a factor on the times of tasks, and of a file's messages, too.

    "even": 16 equal sections, 1 MB of parameters each, links of 1 GB/s and 0.2 ms. "uneven": sections of which one
    takes up to three times as long and has up to four times as much as another, links of 1 Gb/s. "real": the tiny job
    is computed. Else a profile's file, with 64 micro-batches of four samples.
    """
    if source == "real":
        real = subject_of_job(TINY_JOB, 5, 2)
        sizes = (1, real.m)
        profile = synthetic_profile(num_sections=real.num_sections, batch_size=real.batch_size, micro_batch_sizes=sizes)
        return Job(profile, real.m, 1.0, real=real)
    if source == "even":
        profile = synthetic_profile(
            num_sections=NUM_SECTIONS,
            forward_s=slower * FORWARD_S,
            overhead_s=0.0001,
            batch_size=shape.num_micro_batches,
            micro_batch_sizes=(1,),
            parameter_bytes=PARAMETER_BYTES,
            boundary_bytes_per_sample=16_384,
        )
        return Job(profile, 1, REAL_STATE_BYTES / sum(section.parameter_bytes for section in profile.sections))
    if source == "uneven":
        profile = synthetic_profile(
            num_sections=NUM_SECTIONS,
            forward_s=[slower * FORWARD_S * (1 + 7 * index % 5 / 2) for index in range(NUM_SECTIONS)],
            batch_size=MANY_MICRO_BATCHES,
            micro_batch_sizes=(1,),
            parameter_bytes=[PARAMETER_BYTES * (1 + 3 * index % 4) for index in range(NUM_SECTIONS)],
            boundary_bytes_per_sample=16_384,
            bandwidth_bytes_per_s=1.25e8,
        )
        return Job(profile, 1, 0.02)
    profile = stretched(load_profile(Path(source)), slower * FASTER)
    facts = profile.job.model_copy(update={"batch_size": MANY_MICRO_BATCHES * M_OF_FILES})
    return Job(profile.model_copy(update={"job": facts}), M_OF_FILES, 1e-3)


EMULATED_MEMORY_BYTES = 2**50
"""Memory of a device, of which a profile's parameters really use only a small part, and activations nothing."""


def make_plans(job: Job, shape: Shape) -> dict[int, Plan]:
    """Return the plans: the given shape for all workers; for fewer, the best, or, if P = 1 or D = 1, the same kind.

    Plans for more workers claim to be faster than they are, because the benchmark measures the cost of a change.
    """

    def best(count: int, depth: int | None = None, replicas: int | None = None) -> Plan:
        return plan(
            job.profile,
            num_gpus=count,
            pipeline_depth=depth,
            num_replicas=replicas,
            micro_batch_size=job.micro_batch_size,
            memory_bytes=EMULATED_MEMORY_BYTES,
        ).best

    def fewer(count: int) -> Plan:
        if shape.depth == 1:
            return best(count, 1, count)
        return best(count, count, 1) if shape.replicas == 1 else best(count)

    plans = {count: fewer(count) for count in range(1, shape.num_workers)}
    plans[shape.num_workers] = best(shape.num_workers, shape.depth, shape.replicas)
    speed = 0.0
    for count, found in sorted(plans.items()):
        speed = max(1.03 * speed, found.expected.examples_per_s)
        expected = found.expected.model_copy(update={"examples_per_s": speed})
        plans[count] = found.model_copy(update={"expected": expected})
    return plans


def make_run(job: Job, shape: Shape, directory: Path, redundancy: str = "auto") -> tuple[Subject, SessionSpec]:
    """Return what to run in this directory."""
    profile = job.profile
    subject = job.real or subject_of_profile(f"pause of {shape}", profile, job.micro_batch_size)
    losses = ExpectedLosses()
    if job.losses_per_vm_h is not None:
        losses = losses.model_copy(update={"per_vm_h": job.losses_per_vm_h, "weight_vm_h": 1e3})
    options = EmulationOptions(state_scale=job.state_scale, message_scale=0.25)
    spec = specify(
        subject,
        make_plans(job, shape),
        Policy.model_validate({"checkpoint_every_steps": CHECKPOINT_EVERY_STEPS, "redundancy": redundancy}),
        steady_vms(shape.num_workers),
        config={"job": subject.job_path, "state_copies": 3, "expected_losses": losses},
        emulation=None
        if job.real
        else emulated_device(profile, job.micro_batch_size, range(2, shape.num_workers + 1), options),
        machines=Processes(log_path=directory / "workers.log"),
    )
    return subject, spec


def stream_s(device: EmulatedDevice, found: Plan) -> float:
    """Return the time of the first stage's gradients on a link, which nothing overlaps."""
    first = found.stages[0].sections
    values = sum(unit.real_values for unit in device.units if set(unit.sections) & set(first))
    return FLOAT_BYTES * values * device.state_s_per_byte
