from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from morph.runtime.state import fixed_point, loops
from morph.runtime.state.fixed_point import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    SUM_BITS,
    first_exponent,
    fits,
    fixed_sum,
    limit_bits,
    next_exponent,
)
from morph.runtime.state.fixed_point import (
    to_fixed as to_sums,
)
from tests.waiting import BOUND_S

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
COUNTS = st.integers(1, 5000)


def add_fixed(total: torch.Tensor, gradient: torch.Tensor, exponent: int, largest: torch.Tensor) -> None:
    fixed_point.add_fixed([fixed_sum(total, largest, exponent)], [gradient], [False])


def from_fixed(totals: torch.Tensor, exponent: int, divisor: int, into: torch.Tensor) -> None:
    fixed_point.from_fixed([totals], [exponent], divisor, [into])


def to_fixed(gradient: torch.Tensor, exponent: int) -> torch.Tensor:
    total = torch.zeros(gradient.numel(), dtype=torch.int64)
    add_fixed(total, gradient, exponent, nothing_yet())
    return total


def nothing_yet() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.float64)


def back_from(total: torch.Tensor, exponent: int, divisor: int, dtype: torch.dtype) -> torch.Tensor:
    mean = torch.empty(total.shape[-1], dtype=dtype)
    from_fixed(total.view(-1, total.shape[-1]), exponent, divisor, mean)
    return mean


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["processor", "no loops", "device", *["fused"] * INTERPRETED])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Yield the compiled loops, a device's operations, and its fused kernels under Triton's interpreter, in turn."""
    if request.param == "no loops":
        monkeypatch.setattr(fixed_point, "_loops", lambda _dtype: None)
    elif request.param != "processor":
        monkeypatch.setattr(fixed_point, "_on_processor", lambda _tensor: False)
    if request.param == "fused":
        fused = importlib.import_module("morph.runtime.state.fused_sums")
        monkeypatch.setattr(fixed_point, "_fused", lambda _device: fused)


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


@given(st.integers(-200, 200), st.integers(-1000, 1000), COUNTS)
def test_fitting_is_exactly_being_below_the_limit(exponent: int, power: int, count: int) -> None:
    """Powers of two and their neighbours, compared as integers."""
    for largest in (math.ldexp(1.0, power), math.nextafter(math.ldexp(1.0, power), 0.0)):
        numerator, denominator = largest.as_integer_ratio()
        limit = 2 ** limit_bits(count)
        scaled_up, scaled_down = 2 ** max(exponent, 0), 2 ** max(-exponent, 0)
        assert fits(exponent, largest, count) == (numerator * scaled_up < limit * denominator * scaled_down)


@pytest.mark.parametrize("largest", [math.inf, math.nan])
def test_values_that_are_not_finite_fit_no_scale(largest: float) -> None:
    assert not fits(0, largest, 1)


@given(st.lists(FLOAT32, min_size=1, max_size=64))
def test_the_sum_is_within_half_a_unit_for_each_contribution(values: list[float]) -> None:
    count = len(values)
    exponent = next_exponent(0, max(map(abs, values)), count)
    total = sum(to_fixed(torch.tensor([value], dtype=torch.float32), exponent) for value in values)
    assert isinstance(total, torch.Tensor)
    exact = math.fsum(values)
    bound = count * 0.5 * 2.0**-exponent + abs(exact) * 2.0**-51
    assert abs(float(back_from(total, exponent, 1, torch.float64)) - exact) <= bound


def test_before_the_first_step_gradients_below_sixteen_fit() -> None:
    for count in (1, 6, 4096):
        assert fits(first_exponent(count), math.nextafter(16.0, 0.0), count)
        assert not fits(first_exponent(count), 16.0, count)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("size", [1, 7, 1 << 12, (1 << 15) + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_way_to_add_and_back_rounds_once(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    gradient = torch.randn(size, generator=generator).to(dtype)
    total = torch.randint(-(2**50), 2**50, (size,), generator=generator)
    wide, largest = gradient.double(), nothing_yet()
    for exponent in (40, 3, -130):  # coarse: halves are rounded to even
        want = total + (wide * 2.0**exponent).round().to(torch.int64)
        add_fixed(total, gradient, exponent, largest)
        assert torch.equal(total, want)
    assert float(largest) == float(wide.abs().max())
    members = torch.stack([total, -3 * total, total + 5])
    mean = (members.sum(0).double() * (2.0**-40 / 6)).to(dtype)
    assert torch.equal(back_from(members, 40, 6, dtype), mean)


SIZES = [1, 7, 4096, 2048, 0, 5000, 3]


@pytest.mark.usefixtures("anywhere")
def test_tensors_of_one_call_have_the_bits_that_each_has_alone() -> None:
    """Any grouping of any tensors of several types, some of which are added for the first time."""
    generator, chance = torch.Generator().manual_seed(3), random.Random(3)
    types = [torch.float32, torch.bfloat16, torch.float64]
    for _ in range(6):
        sizes = chance.choices(SIZES, k=40)  # more than one call of a kernel accepts
        exponents = chance.choices([40, 3, -130, 150], k=40)
        gradients = [torch.randn(size, generator=generator).to(chance.choice(types)) for size in sizes]
        first = chance.choices([True, False], k=40)
        before = torch.randint(-(2**40), 2**40, (sum(sizes),), generator=generator)
        found = []
        for together in (True, False):
            total, largest = before.clone(), torch.full((40,), -1.0, dtype=torch.float64)
            sums = [fixed_sum(*place) for place in zip(total.split(sizes), largest.split(1), exponents, strict=True)]
            for some in [range(40)] if together else [[index] for index in range(40)]:
                each = ([those[index] for index in some] for those in (sums, gradients, first))
                fixed_point.add_fixed(*each)
            rows = torch.stack([total, total // 3])
            ends = list(itertools.accumulate(sizes))
            spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
            means = torch.empty(len(total))
            for some in [range(40)] if together else [[index] for index in range(40)]:
                args = [rows[:, spans[index]] for index in some], [40 + index for index in some]
                fixed_point.from_fixed(*args, 12, [means[spans[index]] for index in some])
            found.append((total.tolist(), largest.tolist(), means.tolist()))
        assert found[0] == found[1]
        assert found[0][1] == [float(one.abs().max().double()) if one.numel() else 0.0 for one in gradients]


def test_a_range_of_elements_is_processed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    total = torch.arange(23) * 2**40
    whole = back_from(total, 40, 6, torch.bfloat16)
    monkeypatch.setattr(fixed_point, "BLOCK", 5)
    assert torch.equal(back_from(total, 40, 6, torch.bfloat16), whole)


def test_a_transposed_gradient_is_added_in_its_own_order() -> None:
    gradient = torch.arange(6.0).view(2, 3)
    assert to_fixed(gradient.T, 1).tolist() == [0, 6, 2, 8, 4, 10]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # from Triton's interpreter
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 3, 16, 99])
def test_one_number_that_is_not_finite_is_seen_wherever_it_stands(odd: float, place: int, dtype: torch.dtype) -> None:
    values, total, largest = (
        torch.linspace(-3.0, 2.0, 100, dtype=dtype),
        torch.zeros(100, dtype=torch.int64),
        nothing_yet(),
    )
    add_fixed(total, values, 3, largest)
    assert float(largest) == 3.0
    add_fixed(total, torch.cat([values[:place], torch.tensor([odd], dtype=dtype), values[place + 1 :]]), 3, largest)
    add_fixed(total, values, 3, largest)  # and is remembered
    assert not math.isfinite(float(largest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("%sum = add i64 %before", "%sum = sub i64 %before"), ("mul i64 %row", "add i64 %row"), ("ret void", "no code")],
)
def test_loops_with_other_bits_or_compile_errors_are_not_used(
    right: str, wrong: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fixed_point, "_loops", cache(fixed_point._loops.__wrapped__))
    assert right in loops._TEXT
    monkeypatch.setattr(loops, "_TEXT", loops._TEXT.replace(right, wrong))
    total = torch.zeros(2, dtype=torch.int64)
    add_fixed(total, torch.tensor([1.5, -2], dtype=dtype), 1, nothing_yet())
    assert total.tolist() == [3, -4]
    assert back_from(torch.tensor([[3, -4], [1, 2]]), 1, 1, dtype).tolist() == [2, -1]
    assert len(caplog.messages) == 1
    assert "gradients are summed by several passes of torch, not one" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=64), st.integers(0, 62), st.integers(1, 5000))
def test_sums_that_have_the_same_means_are_found_again(
    dtype: torch.dtype, sums: list[int], shift: int, divisor: int
) -> None:
    total = torch.tensor(sums, dtype=torch.int64) >> shift
    exponent = 40 if dtype is torch.float16 else 20
    means, again = back_from(total, exponent, divisor, dtype), torch.empty_like(total)
    to_sums(means, exponent, divisor, again)
    back = back_from(again, exponent, divisor, dtype)
    assert torch.equal(back[means.isfinite()], means[means.isfinite()])  # others are beyond float16


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs Triton, which torch's builds for GPUs bring: pip install triton",
)
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from morph.runtime.state import fused_sums

for capability in (70, 80, 90):
    for dtype in ("*fp32", "*fp64", "*bf16", "*fp16"):
        for num in (1, 12):
            sums, values, nums, scales = ((kind,) * num for kind in ("*i64", dtype, "i32", "fp32"))
            add = {"sums": sums, "values": values, "largest": sums, "scales": scales, "scales_too": scales}
            add |= {"nums": nums, "is_first": "i32"}
            mean = {"sums": sums, "means": values, "scales": scales, "nums": nums, "divisor": "i32"}
            mean |= {"stride": "i32", "members": "i32"}
            for kernel, types in ((fused_sums._add, add), (fused_sums._mean, mean)):
                types |= {"size": "constexpr"}
                source = ASTSource(kernel, types, constexprs={"size": fused_sums.ELEMENTS})
                print(len(compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]))
"""


@needs_triton
@pytest.mark.slow
def test_the_fused_kernels_can_be_compiled_for_devices(tmp_path: Path) -> None:
    made = run([sys.executable, "-c", COMPILE], {"TRITON_CACHE_DIR": str(tmp_path)})
    assert len([size for size in made.split() if int(size) > 0]) == 48


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is run by itself")
def test_the_fused_kernels_find_the_same_bits() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", "fused-", __file__]
    assert " passed" in run(command, {"TRITON_INTERPRET": "1"})


def run(command: list[str], environment: dict[str, str]) -> str:
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=2 * BOUND_S, check=True
    ).stdout
