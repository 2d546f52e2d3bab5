"""The forecast of a run's end holds the truth as often as it says, and says nothing before it can."""

from __future__ import annotations

import random
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest
from simulated_cluster import Faults, JournalledCluster, SimulatedCluster, played

from manager.accounting.spent import Prices
from manager.controller.state.events import Event
from manager.controller.state.state import ControllerState, Decision, Phase
from manager.dashboard.snapshot import snapshot
from manager.report import remaining as forecast
from manager.report.journal_reader import read_report
from manager.report.live import LiveRun
from manager.report.page import report_page
from manager.report.remaining import FEWEST, SHARE, Remaining, remaining
from manager.report.summary import summarise
from morph.words import duration_text

NUM_STEPS = 600


@cache
def history(seed: int) -> list[tuple[float, float]]:
    """Return (time, version) of every decided step of a run with jitter, slow stretches, pauses and lost steps."""
    rng = random.Random(seed)
    now_s, version, points, slow = 1000.0 * seed, 0, list[tuple[float, float]](), 1.0
    while version < NUM_STEPS:
        if rng.random() < 0.08:
            slow = rng.choice((1.0, 1.0, 1.5))  # another shape
        if rng.random() < 0.05:
            now_s += rng.expovariate(1 / 4)
            version = max(0, version - rng.randrange(4))
        now_s += slow * rng.gauss(1.0, 0.1)
        version += 1
        points.append((now_s, float(version)))
    return points


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_interval_holds_the_true_end_in_about_its_stated_share_of_runs(share: float) -> None:
    held, errors = 0, list[float]()
    for seed in range(600):
        points = history(seed)
        seen = points[: int(len(points) * share)]
        now_s = seen[-1][0]
        left = remaining(seen, now_s, NUM_STEPS)
        assert left is not None
        truth_s = points[-1][0] - now_s
        held += left.low_s <= truth_s <= left.high_s
        errors.append(left.left_s / truth_s - 1)
    assert held / 600 == pytest.approx(SHARE, abs=0.06)
    assert sum(errors) / len(errors) == pytest.approx(0, abs=0.05)


def test_dollars_grow_with_the_time_that_is_left() -> None:
    points = [(float(second), float(second)) for second in range(1, 31)]
    left = remaining(points, 30.0, 60, (1.0, 30.0))  # a dollar a second
    assert (left.left_s, left.low_s, left.high_s) == pytest.approx((30, 30, 30))
    assert left.end_usd == pytest.approx((60, 60, 60))
    assert (left.text, left.dollars_text) == ("about 30 s left", "$30.0000 so far, about $60.0000 at the end")


def test_a_stall_makes_the_end_later_and_less_certain() -> None:
    points = history(1)[:300]
    before, after = (remaining(points, points[-1][0] + stall_s, NUM_STEPS) for stall_s in (0.0, 100.0))
    assert after.left_s > before.left_s
    assert after.high_s - after.low_s > before.high_s - before.low_s


@pytest.mark.parametrize(
    ("num_points", "num_steps"),
    [(0, 40), (1, 40), (FEWEST, 40), (30, None)],
)
def test_nothing_is_said_of_a_run_that_has_no_end_or_has_barely_begun(num_points: int, num_steps: int | None) -> None:
    points = [(float(second), float(second)) for second in range(num_points)]
    assert remaining(points, num_points, num_steps) is None


def test_without_a_price_the_forecast_is_of_time_alone() -> None:
    points = list(zip(accumulate([1.0, 1.0, 2.0] * 10), map(float, range(1, 31)), strict=True))
    left = remaining(points, points[-1][0], 60)
    assert isinstance(left, Remaining)
    assert left.end_usd is None
    assert left.dollars_text is None
    assert left.low_s < left.left_s < left.high_s


def test_a_run_says_its_end_while_it_trains_and_not_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshot(played(stop_at=8))["remaining"] is None, "too early"
    monkeypatch.setattr(forecast, "FEWEST", 5)
    training, ended = played(stop_at=8), played()
    training.phase = Phase.TRAINING
    left, dollars = snapshot(training)["remaining"], training.dollars
    assert left["low_s"] <= left["left_s"] <= left["high_s"]
    assert left["text"] in training.headline
    assert dollars is not None
    assert left["end_usd"][0] > dollars
    assert snapshot(ended)["remaining"] is None


def test_the_journal_gives_the_forecast_of_the_live_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "FEWEST", 5)
    prices = Prices(paid_usd_per_h=1.0)
    run = LiveRun("job", 24, 8, prices)

    def observe(cluster: SimulatedCluster, _before: ControllerState, event: Event, decision: Decision) -> None:
        run.take(cluster.now_s, event, decision)

    cluster = JournalledCluster(0, tmp_path, Faults(), expected_nodes=4)
    cluster.observers = (*cluster.observers, observe)
    cluster.run(4)
    cluster.journal.close()
    ended = read_report(tmp_path)
    assert ended.remaining(prices) is None
    report = ended.model_copy(update={"outcome": "running", "num_steps": 24})
    run.phase = Phase.TRAINING
    told = report.remaining(prices)
    assert told is not None
    assert told == run.remaining
    assert told.text in summarise(report)
    assert told.text in report_page(report, prices)
    assert (told.dollars_text or "no price") in report_page(report, prices)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (273600, "3 d 4 h")],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
