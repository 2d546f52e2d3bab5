"""All-reduces of an emulated worker, which are really carried out and take at least the profile's time.

The order is the simulator's: gradients that a section completes are reduced one after the other, round by round, from
the last section to the first; then those that several stages of a pipeline hold, when all of these are free. Members of
a ring begin each part at the latest time that any of them can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist

from morph.contract.emulation import Curve, EmulatedDevice
from morph.contract.pool import type_and_zone
from morph.runtime.emulation.clock import NEVER_S, DeviceClock
from morph.runtime.emulation.stage import EmulatedStage
from morph.runtime.groups.channels import Ring
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.step.executor import Executor
from morph.runtime.step.generation import Generation, StageWork
from morph.runtime.step.sums import StepSums

Curves = Mapping[int, Curve]


@dataclass(frozen=True)
class EmulatedRing:
    """One reduction group; ``left_s``: remaining seconds by section, None: what waits for the whole stage."""

    ring: Ring
    left_s: Mapping[int | None, float]

    def run(self, ready_s: Sequence[Sequence[float]]) -> list[float]:
        """Meet the other members; ``ready_s``: when this worker can begin each part, a row per requested answer."""
        begin = torch.tensor(ready_s, dtype=torch.float64)
        self.ring.reduce(begin, dist.ReduceOp.MAX).wait("the other members of an emulated all-reduce")
        rows: list[list[float]] = begin.tolist()
        parts_s = self.left_s.values()
        return [max(start_s + after_s for start_s, after_s in zip(row, parts_s, strict=True)) for row in rows]


class EmulatedExecutor(Executor):
    """See ``Executor``: its reductions take at least the time of the profile of ``emulated``."""

    def __init__(
        self,
        stage: EmulatedStage,
        work: StageWork,
        current: Generation,
        faults: FaultPlan,
        emulated: EmulatedDevice,
        clock: DeviceClock,
    ) -> None:
        super().__init__(stage, work, current.interrupt, faults, torch.device("cpu"))
        self._ends_s, self._current, self._emulated, self._device_clock = stage.ends_s, current, emulated, clock
        self.stopwatch.device_took_s = lambda: clock.took_s

    def reduce(self, sums: StepSums) -> None:
        clock = self._device_clock
        free_s = clock.free_s
        super().reduce(sums)
        start = self.stopwatch.mark()
        rings = rings_of(self._current, self._emulated)
        free_s, undelayed_s = run_rings(rings, free_s, self._ends_s, clock.late_s)
        clock.wait_until(free_s)
        self.stopwatch.stood("reduce", start)
        if undelayed_s > NEVER_S:  # this worker had a task, or a ring
            self.stopwatch.late_s = max(0.0, clock.now() - undelayed_s)
        clock.rest()


def run_rings(
    rings: Sequence[EmulatedRing], free_s: float, passed_s: Mapping[int, float], late_s: float = 0.0
) -> tuple[float, float]:
    """Run a worker's rings in turn; return when they are done, and when they would be if no host were busy.

    ``free_s``: the end of this worker's last task, ``late_s`` its delay, ``passed_s`` the end of its last backward
    through each section that has one. Raises as ``Interrupt.wait_for``.
    """
    link_free_s, delays_s = [-math.inf, -math.inf], (0.0, late_s)
    for ring in rings:
        passed = [free_s if section is None else passed_s.get(section, free_s) for section in ring.left_s]
        link_free_s = ring.run(
            [
                [max(ready_s - delay_s, begin_s) for ready_s in passed]
                for delay_s, begin_s in zip(delays_s, link_free_s, strict=True)
            ]
        )
    done_s, undelayed_s = (max(free_s - delay, end) for delay, end in zip(delays_s, link_free_s, strict=True))
    return done_s, undelayed_s


def rings_of(current: Generation, device: EmulatedDevice) -> list[EmulatedRing]:
    """Return the rings of this worker, in an order that all workers share."""
    topology = current.topology
    members = {spec.name: spec.members for spec in topology.groups}
    types = {slot.worker: current.plan.stages[slot.stage].node_type for slot in current.order.slots}
    zones = {worker: type_and_zone(node_type)[1] for worker, node_type in types.items()}
    num_bytes: dict[tuple[str, bool], dict[int | None, int]] = {}
    for unit in device.units:
        if unit.id in current.units:
            is_split = unit.id in topology.split_units
            completes = None if is_split else min(unit.sections)
            parts = num_bytes.setdefault((topology.unit_rings[unit.id], is_split), {})
            parts[completes] = parts.get(completes, 0) + unit.reduced_bytes
    rings = []
    for (name, _), parts in sorted(num_bytes.items(), key=partial(_turn, topology.rounds)):
        ring = current.groups.ring(name)
        if ring is not None:
            number = len(members[name])
            left = left_s(device.all_reduce, number, parts)
            if len({zones[member] for member in members[name]}) > 1:
                over_zones = left_s(device.all_reduce_over_zones, number, parts)
                left = {section: max(time_s, over_zones[section]) for section, time_s in left.items()}
            rings.append(EmulatedRing(ring, left))
    return rings


def _turn(
    rounds: Sequence[int], entry: tuple[tuple[str, bool], Mapping[int | None, int]]
) -> tuple[bool, int, int, str]:
    """Order rings as units are reduced: by round, from the last section to the first; then split units by name."""
    (name, is_split), parts = entry
    last = max((section for section in parts if section is not None), default=0)
    return is_split, 0 if is_split else rounds[last], -last, name


def left_s(curves: Curves, ring_size: int, num_bytes: Mapping[int | None, int]) -> dict[int | None, float]:
    """Return AR(D) of the gradients that each section and all sections before it complete."""
    sections = sorted(num_bytes, key=lambda section: -1 if section is None else section)
    totals = accumulate(num_bytes[section] for section in sections)
    return {section: all_reduce_s(curves, ring_size, total) for section, total in zip(sections, totals, strict=True)}


def all_reduce_s(curves: Curves, ring_size: int, num_bytes: int) -> float:
    """Return AR(D) of this many bytes; ``curves``: by D."""
    if ring_size not in curves or num_bytes == 0:
        return 0.0
    points = curves[ring_size]
    return float(np.interp(num_bytes, points.sizes_bytes, points.times_s))
