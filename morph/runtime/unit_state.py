"""State of one parameter unit: parameters, optimizer, accumulation scales, version."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from morph.cutting.cut_model import ParameterUnit
from morph.runtime.accumulators import Accumulator, ExactAccumulator, FastAccumulator, Reduced
from morph.runtime.fixed_point import first_exponent

MakeOptimizer = Callable[[Iterable[tuple[str, Parameter]]], Optimizer]
_NUMBERS = "numbers"


class UnitState:
    """What a worker holds of one unit.

    Args:
        unit: The unit.
        parameters: Its parameters by name; they become this state's own leaves.
        make_optimizer: The job's optimizer factory; the unit gets an instance of its own.
        num_micro_batches: N; with the number of sections that use the unit, it bounds the contributions.
        exact: Whether gradients are summed in fixed point.
    """

    def __init__(
        self,
        unit: ParameterUnit,
        parameters: Mapping[str, Tensor],
        make_optimizer: MakeOptimizer,
        *,
        num_micro_batches: int,
        exact: bool,
    ) -> None:
        self.unit = unit
        self.version = 0
        self.parameters = {name: Parameter(parameters[name].detach().clone()) for name in unit.parameters}
        self.optimizer = make_optimizer(list(self.parameters.items()))
        self.reduced: Reduced | None = None
        self._exact = exact
        self._num_contributions = num_micro_batches * len(unit.sections)
        self.exponents = dict.fromkeys(unit.parameters, first_exponent(self._num_contributions)) if exact else {}

    def new_accumulator(self) -> Accumulator:
        """A fresh accumulator at the current scales."""
        if self._exact:
            return ExactAccumulator(self.parameters, self.exponents, self._num_contributions)
        return FastAccumulator(self.parameters)

    def rescale(self, reduced: Reduced) -> None:
        """Take the scales that fit an overflowed step before it is run again."""
        self.exponents = dict(reduced.exponents)

    def apply(self) -> None:
        """Apply the held gradients: the optimizer steps, the version grows by one."""
        assert self.reduced is not None
        for name, parameter in self.parameters.items():
            parameter.grad = self.reduced.gradients[name]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.exponents = dict(self.reduced.exponents)
        self.reduced = None
        self.version += 1

    def tensors(self) -> dict[str, Tensor]:
        """Copy the whole state as named CPU tensors (``param/..``, ``optim/../..``) and one of numbers."""
        tensors = {f"param/{name}": _copy(parameter) for name, parameter in self.parameters.items()}
        numbers: dict[str, object] = {"version": self.version, "exponents": self.exponents, "optimizer": {}}
        plain: dict[str, dict[str, object]] = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optim/{name}/{key}"] = _copy(value)
                else:
                    plain.setdefault(name, {})[key] = value
        numbers["optimizer"] = plain
        text = json.dumps(numbers, sort_keys=True).encode()
        tensors[_NUMBERS] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state made by ``tensors``.

        Raises:
            ValueError: if a parameter is missing or has another shape or dtype.
        """
        numbers = json.loads(bytes(tensors[_NUMBERS].tolist()))
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                saved = tensors.get(f"param/{name}")
                if saved is None or saved.shape != parameter.shape or saved.dtype != parameter.dtype:
                    raise ValueError(f"unit {self.unit.id}: saved state does not fit parameter {name}")
                parameter.copy_(saved)
                state: dict[str, object] = dict(numbers["optimizer"].get(name, {}))
                prefix = f"optim/{name}/"
                for key, value in tensors.items():
                    if key.startswith(prefix):
                        device = parameter.device if value.dim() else value.device
                        state[key.removeprefix(prefix)] = value.clone().to(device)
                if state:
                    self.optimizer.state[parameter] = state
        self.version = int(numbers["version"])
        # a state that was saved under the other kind of accumulation brings no scales, or needless ones
        saved_exponents = numbers["exponents"]
        self.exponents = {name: int(saved_exponents.get(name, first)) for name, first in self.exponents.items()}
        self.reduced = None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
