from __future__ import annotations

import math

import pytest
import torch

from morph.contract.decided import Decided, decided_step
from morph.contract.errors import TrainingStopped
from morph.cutting.cuts.cut_model import ParameterUnit
from morph.runtime.state.accumulators import Reduced
from morph.runtime.state.unit_state import UnitState, UpdateRules, squared_norm
from tests.training.training_jobs import sgd


def gradients(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0**-seed for shape in shapes]


@pytest.mark.parametrize("shapes", [((1,),), ((3, 5), (7,)), ((1 << 20,), (1025,)), ((0,), (2,)), ((3, 700_001),)])
def test_the_norm_is_that_of_all_elements(shapes: tuple[tuple[int, ...], ...]) -> None:
    tensors = gradients(1, *shapes)
    exact = math.fsum(value**2 for tensor in tensors for value in tensor.double().flatten().tolist())
    assert squared_norm(tensors) == pytest.approx(exact, rel=1e-14)


def test_the_norm_has_the_same_bits_for_any_number_of_threads_and_any_layout() -> None:
    (tensor,) = gradients(2, (1000, 2003))
    threads = torch.get_num_threads()
    found = set()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.add(squared_norm([tensor]))
            found.add(squared_norm([tensor.t().contiguous().t()]))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_the_norm_leaves_the_gradient_as_it_is() -> None:
    (tensor,) = gradients(0, (9,))
    before = tensor.clone()
    squared_norm([tensor])
    squared_norm([tensor.double()])
    wide = tensor.double()
    squared_norm([wide])
    assert torch.equal(tensor, before)
    assert torch.equal(wide, before.double())


@pytest.mark.parametrize("most", [0.05, 1.0, 100.0])
def test_clipping_does_what_torch_does_to_a_model_in_one_piece(most: float) -> None:
    shapes = ((4, 3), (3,), (6,))
    whole = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter, gradient in zip(whole, gradients(0, *shapes), strict=True):
        parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(whole, most)
    torch.optim.SGD(whole, lr=0.2, momentum=0.9, nesterov=True).step()

    units = [ParameterUnit(f"s{index}", (index,), ("p",)) for index in range(3)]
    states = [
        UnitState(
            unit, {"p": torch.ones(shape)}, sgd, num_micro_batches=2, exact=True, rules=UpdateRules(clip_grad_norm=most)
        )
        for unit, shape in zip(units, shapes, strict=True)
    ]
    for state, gradient in zip(states, gradients(0, *shapes), strict=True):
        state.reduced = Reduced(gradients={"p": gradient}, exponents={}, overflowed=False)
    norms_sq = [{state.unit.id: state.norm_sq() or 0.0} for state in states]
    decided = decided_step(1, norms_sq, [False] * 3, [unit.id for unit in units])
    assert decided.gradient_norm == pytest.approx(float(norm), rel=1e-6)
    for state, parameter in zip(states, whole, strict=True):
        state.apply(decided)
        assert torch.allclose(state.parameters["p"], parameter, rtol=1e-6, atol=0)


def test_the_norm_does_not_depend_on_who_reports_what() -> None:
    norms = {f"s{index}": 10.0 ** (index - 4) / 3 for index in range(9)}
    together = decided_step(4, [norms], [False], norms)
    backwards = [{unit: norms[unit]} for unit in reversed(norms)]
    assert decided_step(4, [*backwards, {"s3": norms["s3"]}], [False] * 10, norms) == together
    assert Decided.model_validate_json(together.model_dump_json()) == together


def test_two_holders_of_one_unit_with_different_gradients_stop_the_run() -> None:
    with pytest.raises(TrainingStopped, match=r"step 6: two workers hold different gradients of unit s1"):
        decided_step(7, [{"s1": 1.0, "s0": 2.0}, {"s1": 1.0000000000000002}], [False, False], ["s0", "s1"])


def test_a_unit_of_which_nobody_reports_stops_the_run() -> None:
    with pytest.raises(TrainingStopped, match=r"no worker reported the gradient norm of s0, s2"):
        decided_step(7, [{"s1": 1.0}], [False], ["s0", "s1", "s2"])


def test_a_job_without_clipping_reports_and_decides_no_norm() -> None:
    unit = ParameterUnit("s0", (0,), ("p",))
    state = UnitState(unit, {"p": torch.ones(2)}, sgd, num_micro_batches=1, exact=True)
    state.reduced = Reduced(gradients={"p": torch.ones(2)}, exponents={}, overflowed=False)
    assert state.norm_sq() is None
    assert decided_step(1, [{}], [False], ["s0"]) == Decided(version=1)
