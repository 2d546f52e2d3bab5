from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from morph.runtime.state.fixed_point import (
    BLOCK,
    MAX_EXPONENT,
    MIN_EXPONENT,
    SUM_BITS,
    add_fixed,
    first_exponent,
    fits,
    flat_floats,
    from_fixed,
    largest_magnitude,
    limit_bits,
    next_exponent,
)

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
COUNTS = st.integers(1, 5000)


def to_fixed(gradient: torch.Tensor, exponent: int) -> torch.Tensor:
    total = torch.zeros(gradient.numel(), dtype=torch.int64)
    add_fixed(total, flat_floats(gradient), exponent)
    return total


@pytest.mark.parametrize(("count", "bits"), [(1, 62), (2, 61), (3, 60), (4, 60), (5, 59), (8192, 49)])
def test_the_bits_of_one_contribution_leave_room_for_all_of_them(count: int, bits: int) -> None:
    assert limit_bits(count) == bits
    assert count * 2**bits <= 2**SUM_BITS


@given(st.lists(FLOAT32, min_size=1, max_size=8), COUNTS)
def test_the_next_scale_fits_what_was_seen_with_room_to_grow(values: list[float], count: int) -> None:
    largest = max(map(abs, values))
    exponent = next_exponent(3, largest, count)
    assert MIN_EXPONENT <= exponent <= MAX_EXPONENT or largest == 0
    if largest:
        assert fits(exponent, largest, count)
        if exponent < MAX_EXPONENT and largest < 2.0**120:
            assert fits(exponent, largest * 32, count)


def test_a_tensor_of_zeros_keeps_its_scale() -> None:
    assert next_exponent(17, 0.0, 4) == 17
    assert fits(MAX_EXPONENT, 0.0, 4)


@given(st.integers(-200, 200), st.integers(-1000, 1000), COUNTS)
def test_fitting_is_exactly_being_below_the_limit(exponent: int, power: int, count: int) -> None:
    """Powers of two and their neighbours, compared as integers."""
    for largest in (math.ldexp(1.0, power), math.nextafter(math.ldexp(1.0, power), 0.0)):
        numerator, denominator = largest.as_integer_ratio()
        limit = 2 ** limit_bits(count)
        scaled_up, scaled_down = 2 ** max(exponent, 0), 2 ** max(-exponent, 0)
        assert fits(exponent, largest, count) == (numerator * scaled_up < limit * denominator * scaled_down)


@pytest.mark.parametrize("largest", [math.inf, math.nan])
def test_what_is_not_finite_fits_no_scale(largest: float) -> None:
    assert not fits(0, largest, 1)


@given(st.lists(FLOAT32, min_size=1, max_size=32))
def test_one_gradient_comes_back_within_half_a_unit_of_its_scale(values: list[float]) -> None:
    gradient = torch.tensor(values, dtype=torch.float32)
    exponent = next_exponent(0, float(gradient.abs().max()), 1)
    back = from_fixed(to_fixed(gradient, exponent), exponent, 1, torch.float64)
    assert ((back - gradient.double()).abs() <= 0.5 * 2.0**-exponent).all()


@given(st.lists(FLOAT32, min_size=1, max_size=64))
def test_the_sum_is_within_half_a_unit_per_contribution_of_the_true_sum(values: list[float]) -> None:
    count = len(values)
    exponent = next_exponent(0, max(map(abs, values)), count)
    total = sum(to_fixed(torch.tensor([value], dtype=torch.float32), exponent) for value in values)
    assert isinstance(total, torch.Tensor)
    exact = math.fsum(values)
    bound = count * 0.5 * 2.0**-exponent + abs(exact) * 2.0**-51
    assert abs(float(from_fixed(total, exponent, 1, torch.float64)) - exact) <= bound


def test_before_the_first_step_gradients_below_sixteen_fit() -> None:
    for count in (1, 6, 4096):
        assert fits(first_exponent(count), math.nextafter(16.0, 0.0), count)
        assert not fits(first_exponent(count), 16.0, count)


def test_half_precision_gradients_are_widened_before_they_are_scaled() -> None:
    gradient = torch.tensor([1.5, -0.25], dtype=torch.bfloat16)
    assert to_fixed(gradient, 40).tolist() == [3 * 2**39, -(2**38)]


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_adding_block_by_block_is_rounding_the_whole_tensor(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    gradient = torch.randn(size, generator=generator).to(dtype)
    total = torch.randint(-(2**50), 2**50, (size,), generator=generator)
    wide = gradient if dtype is torch.float64 else gradient.float()
    for exponent in (40, 3):  # coarse: halves are rounded to even
        want = total + (wide * 2.0**exponent).round().to(torch.int64)
        add_fixed(total, flat_floats(gradient), exponent)
        assert torch.equal(total, want)
    mean = (total.double() * (2.0**-40 / 6)).to(dtype)
    assert torch.equal(from_fixed(total, 40, 6, dtype), mean)


def test_a_transposed_gradient_is_added_in_its_own_order() -> None:
    gradient = torch.arange(6.0).view(2, 3)
    assert to_fixed(gradient.T, 1).tolist() == [0, 6, 2, 8, 4, 10]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 3, 16, 99])
def test_one_number_that_is_not_finite_is_seen_wherever_it_stands(odd: float, place: int) -> None:
    values = torch.linspace(-3.0, 2.0, 100)
    assert largest_magnitude(flat_floats(values)) == 3.0
    values[place] = odd
    assert not math.isfinite(largest_magnitude(flat_floats(values)))
