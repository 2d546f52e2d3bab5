import numpy as np
import pytest

from morph.contract.profile import AllReduceTime, Timing
from simulator.inputs.synthetic import synthetic_profile
from simulator.inputs.transfer import AllReduce, Curve

LATENCY_S, BYTES_PER_S = 0.0002, 1e9


def _ring_ns(ring: int, size: float) -> float:
    return 2 * (ring - 1) * (LATENCY_S + size / ring / BYTES_PER_S) * 1e9


@pytest.mark.parametrize("size", [1_000, 50_000, 30_000_000, 1e9])
@pytest.mark.parametrize("ring", [2, 4, 8])
def test_a_measured_ring_is_linear_in_size_and_extrapolated(ring: int, size: float) -> None:
    reduce = AllReduce(synthetic_profile())
    assert reduce.times_ns(ring, np.array([size]))[0] == pytest.approx(_ring_ns(ring, size), rel=1e-3)


@pytest.mark.parametrize("ring", [16, 64])
def test_a_larger_ring_follows_the_ring_formula(ring: int) -> None:
    reduce = AllReduce(synthetic_profile())
    assert reduce.times_ns(ring, np.array([1e8]))[0] == pytest.approx(_ring_ns(ring, 1e8), rel=1e-3)


def test_a_ring_between_two_measured_ones_lies_between_them() -> None:
    reduce = AllReduce(synthetic_profile())
    below, between, above = (int(reduce.times_ns(ring, np.array([1e7]))[0]) for ring in (4, 6, 8))
    assert below < between < above


def test_a_ring_of_one_and_no_bytes_cost_nothing() -> None:
    reduce = AllReduce(synthetic_profile())
    assert reduce.times_ns(1, np.array([1e9])).tolist() == [0]
    assert reduce.times_ns(4, np.array([0.0])).tolist() == [0]


def test_a_profile_without_all_reduce_measurements_is_answered_from_its_send_times() -> None:
    profile = synthetic_profile().model_copy(update={"all_reduce": ()})
    assert AllReduce(profile).times_ns(4, np.array([4e7]))[0] == pytest.approx(_ring_ns(4, 4e7), rel=1e-6)


def test_the_nearest_measured_number_of_rings_in_flight_is_used() -> None:
    timing = {1: 0.001, 4: 0.004}
    entries = tuple(
        AllReduceTime(ring_size=2, size_bytes=1000, in_flight=k, time=Timing(median_s=t, mad_s=0, num_samples=1))
        for k, t in timing.items()
    )
    profile = synthetic_profile().model_copy(update={"all_reduce": entries})
    assert [int(AllReduce(profile, k).times_ns(2, np.array([1000.0]))[0]) for k in (1, 3, 9)] == [
        10**6,
        4 * 10**6,
        4 * 10**6,
    ]


def test_one_measured_size_is_continued_in_proportion_and_flat_below() -> None:
    curve = Curve([100], [50])
    assert curve(np.array([10.0, 100.0, 200.0])).tolist() == [50, 50, 100]


@pytest.mark.parametrize("ring", [2, 3, 8])
def test_no_larger_size_takes_less_time_even_where_one_was_measured_faster(ring: int) -> None:
    entries = tuple(
        AllReduceTime(ring_size=of, size_bytes=size, time=Timing(median_s=t, mad_s=0, num_samples=1))
        for of in (2, 4)
        for size, t in ((1000, 0.003), (5000, 0.002 * of), (9000, 0.009))
    )
    for measured in (entries, ()):
        all_reduce = AllReduce(synthetic_profile().model_copy(update={"all_reduce": measured}))
        times_ns = all_reduce.times_ns(ring, np.linspace(0.0, 20_000.0, 501))
        assert times_ns[0] == 0
        assert (np.diff(times_ns) >= 0).all()
