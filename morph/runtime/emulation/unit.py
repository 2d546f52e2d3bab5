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

LEARNING_RATE = 1e-3


class EmulatedUnitState(UnitState):
    """A unit whose update takes at least so long."""

    clock: DeviceClock
    optimizer_s: float

    def apply(self, decided: Decided | None = None) -> None:
        """See ``UnitState.apply``."""
        begun_s = self.clock.begin()
        super().apply(decided)
        self.clock.end(begun_s, self.optimizer_s)


def parameter_unit(unit: EmulatedUnit) -> ParameterUnit:
    """A unit with one parameter, named after it."""
    return ParameterUnit(unit.id, unit.sections, (unit.id,))


def make_unit(device: EmulatedDevice, unit: EmulatedUnit, clock: DeviceClock, num_micro_batches: int) -> UnitState:
    """A unit's state at version 0, the same in every process."""
    random = torch.Generator().manual_seed(_seed_of(device.seed, unit.id))
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
    """By unit: a fixed tensor of its parameter's size, of which every gradient is a multiple."""
    random = torch.Generator().manual_seed(device.seed)
    longest = torch.randn(max(unit.real_values for unit in device.units), generator=random)
    return {unit.id: longest[: unit.real_values] for unit in device.units}


def _seed_of(seed: int, unit: str) -> int:
    return zlib.crc32(f"{seed}/{unit}".encode())


def _adam(named: Iterable[tuple[str, Parameter]]) -> Optimizer:
    return Adam(named, lr=LEARNING_RATE)


def _sgd(named: Iterable[tuple[str, Parameter]]) -> Optimizer:
    return torch.optim.SGD(named, lr=LEARNING_RATE)
