"""All-reduces of an emulated worker: really carried out, and taking at least the profile's time.

The order is the simulator's: what a stage reduces on its own begins when its last replica is there; rings that span
stages follow one after the other, each when all of its stages are free. Every ring agrees by a maximum on when it
begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from morph.contract.emulation import EmulatedDevice
from morph.runtime.groups.channels import Ring
from morph.runtime.step.generation import Generation


@dataclass(frozen=True)
class EmulatedRing:
    """One reduction group and the time of everything that goes over it in a step."""

    ring: Ring
    duration_s: float

    def run(self, ready_s: float) -> float:
        """Meet the other members; returns when this ring is through. Raises as ``Interrupt.wait_for``."""
        begin = torch.tensor([ready_s], dtype=torch.float64)
        self.ring.reduce(begin, dist.ReduceOp.MAX).wait("the other members of an emulated all-reduce")
        return float(begin) + self.duration_s


def rings_of(current: Generation, device: EmulatedDevice) -> list[EmulatedRing]:
    """The rings that this worker belongs to, in an order that all workers share."""
    members = {spec.name: len(spec.members) for spec in current.topology.groups}
    num_bytes: dict[str, int] = {}
    stages: dict[str, tuple[int, ...]] = {}
    for unit in device.units:
        if unit.id in current.units:
            name = current.topology.unit_rings[unit.id]
            num_bytes[name] = num_bytes.get(name, 0) + unit.reduced_bytes
            stages[name] = _stages_of(current, unit.sections)
    rings = []
    for name in sorted(num_bytes, key=lambda name: (len(stages[name]) > 1, stages[name])):
        ring = current.groups.ring(name)
        if ring is not None:
            rings.append(EmulatedRing(ring, all_reduce_s(device, members[name], num_bytes[name])))
    return rings


def all_reduce_s(device: EmulatedDevice, ring_size: int, num_bytes: int) -> float:
    """AR(D) of so many bytes."""
    curve: Mapping[int, object] = device.all_reduce
    if ring_size not in curve or num_bytes == 0:
        return 0.0
    points = device.all_reduce[ring_size]
    return float(np.interp(num_bytes, points.sizes_bytes, points.times_s))


def _stages_of(current: Generation, sections: tuple[int, ...]) -> tuple[int, ...]:
    stages = current.plan.stages
    return tuple(index for index, stage in enumerate(stages) if any(section in stage.sections for section in sections))
