"""Buffers in a unit's state: summed like gradients, applied with the step, saved, moved and followed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from morph.checkpoint.unit_files import from_payload, to_payload
from morph.contract.decided import Decided, LossScale
from morph.contract.errors import JobError, NonFiniteGradient
from morph.cutting.cuts.cut_model import ParameterUnit
from morph.runtime.attendants.wire import apply_update, copy_of_update
from morph.runtime.state.accumulators import change_of
from morph.runtime.state.unit_state import UnitState, UpdateRules, norms_sq

UNIT = ParameterUnit("s0", (0,), ("weight",), ("mean", "count", "begun", "half"))
BUFFERS = {
    "mean": torch.tensor([1.0, -2.0, 1e-3]),
    "count": torch.tensor(7),
    "begun": torch.tensor(False),
    "half": torch.tensor([0.5], dtype=torch.float16),
}
NUM_MICRO_BATCHES = 3


def sgd(parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1, weight_decay=0.5)


def make(*, exact: bool = True, unit: ParameterUnit = UNIT, rules: UpdateRules | None = None) -> UnitState:
    tensors = {"weight": torch.ones(2), **BUFFERS}
    return UnitState(unit, tensors, sgd, num_micro_batches=NUM_MICRO_BATCHES, exact=exact, rules=rules or UpdateRules())


def proposals(index: int) -> dict[str, Tensor]:
    """Return the buffers after the forward of one micro-batch."""
    drawn = torch.randn(3, generator=torch.Generator().manual_seed(index))
    return {
        "mean": 0.9 * BUFFERS["mean"] + 0.1 * drawn,
        "count": BUFFERS["count"] + 1,
        "begun": torch.tensor(True),
        "half": BUFFERS["half"] * (index + 1),
    }


def reduce(state: UnitState, indices: Iterable[int] = range(NUM_MICRO_BATCHES)) -> None:
    sums = state.new_accumulator()
    scale = 1.0 if state.loss_scale is None else state.loss_scale.factor
    for index in indices:
        for name, new in proposals(index).items():
            if name in state.buffers:
                sums.add(name, change_of(state.buffers[name], new))
        for name in state.parameters:
            sums.add(name, torch.full((2,), 0.25 * (index + 1)) * scale)
    state.reduced = sums.finish(NUM_MICRO_BATCHES, state.version)


@pytest.mark.parametrize("exact", [True, False])
def test_a_step_moves_a_buffer_by_the_mean_of_its_changes(exact: bool) -> None:
    state = make(exact=exact)
    reduce(state)
    state.apply()
    expected = torch.stack([proposals(index)["mean"].double() for index in range(NUM_MICRO_BATCHES)]).mean(0)
    torch.testing.assert_close(state.buffers["mean"], expected.float(), rtol=1e-6, atol=1e-7)
    assert state.buffers["mean"].dtype == torch.float32
    assert state.buffers["count"] == 8
    assert state.buffers["count"].dtype == torch.int64
    assert state.buffers["begun"].dtype == torch.bool
    assert bool(state.buffers["begun"])
    assert torch.equal(state.buffers["half"], torch.tensor([1.0], dtype=torch.float16))
    assert torch.equal(state.parameters["weight"].detach(), torch.full((2,), 0.9)), "weight decay of the weight alone"


def test_one_micro_batch_alone_gives_its_own_values_bit_for_bit() -> None:
    state = make()
    sums = state.new_accumulator()
    for name, new in proposals(1).items():
        sums.add(name, change_of(state.buffers[name], new))
    state.reduced = sums.finish(1, 0)
    state.apply()
    assert all(torch.equal(state.buffers[name], new) for name, new in proposals(1).items())


def test_neither_clipping_nor_loss_scaling_sees_a_buffer() -> None:
    plain, ruled = (
        make(),
        make(rules=UpdateRules(clip_grad_norm=1e9, loss_scale=LossScale(exponent=10, growth_steps=5))),
    )
    for state in (plain, ruled):
        reduce(state)
    assert norms_sq({"s": ruled})["s"] == pytest.approx(2 * 0.5**2)
    plain.apply()
    ruled.apply(Decided(version=1, gradient_norm=0.5**0.5))
    assert all(torch.equal(plain.values[name], ruled.values[name]) for name in UNIT.names)


def test_a_skipped_step_changes_no_buffer() -> None:
    state = make(rules=UpdateRules(loss_scale=LossScale(exponent=3, growth_steps=5)))
    sums = state.new_accumulator()
    sums.add("mean", torch.ones(3))
    sums.add("weight", torch.full((2,), torch.inf))
    state.reduced = sums.finish(NUM_MICRO_BATCHES, 0)
    assert state.reduced.non_finite
    state.apply(Decided(version=1, gradient_norm=None, skipped=True))
    assert torch.equal(state.buffers["mean"], BUFFERS["mean"])


def test_a_change_that_is_not_finite_names_the_buffer() -> None:
    for exact in (True, False):
        sums = make(exact=exact).new_accumulator()
        sums.add("mean", change_of(BUFFERS["mean"], torch.tensor([0.0, torch.nan, 0.0])))
        with pytest.raises(NonFiniteGradient, match="the change of buffer mean is NaN or infinite"):
            sums.finish(NUM_MICRO_BATCHES, 0)


def test_values_that_stay_infinite_do_not_change() -> None:
    value = torch.tensor([-torch.inf, 1.0])
    assert torch.equal(change_of(value, torch.tensor([-torch.inf, 3.0])), torch.tensor([0.0, 2.0]).double())


def test_an_integer_that_float64_cannot_hold_is_refused() -> None:
    state = make()
    sums = state.new_accumulator()
    sums.add("count", change_of(BUFFERS["count"], torch.tensor(2**61)))
    state.reduced = sums.finish(1, 0)
    state.rescale(state.reduced)
    sums = state.new_accumulator()
    sums.add("count", change_of(BUFFERS["count"], torch.tensor(2**61)))
    state.reduced = sums.finish(1, 0)
    with pytest.raises(JobError, match="integer buffer count by a number that is too large"):
        state.apply()


def test_a_state_that_was_saved_sent_or_followed_has_the_buffers() -> None:
    state, follower = make(), make()
    reduce(state)
    facts, changes = copy_of_update(state, None)
    state.apply()
    apply_update(follower, facts, changes)
    loaded = make()
    loaded.load(from_payload(to_payload(state.tensors())))
    for other in (follower, loaded):
        for own, its in ((state, other),):
            assert own.tensors().keys() == its.tensors().keys()
            assert all(torch.equal(value, its.tensors()[name]) for name, value in own.tensors().items())


def test_a_saved_state_without_a_buffer_does_not_fit() -> None:
    state = make()
    tensors = state.tensors()
    del tensors["buffer/mean"]
    with pytest.raises(ValueError, match="saved state does not fit buffer mean"):
        state.load(tensors)


def test_a_unit_may_hold_buffers_alone() -> None:
    unit = ParameterUnit("s0+s1", (0, 1), (), ("mean", "count"))
    state = make(unit=unit, rules=UpdateRules(clip_grad_norm=1.0))
    reduce(state)
    assert norms_sq({"s": state}) == {"s": 0.0}
    state.apply(Decided(version=1, gradient_norm=0.3))
    again = make(unit=unit)
    again.load(from_payload(to_payload(state.tensors())))
    assert int(again.buffers["count"]) == 8
    assert again.version == 1
