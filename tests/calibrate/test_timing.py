"""Clocks, samples, and the rule that says when there are enough samples."""

from __future__ import annotations

import random
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from calibrate import calibrate
from calibrate.computing import compute
from calibrate.computing.meter import measure_here
from calibrate.computing.sections import measure_benches
from calibrate.computing.subject import load_subject
from calibrate.links.network import NetworkMeasurement
from calibrate.links.two_nodes import Exchange, compare, on_one_clock
from calibrate.timing.clocks import CpuClock, clock_of, devices_of
from calibrate.timing.samples import NUM_QUANTILES, Sampling, is_stable, sum_of, timing
from calibrate.writing import measure
from morph.contract.errors import ConfigError, JobError
from morph.contract.profile import LinkProfile, SendTime, Timing


def test_processor_time_does_not_count_what_others_do_with_the_core() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, CpuClock)
    start = clock.mark()
    time.sleep(0.05)  # to this clock, the load of another process looks the same
    assert clock.between_s(start, clock.mark()) < 0.04


def test_a_device_that_is_not_there_is_refused() -> None:
    assert devices_of("cpu") == (torch.device("cpu"),)
    with pytest.raises(ConfigError, match=r"device: this machine has no such device \(got 'tpu'\); allowed: cpu"):
        devices_of("tpu")


class LateClock:
    """A clock of an asynchronous device: a mark has a time only once the device has reached it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.queued: list[list[float]] = []

    def settle(self) -> None:
        for mark in self.queued:
            mark.append(self.now_s)
            self.now_s += 1.5
        self.queued.clear()

    def mark(self) -> list[float]:
        mark: list[float] = []
        self.queued.append(mark)
        return mark

    def between_s(self, start: list[float], end: list[float]) -> float:
        return end[0] - start[0]  # raises an error for a mark that was not waited for


class Task:
    """A stand-in for a bench; ``order`` lists the tasks that were run."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.section = type("Section", (), {"signature": name, "finish": None})
        self.device = torch.device("cpu")
        self._name, self._order = name, order

    def forward(self, sample: int) -> tuple[str, torch.Tensor]:
        self._order.append(f"F{self._name}{sample}")
        return self._name, torch.zeros(10, dtype=torch.uint8)

    def backward(self, run: tuple[str, torch.Tensor]) -> None:
        assert run[0] == self._name
        self._order.append(f"B{self._name}")

    def both(self) -> None:
        self.backward(self.forward(0))

    def given_bytes(self) -> int:
        return 7


@pytest.mark.slow
def test_times_are_read_after_the_device_is_done_and_kinds_alternate() -> None:
    order: list[str] = []
    tasks = [Task("a", order), Task("b", order)]
    found = measure_benches(tasks, 2, LateClock(), Sampling(budget_s=0.0, most=5))  # type: ignore[arg-type]
    assert found.keys() == {"a", "b"}
    for measured in found.values():
        assert measured.forward.median_s == measured.backward.median_s == 1.5
        assert measured.forward.num_samples == 5
        assert (measured.input_bytes_per_sample, measured.activation_bytes_per_sample) == (4, 5)
    assert order[-8:] == ["Fa3", "Ba", "Fb3", "Bb", "Fa4", "Ba", "Fb4", "Bb"]


DAY_NS = 86_400 * 10**9


def exchanges(start_ns: int, offset_ns: int, *, down_ns: int, up_ns: int, seed: int) -> tuple[Exchange, Exchange]:
    """Return twenty messages each way, of which some are late."""
    draws = random.Random(seed)
    sent, received, sent_back, got_back = [], [], [], []
    now_ns = start_ns
    for number in range(20):
        late_ns = 0 if number % 4 == 3 else draws.randrange(5_000_000)
        sent.append(now_ns)
        received.append(now_ns + down_ns + late_ns + offset_ns)
        sent_back.append(received[-1] + 1_000)
        back_late_ns = 0 if number % 4 == 1 else draws.randrange(5_000_000)
        got_back.append(sent_back[-1] - offset_ns + up_ns + back_late_ns)
        now_ns = got_back[-1] + 1_000
    return (sent, got_back), (received, sent_back)


def test_late_messages_do_not_move_the_offset() -> None:
    first, second = exchanges(400 * DAY_NS, 300 * DAY_NS, down_ns=200_000, up_ns=200_000, seed=1)
    clocks = compare([first], [second])
    assert clocks.on_first(405 * DAY_NS + 300 * DAY_NS) == 405 * DAY_NS


def test_an_unequal_way_shifts_the_offset_by_half_of_the_difference() -> None:
    first, second = exchanges(DAY_NS, -7, down_ns=300_000, up_ns=100_000, seed=2)
    assert compare([first], [second]).offsets_ns == (-7 + 100_000,)


def test_a_drift_between_comparisons_is_evened_out() -> None:
    hour_ns, drift_ns = 3600 * 10**9, 72_000_000  # 20 parts per million
    early = exchanges(DAY_NS, DAY_NS, down_ns=50_000, up_ns=50_000, seed=3)
    late = exchanges(DAY_NS + hour_ns, DAY_NS + drift_ns, down_ns=50_000, up_ns=50_000, seed=4)
    clocks = compare([early[0], late[0]], [early[1], late[1]])
    middle_ns = DAY_NS + hour_ns // 2
    shown_ns = middle_ns + DAY_NS + drift_ns // 2
    assert abs(clocks.on_first(shown_ns) - middle_ns) < 2_000


def test_stamps_of_odd_ranks_are_shifted_and_of_even_ones_kept() -> None:
    first, second = exchanges(DAY_NS, 1_000, down_ns=10, up_ns=10, seed=5)
    there = {"activation": {"8": [5_000]}, "gradient": {"8": [6_000]}, "all_reduce": {"2/8/1": [(7_000, 8_000)]}}
    here = {**there, "barrier": [(1, 2)], "clock": [first]}
    results = on_one_clock([here, {**there, "barrier": [(9_000, 9_500)], "clock": [second]}, there, there])
    assert {key: results[0][key] for key in there} == there
    assert {key: results[2][key] for key in there} == there
    for moved in (results[1], results[3]):
        assert (moved["activation"]["8"], moved["gradient"]["8"]) == ([4_000], [5_000])
        assert moved["all_reduce"] == {"2/8/1": [(6_000, 7_000)]}
    assert results[1]["barrier"] == [(8_000, 8_500)]


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
        ([1.0] * 4, False),  # too few to have quantiles
        ([1.0] * 20, True),
        ([1.0] * 17 + [50.0] * 3, True),  # outliers do not move a median
        ([1.0 + 0.001 * (i % 10) for i in range(40)], True),
        ([1.0 + 0.1 * (i % 10) for i in range(40)], False),
    ],
)
def test_a_median_is_stable_when_its_interval_is_narrow(samples: list[float], stable: bool) -> None:
    assert is_stable([samples]) is stable


def test_medians_are_stable_together_when_their_sum_is_known() -> None:
    steady, unsteady = [1.0] * 40, [0.004 + 0.0004 * (i % 10) for i in range(40)]
    assert not is_stable([unsteady])
    assert is_stable([steady, unsteady])
    assert not is_stable([steady, [100 * sample for sample in unsteady]])
    assert is_stable([unsteady] * 400)  # the errors are independent
    assert is_stable([unsteady], within=0.5)


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


FOLDER = Path(__file__).parents[2] / "configs/jobs"


exported_once = cache(load_subject)


@pytest.fixture
def job(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the tiny job with m left open; network, contention and disk are not measured."""
    second = timing([1e-3])
    link = SendTime(size_bytes=1, time=second)
    network = NetworkMeasurement(LinkProfile(activation=(link,), gradient=(link,)), (), second)
    monkeypatch.setattr(measure, "measure_network", lambda *_, **__: network)
    monkeypatch.setattr(compute, "measure_contention", lambda *_, **__: ())
    monkeypatch.setattr(measure, "measure_checkpoint_speed", lambda _: 1e9)
    monkeypatch.setattr(measure, "load_subject", exported_once)
    path = tmp_path_factory.getbasetemp() / "open_job.py"
    path.write_text(
        "from dataclasses import replace\nfrom morph.jobs.job import load_job\n"
        f"job = replace(load_job({str(FOLDER / 'tiny_gpt.py:job')!r}), micro_batch_size=None)\n",
        encoding="utf-8",
    )
    return f"{path}:job"


@pytest.mark.slow
def test_sizes_grow_until_nothing_is_gained(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "still_improves", lambda costs: len(costs) < 3)
    profile = calibrate(job, num_samples=5)
    assert profile.micro_batch_sizes == (1, 2, 4)
    assert profile.job.micro_batch_size is None
    peaks = profile.sections[1].peak_bytes
    assert peaks.keys() == {1, 2, 4}
    assert peaks[1] < peaks[2] < peaks[4]
    assert peaks[4] > 4 * profile.sections[1].activation_bytes_per_sample


@pytest.mark.slow
def test_sizes_stop_growing_where_memory_would_end(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "still_improves", lambda costs: True)
    monkeypatch.setattr(compute, "fills_memory", lambda measured, next_size, device: next_size > 2)
    assert calibrate(job, num_samples=5).micro_batch_sizes == (1, 2)


@pytest.mark.slow
def test_sizes_stop_growing_where_memory_does_end(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "still_improves", lambda costs: True)
    fill_memory_from(monkeypatch, 4)
    assert calibrate(job, num_samples=5).micro_batch_sizes == (1, 2)


@pytest.mark.slow
def test_a_size_that_was_asked_for_and_does_not_fit_is_refused(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_memory_from(monkeypatch, 4)
    with pytest.raises(JobError, match=r"micro_batch_size: .* do not fit into the device's memory \(got 4\)"):
        calibrate(job, micro_batch_sizes=(2, 4), num_samples=5)


@pytest.mark.slow
def test_an_error_in_the_model_is_not_mistaken_for_lack_of_memory(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("calibrate.computing.meter.measure_here", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        calibrate(job, num_samples=5)


def fill_memory_from(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    def measure_or_fail(subject: object, model: object, sampling: object) -> object:
        if model.micro_batch_size >= size:  # type: ignore[attr-defined]
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return measure_here(subject, model, sampling)  # type: ignore[arg-type]

    monkeypatch.setattr("calibrate.computing.meter.measure_here", measure_or_fail)
