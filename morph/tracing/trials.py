"""Tries whether one optimizer for each unit gives the same bits as one optimizer for all parameters.

The tracer sees operations; it does not see what Python does with numbers that left the tensors, with the length of the
list of parameters, or with numbers kept on the optimizer. The trials see all this, for the gradients that they try:
ordinary, large and small ones, an overflow in one unit only, and gradients that keep their direction only in every
other unit, until a step size that is estimated over all parameters has moved. One trial continues from counters set far
ahead, as if a warm-up were over. Parameters, their state and the numbers of their groups are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from morph.cutting import ParameterUnit
from morph.runtime.state.optimizer_state import NOT_HYPERPARAMETERS, MakeOptimizer
from morph.runtime.state.unit_state import UnitState

StepFunction = Callable[[Optimizer, Mapping[str, Parameter]], object]
_NUM_STEPS = 2
_STEADY_STEPS = 12
_SCALES = (1.0, 1e4, 1e-4)
_LATE_STEP = 10_000
"""A number of steps that no warm-up inside an optimizer exceeds."""
Gradients = Sequence[Callable[[str], Tensor]]
"""The gradients of each step, by the parameter's name."""
TrialResults = dict[str, dict[str, object]]


@dataclass(frozen=True)
class _Case:
    """``skip_after``: the step after which counters are set far ahead; None: never."""

    label: str
    gradients: Gradients
    skip_after: int | None = None


@dataclass(frozen=True)
class TrialResult:
    """The findings of the trials.

    ``differing``: units with other results, and the gradients of the trial. ``refused``: unit and error, if the
    optimizer could not be built or run for one unit alone. ``lost``: units with other results after a move to another
    worker between two steps.
    """

    differing: Mapping[str, str]
    refused: Mapping[str, str]
    lost: tuple[str, ...]


def run_trials(
    parameters: Mapping[str, Tensor], units: Sequence[ParameterUnit], make: MakeOptimizer, step: StepFunction
) -> TrialResult:
    """Compare one optimizer for all with one for each unit.

    ``parameters``: initial values by name; they are copied. ``step``: runs one step of an optimizer, for the parameters
    by name.
    """
    refused = _refusals(parameters, units, make)
    if refused:
        return TrialResult({}, refused, ())
    differing: dict[str, str] = {}
    cases = _cases(parameters, units)
    for case in cases:
        together = _outcome(parameters, case, make, step)
        for unit in units:
            alone = _outcome({name: parameters[name] for name in unit.parameters}, case, make, step)
            if unit.id not in differing and not all(_same(alone[name], together[name]) for name in unit.parameters):
                differing[unit.id] = case.label
    ordinary = cases[0].gradients
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


def _cases(parameters: Mapping[str, Tensor], units: Sequence[ParameterUnit]) -> list[_Case]:
    generator = torch.Generator().manual_seed(0)
    drawn = [
        {name: torch.randn(value.shape, generator=generator).to(value.dtype) for name, value in parameters.items()}
        for _ in range(_NUM_STEPS)
    ]
    place = {name: index for index, unit in enumerate(units) for name in unit.parameters}
    hit = units[0].parameters[0]

    def scaled(scale: float, *steps: int) -> Gradients:
        return [lambda name, step=step: drawn[step][name] * scale for step in steps]  # type: ignore[misc]

    def overflowed(name: str) -> Tensor:
        gradient = drawn[0][name].clone()
        if name == hit:
            gradient.view(-1)[:1] = float("inf")
        return gradient

    def steady(step: int) -> Callable[[str], Tensor]:
        turning = -1.0 if step % 2 else 1.0
        return lambda name: drawn[0][name] * (turning if place[name] % 2 else 1.0 + place[name])

    return [
        *(_Case(f"gradients times {scale:g}", scaled(scale, *range(_NUM_STEPS))) for scale in _SCALES),
        _Case(f"an overflow in {units[0].id} only", [overflowed, *scaled(1.0, 1)]),
        _Case("gradients that are steady in some units only", [steady(step) for step in range(_STEADY_STEPS)]),
        _Case(f"step counters set to {_LATE_STEP:,}", scaled(1.0, 0, 1, 0, 1), skip_after=1),
    ]


def _outcome(values: Mapping[str, Tensor], case: _Case, make: MakeOptimizer, step: StepFunction) -> TrialResults:
    """Run the steps; return each parameter's final value, state and group, or the error that ended the run."""
    torch.manual_seed(0)
    parameters = {name: Parameter(value.clone()) for name, value in values.items()}
    try:
        optimizer = make(list(parameters.items()))
        for index, gradient in enumerate(case.gradients):
            for name, parameter in parameters.items():
                parameter.grad = gradient(name)
            before = _counts(optimizer) if index == case.skip_after else {}
            step(optimizer, parameters)
            if index == case.skip_after:
                _skip(optimizer, before)
    except Exception as error:
        return {name: {"error": type(error).__name__} for name in values}
    return {name: _end(parameter, optimizer) for name, parameter in parameters.items()}


def _counts(optimizer: Optimizer) -> dict[tuple[int, object], float]:
    """Return the whole numbers in state and groups, by their places."""
    kept = (*optimizer.state.values(), *optimizer.param_groups)
    return {
        (id(entries), key): float(value)
        for entries in kept
        for key, value in entries.items()
        if type(value) is int or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())
    }


def _skip(optimizer: Optimizer, before: Mapping[tuple[int, object], float]) -> None:
    """Set far ahead the counters that the last step has incremented."""
    now = _counts(optimizer)
    for entries in (*optimizer.state.values(), *optimizer.param_groups):
        for key in entries:
            at = (id(entries), key)
            if at in before and now.get(at) == before[at] + 1:
                entries[key] = entries[key] + _LATE_STEP


def _end(parameter: Parameter, optimizer: Optimizer) -> dict[str, object]:
    groups = (group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    return {
        "value": parameter.detach(),
        "group": {key: value for key, value in next(groups, {}).items() if key not in NOT_HYPERPARAMETERS},
        **{str(key): value for key, value in optimizer.state.get(parameter, {}).items()},
    }


def _same(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and first.dtype == second.dtype and torch.equal(_bits(first), _bits(second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return type(first) is type(second) and (first == second or first != first)


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
            parameter.grad = gradients[index](name)
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
