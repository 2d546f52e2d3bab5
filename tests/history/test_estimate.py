"""Expected losses of a kind of VMs, compared with numbers computed by hand, and with populations of a known rate."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.trace_statistics import lines, lives_of_trace
from manager.controller.state.config import ExpectedLosses
from manager.controller.state.events import NodeFacts
from manager.history.estimate import (
    MOST_WEIGHT_VM_H,
    WEIGHT_EVENTS,
    WEIGHT_LOSSES,
    estimate,
    gamma_quantile,
    kinds,
    seen,
)
from manager.report.lives import Ending, Life, together
from morph.contract.trace import parse_trace, write_trace
from simulator import spot_model

PRIOR = ExpectedLosses()
ZONE_1 = NodeFacts(provider="azure", size="NC24", region="westeurope", zone="1")
ZONE_2 = ZONE_1.model_copy(update={"zone": "2"})
ELSEWHERE = ZONE_1.model_copy(update={"region": "eastus"})
SMALL = ZONE_1.model_copy(update={"size": "NC6"})


def lived(
    facts: NodeFacts, num_lost: int, hours: float, lost_with: int = 1, lost_of: int = 10, **more: float
) -> list[Life]:
    """Return this many lives that ended in a loss, and one that did not, of so many hours in total."""
    each_s = hours * 3600.0 / (num_lost + 1)
    common = {"facts": facts, "begun_s": 0.0, "ended_s": each_s, **more}
    lost = [
        Life(vm=f"v{number}", ending=Ending.REVOKED, lost_with=lost_with, lost_of=lost_of, **common)
        for number in range(num_lost)
    ]
    return [*lost, Life(vm="left", ending=Ending.RUN_OVER, **common)]


def test_without_any_life_the_traces_are_believed() -> None:
    found = estimate([], ZONE_1)
    assert found.expected == PRIOR
    assert (found.lead_s, found.num_allocations, found.num_preparations, found.num_notices) == (None, 0, 0, 0)
    assert found.low_per_vm_h < PRIOR.per_vm_h < found.high_per_vm_h


def test_a_rate_narrows_from_wide_kinds_and_counts_each_life_once() -> None:
    lives = [*lived(SMALL, 30, 60.0), *lived(ELSEWHERE, 4, 40.0), *lived(ZONE_2, 0, 5.0), *lived(ZONE_1, 2, 10.0)]
    most = PRIOR.weight_vm_h
    mean = (PRIOR.per_vm_h * most + 30) / (most + 60)
    mean = (mean * most + 4) / (most + 40)
    mean = (mean * most + 0) / (most + 5)
    mean = (mean * most + 2) / (most + 10)
    found = estimate([*lives, *lived(NodeFacts(provider="local"), 50, 1.0)], ZONE_1)
    assert found.expected.per_vm_h == pytest.approx(mean)
    assert found.expected.weight_vm_h == pytest.approx(most + 10)
    assert found.expected.source == "115 VM-hours of azure NC24 westeurope 1 in earlier runs, and published traces"
    anywhere = estimate(lives, NodeFacts(provider="azure"))
    assert anywhere.expected.per_vm_h == pytest.approx((PRIOR.per_vm_h * most + 36) / (most + 115))
    assert anywhere.expected.weight_vm_h == MOST_WEIGHT_VM_H
    # (60 + 15) hours here, and 40 elsewhere
    any_size = estimate(lives, NodeFacts(provider="azure", region="westeurope"))
    mean = (PRIOR.per_vm_h * most + 4) / (most + 40)
    assert any_size.expected.per_vm_h == pytest.approx((mean * most + 32) / (most + 75))
    hosts = lived(NodeFacts(provider="static", zone="h1:22"), 0, 93.0)
    assert estimate(hosts, NodeFacts(provider="static")).expected.weight_vm_h == pytest.approx(100.0)


def test_losses_together_count_as_fewer_and_make_the_interval_wider() -> None:
    alone, by_four = (estimate(lived(ZONE_1, 40, 100.0, lost_with=number), ZONE_1) for number in (1, 4))
    most = PRIOR.weight_vm_h
    assert by_four.expected.per_vm_h == pytest.approx((PRIOR.per_vm_h * most + 10) / (most + 25))
    widths = [found.high_per_vm_h - found.low_per_vm_h for found in (alone, by_four)]
    assert widths[1] > 1.7 * widths[0]
    events = 40 / 4
    assert by_four.expected.bulk_share == pytest.approx((PRIOR.bulk_share * WEIGHT_LOSSES + 40) / (WEIGHT_LOSSES + 40))
    assert by_four.expected.bulk_fraction == pytest.approx(
        (PRIOR.bulk_fraction * WEIGHT_EVENTS + events * 0.4) / (WEIGHT_EVENTS + events)
    )
    assert alone.expected.bulk_share == pytest.approx(PRIOR.bulk_share * WEIGHT_LOSSES / (WEIGHT_LOSSES + 40))
    assert alone.expected.bulk_fraction == PRIOR.bulk_fraction


def test_times_are_medians_of_the_narrowest_kind_with_enough_of_them() -> None:
    here = lived(ZONE_1, 2, 1.0, asked_s=-50.0, appeared_s=0.0, ready_s=20.0, noticed_s=0.0, lead_s=30.0)
    beside = lived(ZONE_2, 3, 1.0, asked_s=-90.0, appeared_s=0.0)
    found = estimate([*here, *beside], ZONE_1)
    assert (found.expected.allocation_s, found.num_allocations) == (90.0, 7)
    assert (found.expected.preparation_s, found.num_preparations) == (PRIOR.preparation_s, 0)
    assert (found.lead_s, found.num_notices) == (30.0, 2)
    (one, two) = kinds([*here, *beside])
    assert (one.facts, one.allocation_s, one.preparation_s, one.lead_s) == (ZONE_1, 50.0, 20.0, 30.0)
    assert (two.facts, two.allocation_s, two.preparation_s, two.lead_s) == (ZONE_2, 90.0, None, None)
    assert (one.seen.num_noticed, two.seen.num_noticed, one.mean_lifetime_h) == (2, 0, 0.5)


def test_the_price_is_the_newest_that_was_seen() -> None:
    told = [(1.0, 0.3), (3.0, 0.5), (2.0, 0.4), (4.0, None)]
    lives = [
        Life(vm=f"v{begun_s}", usd_per_h=usd_per_h, begun_s=begun_s, ended_s=9.0, ending=Ending.GIVEN_BACK)
        for begun_s, usd_per_h in told
    ]
    (one,) = kinds(lives)
    assert (one.usd_per_h, one.mean_lifetime_h, one.seen.num_lost) == (0.5, None, 0)


@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 2.0, 7.5, 40.0, 900.0])
def test_the_quantiles_are_those_of_a_gamma_distribution(shape: float) -> None:
    draw = random.Random(3)
    drawn = sorted(draw.gammavariate(shape, 1.0) for _ in range(40_000))
    for probability in (0.05, 0.5, 0.95):
        quantile = gamma_quantile(probability, shape)
        below = sum(value <= quantile for value in drawn) / len(drawn)
        assert below == pytest.approx(probability, abs=0.006)
    assert gamma_quantile(0.95, 1.0) == pytest.approx(-math.log(0.05), rel=1e-5)
    assert gamma_quantile(0.5, 0.0) == 0.0


def drawn_alone(draw: random.Random, per_vm_h: float) -> list[Life]:
    """Return VMs that were watched for two hours each, and lost independently."""
    lives = []
    for number in range(draw.randrange(5, 120)):
        hours = draw.expovariate(per_vm_h)
        ending = Ending.REVOKED if hours < 2 else Ending.RUN_OVER
        ended_s = 3600.0 * (1e6 * number + min(hours, 2.0))
        lives.append(Life(vm=f"v{number}", facts=ZONE_1, begun_s=3.6e9 * number, ended_s=ended_s, ending=ending))
    return list(together(lives))


def drawn_in_bulk(draw: random.Random, per_vm_h: float) -> list[Life]:
    """Draw a history of eight VMs for up to a week, in which each loss takes one to four of them."""
    begun_h, lives, now_h = dict.fromkeys(range(8), 0.0), [], 0.0
    end_h = draw.uniform(5, 168)
    while (now_h := now_h + draw.expovariate(8 * per_vm_h / 2.5)) < end_h:
        for vm in draw.sample(range(8), draw.randrange(1, 5)):
            times = {"begun_s": 3600 * begun_h[vm], "ended_s": 3600 * now_h}
            lives.append(Life(vm=f"v{vm}", facts=ZONE_1, ending=Ending.REVOKED, **times))
            begun_h[vm] = now_h
    for vm, since_h in begun_h.items():
        times = {"begun_s": 3600 * since_h, "ended_s": 3600 * end_h}
        lives.append(Life(vm=f"v{vm}", facts=ZONE_1, ending=Ending.RUN_OVER, **times))
    return list(together(lives))


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [drawn_alone, drawn_in_bulk])
def test_nine_of_ten_intervals_hold_the_true_rate_of_the_population(
    drawn: Callable[[random.Random, float], list[Life]],
) -> None:
    draw, held, ratios = random.Random(11), 0, []
    rounds = 120
    for _ in range(rounds):
        shape = PRIOR.per_vm_h * PRIOR.weight_vm_h
        per_vm_h = max(0.01, draw.gammavariate(shape, 1 / PRIOR.weight_vm_h))
        found = estimate(drawn(draw, per_vm_h), ZONE_1)
        held += found.low_per_vm_h <= per_vm_h <= found.high_per_vm_h
        ratios.append(found.expected.per_vm_h / per_vm_h)
    assert 0.85 <= held / rounds <= 0.95
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.1)


def test_a_region_informs_an_unknown_zone_until_that_has_lives() -> None:
    beside = lived(ZONE_2, 5, 500.0)
    new = estimate(beside, ZONE_1).expected
    assert new.per_vm_h == pytest.approx(0.0154, abs=0.0001)
    assert estimate([*beside, *lived(ZONE_1, 10, 20.0)], ZONE_1).expected.per_vm_h == pytest.approx(0.371, abs=0.001)


def test_a_generated_trace_has_the_statistics_that_it_was_drawn_with(tmp_path: Path) -> None:
    model = spot_model(20, losses_per_vm_h=0.36, bulk_share=0.4, replacement_s=1.0, num_zones=1)
    trace = model.draw(3, 400_000.0)
    found = seen(lives_of_trace(trace))
    assert found.num_lost == sum(event.event == "remove" for event in trace.events)
    assert found.hours == pytest.approx(20 * trace.duration_s / 3600, rel=0.01)
    assert found.num_lost / found.hours == pytest.approx((0.6 + 0.4 * 3) * 4 / 20, rel=0.15)
    assert found.num_bulk / found.num_lost == pytest.approx(1.2 / 1.8, abs=0.06)
    assert found.bulk_fractions / found.num_bulk_events == pytest.approx(3 / 20, abs=0.02)


def test_the_table_of_traces_shows_common_rates_and_their_spread(tmp_path: Path) -> None:
    texts = (
        "time_s,event,node_id\n0,add,a\n0,add,b\n0,add,c\n0,add,d\n3600,remove,a\n3600,remove,b\n7200,remove,c\n"
        "7200,remove,d\n7200,add,e\n",
        "time_s,event,node_id\n0,add,a\n0,add,b\n0,add,c\n0,add,d\n0,add,e\n3600,remove,a\n3600,remove,b\n"
        "7200,remove,c\n10800,remove,d\n10800,remove,e\n",
    )
    paths = [tmp_path / f"trace{number}.csv" for number in range(2)]
    for path, text in zip(paths, texts, strict=True):
        write_trace(parse_trace(text.splitlines(), "text"), path)
    told = list(lines(paths))
    assert [line.split() for line in told[1:3]] == [
        ["trace0", "6.0", "4", "0.667", "1.00", "0.75"],
        ["trace1", "10.0", "5", "0.500", "0.80", "0.70"],
    ]
    assert told[3] == "losses of a VM in an hour: 0.583, as of 42.0 VM-hours"
    assert told[4] == "of them with others: 0.90, as of 3.5 losses"
    assert told[5] == "of the VMs at a time: 0.72, as of 122.0 such events"
