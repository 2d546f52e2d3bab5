"""The optimizer works on fp32 copies of bf16 parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from morph.contract.decided import decided_step
from morph.cutting.cuts.cut_model import ParameterUnit
from morph.runtime.state.unit_state import UnitState, UpdateRules
from tests.training.training_jobs import adamw, sgd

UNIT = ParameterUnit("s0", (0,), ("p", "q"))
BEGIN = {"p": torch.linspace(1, 2, 6).bfloat16(), "q": torch.linspace(1, 2, 3)}


def make(make_optimizer: object = sgd, tensors: dict[str, Tensor] = BEGIN, *, masters: bool = True) -> UnitState:
    rules = UpdateRules(master_weights=masters)
    return UnitState(UNIT, tensors, make_optimizer, num_micro_batches=1, exact=True, rules=rules)  # type: ignore[arg-type]


def step(state: UnitState, number: int) -> None:
    sums = state.new_accumulator()
    generator = torch.Generator().manual_seed(number)
    for name, parameter in state.parameters.items():
        gradient = torch.randn(parameter.shape, generator=generator) * 1e-4
        sums.add(name, gradient.bfloat16().to(parameter.dtype))
    state.reduced = sums.finish(1, number)
    state.apply(decided_step(number + 1, [{}], [False], ["s0"]))


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_masters_go_as_parameters_in_full_precision_and_sections_read_them_rounded(make_optimizer: object) -> None:
    state = make(make_optimizer)
    wide = make(make_optimizer, {name: tensor.float() for name, tensor in BEGIN.items()})
    for number in range(9):
        step(state, number)
        step(wide, number)
        assert torch.equal(state.tensors()["param/p"], wide.parameters["p"])
        assert torch.equal(state.parameters["p"], wide.parameters["p"].bfloat16())
        assert torch.equal(state.parameters["q"], wide.parameters["q"])
    assert state.parameters["p"].dtype == torch.bfloat16
    assert state.parameters["q"] is state._updated["q"], "what is wide already needs no copy"


def test_steps_too_small_for_bf16_are_not_lost() -> None:
    state, without = make(), make(masters=False)
    for _ in range(200):
        step(state, 1)
        step(without, 1)
    assert torch.equal(without.parameters["p"], BEGIN["p"])
    assert not torch.equal(state.parameters["p"], BEGIN["p"])


def test_a_saved_state_continues_with_the_same_bits() -> None:
    state = make(adamw)
    for number in range(3):
        step(state, number)
    again = make(adamw)
    again.load(state.tensors())
    assert torch.equal(again.parameters["p"], state.parameters["p"])
    for one in (state, again):
        step(one, 3)
    saved, twin = state.tensors(), again.tensors()
    assert all(torch.equal(saved[name], twin[name]) for name in saved)
    assert state.master_bytes == 6 * 4


def test_a_state_with_masters_does_not_fit_a_job_without_them() -> None:
    with pytest.raises(ValueError, match="saved state does not fit param p"):
        make(masters=False).load(make().tensors())
