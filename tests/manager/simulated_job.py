"""The job of the simulated clusters: plans, units and a configuration."""

from __future__ import annotations

import functools
import itertools
import math
import random

from manager.controller.state.config import ControllerConfig
from manager.simulation.spot.sums import with_losses
from morph.contract.checkpoint import Manifest, UnitFile
from morph.contract.cluster import Policy
from morph.contract.decided import Decided, LossScale
from morph.contract.plan import Expectation, PipelineKind, Plan, StagePlan
from morph.contract.pool import Pool
from morph.contract.rules import CheckpointRules, FlapRules, RequestRules, Rules, StutterRules, WaitRules


def make_plan(depth: int, replicas: int, num_sections: int = 6, num_micro_batches: int = 8) -> Plan:
    """Build a balanced plan of equal pipelines whose speed grows with its workers."""
    plan = make_unequal((depth, replicas, ""), num_sections=num_sections, num_micro_batches=num_micro_batches)
    return Plan.model_validate(plan.model_dump() | {"kinds": ()})


def plan_of(depth: int, replicas: int, step_s: float) -> Plan:
    """Return a plan whose steps take exactly this long."""
    plan = make_plan(depth, replicas)
    expected = plan.expected.model_copy(update={"mini_batch_s": step_s, "examples_per_s": 8 / step_s})
    return plan.model_copy(update={"expected": expected})


def make_unequal(*kinds: tuple[int, int, str], num_sections: int = 6, num_micro_batches: int = 8) -> Plan:
    """Build a plan of kinds of pipelines, each (stages, replicas, type of GPU); they share micro-batches by speed."""
    stages = tuple(
        StagePlan(first_section=first, end_section=end, window=2, recompute=False, node_type=node_type)
        for depth, _, node_type in kinds
        for first, end in itertools.pairwise(round(stage * num_sections / depth) for stage in range(depth + 1))
    )
    rates = [rate for depth, replicas, of in kinds for rate in [depth * SPEEDS[of] * (1 - 0.01 * depth)] * replicas]
    ends = [round(num_micro_batches * end / sum(rates)) for end in itertools.accumulate(rates, initial=0)]
    counts = [max(1, end - first) for first, end in itertools.pairwise(ends)]
    counts[counts.index(max(counts))] += num_micro_batches - sum(counts)
    if len(kinds) == 1:
        counts.sort(reverse=True)
    of_replicas = iter(counts)
    speed = sum(depth * replicas * SPEEDS[of] * (1 - 0.01 * depth) for depth, replicas, of in kinds)
    return Plan(
        fingerprint="f",
        schedule="1f1b",
        micro_batch_size=1,
        num_micro_batches=num_micro_batches,
        num_replicas=len(counts),
        stages=stages,
        kinds=tuple(
            PipelineKind(num_stages=depth, micro_batches=tuple(itertools.islice(of_replicas, replicas)))
            for depth, replicas, _ in kinds
        ),
        orders={count: ("F" * count + "B" * count,) * len(stages) for count in set(counts)},
        expected=Expectation(
            mini_batch_s=num_micro_batches / speed,
            examples_per_s=speed,
            lower_bound_s=0,
            peak_memory_bytes=0,
            parts_s={},
        ),
    )


SPEEDS = {"": 1.0, "fast": 1.0, "slow": 0.4}
"""The speed of a GPU, by its type."""
TYPES = ("fast", "slow")
PLANS = {2: make_plan(2, 1), 3: make_plan(3, 1), 4: make_plan(2, 2), 5: make_plan(2, 2), 6: make_plan(3, 2)}
UNEQUAL = {
    2: make_plan(1, 2),
    3: make_unequal((2, 1, ""), (1, 1, "")),
    4: make_unequal((3, 1, ""), (1, 1, "")),
    5: make_unequal((3, 1, ""), (2, 1, "")),
    6: make_unequal((4, 1, ""), (1, 2, "")),
    7: make_unequal((3, 1, ""), (2, 2, "")),
}
"""Unequal pipelines for each number of workers."""
OF_TYPE = {1: ((1, 1),), 2: ((2, 1),), 3: ((2, 1), (1, 1)), 4: ((2, 2),)}
"""Stages and replicas on this many GPUs of one type."""
MIXED = {
    Pool.of({"fast": fast, "slow": slow}): make_unequal(
        *((*kind, "fast") for kind in OF_TYPE.get(fast, ())), *((*kind, "slow") for kind in OF_TYPE.get(slow, ()))
    )
    for fast, slow in itertools.product(range(5), range(5))
    if fast + slow > 1
}
"""A plan for each pool of GPUs of two types."""
RULES = Rules(
    checkpoints=CheckpointRules(file_timeout_s=5.0),
    wait=WaitRules(vms_patience_s=500.0, setup_s=1.0),
    flaps=FlapRules(hold_s=2.0, hold_max_s=8.0, memory_s=60.0),
    requests=RequestRules(backoff_s=1.0, backoff_max_s=8.0, answer_s=3.0, boot_s=8.0, notice_grace_s=2.0),
    stutter=StutterRules(samples=4, windows=2, probe_every_s=1.0, probe_every_max_s=1.5, max_probes=3),
)
UNITS: dict[str, tuple[int, ...]] = {f"s{section}": (section,) for section in range(6)} | {"s0+s5": (0, 5)}
SUMMED = with_losses(UNITS, num_sections=6)
SIZES = {unit: 100 if "+" in unit else 10 for unit in UNITS}


def make_config(**fields: object) -> ControllerConfig:
    """Build a configuration: six sections, one tied unit, at least two workers, twelve steps."""
    policy = Policy(
        checkpoint_every_steps=3, start_patience_s=5.0, heartbeat_timeout_s=2.0, order_timeout_s=20.0, rules=RULES
    )
    values: dict[str, object] = {
        "fingerprint": "f",
        "plans": PLANS,
        "units": UNITS,
        "unit_bytes": SIZES,
        "num_steps": 12,
        "policy": policy,
        "expected_nodes": 4,
    }
    return ControllerConfig.model_validate(values | fields)


FIRST_SCALE = LossScale(exponent=6, growth_steps=3)


@functools.cache
def norm_sq(unit: str, step: int) -> float:
    """Return the squared norm of a unit's gradient in a step; no two are equal, and their sums are rounded."""
    return (step + 1) / 3 + list(UNITS).index(unit) / 7


@functools.cache
def broken_unit(step: int, share: float) -> str | None:
    """Return the unit whose gradient is not finite in a step, if there is one."""
    draw = random.Random(f"non-finite {step}")
    return draw.choice(list(UNITS)) if draw.random() < share else None


@functools.cache
def facts_of(version: int, share: float) -> Decided:
    """Return the right decision about step ``version - 1``: facts of all units, each once, in order."""
    if broken_unit(version - 1, share):
        return Decided(version=version, skipped=True)
    total = math.fsum(norm_sq(unit, version - 1) for unit in sorted(UNITS))
    return Decided(version=version, gradient_norm=math.sqrt(total))


@functools.cache
def scale_of(version: int, share: float) -> LossScale:
    scale = FIRST_SCALE
    for step in range(version):
        scale = scale.after(skipped=broken_unit(step, share) is not None)
    return scale


def file_of(unit: str) -> str:
    return unit.replace("+", "_") + ".safetensors"


FILES = tuple(UnitFile(unit=unit, file=file_of(unit), size_bytes=1, sha256="0" * 64) for unit in UNITS)
MANIFEST = Manifest(fingerprint="f", version=5, units=FILES)
