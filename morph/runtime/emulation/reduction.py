"""All-reduces of an emulated worker: really carried out, and taking at least the profile's time.

The order is the simulator's: what a section completes is reduced once the last backward of every replica has passed it,
one after the other; rings that span stages follow, each when all of its stages are free. Every ring agrees by a maximum
on when each of its parts begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist

from morph.contract.emulation import EmulatedDevice
from morph.runtime.groups.channels import Ring
from morph.runtime.step.generation import Generation


@dataclass(frozen=True)
class EmulatedRing:
    """One reduction group, and what of its time is left once each section has completed its part.

    ``left_s``: by section; by None where everything waits for the whole stage, as rings that span stages do.
    """

    ring: Ring
    left_s: Mapping[int | None, float]

    def run(self, free_s: float, passed_s: Mapping[int, float]) -> float:
        """Meet the other members; returns when this ring is through. Raises as ``Interrupt.wait_for``.

        Args:
            free_s: When this worker has run its last task, and the rings before.
            passed_s: When its last backward was through with each section; missing where it ran none.
        """
        ready_s = [free_s if section is None else passed_s.get(section, free_s) for section in self.left_s]
        begin = torch.tensor(ready_s, dtype=torch.float64)
        self.ring.reduce(begin, dist.ReduceOp.MAX).wait("the other members of an emulated all-reduce")
        begin_s: list[float] = begin.tolist()
        ends_s = [start_s + after_s for start_s, after_s in zip(begin_s, self.left_s.values(), strict=True)]
        return max(free_s, *ends_s)


def rings_of(current: Generation, device: EmulatedDevice) -> list[EmulatedRing]:
    """The rings that this worker belongs to, in an order that all workers share."""
    members = {spec.name: len(spec.members) for spec in current.topology.groups}
    num_bytes: dict[str, dict[int | None, int]] = {}
    stages: dict[str, tuple[int, ...]] = {}
    for unit in device.units:
        if unit.id in current.units:
            name = current.topology.unit_rings[unit.id]
            stages[name] = _stages_of(current, unit.sections)
            completes = min(unit.sections) if len(stages[name]) == 1 else None
            parts = num_bytes.setdefault(name, {})
            parts[completes] = parts.get(completes, 0) + unit.reduced_bytes
    rings = []
    for name in sorted(num_bytes, key=lambda name: (len(stages[name]) > 1, stages[name])):
        ring = current.groups.ring(name)
        if ring is not None:
            rings.append(EmulatedRing(ring, left_s(device, members[name], num_bytes[name])))
    return rings


def left_s(device: EmulatedDevice, ring_size: int, num_bytes: Mapping[int | None, int]) -> dict[int | None, float]:
    """AR(D) of what each section completes and of all that comes after it, which the sections before it complete."""
    sections = sorted(num_bytes, key=lambda section: -1 if section is None else section)
    totals = accumulate(num_bytes[section] for section in sections)
    return {section: all_reduce_s(device, ring_size, total) for section, total in zip(sections, totals, strict=True)}


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
