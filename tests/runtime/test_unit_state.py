from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from morph.checkpoint.unit_files import from_payload, to_payload
from morph.contract.decided import Decided
from morph.cutting.cuts.cut_model import ParameterUnit
from morph.runtime.attendants.wire import apply_update, copy_of_update
from morph.runtime.state import unit_state
from morph.runtime.state.accumulators import Reduced
from morph.runtime.state.fixed_point import first_exponent
from morph.runtime.state.optimizer_state import step_together
from morph.runtime.state.unit_state import MakeOptimizer, UnitState, UpdateRules, apply_all, norms_sq

UNIT = ParameterUnit("s1+s4", (1, 4), ("tok.weight", "bias"))
NUM_MICRO_BATCHES = 6


def adam(parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=0.01)


def momentum(parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1, momentum=0.9)


def plain(parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


def make(optimizer: MakeOptimizer = adam, *, exact: bool = True, seed: int = 0, width: int = 4) -> UnitState:
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        "tok.weight": torch.randn(3, width, generator=generator),
        "bias": torch.randn(5, generator=generator),
    }
    return UnitState(UNIT, parameters, optimizer, num_micro_batches=NUM_MICRO_BATCHES, exact=exact)


def step(state: UnitState, seed: int) -> None:
    """Reduce synthetic gradients on one worker, and apply them."""
    generator = torch.Generator().manual_seed(seed)
    accumulator = state.new_accumulator()
    for _ in range(NUM_MICRO_BATCHES * len(UNIT.sections)):
        for name, parameter in state.parameters.items():
            accumulator.add(name, torch.randn(parameter.shape, generator=generator))
    state.reduced = accumulator.finish(NUM_MICRO_BATCHES, step=state.version)
    state.apply()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("optimizer", [adam, momentum, plain])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_state_that_was_saved_and_loaded_trains_on_bit_for_bit(
    optimizer: MakeOptimizer, exact: bool, num_steps: int
) -> None:
    state = make(optimizer, exact=exact)
    for index in range(num_steps):
        step(state, index)
    saved = from_payload(to_payload(state.tensors()))
    twin = make(optimizer, exact=exact, seed=99)
    twin.load(saved)
    assert twin.version == num_steps
    assert twin.exponents == state.exponents
    assert same(twin.tensors(), state.tensors())
    for index in range(2):
        step(state, 100 + index)
        step(twin, 100 + index)
    assert same(twin.tensors(), state.tensors())


def test_the_saved_state_holds_parameters_moments_and_one_tensor_of_numbers() -> None:
    state = make()
    step(state, 0)
    tensors = state.tensors()
    assert set(tensors) == {
        "param/tok.weight",
        "param/bias",
        *(f"optim/{name}/{key}" for name in UNIT.parameters for key in ("step", "exp_avg", "exp_avg_sq")),
        "numbers",
    }
    assert tensors["numbers"].dtype == torch.uint8


@pytest.mark.parametrize("change", ["apply", "rescale", "load"])
def test_a_deferred_copy_has_the_state_at_the_time_of_its_request(change: str) -> None:
    state = make()
    step(state, 0)
    before, other = state.tensors(), make(seed=99).tensors()
    copy = state.copy_later()
    if change == "load":  # the copy then belongs to a history that is void
        state.load(other)
        assert copy.take() is None
        return
    if change == "apply":
        step(state, 1)
    else:
        state.exponents = dict.fromkeys(state.exponents, 3)
    copied = copy.take()
    assert copied is not None
    assert same(copied, before)
    assert not same(state.tensors(), before)


def test_a_state_has_leaves_of_its_own() -> None:
    shared = {"tok.weight": torch.ones(3, 4), "bias": torch.ones(5)}
    one, other = (UnitState(UNIT, shared, plain, num_micro_batches=1, exact=True) for _ in range(2))
    with torch.no_grad():
        one.parameters["bias"].zero_()
    assert other.parameters["bias"].sum() == 5
    assert shared["bias"].sum() == 5


def test_applying_steps_the_optimizer_once_and_lets_go_of_the_gradients() -> None:
    state = make(plain)
    before = {name: parameter.detach().clone() for name, parameter in state.parameters.items()}
    accumulator = state.new_accumulator()
    for name, parameter in state.parameters.items():
        accumulator.add(name, torch.full(parameter.shape, 3.0))
    state.reduced = accumulator.finish(NUM_MICRO_BATCHES, step=0)
    wanted = dict(state.reduced.exponents)
    state.apply()
    assert state.version == 1
    assert state.reduced is None
    assert state.exponents == wanted
    for name, parameter in state.parameters.items():
        assert parameter.grad is None
        assert torch.allclose(parameter, before[name] - 0.1 * 3.0 / NUM_MICRO_BATCHES)


def test_initial_scales_have_room_for_all_contributions_of_a_unit() -> None:
    assert set(make().exponents.values()) == {first_exponent(NUM_MICRO_BATCHES * 2)}
    assert make(exact=False).exponents == {}


def test_an_overflowed_step_changes_scales_and_nothing_else() -> None:
    state = make()
    accumulator = state.new_accumulator()
    accumulator.add("bias", torch.full((5,), 1e9))
    reduced = accumulator.finish(NUM_MICRO_BATCHES, step=0)
    assert reduced.overflowed
    before = state.tensors()
    state.rescale(reduced)
    after = state.tensors()
    assert state.exponents == dict(reduced.exponents)
    assert state.version == 0
    assert same({k: v for k, v in before.items() if k != "numbers"}, {k: v for k, v in after.items() if k != "numbers"})
    for again in (False, True):  # a step that is given up leaves the scales that it began with
        if again:
            state.take_over(reduced, reduced.exponents)
            assert state.exponents == dict(reduced.exponents)
        state.drop_step()
        assert same(state.tensors(), before)


def test_a_state_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unit s1\+s4.*tok\.weight"):
        make().load(make(width=7).tensors())


@pytest.mark.parametrize("bias", [{}, {"param/bias": torch.zeros(5, dtype=torch.float64)}], ids=["none", "wider"])
def test_a_state_without_a_parameter_of_its_dtype_is_refused(bias: dict[str, torch.Tensor]) -> None:
    tensors = make().tensors()
    del tensors["param/bias"]
    with pytest.raises(ValueError, match="bias"):
        make().load(tensors | bias)


@pytest.mark.parametrize("exact", [True, False])
def test_a_state_saved_under_the_other_accumulation_can_be_trained_on(exact: bool) -> None:
    saved = make(exact=not exact)
    step(saved, 0)
    state = make(exact=exact)
    state.load(saved.tensors())
    assert set(state.exponents) == (set(UNIT.parameters) if exact else set())
    step(state, 1)
    assert state.version == 2


def test_loading_drops_gradients_that_were_held() -> None:
    saved, state = make(), make()
    accumulator = state.new_accumulator()
    state.reduced = accumulator.finish(NUM_MICRO_BATCHES, step=0)
    state.load(saved.tensors())
    assert state.reduced is None


def decaying(parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("optimizer", [adam, decaying])
def test_complex_and_gradientless_parameters_are_updated_as_in_a_plain_loop(
    optimizer: MakeOptimizer, exact: bool
) -> None:
    """A follower that takes the reduced gradients, and a state that is saved and loaded, get the same parameters."""
    generator = torch.Generator().manual_seed(0)
    values = {"tok.weight": torch.randn(3, 4, generator=generator), "bias": torch.randn(5, generator=generator)}
    values["bias"] = torch.complex(values["bias"], values["bias"].flip(0))

    def begun() -> UnitState:
        rules = UpdateRules(clip_grad_norm=1.0)
        return UnitState(UNIT, values, optimizer, num_micro_batches=2, exact=exact, rules=rules)

    state, follower, reference = begun(), begun(), {name: Parameter(value.clone()) for name, value in values.items()}
    reference_optimizer = optimizer(reference.items())
    for given in (["bias"], ["bias", "tok.weight"], ["tok.weight"], [], ["bias"]):
        accumulator = state.new_accumulator()
        for name in given:
            gradient = torch.randn(values[name].shape, generator=generator, dtype=values[name].dtype)
            reference[name].grad = gradient / 2
            accumulator.add(name, gradient)
        state.reduced = accumulator.finish(2, step=state.version)
        norm_sq = norms_sq({"s0": state})["s0"]
        norm = torch.nn.utils.clip_grad_norm_(list(reference.values()), 1.0)
        assert norm_sq**0.5 == pytest.approx(float(norm), rel=1e-6)
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        decided = Decided(version=state.version + 1, gradient_norm=norm_sq**0.5)
        apply_update(follower, *copy_of_update(state, decided))
        state.apply(decided)
        loaded = begun()
        loaded.load(from_payload(to_payload(state.tensors())))
        state = loaded
    assert same(state.tensors(), follower.tensors())
    for name, parameter in state.parameters.items():
        assert torch.allclose(parameter, reference[name], rtol=1e-5, atol=1e-6)
        kept, expected = state.optimizer.state[parameter], reference_optimizer.state[reference[name]]
        assert kept.keys() == expected.keys()
        assert kept.get("step") == expected.get("step")


def half(parameters: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [parameter], "lr": 0.02} for _, parameter in parameters], weight_decay=0.1)


@pytest.mark.parametrize("in_host", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_a_parked_state_is_updated_as_any_other_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, masters: bool, in_host: bool
) -> None:
    """Each move here copies the state to new memory, so that code which still used the old memory would be wrong."""
    moves: list[Tensor] = []

    def elsewhere(tensor: Tensor, _device: torch.device) -> Tensor:
        moved = tensor.clone()
        tensor.fill_(7)
        moves.append(tensor)
        return moved

    monkeypatch.setattr(unit_state, "moved", elsewhere)
    unit = ParameterUnit("s1", (1,), ("weight",), buffers=("seen",))
    rules = UpdateRules(
        make_scheduler=lambda optimizer: StepLR(optimizer, 1, 0.5),
        master_weights=masters,
        optimizer_in_host_memory=in_host,
    )
    values = {"weight": torch.randn(3, 4).to(torch.bfloat16 if masters else torch.float32), "seen": torch.zeros(2)}

    def trained(offloaded: bool) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        state = UnitState(unit, values, half, num_micro_batches=2, exact=True, rules=rules)
        for number in range(4):
            if offloaded and number in (1, 3):
                state.offload()
            accumulator = state.new_accumulator()
            for _ in range(2):
                accumulator.add("weight", torch.randn(3, 4, generator=generator))
                accumulator.add("seen", torch.ones(2, dtype=torch.float64))
            state.reduced = accumulator.finish(2, step=state.version)
            if offloaded and number == 2:
                state.reload()
                state.offload()
            state.apply()
        state.reload()
        return state.tensors()

    usual = trained(offloaded=False)
    assert not moves
    assert same(trained(offloaded=True), usual)
    assert len(moves) > 10


FACTORIES: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw, foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "adam, fused, amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum, foreach": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True, foreach=True),
}


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("scheduled", [False, True], ids=["", "scheduled"])
def test_a_units_step_has_the_same_bits_in_any_group_of_units(
    kind: str, scheduled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step units of many kinds in random groups, some without gradients, and compare with each unit alone."""
    chance = random.Random(f"{kind}{scheduled}")
    generator = torch.Generator().manual_seed(1)

    def factory(named: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        every = list(named)
        decayed = [parameter for name, parameter in every if name.endswith("weight")]
        rest = [parameter for name, parameter in every if not name.endswith("weight")]
        return FACTORIES[kind]([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])

    rules = UpdateRules(
        make_scheduler=(lambda optimizer: StepLR(optimizer, 1, 0.5)) if scheduled else None, clip_grad_norm=1.0
    )
    units = []
    for number in range(9):
        shapes = {f"{number}.weight": (chance.choice([3, 64, 4099]), 5), f"{number}.bias": (chance.choice([1, 7, 16]),)}
        values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        if number == 4:
            values[f"{number}.weight"] = values[f"{number}.weight"].t().contiguous().t()
        if number in (6, 7):
            values = {name: value.double() for name, value in values.items()}
        units.append((ParameterUnit(f"s{number}", (number,), tuple(values)), values))

    def made() -> list[UnitState]:
        return [
            UnitState(unit, values, factory, num_micro_batches=1, exact=True, rules=rules) for unit, values in units
        ]

    alone, joined = made(), made()
    calls: list[int] = []

    def stepped(optimizers: Sequence[torch.optim.Optimizer]) -> None:
        calls.append(len(optimizers))
        step_together(optimizers)

    monkeypatch.setattr(unit_state, "step_together", stepped)
    for version in range(1, 7):
        decided, lacks = Decided(version=version, gradient_norm=2.0), chance.randrange(9) if version == 4 else None
        for one, other in zip(alone, joined, strict=True):
            gradients = {
                name: torch.randn(value.shape, generator=generator, dtype=value.dtype)
                for name, value in one.parameters.items()
                if name != f"{lacks}.bias"
            }
            for state in (one, other):
                own = {name: gradient.clone() for name, gradient in gradients.items()}
                state.reduced = Reduced(gradients=own, exponents=state.exponents, overflowed=False)
        for state in alone:
            state.apply(decided)
        order = chance.sample(joined, 9)
        cut = chance.randrange(3, 7)
        for some in (order[:cut], order[cut:]):
            apply_all(some, decided)
        if version == 5:  # its next step is a first step, unlike those of the others
            joined[0].load({name: tensor.clone() for name, tensor in joined[0].tensors().items()})
        assert all(same(one.tensors(), other.tensors()) for one, other in zip(alone, joined, strict=True))
    assert max(calls) > 2


def test_norms_of_units_have_the_same_bits_in_any_group_of_units() -> None:
    def folded(values: Tensor) -> Tensor:
        """Sum the norms of one chunk by halves."""
        while len(values) > 1:
            half = (len(values) + 1) // 2
            values = torch.cat([values[: len(values) - half] + values[half:], values[len(values) - half : half]])
        return values

    generator = torch.Generator().manual_seed(2)
    sizes = {"a": [5, 1, 1024], "b": [(1 << 20) + 77, 3], "c": [1024, 1024, 5, 0], "d": [], "e": [4099]}
    tensors = {unit: [torch.randn(size, generator=generator) for size in some] for unit, some in sizes.items()}
    tensors["c"][0] = tensors["c"][0].double()
    expected = {
        unit: math.fsum(
            float(folded(chunk.double().square())) for tensor in some for chunk in tensor.split(1 << 20) if len(chunk)
        )
        for unit, some in tensors.items()
    }
    assert unit_state.squared_norms(tensors) == expected
    chance = random.Random(0)
    for _ in range(8):
        some = chance.sample(sorted(tensors), 3)
        found = unit_state.squared_norms({unit: tensors[unit] for unit in some})
        assert found == {unit: expected[unit] for unit in some}


class Operations(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


def test_many_alike_tensors_take_no_more_operations_for_their_norm_than_one() -> None:
    counts, tensors = [], [torch.ones(1024)] * 3
    for num in (1, 40):
        with Operations() as operations:
            unit_state.squared_norms({str(unit): tensors for unit in range(num)})
        counts.append(operations.num)
    assert counts[1] == counts[0] < 20
