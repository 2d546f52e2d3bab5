"""Does one optimizer for each unit end where one optimizer for all parameters does, bit for bit?

The tracer sees operations; it does not see what Python does with numbers that left the tensors, with the length of the
list of parameters, or with numbers kept on the optimizer. The trials do, for the gradients that they try: ordinary,
large and small ones, and an overflow in one unit only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from morph.cutting import ParameterUnit
from morph.runtime.state.optimizer_state import MakeOptimizer
from morph.runtime.state.unit_state import UnitState

StepFunction = Callable[[Optimizer, Mapping[str, Parameter]], object]
_NUM_STEPS = 2
_SCALES = (1.0, 1e4, 1e-4)
Gradients = Sequence[Mapping[str, Tensor]]
Outcome = dict[str, dict[str, object]]


@dataclass(frozen=True)
class TrialResult:
    """What the trials found.

    Attributes:
        differing: Units that ended elsewhere, and with which gradients.
        refused: Unit and error, where the optimizer could not be built or run for one unit alone.
        lost: Units that ended elsewhere after a move to another worker between two steps.
    """

    differing: Mapping[str, str]
    refused: Mapping[str, str]
    lost: tuple[str, ...]


def run_trials(
    parameters: Mapping[str, Tensor], units: Sequence[ParameterUnit], make: MakeOptimizer, step: StepFunction
) -> TrialResult:
    """Compare one optimizer for all with one for each unit.

    Args:
        parameters: Initial values by name; they are copied.
        units: The units they belong to.
        make: The job's optimizer function.
        step: Runs one step of an optimizer, for the parameters by name.
    """
    refused = _refusals(parameters, units, make)
    if refused:
        return TrialResult({}, refused, ())
    differing: dict[str, str] = {}
    for label, gradients in _cases(parameters, units):
        together = _outcome(parameters, gradients, make, step)
        for unit in units:
            alone = _outcome({name: parameters[name] for name in unit.parameters}, gradients, make, step)
            if unit.id not in differing and not all(_same(alone[name], together[name]) for name in unit.parameters):
                differing[unit.id] = label
    ordinary = next(gradients for _, gradients in _cases(parameters, units))
    lost = tuple(unit.id for unit in units if not _survives_a_move(unit, parameters, ordinary, make, step))
    return TrialResult(differing, {}, lost)


def _refusals(parameters: Mapping[str, Tensor], units: Sequence[ParameterUnit], make: MakeOptimizer) -> dict[str, str]:
    refused: dict[str, str] = {}
    for unit in units:
        try:
            make([(name, Parameter(parameters[name].clone())) for name in unit.parameters])
        except Exception as error:
            refused[unit.id] = f"{type(error).__name__}: {error}"
    return refused


def _cases(parameters: Mapping[str, Tensor], units: Sequence[ParameterUnit]) -> Iterable[tuple[str, Gradients]]:
    generator = torch.Generator().manual_seed(0)
    drawn = [
        {name: torch.randn(value.shape, generator=generator).to(value.dtype) for name, value in parameters.items()}
        for _ in range(_NUM_STEPS)
    ]
    for scale in _SCALES:
        yield f"gradients times {scale:g}", [{k: g * scale for k, g in step.items()} for step in drawn]
    overflowed = [{name: gradient.clone() for name, gradient in step.items()} for step in drawn]
    hit = overflowed[0][units[0].parameters[0]]
    hit.view(-1)[:1] = float("inf")
    yield f"an overflow in {units[0].id} only", overflowed


def _outcome(values: Mapping[str, Tensor], gradients: Gradients, make: MakeOptimizer, step: StepFunction) -> Outcome:
    """Run the steps; returns each parameter's end: its value and state, or the error that ended it."""
    torch.manual_seed(0)
    parameters = {name: Parameter(value.clone()) for name, value in values.items()}
    try:
        optimizer = make(list(parameters.items()))
        for gradient in gradients:
            for name, parameter in parameters.items():
                parameter.grad = gradient[name].clone()
            step(optimizer, parameters)
    except Exception as error:
        return {name: {"error": type(error).__name__} for name in values}
    return {name: _end(parameter, optimizer) for name, parameter in parameters.items()}


def _end(parameter: Parameter, optimizer: Optimizer) -> dict[str, object]:
    return {
        "value": parameter.detach(),
        **{str(key): value for key, value in optimizer.state.get(parameter, {}).items()},
    }


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and (one == other or one != one)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _survives_a_move(
    unit: ParameterUnit, parameters: Mapping[str, Tensor], gradients: Gradients, make: MakeOptimizer, step: StepFunction
) -> bool:
    """Whether a unit that moves to another worker between two steps ends as if it had stayed."""

    def new_state() -> UnitState:
        return UnitState(unit, parameters, make, num_micro_batches=1, exact=False)

    def advance(state: UnitState, index: int) -> None:
        for name, parameter in state.parameters.items():
            parameter.grad = gradients[index][name].clone()
        step(state.optimizer, state.parameters)
        state.optimizer.zero_grad(set_to_none=True)

    stays, moves = new_state(), new_state()
    try:
        advance(stays, 0)
        advance(moves, 0)
        arrived = new_state()
        arrived.load(copy.deepcopy(moves.tensors()))
        advance(stays, 1)
        advance(arrived, 1)
    except Exception:
        return False
    return all(
        _same(_end(stays.parameters[name], stays.optimizer), _end(arrived.parameters[name], arrived.optimizer))
        for name in unit.parameters
    )
