"""The workload of an emulated device: a profile's times and memory under the real executor, groups and state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from morph.contract.emulation import EmulatedDevice
from morph.contract.messages import Slot, StepOrder, WorkerSetup
from morph.contract.plan import Plan
from morph.contract.pool import type_and_zone
from morph.cutting.sections.section import BoundaryTensor, ParameterUnit
from morph.runtime.device.links import HostLink
from morph.runtime.emulation.clock import NEVER_S, Alarm, DeviceClock, JitterDraw
from morph.runtime.emulation.links import IncomingLink, IncomingState, OutgoingLink
from morph.runtime.emulation.message import border
from morph.runtime.emulation.reduction import EmulatedExecutor
from morph.runtime.emulation.stage import EmulatedStage, SectionUnits, TaskTimes
from morph.runtime.emulation.unit import DeviceMemory, EmulatedUnitState, gradient_patterns, make_unit, parameter_unit
from morph.runtime.groups.channels import Carrier, Channel
from morph.runtime.groups.faults import FaultPlan
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.state.fixed_point import prepare
from morph.runtime.state.unit_state import UnitState
from morph.runtime.step.executor import Executor
from morph.runtime.step.generation import Generation, Links

_LOSS = BoundaryTensor("loss", (), torch.float32, True)


class EmulatedWorkload:
    """See ``Workload``. Evaluates nothing."""

    def __init__(self, setup: WorkerSetup) -> None:
        assert setup.emulation is not None
        prepare()
        self._emulated: EmulatedDevice = setup.emulation
        self._device = self._emulated
        self._units = {unit.id: unit for unit in self._device.units}
        self._patterns = gradient_patterns(self._device)
        self._clock = DeviceClock(self._device.forgiven_s)
        self._alarm = Alarm()
        self._arrivals = threading.Lock()
        self._arrived_s = NEVER_S

    @property
    def units(self) -> tuple[ParameterUnit, ...]:
        return tuple(parameter_unit(unit) for unit in self._device.units)

    @property
    def evaluation(self) -> None:
        """See ``Workload.evaluation``: an emulated device evaluates nothing."""

    @property
    def attendants(self) -> tuple[()]:
        return ()

    @property
    def epochs(self) -> None:
        """See ``Workload.epochs``: an emulated device has no data."""

    def make_unit(self, unit: str, num_micro_batches: int, *, empty: bool = False) -> UnitState:  # noqa: ARG002
        """See ``Workload.make_unit``: its few numbers are always drawn."""
        return make_unit(self._device, self._units[unit], self._clock, num_micro_batches)

    def incoming_state(self, channel: Channel, interrupt: Interrupt) -> Carrier:
        return IncomingState(channel, self._clock, self._alarm, interrupt, self._device.state_s_per_byte)

    def make_unit_copy(self, unit: str, num_micro_batches: int) -> UnitState:
        """See ``Workload.make_unit_copy``: its updates take their time on a clock of its own."""
        return make_unit(self._device, self._units[unit], DeviceClock(0.0), num_micro_batches)

    def arrive(self, num_bytes: int) -> None:
        """See ``Workload.arrive``: senders share the link, one after the other."""
        with self._arrivals:
            now_s = self._clock.now()
            self._arrived_s = max(self._arrived_s, now_s) + num_bytes * self._device.state_s_per_byte
            due_s = self._arrived_s
        time.sleep(max(0.0, due_s - now_s))

    def adopt(self, unit_copy: UnitState) -> UnitState:
        assert isinstance(unit_copy, EmulatedUnitState)
        unit_copy.clock = self._clock
        return unit_copy

    def take_place(self, current: Generation) -> None:
        """See ``Workload.take_place``: from now on times are those of the stage's type of node."""
        if current.slot is None:
            return
        self._device = self._emulated.of_type(current.plan.stages[current.slot.stage].node_type)
        self._units = {unit.id: unit for unit in self._device.units}
        for unit, state in current.units.items():
            assert isinstance(state, EmulatedUnitState)
            state.optimizer_s = self._units[unit].optimizer_s

    def executor(self, current: Generation, order: StepOrder, faults: FaultPlan) -> Executor:
        assert current.slot is not None
        self._clock.rest()  # its first task does not begin when the optimizer's step ended, before the order came
        self._clock.slowness = slowness(self._device, current.plan, current.slot) * faults.slowness
        plan = current.plan.stages[current.slot.stage]
        jitter = JitterDraw(
            self._device.jitter_seed, order.step, len(self._device.sections), current.plan.num_micro_batches
        )
        inputs = (self._border(plan.first_section - 1),) if plan.first_section else ()
        is_last = plan.end_section == len(self._device.sections)
        outputs = (_LOSS,) if is_last else (self._border(plan.end_section - 1),)
        micro_batches = current.micro_batches_in(order)
        links = self._links(current, jitter, micro_batches)
        work = current.work_between(micro_batches, inputs, outputs, links)
        work = replace(work, record_timeline=order.record_timeline)
        stage = EmulatedStage(
            self._sections(current, plan.sections),
            task_times(self._device, plan.groups, jitter, micro_batches),
            micro_batches,
            recompute=plan.recompute,
            clock=self._clock,
            memory=stage_memory(self._device, plan.groups),
            key=(self._device.seed, order.step),
            message=None if is_last else torch.zeros(outputs[0].shape, dtype=torch.float64),
            gradient=torch.zeros(inputs[0].shape, dtype=torch.float64) if inputs else None,
        )
        executor = EmulatedExecutor(stage, work, current, faults, self._device, self._clock)
        executor.stopwatch.in_groups = len(plan.groups) > 1
        return executor

    def probe(
        self,
        sections: range,
        held: Mapping[str, UnitState],  # noqa: ARG002
        faults: FaultPlan,
    ) -> Callable[[], float]:
        """See ``Workload.probe``: the sections' medians pass on the device's clock."""
        timed = [self._device.sections[section] for section in sections]
        forward_s = sum(section.forward.median_s for section in timed)
        backward_s = sum(section.backward.median_s for section in timed)

        def run() -> float:
            self._clock.rest()
            self._clock.slowness = faults.slowness
            took_s = 0.0
            for task_s in (forward_s, backward_s):
                self._clock.end(self._clock.begin(), task_s)
                took_s += self._clock.took_s
            self._clock.rest()
            return took_s

        return run

    def collect_notes(self) -> tuple[str, ...]:
        """See ``Workload.collect_notes``: it has no data workers."""
        return ()

    def samples_of(self, step: int) -> tuple[int, ...]:  # noqa: ARG002
        return ()

    def _border(self, section: int) -> BoundaryTensor:
        return border(self._device.sections[section].real_message_bytes)

    def _sections(self, current: Generation, sections: range) -> list[SectionUnits]:
        first = {name: float(state.parameters[name].detach()[0]) for name, state in current.units.items()}
        with_units = []
        for section in sections:
            units = [unit.id for unit in self._device.units if section in unit.sections]
            patterns = {unit: self._patterns[unit] for unit in units}
            with_units.append(SectionUnits(section, sum(first[unit] for unit in units), patterns))
        return with_units

    def _links(self, current: Generation, jitter: JitterDraw, micro_batches: Sequence[int]) -> Links:
        (activations_in, gradients_out, activations_out, gradients_in), slot = current.edges, current.slot
        assert slot is not None
        return (
            self._incoming(activations_in, current),
            self._outgoing(gradients_out, current, jitter, slot.stage - 1, micro_batches),
            self._outgoing(activations_out, current, jitter, slot.stage, micro_batches),
            self._incoming(gradients_in, current),
        )

    def _incoming(self, channel: Carrier | None, current: Generation) -> HostLink | None:
        if channel is None:
            return None
        return HostLink(IncomingLink(channel, self._clock, self._alarm, current.interrupt))

    def _outgoing(
        self,
        channel: Carrier | None,
        current: Generation,
        jitter: JitterDraw,
        boundary: int,
        micro_batches: Sequence[int],
    ) -> HostLink | None:
        """Return the sending end over the border after stage ``boundary``; from the later stage, it sends gradients."""
        if channel is None:
            return None
        slot, plan = current.slot, current.plan
        assert slot is not None
        kind = "activation" if boundary == slot.stage else "gradient"
        section = plan.stages[boundary].end_section - 1
        same_node = bool(plan.placement) and len(set(plan.placement[slot.replica][boundary : boundary + 2])) == 1
        ends = [self._emulated.of_type(plan.stages[stage].node_type) for stage in (boundary, boundary + 1)]
        links = [device.intra_node if same_node else device.inter_node for device in ends]
        zones = {type_and_zone(plan.stages[stage].node_type)[1] for stage in (boundary, boundary + 1)}
        links += [ends[0].between_zones] if len(zones) > 1 and ends[0].between_zones is not None else []
        messages = [getattr(each, kind)[section] for each in links]  # between two types as on the slower one
        message, wire_s = max(messages, key=lambda each: each.median_s), max(each.wire_s for each in messages)
        times_s = jitter.times_s(kind, {section: message}, micro_batches)
        return HostLink(OutgoingLink(channel, self._clock, iter(times_s.tolist()), wire_s))


def stage_memory(device: EmulatedDevice, groups: Sequence[range]) -> DeviceMemory:
    """Return the memory of a stage that holds the activations of one group of its sections at once."""
    peaks, most = [], 0
    for group in groups:
        sections = [device.sections[section] for section in group]
        kept = list(accumulate(section.activation_bytes for section in sections))  # a backward frees them from the end
        peaks += [up_to + section.extra_bytes for up_to, section in zip(kept, sections, strict=True)]
        most = max(most, kept[-1])
    return DeviceMemory(
        device.memory_bytes,
        held_bytes=sum(device.sections[section].held_bytes for group in groups for section in group),
        input_bytes=sum(device.sections[group[0]].input_bytes for group in groups),
        activation_bytes=most,
        extra_bytes=max(peaks) - most,
    )


def task_times(
    device: EmulatedDevice, groups: Sequence[range], jitter: JitterDraw, micro_batches: Sequence[int]
) -> TaskTimes:
    """Return times of a stage whose recompute runs its last group of sections again, and whose backward the others."""
    forward = {section: device.sections[section].forward for group in groups for section in group}
    backward = {section: device.sections[section].backward for section in forward}
    recompute_s = [
        jitter.times_s("recompute", {section: forward[section] for section in group}, micro_batches) for group in groups
    ]
    backward_s = jitter.section_times_s("backward", backward, micro_batches)
    for group, group_s in zip(groups[:-1], recompute_s[:-1], strict=True):
        backward_s[group[-1] - groups[0][0]] += group_s
    return TaskTimes(
        forward_s=jitter.times_s("forward", forward, micro_batches), recompute_s=recompute_s[-1], backward_s=backward_s
    )


def slowness(device: EmulatedDevice, plan: Plan, slot: Slot) -> float:
    """Return how many times as long tasks take on one worker's device, because of the device and its node."""
    factor = 1.0
    for slow in device.slow:
        if slow.stage == slot.stage and slow.replica in (None, slot.replica):
            factor *= slow.factor
    if plan.placement:
        mine = plan.placement[slot.replica][slot.stage]
        factor *= device.contention.get(sum(nodes.count(mine) for nodes in plan.placement), 1.0)
    return factor
