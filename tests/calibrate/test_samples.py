from __future__ import annotations

import pytest

from calibrate.timing.samples import NUM_QUANTILES, Sampling, is_stable, sum_of, timing
from morph.contract.profile import Timing


def test_a_timing_is_median_spread_mean_and_every_outlier() -> None:
    result = timing([1.0, 2.0, 9.0])
    assert (result.median_s, result.mad_s, result.mean_s, result.num_samples) == (2.0, 1.0, 4.0, 3)
    assert len(result.quantiles_s) == NUM_QUANTILES
    assert (result.quantiles_s[0], result.quantiles_s[8], result.quantiles_s[-1]) == (1.0, 2.0, 9.0)
    assert list(result.quantiles_s) == sorted(result.quantiles_s)


def test_one_sample_has_no_quantiles_and_no_time_is_negative() -> None:
    assert timing([3.0]).quantiles_s == ()
    assert timing([-1e-9, -1e-9]) == Timing(
        median_s=0.0, mad_s=0.0, num_samples=2, mean_s=0.0, quantiles_s=(0.0,) * NUM_QUANTILES
    )


def test_times_are_whole_nanoseconds() -> None:
    assert timing([1.2345678912, 1.2345678914]).median_s == 1.234567891


def test_spreads_of_what_follows_each_other_add_as_independent_ones() -> None:
    one, other = timing([1.0, 4.0, 7.0]), timing([10.0, 14.0, 18.0])
    total = sum_of([one, other])
    assert (total.median_s, total.mean_s, total.mad_s, total.num_samples) == (18.0, 18.0, 5.0, 3)
    assert (total.quantiles_s[0], total.quantiles_s[-1]) == (13.0, 23.0)
    assert list(total.quantiles_s) == sorted(total.quantiles_s)


def test_nothing_takes_no_time() -> None:
    assert sum_of([]) == Timing(median_s=0.0, mad_s=0.0, num_samples=1, mean_s=0.0)


def test_parts_without_quantiles_give_a_sum_without() -> None:
    assert sum_of([timing([1.0, 2.0]), Timing(median_s=1.0, mad_s=0.0, num_samples=4)]).quantiles_s == ()


@pytest.mark.parametrize(
    ("samples", "stable"),
    [
        ([1.0] * 4, False),  # too few to say
        ([1.0] * 20, True),
        ([1.0] * 17 + [50.0] * 3, True),  # outliers do not move a median
        ([1.0 + 0.001 * (i % 10) for i in range(40)], True),
        ([1.0 + 0.1 * (i % 10) for i in range(40)], False),
    ],
)
def test_a_median_is_stable_when_its_interval_is_narrow(samples: list[float], stable: bool) -> None:
    assert is_stable(samples) is stable


@pytest.mark.parametrize(
    ("count", "spent_s", "more"),
    [(0, 99.0, True), (4, 99.0, True), (5, 99.0, False), (19, 0.0, True), (20, 0.0, False), (200, 0.0, False)],
)
def test_a_steady_time_is_sampled_until_it_is_known(count: int, spent_s: float, more: bool) -> None:
    assert Sampling(budget_s=1.0).wants_more([[1.0] * count], spent_s) is more


def test_one_unsteady_time_keeps_all_of_them_going_up_to_the_bounds() -> None:
    steady, unsteady = [1.0] * 50, [1.0 + (i % 2) for i in range(50)]
    sampling = Sampling(budget_s=1.0, most=100)
    assert sampling.wants_more([steady, unsteady], 0.5)
    assert not sampling.wants_more([steady, steady], 0.5)
    assert not sampling.wants_more([steady, unsteady], 1.5)
    assert not sampling.wants_more([steady * 2, unsteady * 2], 0.5)


def test_fewer_samples_than_usual_can_be_asked_for() -> None:
    assert Sampling(budget_s=9.0, most=2).wants_more([[1.0]], 0.0)
    assert not Sampling(budget_s=9.0, most=2).wants_more([[1.0, 5.0]], 0.0)
