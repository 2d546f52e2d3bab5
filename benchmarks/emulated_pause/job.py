"""The emulated job of one shape: many short tasks, plans for every number of workers, and who runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manager.controller.state.config import ControllerConfig
from manager.engine.run.machines import Processes
from manager.engine.run.session import RunSpec
from manager.rehearsal.device import EmulationOptions, emulated_device, known_units
from manager.run_dir import RunFacts
from morph.contract.cluster import ClusterConfig, Policy
from morph.contract.plan import Plan
from morph.contract.profile import Profile
from morph.contract.trace import Trace, TraceEvent
from simulator import plan, synthetic_profile

NUM_SECTIONS = 16
FORWARD_S = 0.0005
PARAMETER_BYTES = 1_000_000
REAL_STATE_BYTES = 128 * 1024
CHECKPOINT_EVERY_STEPS = 20
NEVER_STEPS = 10**9


@dataclass(frozen=True)
class Shape:
    """P x D, with all workers there."""

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
        """Of a step: two for each replica, one where there is nothing but replicas, four at least."""
        return max(4, self.replicas if self.depth == 1 else 2 * self.replicas)

    def __str__(self) -> str:
        return f"{self.depth}x{self.replicas}"


def make_profile(shape: Shape) -> Profile:
    """16 equal sections, 1 MB of parameters each, links of 1 GB/s and 0.2 ms."""
    return synthetic_profile(
        num_sections=NUM_SECTIONS,
        forward_s=FORWARD_S,
        overhead_s=0.0001,
        batch_size=shape.num_micro_batches,
        micro_batch_sizes=(1,),
        parameter_bytes=PARAMETER_BYTES,
        boundary_bytes_per_sample=16_384,
    )


def make_plans(profile: Profile, shape: Shape) -> dict[int, Plan]:
    """The wanted shape for all workers; for fewer the planner's best, or, where P = 1 or D = 1, all of them likewise.

    More workers are called faster than they are: the question is what a change costs, not when it pays.
    """

    def best(count: int) -> Plan:
        if shape.depth == 1:
            return plan(profile, num_gpus=count, pipeline_depth=1, num_replicas=count).best
        if shape.replicas == 1:
            return plan(profile, num_gpus=count, pipeline_depth=count, num_replicas=1).best
        return plan(profile, num_gpus=count).best

    plans = {count: best(count) for count in range(1, shape.num_workers)}
    plans[shape.num_workers] = plan(
        profile, num_gpus=shape.num_workers, pipeline_depth=shape.depth, num_replicas=shape.replicas
    ).best
    speed = 0.0
    for count, found in sorted(plans.items()):
        speed = max(1.03 * speed, found.expected.examples_per_s)
        expected = found.expected.model_copy(update={"examples_per_s": speed})
        plans[count] = found.model_copy(update={"expected": expected})
    return plans


def make_run(shape: Shape, directory: Path, redundancy: str = "auto") -> tuple[RunSpec, RunFacts]:
    """What to run in this directory, and what the directory belongs to."""
    profile = make_profile(shape)
    plans = make_plans(profile, shape)
    policy = Policy.model_validate({"checkpoint_every_steps": CHECKPOINT_EVERY_STEPS, "redundancy": redundancy})
    units = known_units(profile)
    config = ControllerConfig(
        job=f"pause of {shape}",
        fingerprint=profile.job.fingerprint,
        plans=plans,
        units={unit.id: unit.sections for unit in units},
        unit_bytes={unit.id: 3 * unit.parameter_bytes for unit in units},
        num_steps=NEVER_STEPS,
        policy=policy,
        expected_nodes=shape.num_workers,
    )
    state_scale = REAL_STATE_BYTES / sum(section.parameter_bytes for section in profile.sections)
    device = emulated_device(
        profile, 1, range(2, shape.num_workers + 1), EmulationOptions(state_scale=state_scale, message_scale=0.25)
    )
    nodes = [TraceEvent(time_s=0, event="add", node_id=f"vm{index}") for index in range(shape.num_workers)]
    facts = RunFacts(
        job=config.job,
        fingerprint=config.fingerprint,
        micro_batch_size=1,
        batch_size=shape.num_micro_batches,
        num_sections=NUM_SECTIONS,
    )
    spec = RunSpec(
        job_path=config.job,
        config=config,
        cluster=ClusterConfig(policy=policy),
        trace=Trace(events=tuple(nodes)),
        num_sections=NUM_SECTIONS,
        micro_batch_size=1,
        emulation=device,
        machines=Processes(log_path=directory / "workers.log"),
    )
    return spec, facts
