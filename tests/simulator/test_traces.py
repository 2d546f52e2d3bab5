"""Traces drawn from a model, models fitted to traces, and statistics of traces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from morph.contract.errors import ConfigError, TraceError
from morph.contract.trace import Trace, TraceEvent, TracePrice, load_trace, write_trace
from simulator import TraceModel, spot_model
from simulator.traces.fitting import fit
from simulator.traces.model import Zone
from simulator.traces.statistics import revocations_of, statistics_of, survival

DAY_S = 86_400.0


def removals(trace: Trace) -> Counter[float]:
    return Counter(event.time_s for event in trace.events if event.event == "remove")


def trace_of(*events: tuple[float, str], zone: str = "z") -> Trace:
    """Return a trace: "+a" means that VM a comes, "-a" that it is lost."""
    return Trace(
        events=tuple(
            TraceEvent(time_s=time_s, event="add" if what[0] == "+" else "remove", node_id=what[1:], zone=zone)
            for time_s, what in events
        )
    )


def test_the_same_seed_gives_the_identical_trace() -> None:
    model = spot_model(8, losses_per_vm_h=1.0)
    assert model.draw(7, DAY_S) == model.draw(7, DAY_S)
    assert model.draw(7, DAY_S) != model.draw(8, DAY_S)


@pytest.mark.parametrize("seed", range(10))
def test_a_drawn_trace_is_valid_and_survives_a_round_trip(seed: int, tmp_path: Path) -> None:
    model = spot_model(
        7, losses_per_vm_h=20, initial=5, least=2, noticed=0.5, replacement_s=60, num_zones=3, start_hour=5.0
    )
    trace = model.draw(seed, 3600)
    write_trace(trace, tmp_path / "trace.csv")
    assert load_trace(tmp_path / "trace.csv") == trace
    alive, counts = 0, []
    for event in trace.events:
        alive += 1 if event.event == "add" else -1
        counts.append(alive)
    assert counts[4] == 5
    assert min(counts[4:]) >= 2
    assert max(counts) <= 7
    assert trace.events[-1].time_s <= trace.duration_s == 3600
    added = [event.node_id for event in trace.events if event.event == "add"]
    assert len(set(added)) == len(added) > 8
    assert any(event.notice_s for event in trace.events)
    assert any(event.event == "remove" and event.notice_s is None for event in trace.events)


def test_the_bulk_share_decides_how_many_vms_of_a_zone_go() -> None:
    alone = spot_model(8, losses_per_vm_h=2, bulk_share=0, replacement_s=20).draw(1, DAY_S)
    bulk = spot_model(8, losses_per_vm_h=2, bulk_share=1, replacement_s=20).draw(1, DAY_S)
    assert set(removals(alone).values()) == {1}
    assert np.mean([size > 1 for size in removals(bulk).values()]) > 0.98  # a zone may have only one left
    zones: dict[float, set[str]] = {}
    for event in bulk.events:
        if event.event == "remove":
            zones.setdefault(event.time_s, set()).add(event.zone)
    assert {len(names) for names in zones.values()} == {1}


def test_losses_go_by_the_hour_of_the_day() -> None:
    by_hour = tuple(3.0 if hour < 8 else 0.0 for hour in range(24))
    zone = Zone(vms=20, losses_per_vm_h=0.5, by_hour=by_hour, replacement_s=10)
    trace = TraceModel(zones=(zone,), start_hour=20).draw(0, 10 * DAY_S)
    hours = Counter(int(20 + event.time_s / 3600) % 24 for event in trace.events if event.event == "remove")
    assert set(hours) == set(range(8))
    assert sum(hours.values()) == pytest.approx(0.5 * 20 * 240, rel=0.06)


def test_zones_that_go_together_lose_vms_at_the_same_moments() -> None:
    model = spot_model(30, losses_per_vm_h=0.5, num_zones=3, replacement_s=60)
    for together, share in ((0.0, 0.0), (0.5, 0.6)):
        trace = model.model_copy(update={"together": together}).draw(2, 5 * DAY_S)
        zones: dict[float, set[str]] = {}
        for event in trace.events:
            if event.event == "remove":
                zones.setdefault(event.time_s, set()).add(event.zone)
        several = np.mean([len(names) > 1 for names in zones.values()])
        assert several == pytest.approx(share, abs=0.2)
        assert (several > 0) == (together > 0)
        whole = statistics_of(trace)["all"]
        assert whole.losses_per_vm_h == pytest.approx(0.5, rel=0.15)  # whether or not zones go together


def test_prices_wander_around_their_mean() -> None:
    zone = Zone(vms=2, losses_per_vm_h=0.1, replacement_s=10, usd_per_h=2.0, price_spread=0.3)
    trace = TraceModel(zones=(zone, zone.model_copy(update={"name": "b", "price_spread": 0.0}))).draw(3, 100 * DAY_S)
    wander = [price.usd_per_h for price in trace.prices if price.zone == "zone-a"]
    assert len(wander) == 2401
    assert np.mean(wander) == pytest.approx(2.0, rel=0.05)
    assert np.std(np.log(wander)) == pytest.approx(0.3, rel=0.15)
    assert [price.usd_per_h for price in trace.prices if price.zone == "b"] == [2.0]


def test_the_figures_of_a_small_trace() -> None:
    trace = trace_of((0, "+a"), (0, "+b"), (3600, "-a"), (3630, "-b"), (7200, "+c"), (10_800, "-c"))
    one = statistics_of(trace)["z"]
    assert (one.hours, one.peak, one.num_lost, one.sizes) == (3.0, 2, 3, {1: 1, 2: 1})
    assert one.vm_hours == pytest.approx(1 + 1 + 30 / 3600 + 1)
    assert one.bulk_share == pytest.approx(2 / 3)
    assert one.median_life_h == pytest.approx(1.0)
    assert statistics_of(trace, window_s=10)["z"].sizes == {1: 3}
    assert survival([(1.0, True), (2.0, False), (3.0, True)]) == [(1.0, pytest.approx(2 / 3)), (3.0, 0.0)]


@pytest.mark.slow
def test_a_model_fitted_to_long_traces_is_their_own() -> None:
    by_hour = tuple(1.6 if 8 <= hour < 20 else 0.4 for hour in range(24))
    zones = tuple(
        Zone(
            name=name,
            vms=30,
            losses_per_vm_h=rate,
            by_hour=by_hour,
            sizes={1: 0.5, 2: 0.3, 5: 0.2},
            replacement_s=600,
            usd_per_h=usd,
            price_spread=0.2,
        )
        for name, rate, usd in (("a", 0.4, 0.9), ("b", 0.2, 1.2))
    )
    model = TraceModel(zones=zones, together=0.4, noticed=0.7, notice_s=90, start_hour=3, instance_type="p3")
    found = fit(model.draw(5, 30 * DAY_S), start_hour=3, window_s=1.0)
    assert [zone.name for zone in found.zones] == ["a", "b"]
    for zone, real in zip(found.zones, model.zones, strict=True):
        assert zone.vms == real.vms
        assert zone.losses_per_vm_h == pytest.approx(real.losses_per_vm_h, rel=0.12)
        assert zone.replacement_s == pytest.approx(real.replacement_s, rel=0.12)
        assert zone.mean_size == pytest.approx(real.mean_size, rel=0.08)
        assert np.corrcoef(zone.by_hour, by_hour)[0, 1] > 0.9
        assert zone.usd_per_h == pytest.approx(real.usd_per_h, rel=0.05)
        assert zone.price_spread == pytest.approx(real.price_spread, rel=0.2)
    assert found.together == pytest.approx(model.together, abs=0.06)
    assert found.noticed == pytest.approx(model.noticed, abs=0.06)
    assert found.notice_s == pytest.approx(model.notice_s, rel=0.05)
    assert (found.price_every_s, found.instance_type) == (3600, "p3")


def test_unrelated_zones_are_not_fitted_as_if_related() -> None:
    model = spot_model(40, losses_per_vm_h=0.5, num_zones=2)
    assert fit(model.draw(1, 20 * DAY_S), window_s=1.0).together < 0.02


def test_a_fitted_model_spreads_over_zones_with_as_many_losses() -> None:
    trace = spot_model(24, losses_per_vm_h=0.6, num_zones=1, bulk_share=0.7).draw(1, 3 * DAY_S)
    spread = fit(trace).with_zones(3)
    assert [(zone.name, zone.vms) for zone in spread.zones] == [("zone-a", 8), ("zone-b", 8), ("zone-c", 8)]
    whole = statistics_of(spread.draw(2, 3 * DAY_S))["all"]
    assert whole.losses_per_vm_h == pytest.approx(statistics_of(trace)["zone-a"].losses_per_vm_h, rel=0.15)


def test_what_cannot_be_fitted_or_drawn_is_named() -> None:
    with pytest.raises(TraceError, match="no VM is lost"):
        fit(trace_of((0, "+a"), (60, "+b")))
    for options, field in (
        ({"bulk_share": 1.5}, "bulk_share"),
        ({"losses_per_vm_h": -1.0}, "zones.0.losses_per_vm_h"),
        ({"replacement_s": 0.0}, "zones.0.replacement_s"),
        ({"together": 2.0}, "together"),
    ):
        with pytest.raises(ConfigError, match=field):
            spot_model(4, **({"losses_per_vm_h": 1.0} | options))  # type: ignore[arg-type]


def test_revocations_are_of_one_zone_each() -> None:
    trace = Trace(
        events=(
            *trace_of((0, "+a"), (0, "+b")).events,
            *trace_of((0, "+c"), (60, "-c"), zone="y").events,
            *trace_of((60, "-a"), (60, "-b")).events,
        ),
        prices=(TracePrice(time_s=0, usd_per_h=1.0),),
    )
    assert [(one.zone, one.size) for one in revocations_of(trace)] == [("y", 1), ("z", 2)]
