from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from morph.contract.errors import NonFiniteGradient
from morph.runtime.state.accumulators import ExactAccumulator, FastAccumulator, Reduced
from morph.runtime.state.fixed_point import first_exponent

SHAPES = {"weight": (3, 4), "bias": (5,)}
NUM = 12


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def exact(exponents: dict[str, int] | None = None, num: int = NUM) -> ExactAccumulator:
    return ExactAccumulator(parameters(), exponents or dict.fromkeys(SHAPES, first_exponent(num)), num)


def contributions(seed: int, num: int = NUM, spread: float = 3.0) -> list[dict[str, Tensor]]:
    """Return gradients over many orders of magnitude, none above 8."""
    generator = torch.Generator().manual_seed(seed)

    def one(shape: tuple[int, ...]) -> Tensor:
        size = torch.pow(10.0, -spread * torch.rand(shape, generator=generator))
        return (torch.rand(shape, generator=generator) * 16 - 8) * size

    return [{name: one(shape) for name, shape in SHAPES.items()} for _ in range(num)]


def add_all(accumulator: ExactAccumulator | FastAccumulator, gradients: list[dict[str, Tensor]]) -> None:
    for gradient in gradients:
        for name, tensor in gradient.items():
            accumulator.add(name, tensor)


def reduced_over(members: list[ExactAccumulator], num: int = NUM) -> Reduced:
    """Reduce the members' sums as a ring does, without processes; return the first member's result."""
    first = members[0]
    for index, part in enumerate(first.parts):
        sums = torch.stack([member.parts[index].shares(len(members)) for member in members])
        length = sums.shape[2]
        part.means = torch.empty(sums.shape[1] * length, dtype=part.mean_dtype)
        for rank, means in enumerate(part.means.split(length)):
            members[rank].mean(part, sums[:, rank], rank * length, num, means)
    for member in members[1:]:
        torch.maximum(first.largest, member.largest, out=first.largest)
    return first.finish(num, step=0)


def test_a_section_without_parameters_sums_nothing() -> None:
    none = ExactAccumulator({}, {}, NUM)
    assert none.finish(NUM, 0) == Reduced(gradients={}, exponents={}, overflowed=False)


def same_bits(one: Reduced, other: Reduced) -> bool:
    return dict(one.exponents) == dict(other.exponents) and all(
        torch.equal(one.gradients[name], other.gradients[name]) for name in SHAPES
    )


@given(st.integers(0, 2**31), st.permutations(range(NUM)), st.lists(st.integers(0, 3), min_size=NUM, max_size=NUM))
def test_any_order_and_any_grouping_over_replicas_gives_the_same_bits(
    seed: int, order: list[int], owners: list[int]
) -> None:
    gradients = contributions(seed)
    alone = exact()
    add_all(alone, gradients)
    members = [exact() for _ in range(4)]
    for index in order:
        add_all(members[owners[index]], [gradients[index]])
    assert same_bits(alone.finish(NUM, step=0), reduced_over(members))


def test_floating_point_sums_would_not_have_the_same_bits_in_every_order() -> None:
    """This is the control of the test above: its inputs do distinguish orders."""
    gradients = contributions(seed=1)
    results = set()
    for order in itertools.islice(itertools.permutations(gradients), 0, 5000, 250):
        accumulator = FastAccumulator(parameters())
        add_all(accumulator, list(order))
        results.add(accumulator.finish(NUM, step=0).gradients["weight"].numpy().tobytes())
    assert len(results) > 1


def test_the_mean_is_the_true_mean_but_for_the_last_rounding() -> None:
    gradients = contributions(seed=2)
    accumulator = exact()
    add_all(accumulator, gradients)
    found = accumulator.finish(NUM, step=0).gradients
    for name in SHAPES:
        reference = torch.stack([gradient[name].double() for gradient in gradients]).sum(0) / NUM
        unit = 2.0 ** -first_exponent(NUM)
        bound = reference.abs() * 2.0**-24 + unit
        assert ((found[name].double() - reference).abs() <= bound).all()
        assert found[name].shape == SHAPES[name]
        assert found[name].dtype == torch.float32


@given(st.integers(0, 2**31), st.integers(0, NUM - 1), st.integers(0, 3))
def test_an_overflow_on_any_member_gives_all_the_same_scales(seed: int, where: int, owner: int) -> None:
    gradients = contributions(seed)
    gradients[where]["weight"][0, 0] = 2.0**20
    alone = exact()
    add_all(alone, gradients)
    members = [exact() for _ in range(4)]
    for index, gradient in enumerate(gradients):
        add_all(members[owner if index == where else index % 4], [gradient])
    expected, found = alone.finish(NUM, step=0), reduced_over(members)
    assert expected.overflowed
    assert found.overflowed
    assert dict(expected.exponents) == dict(found.exponents)


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30, 3e38])
def test_gradients_of_any_size_are_summed_once_the_scale_has_followed(size: float) -> None:
    exponents = dict.fromkeys(SHAPES, first_exponent(2))
    for _ in range(2):  # at most one redo
        accumulator = exact(exponents, num=2)
        for _ in range(2):
            accumulator.add("bias", torch.full((5,), size))
        result = accumulator.finish(2, step=0)
        exponents = dict(result.exponents)
    assert not result.overflowed
    # the finest scale is 2**-120: smaller numbers are lost on purpose
    assert torch.allclose(result.gradients["bias"], torch.full((5,), size), rtol=1e-5, atol=2.0**-120)


def test_zeros_keep_their_scale_and_do_not_overflow() -> None:
    exponents = {"weight": 31, "bias": 7}
    accumulator = exact(exponents)
    add_all(accumulator, [{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * NUM)
    result = accumulator.finish(NUM, step=0)
    assert not result.overflowed
    assert dict(result.exponents) == exponents
    assert not any(gradient.any() for gradient in result.gradients.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_a_gradient_that_is_not_finite_names_step_and_parameter(kind: str, value: float) -> None:
    accumulator = exact() if kind == "exact" else FastAccumulator(parameters())
    gradients = contributions(seed=4)
    gradients[7]["bias"][1] = value
    add_all(accumulator, gradients)
    with pytest.raises(NonFiniteGradient, match=r"step 9.*bias"):
        accumulator.finish(NUM, step=9)


@pytest.mark.parametrize("num_sections", [1, 2, 5])
def test_the_largest_contributions_of_all_micro_batches_and_sections_cannot_overflow(num_sections: int) -> None:
    """N micro-batches times the sections that share the parameter, each just below the limit, are exact in int64."""
    num_micro_batches = 7
    num = num_micro_batches * num_sections
    accumulator = ExactAccumulator({"w": torch.zeros(1)}, {"w": first_exponent(num)}, num)
    value = torch.tensor([16.0]).nextafter(torch.tensor([0.0]))
    for _ in range(num):
        accumulator.add("w", value)
    result = accumulator.finish(num_micro_batches, step=0)
    assert not result.overflowed
    assert torch.allclose(result.gradients["w"], value * num_sections, rtol=1e-6)


def test_the_fast_accumulator_keeps_double_precision_for_double_parameters() -> None:
    accumulator = FastAccumulator(parameters(torch.float64))
    accumulator.add("bias", torch.full((5,), 1.0 + 2.0**-40, dtype=torch.float64))
    gradient = accumulator.finish(1, step=0).gradients["bias"]
    assert gradient.dtype == torch.float64
    assert float(gradient[0]) == 1.0 + 2.0**-40


@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_complex_gradients_are_summed_as_their_real_and_imaginary_parts_are(kind: str) -> None:
    like = {
        "w": torch.zeros(2, 3, dtype=torch.complex64),
        "b": torch.zeros(1),
        "n": torch.zeros((), dtype=torch.cfloat),
    }
    parts = {f"{name}{part}": torch.zeros(one.shape) for name, one in like.items() for part in ("re", "im")}
    generator = torch.Generator().manual_seed(8)

    def made(some: dict[str, Tensor]) -> ExactAccumulator | FastAccumulator:
        return FastAccumulator(some) if kind == "fast" else ExactAccumulator(some, dict.fromkeys(some, 40), NUM)

    whole, other, split = made(like), made(like), made(parts)
    for name, one in [*like.items()] * NUM:
        gradient = torch.randn(one.shape, generator=generator, dtype=one.dtype)
        gradient = gradient.conj() if one.is_complex() else gradient  # a lazy conjugate, which autograd often leaves
        whole.add(name, gradient)
        split.add(f"{name}re", gradient.real if one.is_complex() else gradient)
        split.add(f"{name}im", gradient.imag if one.is_complex() else torch.zeros(one.shape))
    partial = whole.partial()
    assert partial is not None
    other.merge(partial)
    found, taken, expected = (one.finish(NUM, step=0).gradients for one in (whole, other, split))
    for name, one in like.items():
        assert (found[name].dtype, found[name].shape) == (one.dtype, one.shape)
        assert torch.equal(found[name], taken[name])
        real = found[name].real if one.is_complex() else found[name]
        assert torch.equal(real, expected[f"{name}re"])
        assert not one.is_complex() or torch.equal(found[name].imag, expected[f"{name}im"])


@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_a_complex_gradient_with_an_infinite_imaginary_part_is_named(kind: str) -> None:
    like = {"w": torch.zeros(2, dtype=torch.complex64), "c": torch.zeros(2, dtype=torch.complex64)}
    accumulator = FastAccumulator(like) if kind == "fast" else ExactAccumulator(like, dict.fromkeys(like, 40), NUM)
    accumulator.add("w", torch.ones(2, dtype=torch.complex64))
    accumulator.add("c", torch.tensor([1.0, complex(0.0, float("inf"))]))
    with pytest.raises(NonFiniteGradient, match=r"step 9.*of c "):
        accumulator.finish(NUM, step=9)


@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_only_what_something_was_added_to_has_a_gradient(kind: str) -> None:
    like = {**parameters(), "empty": torch.zeros(0), "none": torch.zeros(2), "buffer": torch.zeros(2)}
    exponents, changes = dict.fromkeys(like, 31), frozenset({"buffer"})

    def made() -> ExactAccumulator | FastAccumulator:
        if kind == "fast":
            return FastAccumulator(like, changes=changes)
        return ExactAccumulator(like, exponents, NUM, changes=changes)

    one, other = made(), made()
    assert one.partial() is not None  # reading the sums adds nothing
    one.add("weight", torch.zeros(3, 4))
    one.add("empty", torch.zeros(0))
    other.add("bias", torch.ones(5))
    partial = other.partial()
    assert partial is not None
    one.merge(partial)
    found = one.finish(NUM, step=0)
    assert set(found.gradients) == {"weight", "bias", "empty", "buffer"}
    assert not found.gradients["weight"].any()
    assert not found.gradients["buffer"].any()
    assert not found.overflowed
    assert kind == "fast" or found.exponents["none"] == exponents["none"]
