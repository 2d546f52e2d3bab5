"""Parameter units of an emulated model: real tensors of scaled size, whose optimizer takes the profile's time."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, Optimizer

from morph.contract.decided import Decided
from morph.contract.emulation import EmulatedDevice, EmulatedUnit
from morph.cutting.sections.section import ParameterUnit
from morph.runtime.emulation.clock import DeviceClock
from morph.runtime.state.unit_state import UnitState

# Memory of an emulated device: it is counted, but not allocated.

LEARNING_RATE = 1e-3


class DeviceMemory:
    """Counts a stage's bytes against the device's memory: those it holds, and those of each micro-batch."""

    def __init__(
        self, limit_bytes: int | None, held_bytes: int, input_bytes: int, activation_bytes: int, extra_bytes: int
    ) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = held_bytes
        self._input_bytes = input_bytes
        self._activation_bytes = activation_bytes
        self._extra_bytes = extra_bytes
        self.peak_bytes = 0
        self.use(0, 0)

    def use(self, num_inputs: int, num_activations: int) -> None:
        """Count a task that runs while so many micro-batches are stored. Raises torch.OutOfMemoryError."""
        kept_bytes = num_inputs * self._input_bytes + num_activations * self._activation_bytes
        needed_bytes = self._held_bytes + kept_bytes + self._extra_bytes
        self.peak_bytes = max(self.peak_bytes, needed_bytes)
        if self._limit_bytes is not None and needed_bytes > self._limit_bytes:
            raise torch.OutOfMemoryError(
                f"the emulated device is out of memory: {needed_bytes} bytes are needed ({self._held_bytes} of state, "
                f"{num_inputs} stored inputs, {num_activations} micro-batches' activations), {self._limit_bytes} there"
            )


class EmulatedUnitState(UnitState):
    """A unit whose update takes at least a given time."""

    clock: DeviceClock
    optimizer_s: float
    joins = False

    def apply(self, decided: Decided | None = None) -> None:
        begun_s = self.clock.begin()
        super().apply(decided)
        self.clock.end(begun_s, self.optimizer_s)


def parameter_unit(unit: EmulatedUnit) -> ParameterUnit:
    """Return a unit with one parameter, named after the unit."""
    return ParameterUnit(unit.id, unit.sections, (unit.id,))


def make_unit(device: EmulatedDevice, unit: EmulatedUnit, clock: DeviceClock, num_micro_batches: int) -> UnitState:
    """Return a unit's state at version 0, the same in every process."""
    random = torch.Generator().manual_seed(zlib.crc32(f"{device.seed}/{unit.id}".encode()))
    state = EmulatedUnitState(
        parameter_unit(unit),
        {unit.id: torch.randn(unit.real_values, generator=random) * 0.02},
        _adam if device.optimizer == "adam" else _sgd,
        num_micro_batches=num_micro_batches,
        exact=device.exact,
    )
    state.clock, state.optimizer_s = clock, unit.optimizer_s
    return state


def gradient_patterns(device: EmulatedDevice) -> dict[str, Tensor]:
    """Return, by unit, a fixed tensor of its parameter's size; every gradient is a multiple of it."""
    random = torch.Generator().manual_seed(device.seed)
    longest = torch.randn(max(unit.real_values for unit in device.units), generator=random)
    return {unit.id: longest[: unit.real_values] for unit in device.units}


def _adam(named: Iterable[tuple[str, Parameter]]) -> Optimizer:
    return Adam(named, lr=LEARNING_RATE)


def _sgd(named: Iterable[tuple[str, Parameter]]) -> Optimizer:
    return torch.optim.SGD(named, lr=LEARNING_RATE)
